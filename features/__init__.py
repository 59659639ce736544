"""Optional features, one folder each. Remove a name from this list to be without a feature."""

FEATURES = [
    "auto_size",
    "mixtures",
    "streams",
    "cleaning",
    "distillation",
    "pruning",
    "monitoring",
    "early_exit",
    "retrieval",
    "structured_output",
    "speculation",
    "quantization_study",
    "ollama",
]
