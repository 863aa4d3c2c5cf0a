"""The best partition of a network over GPUs, before any is booked. Needs no torch."""
