"""Searches for a learning rate or a batch size by short trainings that leave no trace."""
