"""Attention and attribution of trained models, with plots."""
