"""docs/gallery.md: what each script of examples/ makes, prints and takes."""
