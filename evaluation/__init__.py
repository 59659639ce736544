"""How good a Thinker is, in numbers."""
