"""What a config resolves to on this machine, and the memory that it needs."""
