"""The text of a run: its corpus, its batches, and opening them again later."""
