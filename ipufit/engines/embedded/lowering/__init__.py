"""Ways in which a recorded program runs, besides operator by operator."""
