"""Data, checkpoints, ranks, pages and the server."""
