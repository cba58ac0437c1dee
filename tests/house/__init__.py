"""Figures of the package's structure, and the bounds that it has reached."""
