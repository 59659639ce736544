"""Decoders: what runs the model for one or more new tokens."""
