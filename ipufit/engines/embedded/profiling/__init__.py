"""One micro-batch, operator by operator: what each takes, and what memory it leaves in use."""
