"""A long run, of which nothing may be left: memory, files and threads."""
