"""Files of checkpoints as a stranger might make them, found by looking at what they reach."""
