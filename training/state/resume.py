"""Resume a run bit for bit: its saved state, and the keys that must not change."""

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from thinker import checkpoint
from thinker.checkpoint import CorruptCheckpoint
from thinker.checkpoint.run_directory import RunDirectory
from thinker.data.tokenizers.tokenizer_factory import is_path
from thinker.runtime.errors import UserError
from thinker.runtime.ranks import DistContext
from thinker.runtime.registry import features, import_offer
from thinker.training.callback import Callback
from thinker.training.optim.optimizer_state import expected_state, load_state
from thinker.training.settings.settings import Settings
from thinker.training.state.run_state import RunState
from thinker.training.state.saved_state import PLAIN, describe_machine
from thinker.training.step import TrainingStep

# Keys that must not change. In the sections model and data these are all keys except
# DATA_KEYS_OF_THE_MACHINE, and features add theirs.
FIXED_KEYS = {
    "optimizer": ("name",),
    "run": ("seed", "init_from"),
    "train": ("batch_size", "lora_rank", "lora_alpha", "ema_decay", "fit_bigrams"),
}
# In data; they affect neither text nor batches.
DATA_KEYS_OF_THE_MACHINE = ("cache_dir", "num_workers", "streaming")
PATHS = ("path", "val_tokens", "tokenizer", "chat_template")  # in data; files may move, not change
# In train; they change the last bits.
ROUNDING_KEYS = ("micro_batch_size", "precision", "compile", "deterministic")
REMEDY = "undo the change, choose another run.dir, or delete that folder to start over"


# ---------------------------------------------------------------- keys


@dataclass(frozen=True)
class KeyChange:
    """A key of the config that has another value than when the run started."""

    name: str  # section.key
    was: Any
    value: Any
    previous: Settings  # that the run started with
    folder: Path  # of the run

    @property
    def reason(self) -> str:
        """Why the run cannot resume, if it cannot."""
        return (
            f"{self.name} is {self.value!r}, but the run in {self.folder} started with {self.was!r}"
        )


def check_unchanged(
    run: RunDirectory, previous: Settings, sections: dict[str, dict[str, Any]]
) -> None:
    """Raise UserError if a key that affects weights or batches has changed since the run
    started."""
    started_with = previous.model_dump(mode="json")
    rules = _rules_of_features()
    for section, values in sections.items():
        for key, value in values.items():
            was = started_with[section].get(key)
            if value == was:
                continue
            change = KeyChange(f"{section}.{key}", was, value, previous, run.path)
            reason = rules.get(change.name, _reason)(change)
            if reason:
                raise UserError(f"{reason}; {REMEDY}")


def _reason(change: KeyChange) -> str:
    """Why a key may not change; "" if it may."""
    section, _, key = change.name.partition(".")
    if key not in FIXED_KEYS.get(section, (key,)) or key in DATA_KEYS_OF_THE_MACHINE:
        return ""
    is_moved = key in PATHS and change.value is not None and change.was is not None
    if is_moved and (key != "tokenizer" or is_path(change.value)):
        return ""
    return change.reason


def _rules_of_features() -> dict[str, Callable[[KeyChange], str]]:
    rules: dict[str, Callable[[KeyChange], str]] = {}
    for feature in features():
        for name, offer in feature.fixed_keys.items():
            rules[name] = import_offer(offer) if offer else _always_fixed
    return rules


def _always_fixed(change: KeyChange) -> str:
    return change.reason


def warn_about_changes(state: RunState, machine: dict[str, str], settings: Settings) -> None:
    """Print to stderr which keys have changed, and which changes make results differ from an
    uninterrupted run."""
    previous = state.settings.model_dump(mode="json")
    now = settings.model_dump(mode="json", exclude={"run", "extensions"})
    changes = []
    for section, keys in now.items():
        for key, value in keys.items():
            before = previous[section].get(key)
            if before != value:
                changes.append(f"{section}.{key} {before} -> {value}")
    if changes:
        print(f"changed since the last save: {', '.join(changes)}", file=sys.stderr)

    old = {"ranks": "1", "kernels": PLAIN} | state.machine | _rounding_keys(previous)
    new = {"ranks": "1", "kernels": PLAIN} | machine | _rounding_keys(now)
    for key in old | new:
        before, after = old.get(key), new.get(key)
        if before != after:
            print(
                f"{key}: {before} -> {after}; results differ slightly from an uninterrupted run",
                file=sys.stderr,
            )


def _rounding_keys(tree: dict[str, Any]) -> dict[str, Any]:
    return {f"train.{key}": tree["train"][key] for key in ROUNDING_KEYS}


