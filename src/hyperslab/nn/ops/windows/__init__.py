"""Functions whose outputs read a window of the input: convolutions, pools, padding and the like."""
