"""The file formats, one a file or a folder; ``io/reader.py`` lists them."""
