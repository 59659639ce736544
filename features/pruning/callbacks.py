"""The callback that prunes during training, as train.prune says."""

from thinker.features.pruning.gates import Gates
from thinker.features.pruning.gradual_pruning import GradualPruning
from thinker.training.callback import Callback
from thinker.training.settings.settings import Settings


def pruning_callbacks(settings: Settings) -> list[Callback]:
    """Gates or gradual pruning, or nothing."""
    options, seed = settings.train.prune, settings.run.seed
    if options is None:
        return []
    if options.by == "gates":
        return [Gates(options, seed)]
    return [GradualPruning(options, seed)]
