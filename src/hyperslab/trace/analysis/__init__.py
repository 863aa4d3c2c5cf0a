"""What a trace tells: what waited for what, in words, tables, pictures and a page."""