# ---------------------------------------------------------------- state and tensors


def resume_run(
    run: RunDirectory,
    folder: Path,
    state: RunState,
    step: TrainingStep,
    settings: Settings,
    dist: DistContext,
) -> None:
    """Restore model, optimizers, scaler and callbacks from a checkpoint, and adapt its state to
    changed keys."""
    if dist.is_main:
        for newer in checkpoint.list_checkpoints(run.checkpoints):
            if newer.name > folder.name:
                # So that it does not count towards keep_last.
                checkpoint.quarantine(newer, "damaged")
    if state.skipped > settings.train.max_nonfinite_steps:
        remedy = f"set train.max_nonfinite_steps to at least {state.skipped}"
        raise UserError(
            f"the run in {run.path} has already skipped {state.skipped} non-finite steps; {remedy}"
        )
    restore(folder, step, state)
    warn_about_changes(state, describe_machine(step, dist, settings.train.parallel), settings)
    if state.settings.train.eval_sequences != settings.train.eval_sequences:
        # Losses so far were of other sequences.
        state.best_val_loss = None
        state.best_rank = None
        state.lowest_val_loss = None
        state.evaluations_since_lowest = 0
    else:
        best = [{"val_loss": state.best_val_loss, "rank": state.best_rank}]
        if dist.is_main:
            best += _best_states(run)
        state.best_val_loss = dist.broadcast_object(_least(best, "val_loss"))
        state.best_rank = dist.broadcast_object(_least(best, "rank"))


def _best_states(run: RunDirectory) -> list[dict[str, Any]]:
    """The states of the checkpoints best-*, which are kept even if the run resumes from an earlier
    step."""
    states = []
    for best in checkpoint.list_checkpoints(run.checkpoints, "best"):
        with contextlib.suppress(CorruptCheckpoint):
            checkpoint.verify(best)
            states.append(checkpoint.read_json(best / "state.json"))
    return states


def _least(states: list[dict[str, Any]], key: str) -> float | None:
    """The lowest value of a key."""
    values = [state.get(key) for state in states]
    return min((value for value in values if isinstance(value, float)), default=None)


def restore(folder: Path, step: TrainingStep, state: RunState) -> None:
    """Load a checkpoint into model, optimizers, scaler and callbacks.

    Raises UserError if the run has other callbacks, CorruptCheckpoint if names or shapes differ
    otherwise.
    """
    saved = checkpoint.read_header(folder, checkpoint.TRAINING)
    expected = {}
    for callback in step.callbacks:
        for name, tensor in callback.tensors().items():
            expected[name] = torch.empty_like(tensor)
    has_optimizer_state = saved.keys() > expected.keys()
    if has_optimizer_state:  # there is none before the first step
        of_optimizers = {name: shape for name, shape in saved.items() if name not in expected}
        expected |= expected_state(step.optimizers, of_optimizers)
    tensors = checkpoint.load_tensors(folder, checkpoint.TRAINING, expected)
    checkpoint.load_weights(step.model, folder)
    for callback in step.callbacks:
        own = {name: tensors.pop(name) for name in callback.tensors()}
        if own:
            callback.load_tensors(own)
    if has_optimizer_state:
        load_state(step.optimizers, tensors)
    if state.scaler:
        try:
            step.scaler.load_state_dict(state.scaler)
        except (RuntimeError, KeyError) as error:
            raise CorruptCheckpoint(f"{folder} has no valid loss scale: {error}") from error
    step.n_nonfinite.fill_(state.skipped)


def give_state_to_callbacks(state: RunState, callbacks: Sequence[Callback], folder: Path) -> None:
    """Give callbacks what they have saved. Raises UserError if the run that is resumed has other
    callbacks."""
    left = dict(state.of_callbacks)
    for callback in callbacks:
        keys = list(callback.state_dict())
        saved = {key: left.pop(key) for key in keys if key in left}
        missing = [key for key in keys if key not in saved]
        name = type(callback).__name__
        if keys and not saved:
            raise UserError(
                f"{folder} was saved without the callback {name}, so it has no {missing[0]}; "
                f"{REMEDY}"
            )
        if not keys:
            continue
        try:
            callback.load_state_dict(saved)
        except KeyError as error:
            if not missing:
                raise
            raise UserError(
                f"{folder} was saved with another version of the callback {name}, so it has no "
                f"{missing[0]}; {REMEDY}"
            ) from error
    for key, value in left.items():
        if value:
            raise UserError(
                f"{folder / 'state.json'} has {key}, which this run does not read; pass the "
                f"callbacks and "
                "install the features that the run started with"
            )
        del state.of_callbacks[key]
