"""Resume a run bit for bit: its saved state, and the keys that must not change."""

import contextlib
import hashlib
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from thinker import checkpoint
from thinker.checkpoint import CorruptCheckpoint
from thinker.checkpoint.run_directory import RunDirectory
from thinker.data.tokenizers.tokenizer import FILE_NAME
from thinker.data.tokenizers.tokenizer_factory import is_path
from thinker.features.mixtures.keys import MixedSource
from thinker.runtime.device import device_name
from thinker.runtime.errors import UserError
from thinker.runtime.process_group import DistContext
from thinker.training.run_state import RunState, read_state
from thinker.training.settings.settings import Settings
from thinker.training.step import TrainingStep

# Keys that must not change. In the sections model and data these are all keys except DATA_KEYS_OF_THE_MACHINE.
FIXED_KEYS = {
    "optimizer": ("name",), "run": ("seed", "init_from"),
    "train": ("batch_size", "lora_rank", "lora_alpha", "ema_decay", "distill", "prune"),
}  # fmt: skip
DATA_KEYS_OF_THE_MACHINE = (
    "cache_dir",
    "num_workers",
    "streaming",
)  # do not affect text or batches
PATHS = (
    "path",
    "val_tokens",
    "tokenizer",
    "chat_template",
)  # in data; files may move, but must not change
ROUNDING_KEYS = (
    "micro_batch_size",
    "precision",
    "compile",
    "deterministic",
)  # in train; they change the last bits
PLAIN = "plain PyTorch"
REMEDY = "undo the change, choose another run.dir, or delete that folder to start over"


def describe_machine(step: TrainingStep, dist: DistContext, parallel: str) -> dict[str, str]:
    """Properties that must stay the same for bitwise equal results."""
    machine = {
        "device": device_name(step.device),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
    }
    machine["kernels"] = PLAIN if step.kernels is None else "fused"
    return machine | ({"ranks": f"{dist.world_size} ({parallel})"} if dist.world_size > 1 else {})


def check_unchanged(
    run: RunDirectory, previous: Settings, sections: dict[str, dict[str, Any]]
) -> None:
    """Raise UserError if a key that affects weights or batches has changed since the run started."""
    started_with = previous.model_dump(mode="json")
    has_schedule = any(len(source.weights) > 1 for source in previous.data.sources or ())
    fixed_keys = FIXED_KEYS | (
        {"train": (*FIXED_KEYS["train"], "max_steps")} if has_schedule else {}
    )
    for section, values in sections.items():
        for key, value in values.items():
            was, is_fixed = started_with[section][key], key in fixed_keys.get(section, (key,))
            may_move = (
                key in PATHS and None not in (value, was) and (key != "tokenizer" or is_path(value))
            )
            if key == "distill" and None not in (value, was):
                may_move = (
                    value | {"teacher": was["teacher"]} == was
                )  # its weights are compared (features/distillation/teacher.py)
            if key == "sources" and None not in (value, was):
                may_move = [_without_place(source) for source in value] == [
                    _without_place(source) for source in was
                ]
            if is_fixed and value != was and key not in DATA_KEYS_OF_THE_MACHINE and not may_move:
                reason = (
                    f"{section}.{key} is {value!r}, but the run in {run.path} started with {was!r}"
                )
                if key == "sources":
                    reason = f"data.sources has changed since the run in {run.path} started"
                    names = [MixedSource(**source).label for source in was or ()]
                    reason += (
                        f" (a source that was moved needs the name that it had: {', '.join(names)})"
                    )
                raise UserError(f"{reason}; {REMEDY}")


def _without_place(source: dict[str, Any]) -> dict[str, Any]:
    """A source of a mixture without the keys that may change, and with the name that it has in messages."""
    kept = {
        key: value
        for key, value in source.items()
        if key not in (*PATHS, *DATA_KEYS_OF_THE_MACHINE)
    }
    return kept | {"name": MixedSource(**source).label}


def warn_about_changes(state: RunState, machine: dict[str, str], settings: Settings) -> None:
    """Print to stderr which keys have changed, and which changes make results differ from an uninterrupted run."""
    previous, now = (
        state.settings.model_dump(mode="json"),
        settings.model_dump(mode="json", exclude={"run", "extensions"}),
    )
    changes = [
        f"{section}.{key} {previous[section][key]} -> {value}"
        for section, keys in now.items()
        for key, value in keys.items()
        if previous[section][key] != value
    ]
    if changes:
        print(f"changed since the last save: {', '.join(changes)}", file=sys.stderr)
    bits = [
        {f"train.{key}": tree["train"][key] for key in ROUNDING_KEYS} for tree in (previous, now)
    ]
    old, new = (
        {"ranks": "1", "kernels": PLAIN} | where | keys
        for where, keys in zip((state.machine, machine), bits)
    )
    for key in old | new:
        before, after = old.get(key), new.get(key)
        if before != after:
            print(
                f"{key}: {before} -> {after}; results differ slightly from an uninterrupted run",
                file=sys.stderr,
            )


