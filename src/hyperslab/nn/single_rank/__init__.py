"""Modules on one rank: plain tensors, with our implementations of some functions."""
