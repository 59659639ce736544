"""The state of a run that checkpoints keep, and resuming from it."""
