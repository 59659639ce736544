"""Attention, attribution and pruning of trained models, with plots."""
