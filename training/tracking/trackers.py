"""The trackers by name. Imports no torch, as configs check names here."""

from thinker.runtime.registry import Registry

# A value is a function (Settings) -> Tracker, or "module:name" of one. Modules in a config's
# `extensions` register more.
TRACKERS: Registry = Registry("tracker")
TRACKERS.register("tensorboard", "thinker.training.tracking.tensorboard_tracker:TensorBoardTracker")
TRACKERS.register("csv", "thinker.training.tracking.csv_tracker:CsvTracker")
TRACKERS.register("trackio", "thinker.training.tracking.trackio_tracker:TrackioTracker")
TRACKERS.register("wandb", "thinker.training.tracking.wandb_tracker:WandbTracker")
