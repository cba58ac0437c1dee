"""Many settings of a model, trained together."""
