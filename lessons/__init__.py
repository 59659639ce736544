"""Lessons on attention: notebooks in percent format, what they share, and the command that builds
them."""
