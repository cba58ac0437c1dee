"""Finding out what is wrong with a training."""
