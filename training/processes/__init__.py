"""Training in processes of their own, one after the other or side by side."""
