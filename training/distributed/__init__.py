"""Training on several ranks: how they connect, and how they share a model."""
