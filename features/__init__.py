"""Optional features, one folder each. Remove a name from this list to be without a feature."""

# Where features offer the same thing, such as an objective, the order counts: distillation chooses
# the objective, and mixtures measure its loss by source.
FEATURES = [
    "auto_size",
    "distillation",
    "mixtures",
    "streams",
    "cleaning",
    "pruning",
    "monitoring",
    "run_report",
    "early_exit",
    "retrieval",
    "structured_output",
    "speculation",
    "quantization_study",
    "sweeps",
    "ladder",
    "ollama",
    "eval_suites",
    "preferences",
    "rewards",
]
