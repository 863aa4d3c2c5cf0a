"""Passes of a module on one GPU that are recorded in CUDA graphs once, and replayed."""
