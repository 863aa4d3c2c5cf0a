"""Functions of each element by itself, and random numbers for each."""
