"""The training loop: optimizer steps, evaluations, checkpoints and metrics."""

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from thinker import checkpoint
from thinker.checkpoint import CheckpointManager
from thinker.checkpoint.run_directory import RunDirectory
from thinker.data.batches.prefetch import Prefetcher
from thinker.data.corpus.corpus import Corpus
from thinker.evaluation.loss import Evaluation
from thinker.model import Thinker
from thinker.runtime.errors import RunError, UserError
from thinker.runtime.process.progress import Progress
from thinker.runtime.ranks import DistContext
from thinker.training.callback import StepInfo, TrainingRun, evaluated_weights
from thinker.training.metrics import MemoryMeter, evaluation_line, format_trained
from thinker.training.optim.schedule import lr_multiplier
from thinker.training.settings.settings import Settings
from thinker.training.signals import SignalHandler
from thinker.training.state.run_state import RunState
from thinker.training.state.saved_state import collect_state, training_tensors
from thinker.training.step import TrainingStep, seed_step
from thinker.training.step_log import StepLog

# Without smoothing, the remaining time follows the mean speed, and evaluations do not distort it.
BAR_OPTIONS = {
    "smoothing": 0,
    "bar_format": "{percentage:3.0f}%|{bar}|{postfix} [{elapsed}<{remaining}]",
}


