"""From what the user passes to combined batches."""
