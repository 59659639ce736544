"""Tokenizers, and conversion from and to other formats."""
