"""How boxes are read: files, threads, memory, and arrays in one piece, in chunks, in gzip."""
