"""Models that are trained at once and play against each other."""
