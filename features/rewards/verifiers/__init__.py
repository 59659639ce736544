"""Verifiers, and the process in which they run."""
