"""Training processes that are killed at random moments, and go on."""
