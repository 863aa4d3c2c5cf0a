"""Exact operators on plain pieces of a tensor: local kernels plus messages between ranks."""
