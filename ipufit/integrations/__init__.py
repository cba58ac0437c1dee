"""Models of other libraries, as they are."""
