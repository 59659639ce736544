"""Caches: keys and values of earlier positions, in several forms."""
