"""The optimizers by name. Imports no torch, as configs check names here."""

from thinker.runtime.registry import Registry

# A value is a function (OptimizerParts) -> list of torch optimizers, or "module:name" of one.
OPTIMIZERS: Registry = Registry("optimizer")
OPTIMIZERS.register("muon", "thinker.training.optim.muon:muon_and_adamw")
OPTIMIZERS.register("adamw", "thinker.training.optim.optimizers:adamw")
