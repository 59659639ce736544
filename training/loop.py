"""Training: build everything from a recipe, then one optimizer step after the other."""

from __future__ import annotations

import math
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from data.ahead import Ahead
from data.corpus import Corpus, prepare
from data.loader import Loader, Windows
from data.tokenizer import token_byte_lengths
from device import choose_device, tune
from errors import UserError
from evaluation.loss import Evaluation, Evaluator
from generation import Generator, SamplingParams
from generation.engine import check_length
from storage import checkpoint
from storage.run_directory import RunDirectory
from training.meter import MemoryMeter, flops_per_token, peak_flops
from training.optimizers import fill_rates
from training.picture import draw_loss
from training.recipe import Recipe
from training.resume import refuse_another_tokenizer, refuse_changes
from training.schedule import lr_factor
from training.settle import settle_precision, settle_size
from training.step import TrainingStep, draw
from training.tracking import Tracker

EXIT_STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143}


def prepare_data(recipe: Recipe) -> Corpus:
    """The recipe's corpus as tokens on disk."""
    data = recipe.data
    options = {name: getattr(data, name) for name in ("path", "config", "split", "column", "streaming")}
    return prepare(
        source=data.source,
        **{name: value for name, value in options.items() if value is not None},
        tokenizer=data.tokenizer,
        val_fraction=data.val_fraction,
        max_documents=data.max_documents,
        cache_dir=data.cache_dir,
        seed=recipe.run.seed,
    )


