"""The state of a run, which state.json saves with each checkpoint."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from thinker import checkpoint
from thinker.checkpoint import CorruptCheckpoint
from thinker.training.config.sections import TrainConfig
from thinker.training.settings.settings import Settings

Count = Annotated[int, Field(ge=0, lt=2**53)]


class RunState(BaseModel):
    """The state of a run in state.json: everything that resuming needs besides tensors.

    Keys that are not listed here belong to callbacks (Callback.state_dict).
    """

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    # Progress.
    step: Count = 0  # steps done; with the seed, also the position in the data
    tokens: Count = 0  # that were trained on: targets
    processed_tokens: Count = 0  # positions of all batches, also without a target
    elapsed_s: float = 0.0  # of training

    # Evaluations.
    best_val_loss: float | None = None
    best_rank: float | None = None  # Evaluation.rank of the checkpoint `best`
    evaluated_at: Count | None = None  # the step of the last evaluation
    # In this run; a resumed run may have a better one in best-*.
    lowest_val_loss: float | None = None
    lowest_at: Count = 0  # its step
    evaluations_since_lowest: Count = 0

    # Steps that metrics.jsonl does not have yet, and non-finite ones.
    skipped: Count = 0  # non-finite steps
    pending_steps: Count = 0
    pending_losses: float = 0.0  # their sum
    pending_norm: float | None = None  # the gradient norm of the last one
    pending_sources: list[float] = []  # of each part of the loss its sum and its number of targets

    scaler: dict[str, float | int] = {}

    # What the run depends on.
    tokenizer: str = ""  # content hash
    corpus: str = ""  # sha256 of its tokens
    machine: dict[str, str] = {}
    settings: Settings | None = None

    def progress(self, train: TrainConfig) -> float:
        """The share of the run that is done, from 0 to 1: of steps or time, whichever is larger; 1
        if it stops early."""
        if self.stops_early(train):
            return 1.0
        return self.share_of_length(train)

    def share_of_length(self, train: TrainConfig) -> float:
        """The share of train.max_steps or train.max_minutes that is done, whichever is larger."""
        steps = self.step / train.max_steps if train.max_steps else 0.0
        minutes = self.elapsed_s / 60 / train.max_minutes if train.max_minutes else 0.0
        return min(1.0, max(steps, minutes))

    def stops_early(self, train: TrainConfig) -> bool:
        """Whether the validation loss has not reached a new low for train.patience evaluations."""
        if train.patience is None:
            return False
        return self.evaluations_since_lowest >= train.patience

    def add_evaluation(self, val_loss: float) -> None:
        """Count an evaluation after the last step."""
        self.evaluated_at = self.step
        self.evaluations_since_lowest += 1
        if self.lowest_val_loss is None or val_loss < self.lowest_val_loss:
            self.lowest_val_loss = val_loss
            self.lowest_at = self.step
            self.evaluations_since_lowest = 0

    def add_step(self, loss: float, grad_norm: float | None, parts: list[float]) -> None:
        """Count a step for the next line of metrics.jsonl. parts: sums and numbers of targets,
        flat."""
        self.pending_steps += 1
        self.pending_losses += loss
        self.pending_norm = grad_norm
        before = self.pending_sources or [0.0] * len(parts)
        self.pending_sources = [old + new for old, new in zip(before, parts)]

    def clear_pending(self) -> None:
        """Forget the steps that have just been logged."""
        self.pending_steps = 0
        self.pending_losses = 0.0
        self.pending_norm = None
        self.pending_sources = []

    @property
    def of_callbacks(self) -> dict[str, Any]:
        """What callbacks have saved, by key."""
        return self.model_extra


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
