"""Choose what follows each optimizer step: an average of the weights, pruning, gates, or nothing."""

from thinker.features.pruning.gates import Gates
from thinker.features.pruning.gradual_pruning import GradualPruning
from thinker.model import Thinker, ThinkerConfig
from thinker.runtime.errors import UserError
from thinker.runtime.process_group import DistContext
from thinker.training.after_step import AfterStep
from thinker.training.optim.optimizers import Optimizers
from thinker.training.settings.settings import Settings
from thinker.training.weight_average import WeightAverage


def make_after_step(
    model: Thinker, optimizers: Optimizers, settings: Settings, dist: DistContext
) -> AfterStep:
    """What the config asks for. Raises UserError if the model cannot be pruned so."""
    train, seed = settings.train, settings.run.seed
    average = None if train.ema_decay is None else WeightAverage(model, train.ema_decay)
    if train.prune is None:
        return AfterStep(average)
    if hasattr(model, "unshard"):  # FSDP2, which train.parallel=auto may choose
        raise UserError(
            "train.prune does not work with the split matrices of FSDP2; set train.parallel=ddp"
        )
    if train.prune.heads:
        check_heads(model.config)
    if train.prune.by == "gates":
        return Gates(model, train.prune, seed, dist)
    return GradualPruning(model, optimizers, average, train.prune, seed, dist)


def check_heads(config: ThinkerConfig) -> None:
    """Raise UserError if KV heads of this model cannot be removed once they are zero."""
    counts = [config.head_counts(layer)[1] for layer in range(config.n_layers)]
    try:
        ThinkerConfig.from_dict(config.to_dict() | {"n_kv_heads_per_layer": counts})
    except UserError:
        raise UserError(
            "train.prune.heads does not work with alibi or per-head patterns; remove it"
        ) from None