def open_run(run: RunDirectory, dist: DistContext) -> tuple[Path | None, RunState]:
    """Lock the run directory. Returns its newest valid checkpoint, or None for a new run, and the state."""
    run.lock()
    if dist.is_main:
        checkpoint.recover(run.checkpoints)
    folder = dist.broadcast_object(run.latest() if dist.is_main else None)
    if folder is None:
        return None, RunState()
    state = read_state(folder)
    if state.settings is None:
        remedy = f"move {folder} elsewhere to resume from an earlier checkpoint"
        raise CorruptCheckpoint(f"{folder / 'state.json'} does not contain settings; {remedy}")
    return folder, state


def create_run(run: RunDirectory, is_new: bool, dist: DistContext) -> None:
    """Create and lock the run directory. If the run starts over, an old best checkpoint is renamed to earlier-*."""
    run.create()
    run.lock()
    if not (dist.is_main and is_new):
        return
    if checkpoint.list_checkpoints(run.checkpoints):
        raise UserError(
            f"another process has just trained in {run.path}; run the same command again"
        )
    shutil.rmtree(run.streams, ignore_errors=True)
    for folder in checkpoint.list_checkpoints(run.checkpoints, "best"):
        if (run.path / FILE_NAME).exists():
            shutil.copy(run.path / FILE_NAME, folder)  # the run's tokenizer may change
        checkpoint.quarantine(folder, "earlier")


def resume_run(
    run: RunDirectory,
    folder: Path,
    state: RunState,
    step: TrainingStep,
    settings: Settings,
    dist: DistContext,
) -> None:
    """Restore model, optimizers and scaler from a checkpoint, and adapt its state to changed keys."""
    if dist.is_main:
        for newer in checkpoint.list_checkpoints(run.checkpoints):
            if newer.name > folder.name:
                checkpoint.quarantine(
                    newer, "damaged"
                )  # so that it does not count towards keep_last
    if state.skipped > settings.train.max_nonfinite_steps:
        remedy = f"set train.max_nonfinite_steps to at least {state.skipped}"
        raise UserError(
            f"the run in {run.path} has already skipped {state.skipped} non-finite steps; {remedy}"
        )
    restore(folder, step, state)
    warn_about_changes(state, describe_machine(step, dist, settings.train.parallel), settings)
    losses = [state.best_val_loss]
    for best in checkpoint.list_checkpoints(run.checkpoints, "best") if dist.is_main else ():
        with contextlib.suppress(
            CorruptCheckpoint
        ):  # kept, even if the run resumes from an earlier step
            checkpoint.verify(best)
            losses.append(checkpoint.read_json(best / "state.json").get("val_loss"))
    if state.settings.train.eval_sequences != settings.train.eval_sequences:
        losses, state.lowest_val_loss, state.evaluations_since_lowest = (
            [],
            None,
            0,
        )  # of other sequences
    state.best_val_loss = dist.broadcast_object(
        min((x for x in losses if isinstance(x, float)), default=None)
    )


def restore(folder: Path, step: TrainingStep, state: RunState) -> None:
    """Load a checkpoint into model, optimizers and scaler. Raises CorruptCheckpoint if names or shapes differ."""
    expected = step.after_step.expected_tensors()
    has_optimizer_state = (
        checkpoint.read_header(folder, checkpoint.TRAINING).keys() > expected.keys()
    )
    if has_optimizer_state:  # there is none before the first step
        expected |= step.optimizers.expected_state()
    tensors = checkpoint.load_tensors(folder, checkpoint.TRAINING, expected)
    checkpoint.load_weights(step.model, folder)
    step.after_step.load(tensors)
    if has_optimizer_state:
        step.optimizers.load_state(tensors)
    if state.scaler:
        try:
            step.scaler.load_state_dict(state.scaler)
        except (RuntimeError, KeyError) as error:
            raise CorruptCheckpoint(f"{folder} has no valid loss scale: {error}") from error
    step.n_nonfinite.fill_(state.skipped)


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed dropout for this step and rank, independently of interruptions."""
    torch.manual_seed(
        int.from_bytes(hashlib.sha256(f"{seed}:{step}:{rank}".encode()).digest()[:7], "little")
    )
