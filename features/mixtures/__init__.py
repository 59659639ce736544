"""Mixtures: several sources with weights."""
