"""Open the folder of a run, which may have a checkpoint, and create it."""

import shutil
from pathlib import Path

from thinker import checkpoint
from thinker.checkpoint import CorruptCheckpoint
from thinker.checkpoint.run_directory import RunDirectory
from thinker.data.tokenizers.tokenizer import FILE_NAME
from thinker.runtime.errors import UserError
from thinker.runtime.ranks import DistContext
from thinker.training.state.run_state import RunState, read_state


def open_run(run: RunDirectory, dist: DistContext) -> tuple[Path | None, RunState]:
    """Lock the run directory. Returns its newest valid checkpoint, or None for a new run, and the
    state."""
    run.lock()
    if dist.is_main:
        checkpoint.recover(run.checkpoints)
    latest = run.latest() if dist.is_main else None
    folder = dist.broadcast_object(latest)
    if folder is None:
        return None, RunState()
    state = read_state(folder)
    if state.settings is None:
        remedy = f"move {folder} elsewhere to resume from an earlier checkpoint"
        raise CorruptCheckpoint(f"{folder / 'state.json'} does not contain settings; {remedy}")
    return folder, state


def create_run(run: RunDirectory, is_new: bool, dist: DistContext) -> None:
    """Create and lock the run directory. If the run starts over, an old best checkpoint is renamed
    to earlier-*."""
    run.create()
    run.lock()
    if not (dist.is_main and is_new):
        return
    if checkpoint.list_checkpoints(run.checkpoints):
        raise UserError(
            f"another process has just trained in {run.path}; run the same command again"
        )
    shutil.rmtree(run.dataset_files, ignore_errors=True)
    for folder in checkpoint.list_checkpoints(run.checkpoints, "best"):
        if (run.path / FILE_NAME).exists():
            shutil.copy(run.path / FILE_NAME, folder)  # the run's tokenizer may change
        checkpoint.quarantine(folder, "earlier")
