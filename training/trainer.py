"""The training loop: optimizer steps, evaluations, checkpoints, samples and metrics."""

import json
import math
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from thinker import checkpoint
from thinker.checkpoint import CheckpointManager
from thinker.checkpoint.run_directory import RunDirectory
from thinker.data.batches.prefetch import Prefetcher
from thinker.data.corpus.corpus import Corpus
from thinker.evaluation.loss import Evaluation, Evaluator
from thinker.features.mixtures.mixture_loss import MixtureEvaluator
from thinker.features.mixtures.reports import part_losses
from thinker.features.monitoring.layer_log import LayerLog
from thinker.generation import Generator, SamplingParams
from thinker.runtime.errors import RunError, UserError
from thinker.runtime.files import atomic_write
from thinker.runtime.process_group import DistContext
from thinker.training import resume
from thinker.training.metrics import MemoryMeter, flops_per_token, peak_flops
from thinker.training.nonfinite import diagnose, finite_or_none, unwrapped_copy
from thinker.training.optim.schedule import lr_multiplier
from thinker.training.reports.summary import print_summary
from thinker.training.run_state import RunState
from thinker.training.settings.settings import Settings
from thinker.training.signals import SignalHandler
from thinker.training.step import TrainingStep
from thinker.training.tracking import Tracker

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
    evaluator: Evaluator | MixtureEvaluator
    checkpoints: CheckpointManager
    tracker: Tracker
    memory: MemoryMeter
    dist: DistContext
    saved: RunState | None = None  # the state in the newest checkpoint
    last_evaluation: Evaluation | None = None
    unread: list[tuple[int, Tensor]] = field(
        default_factory=list
    )  # steps, and their results on the device

    def __post_init__(self) -> None:
        self.model, self.device, self.loader = (
            self.step.model,
            self.step.device,
            self.batches.loader,
        )
        self.layers = LayerLog(self.settings.train, self.step, self.state)
        self.signal_handler = SignalHandler(together=self.dist.world_size > 1)
        self.logged = (
            self.state.elapsed_s,
            self.state.tokens,
            0.0,
        )  # at the last logged line, with the seconds waited
        if self.is_finished:
            return
        if self.dist.is_main:
            self.loader.write_streams(self.state.step)
        self.dist.broadcast_object(
            None
        )  # the other ranks read only after old blocks of streams were removed
        self.sync_step()

    @property
    def is_finished(self) -> bool:
        """Whether the run is complete, including the last evaluation."""
        return (
            self.state.step > 0
            and self.progress() >= 1
            and self.state.evaluated_at == self.state.step
        )

    def train(self) -> int:
        """Train to the end, or until a signal. Returns the exit status."""
        is_finished = self.is_finished
        if is_finished:
            limit = "patience" if self.stops_early else "max_steps or max_minutes"
            print(f"{self.run.path} is finished; raise train.{limit} to continue", file=sys.stderr)
        elif self.state.step:
            print(f"resuming from step {self.state.step} in {self.run.path}", file=sys.stderr)
        with self.signal_handler:
            self.bar = tqdm(total=1.0, initial=self.progress(), disable=is_finished, **BAR_OPTIONS)
            try:
                if not is_finished:
                    self.fit()
                self.checkpoints.wait()
            finally:
                self.bar.close()
                self.batches.close(is_finished=self.is_finished)
                self.checkpoints.close()
                is_evaluation_due = (
                    self.is_due(self.settings.train.eval_every) or self.progress() >= 1
                )
                is_evaluated = self.state.evaluated_at == self.state.step
                self.tracker.finish(
                    is_complete=is_evaluated or not (self.stopping and is_evaluation_due)
                )
                self.run.unlock()
            if self.stopping:
                saved = f"saved step {self.state.step} in {self.run.path}"
                print(f"{saved}; run the same command again to resume", file=sys.stderr)
                return 128 + self.stopping  # as shells report a signal: 129, 130, 143
            shares = dict(zip(self.corpus.parts, self.loader.mixture.mean_token_shares().tolist()))
            print_summary(self.run, self.state, self.epochs, self.corpus, shares)
        return 0

    def fit(self) -> None:
        """Run all steps with their evaluations, checkpoints and samples; then evaluate and save a last time."""
        train = self.settings.train
        try:
            if self.is_due(train.eval_every):  # a signal interrupted it
                self.evaluate()
            while self.progress() < 1 and not self.stopping:
                self.train_step()
                if self.is_due(train.eval_every):
                    self.evaluate()
                if self.is_due(train.save_every):
                    self.bar.set_postfix_str(f"step {self.state.step}, saving")
                    self.save()
                if train.sample_every and self.state.step % train.sample_every == 0:
                    self.bar.set_postfix_str(f"step {self.state.step}, sampling")
                    self.bar.write(f"step {self.state.step}: {self.sample()}", file=sys.stderr)
            if not self.stopping:
                self.evaluate()
        except UserError as error:  # the text of a stream cannot be read
            if self.dist.world_size > 1:
                raise
            self.save()
            raise UserError(f"{error}; saved step {self.state.step}") from error
        except RuntimeError as error:
            names = [
                kind.__name__ for kind in type(error).__mro__
            ]  # importing torch._dynamo.exc is slow
            if not (self.signal_handler.number and "BackendCompilerFailed" in names):
                raise
            self.signal = (
                self.signal_handler.number
            )  # the signal also ended the compilers of all ranks
        self.save()
        self.bar.update(self.progress() - self.bar.n)

    def train_step(self) -> None:
        """Run one optimizer step, and log metrics if they are due."""
        state, started = self.state, time.perf_counter()
        multiplier = lr_multiplier(self.settings.train, state.step, self.progress())
        resume.seed_step(self.settings.run.seed, state.step, self.dist.rank)
        loss, grad_norm = self.step(self.batch, multiplier)
        if self.batch.n_targets:
            self.unread.append(
                (
                    state.step,
                    torch.cat((loss[None], grad_norm[None], self.step.part_sums.flatten())),
                )
            )
        state.step += 1
        self.step.after_step.update(state.step, self.progress(), self.batch)
        state.tokens += self.batch.n_targets
        is_log_step = state.step % self.settings.train.log_every == 0
        if is_log_step:
            self.read_losses()  # waits for the device
            started += self.layers.measure(self.batch)
        try:
            self.sync_step(started)
        except UserError:  # of a stream, after which the run is saved
            state.elapsed_s += time.perf_counter() - started
            raise
        finally:
            if is_log_step:
                self.log_steps(multiplier)
        self.bar.update(self.progress() - self.bar.n)

    def sync_step(self, started: float | None = None) -> None:
        """Fetch the next batch; share its number of targets, the time since `started`, and signals with all ranks."""
        is_alone = self.dist.world_size == 1  # then a signal need not wait for the text of a stream
        batch = self.batches.batch(
            self.state.step, lambda: bool(is_alone and self.signal_handler.number)
        )
        elapsed = self.state.elapsed_s + (0.0 if started is None else time.perf_counter() - started)
        values = self.dist.all_gather_scalars(
            batch.n_targets if batch else 0, elapsed, self.signal_handler.number
        )
        n_targets, elapsed_s, signals = zip(*values)
        self.batch = batch and batch._replace(n_targets=int(sum(n_targets)))
        self.state.elapsed_s, self.signal = elapsed_s[0], int(max(signals))

    @property
    def stopping(self) -> int:
        """The signal that ends the run, or 0. With several ranks, one that all of them know."""
        return self.signal if self.dist.world_size > 1 else self.signal_handler.number

    def poll_signals(self) -> bool:
        """Whether any rank has received a signal that should end the run. All ranks must call this."""
        self.signal = int(
            max(number for (number,) in self.dist.all_gather_scalars(self.signal_handler.number))
        )
        return bool(self.stopping)

    def read_losses(self) -> None:
        """Fetch the losses and gradient norms of recent steps. Nothing else in a step waits for the device."""
        rows = torch.stack([values for _, values in self.unread]).tolist() if self.unread else []
        steps = [step for step, _ in self.unread]
        self.unread.clear()
        for step, (loss, grad_norm, *part_sums) in zip(steps, rows):
            if math.isfinite(loss) and (math.isfinite(grad_norm) or self.step.scaler.is_enabled()):
                self.state.pending_steps += 1
                self.state.pending_losses += loss
                self.state.pending_norm = finite_or_none(grad_norm)
                pending = self.state.pending_sources or [0.0] * len(part_sums)
                self.state.pending_sources = [old + new for old, new in zip(pending, part_sums)]
            else:
                self.skip_nonfinite_step(step, loss, grad_norm)

    def skip_nonfinite_step(self, step: int, loss: float, grad_norm: float) -> None:
        """Report a non-finite step (from 0), which changed no weights. Raises RunError if no more are allowed."""
        number, allowed = step + 1, self.settings.train.max_nonfinite_steps
        self.state.skipped += 1
        is_allowed = self.state.skipped <= allowed
        message = f"step {number}: loss {loss:g}, gradient norm {grad_norm:g}"
        report = {
            "step": number,
            "loss": finite_or_none(loss),
            "grad_norm": finite_or_none(grad_norm),
        }
        report["sample_ids"] = self.loader.sample_ids(step)
        if not is_allowed:
            report |= diagnose(self.model, self.loader, self.corpus.tokenizer, step)
        path = self.run.path / f"nonfinite-step-{number:08d}.json"
        if self.run.writes:
            atomic_write(path, json.dumps(report, indent=1, ensure_ascii=False) + "\n")
        if is_allowed:
            self.bar.write(
                f"{message}; step skipped ({self.state.skipped} of {allowed}, see {path})",
                file=sys.stderr,
            )
            return
        self.checkpoints.save(
            "nonfinite", number, checkpoint.checkpoint_files(self.model, {"step": number})
        )
        self.dist.all_gather_scalars(number)  # the first rank to end ends the others
        name, size = report["largest_weight"]
        size = "not finite" if size is None else f"{size:g}"
        raise RunError(
            f"{message}; the weights are unchanged. {path} lists the samples of this step. {self.run.checkpoints}/"
            f"nonfinite-{number:08d} contains the weights (largest absolute value: {size}, in {name}). Lower "
            f"optimizer.lr, or skip rare bad samples with train.max_nonfinite_steps={allowed + 1}; {self.resume_hint()}"
        )

    def resume_hint(self) -> str:
        """Say where the run would resume."""
        if self.saved is None:
            return "the same command starts over, as there is no checkpoint"
        return f"the same command resumes from step {self.saved.step}; to start earlier, delete that checkpoint"

    def log_steps(self, multiplier: float) -> None:
        """Log a line of metrics for the steps since the last one."""
        state, now = self.state, (self.state.elapsed_s, self.state.tokens, self.batches.waited)
        seconds, tokens, waited = (max(new - old, 1e-9) for new, old in zip(now, self.logged))
        self.logged = now
        if not state.pending_steps:
            return  # all were skipped, or had no targets
        line = {
            "train_loss": state.pending_losses / state.pending_steps,
            "lr": self.step.optimizers.lr * multiplier,
        }
        if state.pending_norm is not None:
            line["grad_norm"] = state.pending_norm
        line |= (
            part_losses(self.step.compute_loss.parts, self.corpus, state.pending_sources)
            | self.layers.values
        )
        state.pending_steps, state.pending_losses, state.pending_norm, state.pending_sources = (
            0,
            0.0,
            None,
            [],
        )
        if state.skipped:
            line["skipped_steps"] = state.skipped
        flops = (
            tokens / seconds * flops_per_token(self.model, self.settings.data.seq_len)
        )  # per second, of all ranks
        line |= {
            "data_wait": waited / seconds,
            "tokens_per_second": tokens / seconds,
            "flops_per_second": flops,
        }
        if peak := peak_flops(self.device, self.settings.train.precision):
            line["mfu"] = flops / (peak * self.dist.world_size)
        self.log(line | {"peak_memory_bytes": self.memory.peak()} | self.step.after_step.metrics())
        val = f", validation {self.last_evaluation.loss:.3f}" if self.last_evaluation else ""
        text = f"step {state.step}, epoch {self.epochs:.2f}, loss {line['train_loss']:.3f}{val}"
        self.bar.set_postfix_str(f"{text}, {tokens / seconds:,.0f} tokens/s", refresh=False)

    def is_due(self, every: int | None) -> bool:
        """Whether an action is due that repeats every `every` steps. False at the end, where fit() acts anyway."""
        return bool(
            every and self.state.step and self.state.step % every == 0 and self.progress() < 1
        )

    def progress(self) -> float:
        """Fraction of the run that is done, in [0, 1]: of steps or time, whichever is larger; 1 if it stops early."""
        train = self.settings.train
        if self.stops_early:
            return 1.0
        steps = self.state.step / train.max_steps if train.max_steps else 0.0
        minutes = self.state.elapsed_s / 60 / train.max_minutes if train.max_minutes else 0.0
        return min(1.0, max(steps, minutes))

    @property
    def stops_early(self) -> bool:
        """Whether the validation loss has not reached a new low for train.patience evaluations."""
        patience = self.settings.train.patience
        return patience is not None and self.state.evaluations_since_lowest >= patience

    @property
    def epochs(self) -> float:
        """Number of epochs: how often the training split, or the source of a mixture that repeats most, was read."""
        return max(self.loader.epochs(self.state.step))

    def log(self, line: dict[str, Any]) -> None:
        """Write one line to metrics.jsonl and to wandb."""
        line = {
            "step": self.state.step,
            "tokens": self.state.tokens,
            **line,
            "elapsed_s": self.state.elapsed_s,
        }
        self.run.log(line)
        self.tracker.log(line)

    def evaluate(self) -> None:
        """Measure and log the validation loss, unless that was done or a signal comes. Save the best weights."""
        self.read_losses()
        if self.state.evaluated_at == self.state.step:
            return
        with self.step.after_step.in_model():
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
        self.layers.write_reference(self.run, self.corpus, self.settings.data.seq_len)
        self.last_evaluation, state.evaluated_at = evaluation, state.step
        line = {"val_loss": evaluation.loss, "val_bits_per_byte": evaluation.bits_per_byte}
        for name, part in evaluation.parts.items():
            line |= {f"val_loss/{name}": part.loss, f"val_bits_per_byte/{name}": part.bits_per_byte}
        if evaluation.entropy_floor is not None:
            line["entropy_floor"] = evaluation.entropy_floor
        self.log(line)
        state.evaluations_since_lowest += 1
        if state.lowest_val_loss is None or evaluation.loss < state.lowest_val_loss:
            state.lowest_val_loss, state.lowest_at, state.evaluations_since_lowest = (
                evaluation.loss,
                state.step,
                0,
            )
        is_best = state.best_val_loss is None or evaluation.loss < state.best_val_loss
        if is_best and self.step.after_step.is_complete:
            state.best_val_loss = evaluation.loss
            values = {"step": state.step, "val_loss": evaluation.loss, "corpus": self.corpus.sha256}
            self.checkpoints.save(
                "best", state.step, checkpoint.checkpoint_files(self.model, values)
            )

    def save(self) -> None:
        """Write a checkpoint, unless the newest one has this state."""
        self.read_losses()
        self.state.scaler = self.step.scaler.state_dict()
        if self.state != self.saved:
            state, tensors = self.state.model_dump(mode="json"), self.step.optimizers.tensors()
            self.run.check()
            self.run.flush_metrics()
            with self.step.after_step.in_model() as weights:
                files = checkpoint.checkpoint_files(self.model, state, tensors | weights)
                self.checkpoints.save("step", self.state.step, files)
            self.saved = self.state.model_copy(deep=True)

    def sample(self) -> str:
        """A sample from the current model, as one line; empty except on rank 0. All ranks must call this."""
        with self.step.after_step.in_model():
            model = unwrapped_copy(self.model) if hasattr(self.model, "unshard") else self.model
            if not self.dist.is_main:
                return ""
            generator = Generator(model, self.corpus.tokenizer)  # which copies the weights
        prompt, seed = self.settings.train.sample_prompt, self.state.step
        try:
            completion = generator.generate(
                [prompt], SamplingParams(max_new_tokens=48, temperature=0.8, seed=seed)
            )
        except RunError as error:  # non-finite logits; training continues, and checks the next loss
            return str(error)
        return " ".join((prompt + completion[0].text).split())
