"""Functions that reduce over dims: sums, extremes, normalisations, losses."""
