"""Files: their formats, and what compressed ones contain."""
