"""Triton kernels. Importing these modules needs Triton, which comes with PyTorch for GPUs."""
