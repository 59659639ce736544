"""The callbacks that a config asks for."""

from typing import TYPE_CHECKING

from thinker.data.corpus.corpus import Corpus
from thinker.runtime.errors import UserError
from thinker.runtime.registry import import_offer, offers
from thinker.training.callback import Callback
from thinker.training.callbacks.registry import CALLBACKS
from thinker.training.settings.settings import Settings
from thinker.training.tracking.trackers import TRACKERS

if TYPE_CHECKING:
    from thinker.training.tracking.tracker import Tracker


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


def callbacks_of_output(settings: Settings, corpus: Corpus) -> list[Callback]:
    """Samples and trackers. What they need is imported only for them."""
    callbacks: list[Callback] = []
    train = settings.train
    if train.sample_every is not None:
        from thinker.training.callbacks.samples import Samples

        callbacks.append(Samples(settings, corpus))
    trackers = make_trackers(settings)
    if trackers:
        from thinker.training.tracking.tracking_callback import Tracking

        callbacks.append(Tracking(trackers))
    return callbacks


def make_trackers(settings: Settings) -> "list[Tracker]":
    """Those of tracking.trackers and tracking.wandb. Raises UserError if the package of one is not
    installed."""
    if not settings.tracking.names:
        return []
    from thinker.training.tracking.tracker import Tracker

    trackers = []
    for name in settings.tracking.names:
        factory = TRACKERS.get(name)
        if isinstance(factory, str):
            factory = import_offer(factory)
        tracker = factory(settings)
        if not isinstance(tracker, Tracker):
            kind = type(tracker).__name__
            raise UserError(f"the tracker {name} is a {kind}; derive it from thinker.Tracker")
        trackers.append(tracker)
    return trackers
