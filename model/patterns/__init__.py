"""Attention patterns: predicates, their parser, and patterns that depend on content."""
