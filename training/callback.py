"""What happens around training steps: averages of weights, pruning, logs, samples.

The order of the list of callbacks is the order in which their hooks run; after_eval() runs in the
opposite order. The list has objectives that are callbacks, the average of the weights, what
features offer, the callbacks of the user, then samples and trackers.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from thinker.checkpoint.run_directory import RunDirectory
from thinker.data.batches.batch_loader import BatchLoader
from thinker.data.batches.prefetch import Batch
from thinker.data.corpus.corpus import Corpus
from thinker.model import Thinker
from thinker.runtime.ranks import DistContext
from thinker.training.kernels import Kernels
from thinker.training.optim.optimizers import Optimizers
from thinker.training.reports.run_summary import RunSummary
from thinker.training.settings.settings import Settings
from thinker.training.state.run_state import RunState

T = TypeVar("T", bound="Callback")


class StepInfo(NamedTuple):
    """A step that has just been made."""

    step: int  # counted from 1
    progress: float  # the share of the run that is done, from 0 to 1
    batch: Batch  # this rank's rows, on the host


class Callback:
    """Hooks around training steps, which do nothing here. A callback overrides those that it needs.

    All ranks call all hooks, except on_summary(). A callback changes only what is its own, and the
    weights of the model.
    """

    def setup(self, parts: "TrainingParts") -> None:
        """Model and optimizers are built. No checkpoint is loaded yet, and no file is written.

        Raise UserError if the callback does not fit the model.
        """

    def on_start(self, run: "TrainingRun") -> None:
        """Training is about to start or resume. From here on files may be written."""

    def before_clip(self) -> None:
        """The gradients of the whole batch are in place. They are clipped next, then the optimizers
        step."""

    def after_step(self, info: StepInfo) -> None:
        """The optimizers have stepped."""

    def metrics(self) -> dict[str, float]:
        """More keys of a line in metrics.jsonl. Called after a step that is logged; its time does
        not count as training."""
        return {}

    def before_batch(self, info: StepInfo) -> None:
        """The batch of the next step is read next; all callbacks have seen the step before. Not
        called before the first batch of a process: use on_start().

        The next step is not made if the time is over then, or if it is interrupted. Raise UserError
        if there can be no batch; the run is then saved.
        """

    def progress_text(self) -> str:
        """What is shown beside the progress bar, after the loss, such as "reward 0.500"; "" for
        nothing."""
        return ""

    def on_log(self, line: Mapping[str, Any]) -> None:
        """A line was written to metrics.jsonl. While one with `val_loss` is, the model has the
        evaluated weights."""

    def on_sample(self, step: int, prompt: str, text: str) -> None:
        """A sample was written to samples.jsonl (train.sample_every): what the model wrote after
        the prompt."""

    def on_step_end(self, info: StepInfo) -> None:
        """A step is complete: logged, and evaluated where that was due. A checkpoint of it is saved
        next, where that is due. The time here does not count as training."""

    def before_eval(self) -> None:
        """The model is about to be evaluated or saved. Put the weights for that into it."""

    def after_eval(self) -> None:
        """Put the weights back that before_eval() has replaced."""

    def on_save(self, step: int) -> None:
        """A checkpoint of this step was handed to the writer, which may still be writing it."""

    def on_summary(self, summary: RunSummary) -> None:
        """The run is finished, and its summary was printed. on_end() follows.

        Only the first rank calls it, so it must not wait for other ranks. A finished run that is
        started again calls it again.
        """

    def on_end(self, is_evaluated: bool) -> None:
        """The run ends or pauses. is_evaluated: the last step has its evaluation, if one was
        due."""

    def has_final_form(self) -> bool:
        """Whether the model has its final form. Only then are the best weights so far worth
        keeping."""
        return True

    def state_dict(self) -> dict[str, Any]:
        """What state.json keeps of the callback: JSON values by names that no other part of the run
        uses."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what state_dict() returned when the checkpoint was written; before on_start(). An
        earlier version of the callback may have saved fewer keys.

        Raise UserError if the run cannot go on with it.
        """

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint keeps of the callback, by names such as "mine.total". Shapes never
        change.

        Called between before_eval() and after_eval() when a checkpoint is written.
        """
        return {}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take what tensors() returned. The weights of the model are loaded already."""


@dataclass(frozen=True)
class TrainingParts:
    """What a callback is set up with."""

    model: Thinker
    optimizers: Optimizers
    settings: Settings
    dist: DistContext
    kernels: Kernels
    callbacks: Sequence[Callback]


@dataclass(frozen=True)
class TrainingRun:
    """What callbacks may read of the run that they take part in."""

    parts: TrainingParts
    directory: RunDirectory
    state: RunState
    corpus: Corpus
    loader: BatchLoader  # of the training batches
    show_status: Callable[[str], None]  # beside the progress bar

    @property
    def dataset(self) -> Sized:
        """The training windows."""
        return self.loader.dataset

    def evaluated_weights(self) -> contextlib.AbstractContextManager[None]:
        """Context in which the model has the weights that are evaluated and saved."""
        return evaluated_weights(self.parts.callbacks)


@contextlib.contextmanager
def evaluated_weights(callbacks: Sequence[Callback]) -> Iterator[None]:
    """Context in which the model has the weights that are evaluated and saved."""
    with contextlib.ExitStack() as stack:
        for callback in callbacks:
            callback.before_eval()
            stack.callback(callback.after_eval)
        yield


def find_callback(callbacks: Sequence[Callback], kind: type[T]) -> T | None:
    """The first callback of a class, or None."""
    for callback in callbacks:
        if isinstance(callback, kind):
            return callback
    return None
