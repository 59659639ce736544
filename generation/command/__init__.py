"""What the command generate.py prints."""
