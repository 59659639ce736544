"""What may change in a mixture when its run resumes."""

from typing import Any

from thinker.features.mixtures.keys import MixedSource
from thinker.training.state.resume import DATA_KEYS_OF_THE_MACHINE, PATHS, KeyChange


def sources_reason(change: KeyChange) -> str:
    """Why data.sources may not change so; "" if the sources have only moved."""
    if change.was is not None and change.value is not None:
        before = [_without_place(source) for source in change.was]
        now = [_without_place(source) for source in change.value]
        if before == now:
            return ""
    names = [MixedSource(**source).label for source in change.was or ()]
    return (
        f"data.sources has changed since the run in {change.folder} started (a source that "
        f"was moved "
        f"needs the name that it had: {', '.join(names)})"
    )


def max_steps_reason(change: KeyChange) -> str:
    """Why train.max_steps may not change: weights that change follow it."""
    sources = change.previous.data.sources or ()
    has_schedule = any(len(source.weights) > 1 for source in sources)
    return change.reason if has_schedule else ""


def _without_place(source: dict[str, Any]) -> dict[str, Any]:
    """A source without the keys that may change, and with the name that it has in messages."""
    may_change = (*PATHS, *DATA_KEYS_OF_THE_MACHINE)
    kept = {key: value for key, value in source.items() if key not in may_change}
    return kept | {"name": MixedSource(**source).label}
