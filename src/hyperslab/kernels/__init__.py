"""Local compute: what one process does with its own tensors."""
