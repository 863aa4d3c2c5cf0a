"""The memory of the ranks, and the loader that feeds a model from it."""
