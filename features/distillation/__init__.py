"""Distillation: learn from a teacher."""
