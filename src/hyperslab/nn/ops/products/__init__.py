"""Products of matrices and what is built of them."""