class Trainer:
    """One run: its data, model, optimizer and files, and where it stands."""

    def __init__(self, recipe: Recipe) -> None:
        """Check everything, build everything, and take up the run where its newest checkpoint left it.

        Raises UserError before anything is written where the recipe does not fit the machine, the data or the run.
        """
        self.recipe, train = recipe, recipe.train
        self.run = RunDirectory(recipe.run.dir)
        self.device = choose_device(train.device)
        refuse_changes(self.run, recipe, "data", "optimizer", "run", "train")
        begun = checkpoint.list_checkpoints(self.run.checkpoints)
        before = self.run.read_config() if begun else None
        settle_precision(recipe, self.device, before)
        self.corpus = prepare_data(recipe)
        config = recipe.thinker_config(self.corpus.tokenizer.vocab_size)
        recipe.model = type(recipe.model)(**config.to_dict())  # config.yaml shall name every width and rate
        recipe.optimizer = fill_rates(recipe.optimizer, config, train.batch_size)
        refuse_changes(self.run, recipe, "model")
        tune(self.device)
        settle_size(recipe, config, self.device, before)
        refuse_another_tokenizer(self.run, self.corpus.tokenizer)
        aligned = "documents" if recipe.data.source == "tales" else recipe.data.packing
        windows = Windows(self.corpus.train, recipe.data.seq_len, recipe.data.packing)
        self.batches = Ahead(Loader(windows, train.batch_size, recipe.run.seed), pinned=self.device.type == "cuda")
        self.evaluator = Evaluator(
            Windows(self.corpus.val, recipe.data.seq_len, aligned),
            train.micro_batch_size,
            token_byte_lengths(self.corpus.tokenizer),
            train.eval_windows,
        )
        self.memory = MemoryMeter(self.device)
        self.thinker = draw(config, recipe.run.seed, self.device)
        self.train_step = TrainingStep(self.thinker, recipe)
        self.optimizers, self.scaler = self.train_step.optimizers, self.train_step.scaler
        self.step = self.tokens = 0
        self.elapsed = 0.0  # seconds of training
        self.best_loss: float | None = None
        self.last: Evaluation | None = None
        self.evaluated_at: int | None = None  # the step of the last evaluation
        self.signal: int | None = None
        if train.sample_every:
            check_length([0, *self.corpus.tokenizer.encode(train.sample_prompt)], self.thinker.config.max_seq_len)
        self.run.create()
        self.run.lock()
        saved = self.resume()
        self.finished = self.step > 0 and self.progress() >= 1 and self.evaluated_at == self.step
        if not self.finished:
            self.run.write_config(recipe.model_dump(mode="json"))
        self.corpus.tokenizer.save(self.run.path)
        self.tracker = Tracker(recipe, self.run, saved.get("wandb_id"))

    def train(self) -> int:
        """Run until the recipe's end, or a signal. Returns the exit status."""
        train = self.recipe.train
        if self.finished:
            print(f"{self.run.path} is finished; raise train.max_steps or train.max_minutes to go on", file=sys.stderr)
            self.tracker.finish()
            self.run.unlock()
            self.report()
            return 0
        if self.step:
            print(f"going on from step {self.step} in {self.run.path}", file=sys.stderr)
        handlers = {number: signal.signal(number, self._on_signal) for number in EXIT_STATUS}
        bar = tqdm(
            total=1.0,
            initial=self.progress(),
            smoothing=0,  # the time left by the mean speed: an evaluation is no sign of slowness
            bar_format="{percentage:3.0f}%|{bar}|{postfix} [{elapsed}<{remaining}]",
        )
        losses: list[Tensor] = []
        logged_at, logged_tokens, logged_wait = self.elapsed, self.tokens, self.batches.waited
        try:
            while self.progress() < 1 and self.signal is None:
                started = time.perf_counter()
                factor = self.lr_factor()
                batch = self.batches.batch(self.step)
                loss, grad_norm = self.train_step(batch, factor)
                losses.append(loss)
                self.step += 1
                self.tokens += batch.count
                if self.step % train.log_every == 0:
                    line = {"train_loss": torch.stack(losses).mean().item(), "lr": self.optimizers.lr * factor}
                    losses.clear()
                    self.refuse_divergence(line["train_loss"])
                    line["grad_norm"] = float(grad_norm)
                    self.elapsed += time.perf_counter() - started  # after .item(): the device has finished
                    seconds = max(self.elapsed - logged_at, 1e-9)
                    speed = (self.tokens - logged_tokens) / seconds
                    line["data_wait"] = (self.batches.waited - logged_wait) / seconds
                    logged_at, logged_tokens, logged_wait = self.elapsed, self.tokens, self.batches.waited
                    self.log(line | self.speed(speed))
                    val = f", validation {self.last.loss:.3f}" if self.last else ""
                    bar.set_postfix_str(
                        f"step {self.step}, loss {line['train_loss']:.3f}{val}, {speed:,.0f} tokens/s", refresh=False
                    )
                else:
                    self.elapsed += time.perf_counter() - started
                bar.update(self.progress() - bar.n)
                if train.eval_every and self.step % train.eval_every == 0 and self.progress() < 1:
                    self.evaluate()
                if train.save_every and self.step % train.save_every == 0 and self.progress() < 1:
                    self.save()
                if train.sample_every and self.step % train.sample_every == 0:
                    bar.write(f"step {self.step}: {self.sample()}", file=sys.stderr)
            if self.signal is None and self.evaluated_at != self.step:
                self.evaluate()
            if not (self.run.checkpoints / self.name()).exists():
                self.save()
            bar.update(self.progress() - bar.n)
        finally:
            bar.close()
            self.batches.close()
            self.tracker.finish()
            self.run.unlock()
            for number, handler in handlers.items():
                signal.signal(number, handler)
        if self.signal is not None:
            print(f"saved step {self.step} in {self.run.path}; the same command goes on from there", file=sys.stderr)
            return EXIT_STATUS[self.signal]
        self.report()
        return 0

    def lr_factor(self) -> float:
        """What the next step's learning rates are of their peaks."""
        train = self.recipe.train
        return lr_factor(
            self.step,
            self.progress(),
            schedule=train.schedule,
            warmup_steps=train.warmup_steps,
            decay_fraction=train.decay_fraction,
            final=train.final_lr_fraction,
        )

    def progress(self) -> float:
        """The share of the run that is done, in [0, 1]: of steps or of time, whichever is further."""
        train = self.recipe.train
        steps = self.step / train.max_steps if train.max_steps else 0.0
        minutes = self.elapsed / 60 / train.max_minutes if train.max_minutes else 0.0
        return min(1.0, max(steps, minutes))

    def speed(self, tokens_per_second: float) -> dict[str, float]:
        """The keys of a line of metrics that say how fast and how large."""
        line = {"tokens_per_second": tokens_per_second, "peak_memory_bytes": self.memory.peak()}
        peak = peak_flops(self.device, self.recipe.train.precision)
        if peak is not None:
            line["mfu"] = tokens_per_second * flops_per_token(self.thinker, self.recipe.data.seq_len) / peak
        return line

    def log(self, line: dict[str, Any]) -> None:
        """One line to metrics.jsonl and to wandb."""
        line = {"step": self.step, "tokens": self.tokens, **line, "elapsed_s": self.elapsed}
        self.run.log(line)
        self.tracker.log(line)

    def evaluate(self) -> None:
        """Measure the validation loss, log it, and keep the weights if they are the best so far."""
        self.last = found = self.evaluator(self.thinker)
        self.refuse_divergence(found.loss)
        self.evaluated_at = self.step
        line = {"val_loss": found.loss, "val_bits_per_byte": found.bits_per_byte}
        if found.entropy_floor is not None:
            line["entropy_floor"] = found.entropy_floor
        self.log(line)
        if self.best_loss is None or found.loss < self.best_loss:
            self.best_loss = found.loss
            older = checkpoint.list_checkpoints(self.run.checkpoints, "best")
            new = self.run.checkpoints / self.name("best")
            checkpoint.save(new, self.thinker, {"step": self.step, "val_loss": found.loss})
            for path in older:
                if path != new:
                    checkpoint.remove(path)

    def refuse_divergence(self, loss: float) -> None:
        """Raise UserError where a loss is no number any more: what comes after it must not replace a checkpoint."""
        if not math.isfinite(loss):
            raise UserError(
                f"the loss is {loss} after step {self.step}: the run has diverged; lower optimizer.lr. "
                f"The checkpoints in {self.run.checkpoints} are from before"
            )

    def sample(self) -> str:
        """A line from the model as it is now."""
        generator = Generator(self.thinker, self.corpus.tokenizer)
        prompt = self.recipe.train.sample_prompt
        completion = generator.generate([prompt], SamplingParams(max_new_tokens=48, temperature=0.8, seed=self.step))
        return " ".join((prompt + completion[0].text).split())

    def name(self, kind: str = "step") -> str:
        """The name of a checkpoint made now."""
        return f"{kind}-{self.step:08d}"

    def save(self) -> None:
        """Write a checkpoint, then remove those beyond train.keep_last."""
        state = {
            "step": self.step,
            "tokens": self.tokens,
            "elapsed_s": self.elapsed,
            "best_val_loss": self.best_loss,
            "wandb_id": self.tracker.run_id,
            "scaler": self.scaler.state_dict(),
        }
        training = self.optimizers.tensors() | {"random.cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            training["random.cuda"] = torch.cuda.get_rng_state(self.device)
        checkpoint.save(self.run.checkpoints / self.name(), self.thinker, state, training)
        for folder in checkpoint.list_checkpoints(self.run.checkpoints)[: -self.recipe.train.keep_last]:
            checkpoint.remove(folder)

    def resume(self) -> dict[str, Any]:
        """Take up the newest whole checkpoint, if there is one. Returns its state, or an empty dictionary."""
        checkpoint.clear(self.run.checkpoints)
        folder = self.run.latest()
        if folder is None:
            self.run.cut_metrics(0)
            return {}
        for newer in checkpoint.list_checkpoints(self.run.checkpoints):
            if newer.name > folder.name:
                checkpoint.set_aside(newer)  # or it would count as one of the last that are kept
        state = checkpoint.read_json(folder / "state.json")
        training = checkpoint.read_tensors(folder / "training.safetensors")
        checkpoint.load_weights(self.thinker, checkpoint.read_tensors(folder / "model.safetensors"), folder)
        self.optimizers.load_tensors(training)
        self.scaler.load_state_dict(state["scaler"])
        torch.set_rng_state(training["random.cpu"])
        if self.device.type == "cuda" and "random.cuda" in training:
            torch.cuda.set_rng_state(training["random.cuda"], self.device)
        self.step, self.tokens, self.elapsed = state["step"], state["tokens"], state["elapsed_s"]
        self.best_loss = state["best_val_loss"]
        self.run.cut_metrics(self.step)
        steps = [line["step"] for line in self.run.read_metrics() if "val_loss" in line]
        self.evaluated_at = steps[-1] if steps else None
        return state

    def report(self) -> None:
        """Say how the run ended, and draw it."""
        lines = list(self.run.read_metrics())
        picture = self.run.path / "loss.png"
        draw_loss(lines, picture, f"{self.run.path.name}: {self.tokens:,} tokens in {self.elapsed / 60:.1f} minutes")
        val = next(line for line in reversed(lines) if "val_loss" in line)
        floor = val.get("entropy_floor")
        print(f"finished: {self.step} steps, {self.tokens:,} tokens, {self.elapsed:.0f} s of training")
        print(f"validation loss {val['val_loss']:.4f} nats a token, {val['val_bits_per_byte']:.4f} bits a byte")
        if floor is not None:
            above = val["val_loss"] / floor - 1
            print(f"entropy of the corpus {floor:.4f} nats a token: the model is {above:.1%} above the best possible")
        print(f"loss curve {picture}")
        python = Path(sys.executable)
        python = python.relative_to(Path.cwd()) if python.is_relative_to(Path.cwd()) else python
        print(f"sample from it: {python} generate.py {self.run.path}")

    def _on_signal(self, number: int, frame: Any) -> None:
        if self.signal is not None:
            signal.signal(number, signal.SIG_DFL)  # asked twice: leave at once
            signal.raise_signal(number)
        self.signal = number
        print("\nfinishing this step and saving; once more leaves at once", file=sys.stderr)
