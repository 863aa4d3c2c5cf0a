"""What programs and tools that are not ours tell: recorded below them, or read from their files."""
