"""Who may look at whom, where tokens stand, and one call that computes it."""
