"""Pictures of what a model may do and what it does."""
