"""A file that is there before its bytes are: one process a file serves it over FUSE, and fetches what is read."""
