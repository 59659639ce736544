"""Losses of training runs."""
