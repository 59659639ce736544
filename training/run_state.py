"""The state of a run, which state.json saves with each checkpoint."""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from thinker import checkpoint
from thinker.checkpoint import CorruptCheckpoint
from thinker.training.settings.settings import Settings

Count = Annotated[int, Field(ge=0, lt=2**53)]


class RunState(BaseModel):
    """The state of a run in state.json: everything that resuming needs besides tensors."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    step: Count = 0  # steps done; with the seed, also the position in the data
    tokens: Count = 0
    elapsed_s: float = 0.0  # of training
    best_val_loss: float | None = None
    evaluated_at: Count | None = None  # the step of the last evaluation
    lowest_val_loss: float | None = (
        None  # so far in the run; a resumed run may have a better one in best-*
    )
    lowest_at: Count = 0  # its step
    evaluations_since_lowest: Count = 0
    skipped: Count = 0  # non-finite steps
    pending_steps: Count = 0  # steps not yet in metrics.jsonl,
    pending_losses: float = 0.0  # their summed loss,
    pending_norm: float | None = None  # and the gradient norm of the last one
    pending_sources: list[
        float
    ] = []  # for each part of the loss and each source, its sum and number of targets
    scaler: dict[str, float | int] = {}
    tokenizer: str = ""  # content hash
    corpus: str = ""  # sha256 of its tokens
    teacher: str = ""  # sha256 of its weights
    machine: dict[str, str] = {}
    settings: Settings | None = None


def read_state(folder: Path) -> RunState:
    """Read the state of a checkpoint. Raises CorruptCheckpoint if it is not valid."""
    path = folder / "state.json"
    try:
        return RunState.model_validate(checkpoint.read_json(path))
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise CorruptCheckpoint(
            f"{path}: {where} is not valid; use the version of Thinker that wrote it"
        ) from error
