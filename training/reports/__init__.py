"""What is printed and drawn before, after and instead of a run."""
