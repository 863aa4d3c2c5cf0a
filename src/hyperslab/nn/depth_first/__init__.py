"""Chains of layers computed tile by tile, all of a chain for one tile before the next."""