@dataclass
class Trainer:
    """The training loop of one run, built by thinker.training.run. Each rank has its own."""

    settings: Settings
    step: TrainingStep
    state: RunState  # current state, saved with each checkpoint
    run: RunDirectory
    corpus: Corpus
    batches: Prefetcher
    evaluator: Callable[[Thinker, Callable[[], bool]], Evaluation | None]
    checkpoints: CheckpointManager
    memory: MemoryMeter
    dist: DistContext
    saved: RunState | None = None  # the state in the newest checkpoint

    def __post_init__(self) -> None:
        self.train_config = self.settings.train
        self.model = self.step.model
        self.device = self.step.device
        self.callbacks = self.step.callbacks
        self.loader = self.batches.loader
        self.signal_handler = SignalHandler(together=self.dist.world_size > 1)
        self.bar = Progress(disable=True)
        self.last_evaluation: Evaluation | None = None
        self.last_line: dict[str, Any] | None = None  # of training metrics
        if not self.state.processed_tokens:  # a checkpoint from before they were counted
            n_positions = self.train_config.batch_size * self.settings.data.seq_len
            self.state.processed_tokens = self.state.step * n_positions
        self.step_log = StepLog(self.step, self.state, self.run, self.batches, self.memory)
        self._start_callbacks()
        if self.is_finished:
            return
        if self.dist.is_main:
            self.loader.start(self.state.step)
        # The other ranks read only after old files of the dataset were removed.
        self.dist.broadcast_object(None)
        self.fetch_batch()

    # ---------------------------------------------------------------- the run

    def train(self) -> int:
        """Train to the end, or until a signal. Returns the exit status."""
        is_finished = self.is_finished
        if is_finished:
            limit = "patience" if self.stops_early else "max_steps or max_minutes"
            print(f"{self.run.path} is finished; raise train.{limit} to continue", file=sys.stderr)
        elif self.state.step:
            print(f"resuming from step {self.state.step} in {self.run.path}", file=sys.stderr)
        with self.signal_handler:
            self.bar = Progress(
                total=1.0, initial=self.progress(), disable=is_finished, **BAR_OPTIONS
            )
            try:
                if not is_finished:
                    self.fit()
                self.checkpoints.wait()
                stopping = self.stopping
                if not stopping:
                    self._summarize()
            finally:
                self._close()
        if stopping:
            saved = f"saved step {self.state.step} in {self.run.path}"
            print(f"{saved}; run the same command again to resume", file=sys.stderr)
            return 128 + stopping  # as shells report a signal: 129, 130, 143
        return 0

    def fit(self) -> None:
        """Run all steps with their evaluations and checkpoints; then evaluate and save a last
        time."""
        try:
            self._run_steps()
        except UserError as error:  # there is no batch: a stream cannot be read, for instance
            if self.dist.world_size > 1:
                raise
            self.save()
            raise UserError(f"{error}; saved step {self.state.step}") from error
        except RuntimeError as error:
            # Importing torch._dynamo.exc, for the class, is slow.
            names = [kind.__name__ for kind in type(error).__mro__]
            if not (self.signal_handler.number and "BackendCompilerFailed" in names):
                raise
            self.signal = self.signal_handler.number  # it also ended the compilers of all ranks
        self.save()
        self._show_last_line()
        self.bar.update(self.progress() - self.bar.n)

    def _run_steps(self) -> None:
        train = self.train_config
        if self.is_due(train.eval_every):  # a signal interrupted it
            self.evaluate()
        while self.progress() < 1 and not self.stopping:
            info = self.train_step()
            self.checkpoints.check()
            if self.is_due(train.eval_every):
                self.evaluate()
            # Before a save, so that a run that resumes from it lacks nothing of this step.
            for callback in self.callbacks:
                callback.on_step_end(info)
            if self.is_due(train.save_every):
                self.show_status(f"step {self.state.step}, saving")
                self.save()
        if not self.stopping:
            self.evaluate()

    def train_step(self) -> StepInfo:
        """Run one optimizer step, fetch the next batch, and log metrics if they are due."""
        state = self.state
        started = time.perf_counter()
        multiplier = lr_multiplier(self.train_config, state.step, self.progress())
        self.step.optimizers.set_momentum(state.step)
        seed_step(self.settings.run.seed, state.step, self.dist.rank)
        loss, grad_norm = self.step(self.batch, multiplier)
        if self.batch.n_targets:
            self.step_log.add(state.step, loss, grad_norm)
        state.step += 1
        state.tokens += self.batch.n_targets
        state.processed_tokens += self.n_positions
        info = StepInfo(state.step, self.progress(), self.batch)
        for callback in self.callbacks:
            callback.after_step(info)

        is_log_step = state.step % self.train_config.log_every == 0
        if is_log_step:
            self.read_losses()  # waits for the device
            measured = time.perf_counter()
            metrics = self._callback_metrics()
            started += time.perf_counter() - measured
        try:
            if info.progress < 1 and not self.stopping:
                for callback in self.callbacks:
                    callback.before_batch(info)
            self.fetch_batch(started)
        except UserError:  # after which the run is saved
            state.elapsed_s += time.perf_counter() - started
            raise
        finally:
            if is_log_step:
                self._log_steps(multiplier, metrics)
        self.bar.update(self.progress() - self.bar.n)
        return info

    def fetch_batch(self, started: float | None = None) -> None:
        """Fetch the batch of the next step.

        All ranks share its numbers of targets and positions, the time since `started`, and signals.
        """
        is_alone = self.dist.world_size == 1  # then a signal need not wait for the text of a stream
        batch = self.batches.batch(
            self.state.step, lambda: bool(is_alone and self.signal_handler.number)
        )
        elapsed = self.state.elapsed_s
        if started is not None:
            elapsed += time.perf_counter() - started
        n_targets = batch.n_targets if batch else 0
        n_positions = batch.targets.numel() if batch else 0
        values = self.dist.all_gather_scalars(
            n_targets, n_positions, elapsed, self.signal_handler.number
        )
        all_targets, all_positions, all_elapsed, signals = zip(*values)
        if batch is not None:
            batch = batch._replace(n_targets=int(sum(all_targets)))
        self.batch = batch
        self.n_positions = int(sum(all_positions))
        self.state.elapsed_s = all_elapsed[0]
        self.signal = int(max(signals))

    def _start_callbacks(self) -> None:
        run = TrainingRun(
            self.step.parts, self.run, self.state, self.corpus, self.loader, self.show_status
        )
        for callback in self.callbacks:
            callback.on_start(run)

    def _summarize(self) -> None:
        """Print the summary of the finished run, and give it to the callbacks."""
        from thinker.training.reports.summary import print_summary  # needed only here

        self.bar.close()
        summary = print_summary(self.run, self.state, self.epochs, self.corpus, self.loader)
        if summary is not None:
            for callback in self.callbacks:
                callback.on_summary(summary)

    def _close(self) -> None:
        self.bar.close()
        self.batches.close(is_finished=self.is_finished)
        self.checkpoints.close()
        was_due = self.is_due(self.train_config.eval_every) or self.progress() >= 1
        was_evaluated = self.state.evaluated_at == self.state.step
        is_evaluated = was_evaluated or not (self.stopping and was_due)
        for callback in self.callbacks:
            callback.on_end(is_evaluated)
        self.run.unlock()

    # ---------------------------------------------------------------- progress and signals

    @property
    def is_finished(self) -> bool:
        """Whether the run is complete, including the last evaluation."""
        is_evaluated = self.state.evaluated_at == self.state.step
        return self.state.step > 0 and self.progress() >= 1 and is_evaluated

    @property
    def stopping(self) -> int:
        """The signal that ends the run, or 0. With several ranks, one that all of them know."""
        return self.signal if self.dist.world_size > 1 else self.signal_handler.number

    @property
    def stops_early(self) -> bool:
        """Whether the validation loss has not reached a new low for train.patience evaluations."""
        return self.state.stops_early(self.train_config)

    @property
    def epochs(self) -> float:
        """Number of epochs: how often the training split, or that of its sources that repeats most,
        was read."""
        return max(self.loader.epochs(self.state.step))

    def progress(self) -> float:
        """Fraction of the run that is done, in [0, 1]: of steps or time, whichever is larger; 1 if
        it stops early."""
        return self.state.progress(self.train_config)

    def is_due(self, every: int | None) -> bool:
        """Whether an action is due that repeats every `every` steps. False at the end, where fit()
        acts anyway."""
        step = self.state.step
        return bool(every and step and step % every == 0 and self.progress() < 1)

    def poll_signals(self) -> bool:
        """Whether any rank has received a signal that should end the run. All ranks must call
        this."""
        numbers = self.dist.all_gather_scalars(self.signal_handler.number)
        self.signal = int(max(number for (number,) in numbers))
        return bool(self.stopping)

    def resume_hint(self) -> str:
        """Say where the run would resume."""
        if self.saved is None:
            return "the same command starts over, as there is no checkpoint"
        return (
            f"the same command resumes from step {self.saved.step}; to start earlier, "
            f"delete that checkpoint"
        )

    def show_status(self, text: str) -> None:
        """Show what is being done beside the progress bar."""
        self.bar.show_status(text)

    # ---------------------------------------------------------------- metrics

    def read_losses(self) -> None:
        """Fetch the losses of recent steps, and report those that are not finite."""
        for number, loss, grad_norm in self.step_log.read():
            self.skip_nonfinite_step(number, loss, grad_norm)

    def skip_nonfinite_step(self, step: int, loss: float, grad_norm: float) -> None:
        """Report a non-finite step (from 0), which changed no weights. Raises RunError if no more
        are allowed."""
        from thinker.training.nonfinite import NonfiniteSteps  # most runs have no such step

        n_allowed = self.train_config.max_nonfinite_steps
        steps = NonfiniteSteps(
            self.model, self.loader, self.corpus.tokenizer, self.run, self.checkpoints, n_allowed
        )
        self.state.skipped += 1
        message = steps.report(step, loss, grad_norm, self.state.skipped)
        if self.state.skipped > n_allowed:
            steps.end_run(step, message, self.resume_hint())
        self.bar.write(message, file=sys.stderr)

    def _callback_metrics(self) -> dict[str, float]:
        metrics = {}
        for callback in self.callbacks:
            metrics |= callback.metrics()
        return metrics

    def _log_steps(self, multiplier: float, metrics: dict[str, float]) -> None:
        """Log a line for the steps since the last one, and show it beside the progress bar."""
        line = self.step_log.log_steps(multiplier, metrics)
        if line is not None:
            self.last_line = line
            self._show_last_line()

    def _show_last_line(self) -> None:
        """Show the newest line of training metrics beside the progress bar, from its next update
        on."""
        line = self.last_line
        if line is None:
            return
        text = f"step {line['step']}, epoch {self.epochs:.2f}, loss {line['train_loss']:.3f}"
        if self.last_evaluation is not None:
            text += f", validation {self.last_evaluation.loss:.3f}"
        for callback in self.callbacks:
            more = callback.progress_text()
            if more:
                text += f", {more}"
        processed = line["tokens_per_second"]
        text += f", {processed:,.0f} tokens/s"
        text += format_trained(processed, line["trained_tokens_per_second"], " ({} trained on)")
        self.bar.set_postfix_str(text, refresh=False)

    # ---------------------------------------------------------------- evaluations and checkpoints

    def evaluate(self) -> None:
        """Measure and log the validation loss, unless that was done or a signal comes. Save the
        best weights."""
        self.read_losses()
        if self.state.evaluated_at == self.state.step:
            return
        with evaluated_weights(self.callbacks):
            evaluation = self.evaluator(self.model, self.poll_signals)
            if evaluation is not None:
                self.record_evaluation(evaluation)

    def record_evaluation(self, evaluation: Evaluation) -> None:
        """Log an evaluation of the model, and save the model if it is the best."""
        state = self.state
        if not math.isfinite(evaluation.loss):
            message = (
                f"step {state.step}: the validation loss is {evaluation.loss}, so nothing was saved"
            )
            raise RunError(f"{message}; lower optimizer.lr; {self.resume_hint()}")
        self.last_evaluation = evaluation
        self.step_log.write(evaluation_line(evaluation))
        state.add_evaluation(evaluation.loss)
        found, best = evaluation.loss, state.best_val_loss
        if evaluation.rank is not None:
            found, best = evaluation.rank, state.best_rank
        is_best = best is None or found < best
        if is_best and all(callback.has_final_form() for callback in self.callbacks):
            self._save_best(evaluation)

    def _save_best(self, evaluation: Evaluation) -> None:
        step = self.state.step
        self.state.best_val_loss = evaluation.loss
        self.state.best_rank = evaluation.rank
        values = {"step": step, "val_loss": evaluation.loss, "corpus": self.corpus.sha256}
        if evaluation.rank is not None:
            values["rank"] = evaluation.rank
        files = checkpoint.checkpoint_files(self.model, values)
        self.checkpoints.save("best", step, files)

    def save(self) -> None:
        """Write a checkpoint, unless the newest one has this state."""
        self.read_losses()
        self.state.scaler = self.step.scaler.state_dict()
        collect_state(self.state, self.callbacks)
        if self.state == self.saved:
            return
        self.run.check()
        self.run.flush_logs()
        with evaluated_weights(self.callbacks):
            tensors = training_tensors(self.step)
            state = self.state.model_dump(mode="json")
            files = checkpoint.checkpoint_files(self.model, state, tensors)
            self.checkpoints.save("step", self.state.step, files)
        for callback in self.callbacks:
            callback.on_save(self.state.step)
        self.saved = self.state.model_copy(deep=True)
