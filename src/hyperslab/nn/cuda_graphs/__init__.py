"""Passes of a module that are recorded in CUDA graphs once, and replayed."""
