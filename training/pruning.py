"""Choose what follows each optimizer step: an average of the weights, pruning, gates, or nothing."""

from thinker.model import Thinker
from thinker.runtime.errors import UserError
from thinker.runtime.process_group import DistContext
from thinker.training.after_step import AfterStep
from thinker.training.config import Settings
from thinker.training.gates import Gates
from thinker.training.gradual_pruning import GradualPruning
from thinker.training.optimizers import Optimizers
from thinker.training.weight_average import WeightAverage


def make_after_step(model: Thinker, optimizers: Optimizers, settings: Settings, dist: DistContext) -> AfterStep:
    """What the config asks for. Raises UserError if the model cannot be pruned so."""
    train, seed = settings.train, settings.run.seed
    average = None if train.ema_decay is None else WeightAverage(model, train.ema_decay)
    if train.prune is None:
        return AfterStep(average)
    if hasattr(model, "unshard"):  # FSDP2, which train.parallel=auto may choose
        raise UserError("train.prune does not work with the split matrices of FSDP2; set train.parallel=ddp")
    if train.prune.by == "gates":
        return Gates(model, train.prune, seed, dist)
    return GradualPruning(model, optimizers, average, train.prune, seed, dist)
