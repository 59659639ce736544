"""The process of a command: its signals and standard streams."""
