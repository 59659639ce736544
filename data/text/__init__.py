"""Text: sources, rows, conversations and documents."""
