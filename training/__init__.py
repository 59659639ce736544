"""The loop, and what keeps it fast and safe."""
