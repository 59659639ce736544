"""The callbacks that a config asks for."""

from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.runtime.errors import UserError
from thinker.runtime.registry import offers
from thinker.training.callback import Callback
from thinker.training.callbacks.registry import CALLBACKS
from thinker.training.settings.settings import Settings


def callbacks_of_weights(settings: Settings) -> list[Callback]:
    """The average of the weights, the callbacks of features, and those of train.callbacks."""
    callbacks: list[Callback] = []
    if settings.train.ema_decay is not None:
        from thinker.training.callbacks.weight_average import WeightAverage

        callbacks.append(WeightAverage(settings.train.ema_decay))
    for offer in offers("callbacks"):
        callbacks += offer(settings)
    for name in settings.train.callbacks or ():
        callback = CALLBACKS.get(name)(settings)
        if not isinstance(callback, Callback):
            kind = type(callback).__name__
            raise UserError(f"the callback {name} is a {kind}; derive it from thinker.Callback")
        callbacks.append(callback)
    return callbacks


def callbacks_of_output(settings: Settings, tokenizer: Tokenizer) -> list[Callback]:
    """Samples and trackers. What they need is imported only for them."""
    callbacks: list[Callback] = []
    if settings.train.sample_every:
        from thinker.training.callbacks.samples import Samples

        train = settings.train
        callbacks.append(Samples(train.sample_every, train.sample_prompt, tokenizer))
    if settings.tracking.wandb != "disabled":
        from thinker.training.callbacks.tracking import Tracker

        callbacks.append(Tracker())
    return callbacks
