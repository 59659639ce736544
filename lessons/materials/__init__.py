"""What several lessons use: small models and their training, and tasks."""
