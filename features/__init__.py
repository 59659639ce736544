"""Optional features, one folder each."""
