"""What a run needs to go on bit for bit, and what may not change when it does."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from thinker import checkpoint
from thinker.checkpoint import CorruptCheckpoint
from thinker.checkpoint.run_directory import RunDirectory
from thinker.data.corpus import Corpus
from thinker.data.tokenizer import FILE_NAME
from thinker.runtime.device import device_name
from thinker.runtime.errors import UserError
from thinker.runtime.process_group import DistContext
from thinker.training.config import Config
from thinker.training.settings import MachineSettings
from thinker.training.step import TrainingStep

# Of these sections only these keys; of model and data every key.
ONLY = {"optimizer": ("name",), "run": ("seed", "init_from"), "train": ("batch_size", "lora_rank", "lora_alpha")}


Count = Annotated[int, Field(ge=0, lt=2**53)]


class RunState(BaseModel):
    """All that decides a run's future beside its tensors, as state.json holds it."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    step: Count = 0  # steps done; with the seed it is the position in the data too
    tokens: Count = 0
    elapsed_s: float = 0.0  # of training
    best_val_loss: float | None = None
    evaluated_at: Count | None = None  # the step of the last evaluation
    skipped: Count = 0  # non-finite steps
    pending_steps: Count = 0  # steps that are in no line of metrics.jsonl yet,
    pending_losses: float = 0.0  # the sum of their losses,
    pending_norm: float | None = None  # and the last one's gradient norm
    scaler: dict[str, float | int] = {}
    tokenizer: str = ""  # content hash
    corpus: str = ""  # sha256 of its tokens
    machine: dict[str, str] = {}
    chosen: MachineSettings | None = None
    config: dict[str, dict[str, Any]] = {}  # resolved


def read_state(folder: Path) -> RunState:
    """The state of a checkpoint. Raises CorruptCheckpoint where it is none of a run's."""
    path = folder / "state.json"
    try:
        return RunState.model_validate(checkpoint.read_json(path))
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise CorruptCheckpoint(f"{path} holds no state of a run of this version: {where} is wrong") from error


def describe_machine(device: torch.device, dist: DistContext, parallel: str) -> dict[str, str]:
    """What has to stay the same for the same bits."""
    machine = {"device": device_name(device), "threads": str(torch.get_num_threads()), "torch": torch.__version__}
    return machine | ({"ranks": f"{dist.world_size} ({parallel})"} if dist.world_size > 1 else {})


def check_unchanged(run: RunDirectory, before: RunState, config: Config, *sections: str) -> None:
    """Raise UserError, naming the key, where what decides the weights or the batches differs from before."""
    now = config.model_dump(mode="json")
    for section in sections:
        fields = type(getattr(config, section)).model_fields
        for key, value in now[section].items():
            then = before.config.get(section, {}).get(key, fields[key].default)  # a key that there was not then
            if key in ONLY.get(section, (key,)) and value != then and key != "cache_dir":
                raise UserError(
                    f"{section}.{key} is {value!r}, but the run in {run.path} was begun with {then!r}; "
                    "put it back, choose another run.dir, or remove that folder to begin anew"
                )


def check_corpus(run: RunDirectory, before: RunState, corpus: Corpus, source: str) -> None:
    """Raise UserError where ids would mean other words than the weights know, or the batches would be others."""
    changed = "tokenizer" if before.tokenizer != corpus.tokenizer.content_hash else "tokens"
    if changed == "tokenizer" or before.corpus != corpus.sha256:
        raise UserError(
            f"the text of {source} has changed, and with it the {changed}, since the run in {run.path} was begun; "
            "put it back, or choose another run.dir"
        )


def warn_about_changes(before: RunState, machine: dict[str, str], config: Config) -> None:
    """On stderr: keys that have changed, and why the numbers will not be those of before to the last bit."""
    now = config.model_dump(mode="json", exclude={"run"})
    changes = [
        f"{section}.{key} {before.config[section][key]} -> {value}"
        for section, keys in now.items()
        for key, value in keys.items()
        if key in before.config.get(section, {}) and before.config[section][key] != value
    ]
    if changes:
        print(f"changed since it was saved: {', '.join(changes)}", file=sys.stderr)
    for key in before.machine | machine:
        then, value = (each.get(key, "1" if key == "ranks" else None) for each in (before.machine, machine))
        if then != value:
            print(
                f"{key} was {then} and is {value} now: what follows differs slightly from a run that was never stopped",
                file=sys.stderr,
            )


def best_val_loss_so_far(run: RunDirectory, before: RunState, config: Config) -> float | None:
    """The loss to beat: of the weights that are kept as the best, though the run goes on from before they were made.

    None where it was measured on another part of the validation set.
    """
    if before.config.get("train", {}).get("eval_sequences") != config.train.eval_sequences:
        return None
    losses = [before.best_val_loss]
    for folder in checkpoint.list_checkpoints(run.checkpoints, "best"):
        with contextlib.suppress(CorruptCheckpoint):
            checkpoint.verify(folder)
            losses.append(checkpoint.read_json(folder / "state.json").get("val_loss"))
    return min((loss for loss in losses if isinstance(loss, float)), default=None)


def quarantine_stale_best(run: RunDirectory) -> None:
    """Put aside the best weights, with their tokenizer, of a run that ended before its first save and begins anew."""
    for folder in checkpoint.list_checkpoints(run.checkpoints, "best"):
        if (run.path / FILE_NAME).exists():
            shutil.copy(run.path / FILE_NAME, folder)  # the run's may become another
        checkpoint.quarantine(folder, "earlier")


def restore(folder: Path, step: TrainingStep, state: RunState) -> None:
    """Put a checkpoint into model, optimizers and scaler, its shapes having been checked.

    Raises CorruptCheckpoint where a file holds something else.
    """
    has_stepped = bool(checkpoint.read_header(folder, checkpoint.TRAINING))  # before the first step it is empty
    expected = step.optimizers.expected() if has_stepped else {}
    tensors = checkpoint.load_tensors(folder, checkpoint.TRAINING, expected)
    checkpoint.load_weights(step.model, folder)
    if has_stepped:
        step.optimizers.load_tensors(tensors)
    if state.scaler:
        try:
            step.scaler.load_state_dict(state.scaler)
        except (RuntimeError, KeyError) as error:
            raise CorruptCheckpoint(f"{folder} holds no loss scale: {error}") from error
    step.n_nonfinite.fill_(state.skipped)


def seed_step(seed: int, step: int, rank: int) -> None:
    """Have dropout draw what belongs to this step of this run, on this rank: wherever it was stopped before."""
    torch.manual_seed(int.from_bytes(hashlib.sha256(f"{seed}:{step}:{rank}".encode()).digest()[:7], "little"))
