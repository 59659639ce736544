"""Training: build everything from a config, then one optimizer step after the other."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from thinker import checkpoint
from thinker.checkpoint import CheckpointManager
from thinker.checkpoint.run_directory import RunDirectory
from thinker.data.batches import BatchLoader, PackedDataset
from thinker.data.prefetch import Prefetcher
from thinker.data.tokenizer import token_byte_lengths
from thinker.evaluation.loss import Evaluation, Evaluator
from thinker.generation import Generator, SamplingParams
from thinker.generation.engine import check_prompt_length
from thinker.runtime.device import choose_device, configure_backend, enable_determinism
from thinker.runtime.errors import RunError, UserError
from thinker.runtime.process_group import SINGLE_PROCESS, DistContext
from thinker.training import resume
from thinker.training.config import Config
from thinker.training.corpus import prepare_training_data
from thinker.training.initial_model import load_initial_model
from thinker.training.metrics import MemoryMeter, flops_per_token, peak_flops
from thinker.training.nonfinite import diagnose, finite, plain, write_report
from thinker.training.optimizers import finetune_lr_scale, resolve_learning_rates
from thinker.training.report import report
from thinker.training.resume import RunState
from thinker.training.schedule import lr_multiplier
from thinker.training.settings import MachineSettings, resolve_micro_batch, resolve_parallelism, resolve_precision
from thinker.training.signals import SignalHandler, is_compile_error
from thinker.training.step import TrainingStep, build_model
from thinker.training.tracking import Tracker

CPU_SHARE = 0.005  # of a core, for background saves where training has use for every core (docs/resuming.md)


class Trainer:
    """One run: its data, model, optimizer and files, and where it stands. Of several ranks each makes one."""

    def __init__(self, config: Config, dist: DistContext = SINGLE_PROCESS) -> None:
        """Check everything, build everything, and take up the run where its newest checkpoint left it.

        Raises UserError before anything is written where the config does not fit the machine, the data or the run.
        """
        self.config, self.dist, train = config, dist, config.train
        self.run = RunDirectory(config.run.dir, writes=dist.is_main)
        if train.deterministic:
            enable_determinism()
        self.device = choose_device(train.device)
        dist.init_process_group(self.device.type, train.dist_timeout_s)
        self.run.lock()
        folder = None
        if dist.is_main:
            checkpoint.recover(self.run.checkpoints)
            folder = self.run.latest()
        else:
            config.tracking.wandb = "disabled"  # rank 0 sends for all
        name = dist.broadcast_object(folder and folder.name)
        folder = name and self.run.checkpoints / name
        before = resume.read_state(folder) if folder else None
        begun, tokenizer = load_initial_model(config, before, self.run.path)
        if before is not None:
            resume.check_unchanged(self.run, before, config, "run", "data", "optimizer", "train")
        chosen = before.chosen if before else None
        resolve_precision(config, self.device, chosen, dist)
        with dist.main_process_first():
            self.corpus = prepare_training_data(config, tokenizer)
        model_config = config.thinker_config(self.corpus.tokenizer.vocab_size)
        config.model = type(config.model)(**model_config.to_dict())  # model_config.yaml shall name every width and rate
        config.optimizer = resolve_learning_rates(
            config.optimizer, model_config, train.batch_size, finetune_lr_scale(config)
        )
        if before is not None:
            resume.check_unchanged(self.run, before, config, "model")
            resume.check_corpus(self.run, before, self.corpus, config.data.path or config.data.source)
        configure_backend(self.device)
        rows = resolve_parallelism(config, model_config, self.device, dist)
        resolve_micro_batch(config, model_config, self.device, chosen, dist)
        aligned = "documents" if config.data.source == "tales" else config.data.packing
        masking = {"document_masking": config.data.document_masking, "prefix_len": model_config.prefix}
        self.loader = BatchLoader(
            PackedDataset(self.corpus.train, config.data.seq_len, config.data.packing, **masking),
            train.batch_size,
            config.run.seed,
        )
        self.batches = Prefetcher(self.loader, self.device.type == "cuda", rows, config.data.num_workers)
        self.evaluator = Evaluator(
            PackedDataset(self.corpus.val, config.data.seq_len, aligned, **masking),
            train.micro_batch_size,
            token_byte_lengths(self.corpus.tokenizer),
            train.eval_sequences,
            dist,
        )
        self.memory = MemoryMeter(self.device)
        sharded = dist.world_size > 1 and train.parallel == "fsdp"  # then no device ever holds the whole
        self.model = build_model(model_config, config.run.seed, torch.device("cpu") if sharded else self.device, begun)
        self.train_step = TrainingStep(self.model, config, dist=dist)
        if train.sample_every:
            prompt = [0, *self.corpus.tokenizer.encode(train.sample_prompt)]
            check_prompt_length(prompt, model_config, model_config.max_cached_len)
        self.run.create()
        self.run.lock()
        if dist.is_main and folder is None and checkpoint.list_checkpoints(self.run.checkpoints):
            raise UserError(f"another training has just been at work in {self.run.path}; run the same command again")
        self.state = self.begin(folder, before)
        self.saved = self.state.model_copy(deep=True) if folder else None
        self.last: Evaluation | None = None
        self.agreed = 0  # a signal that any rank has been sent, as all know it
        self.unread: list[Tensor] = []  # (loss, gradient norm) of the last steps, still on the device
        self.logged = (self.state.elapsed_s, self.state.tokens, 0.0)  # when the last line was: seconds, tokens, waited
        self.saver = CheckpointManager(
            self.run.checkpoints, train.keep_last, train.keep_every, train.async_save,
            cpu_share=CPU_SHARE if self.device.type == "cpu" else 1.0, dist=dist, sharded=train.save_sharded,
        )  # fmt: skip
        self.interrupt = SignalHandler(together=dist.world_size > 1)
        self.agree()
        self.finished = self.state.step > 0 and self.progress() >= 1 and self.state.evaluated_at == self.state.step
        if not self.finished:
            self.run.write_config(config.model_dump(mode="json"))
        if dist.is_main:
            self.corpus.tokenizer.save(self.run.path)

    def begin(self, folder: Path | None, before: RunState | None) -> RunState:
        """Take up the checkpoint, if there is one. Returns where the run stands."""
        config, first = self.config, self.dist.is_main
        machine = resume.describe_machine(self.device, self.dist, config.train.parallel)
        if folder is None or before is None:
            if first:
                resume.quarantine_stale_best(self.run)
        else:
            for newer in checkpoint.list_checkpoints(self.run.checkpoints) if first else ():
                if newer.name > folder.name:
                    checkpoint.quarantine(newer, "damaged")  # or it would count as one of the last that are kept
            if before.skipped > config.train.max_nonfinite_steps:
                raise UserError(
                    f"the run in {self.run.path} has left out {before.skipped} non-finite steps; "
                    "train.max_nonfinite_steps cannot be fewer"
                )
            resume.restore(folder, self.train_step, before)
            resume.warn_about_changes(before, machine, config)
            before.best_val_loss = self.dist.broadcast_object(
                resume.best_val_loss_so_far(self.run, before, config) if first else None
            )
        state = before or RunState()
        self.run.truncate_metrics(state.step, state.evaluated_at)
        self.tracker = Tracker(config, self.run)
        state.tokenizer, state.corpus = self.corpus.tokenizer.content_hash, self.corpus.sha256
        state.machine, state.chosen = (
            machine,
            MachineSettings(**config.train.model_dump(include=set(MachineSettings.model_fields))),
        )
        state.config = config.model_dump(mode="json")
        return state

    def train(self) -> int:
        """Run until the config's end, or a signal. Returns the exit status."""
        if self.finished:
            print(f"{self.run.path} is finished; raise train.max_steps or train.max_minutes to go on", file=sys.stderr)
            self.tracker.finish()
            self.run.unlock()
            report(self.run, self.state, self.model.config.prefix, self.corpus.train.has_conversations)
            return 0
        if self.state.step:
            print(f"going on from step {self.state.step} in {self.run.path}", file=sys.stderr)
        with self.interrupt:
            self.bar = tqdm(
                total=1.0,
                initial=self.progress(),
                smoothing=0,  # the time left by the mean speed: an evaluation is no sign of slowness
                bar_format="{percentage:3.0f}%|{bar}|{postfix} [{elapsed}<{remaining}]",
            )
            try:
                self.fit()
                self.saver.wait()
            finally:
                self.bar.close()
                self.batches.close()
                self.saver.close()
                self.tracker.finish(is_complete=not self.evaluation_was_left())
                self.run.unlock()
            if self.stopping:
                print(f"saved step {self.state.step} in {self.run.path}; the same command goes on from there",
                      file=sys.stderr)  # fmt: skip
                return 128 + self.stopping  # as shells tell which signal it was: 129, 130, 143
            report(self.run, self.state, self.model.config.prefix, self.corpus.train.has_conversations)
        return 0

    def fit(self) -> None:
        """Every step, with what is due after it; then the last evaluation and the last checkpoint."""
        train = self.config.train
        try:
            if self.is_due(train.eval_every):  # the run was stopped in the midst of it
                self.evaluate()
            while self.progress() < 1 and not self.stopping:
                self.advance()
                if self.is_due(train.eval_every):
                    self.evaluate()
                if self.is_due(train.save_every):
                    self.save()
                if train.sample_every and self.state.step % train.sample_every == 0:
                    self.bar.write(f"step {self.state.step}: {self.sample()}", file=sys.stderr)
            if not self.stopping:
                self.evaluate()
        except RuntimeError as error:
            if not (self.interrupt and is_compile_error(error)):
                raise
            self.agreed = self.interrupt.number  # other ranks' compilers have been ended alike
        self.save()
        self.bar.update(self.progress() - self.bar.n)

    def advance(self) -> None:
        """One optimizer step, and a line of metrics where one is due."""
        state, started = self.state, time.perf_counter()
        factor = self.lr_multiplier()
        resume.seed_step(self.config.run.seed, state.step, self.dist.rank)
        loss, grad_norm = self.train_step(self.batch, factor)
        self.unread.append(torch.stack((loss, grad_norm)))
        state.step += 1
        state.tokens += self.batch.n_targets
        due = state.step % self.config.train.log_every == 0
        if due:
            self.read_losses()  # the device has finished
        self.agree(started)
        if due:
            self.log_steps(factor)
        self.bar.update(self.progress() - self.bar.n)

    def agree(self, started: float | None = None) -> None:
        """Fetch the next batch, and have all ranks know alike what it counts, how late it is, and of signals.

        `started`: when what is to be added to the time of training began.
        """
        batch = self.batches.batch(self.state.step)
        elapsed = self.state.elapsed_s + (0.0 if started is None else time.perf_counter() - started)
        counts, clocks, signals = zip(*self.dist.all_gather_scalars(batch.n_targets, elapsed, self.interrupt.number))
        self.batch = batch._replace(n_targets=int(sum(counts)))
        self.state.elapsed_s, self.agreed = clocks[0], int(max(signals))

    @property
    def stopping(self) -> int:
        """The signal that ends the run, 0 if there is none: of several ranks one that all know of."""
        return self.agreed if self.dist.world_size > 1 else self.interrupt.number

    def hear(self) -> bool:
        """Ask all ranks, which must all ask, for signals. Returns whether the run shall end."""
        self.agreed = int(max(number for (number,) in self.dist.all_gather_scalars(self.interrupt.number)))
        return bool(self.stopping)

    def read_losses(self) -> None:
        """Fetch what the last steps have found: of all a step does, only this waits for the device.

        Raises RunError where one had a loss or gradient that is not finite and may not be left out.
        """
        rows = torch.stack(self.unread).tolist() if self.unread else []
        self.unread.clear()
        for step, (loss, grad_norm) in enumerate(rows, self.state.step - len(rows)):
            if math.isfinite(loss) and (math.isfinite(grad_norm) or self.train_step.scaler.is_enabled()):
                self.state.pending_steps += 1
                self.state.pending_losses += loss
                self.state.pending_norm = finite(grad_norm)
            else:
                self.skip_nonfinite_step(step, loss, grad_norm)

    def skip_nonfinite_step(self, step: int, loss: float, grad_norm: float) -> None:
        """Report a bad step (from 0), which has changed nothing. Raises RunError where it was one too many."""
        number, allowed = step + 1, self.config.train.max_nonfinite_steps
        self.state.skipped += 1
        found = f"step {number}: the loss is {loss:g}, the gradient's norm {grad_norm:g}"
        notes = {"step": number, "loss": finite(loss), "grad_norm": finite(grad_norm)}
        notes["sample_ids"] = self.loader.sample_ids(step)
        if self.state.skipped <= allowed:
            path = write_report(self.run, number, notes)
            self.bar.write(f"{found}: left out, {self.state.skipped} of {allowed} ({path})", file=sys.stderr)
            return
        notes |= diagnose(self.model, self.loader, self.corpus.tokenizer, step)
        path = write_report(self.run, number, notes)
        self.saver.save("nonfinite", number, checkpoint.checkpoint_files(self.model, {"step": number}))
        self.dist.all_gather_scalars(number)  # who leaves first ends the others
        name, size = notes["largest_weight"]
        largest = f"the largest is {'not finite' if size is None else f'{size:g}'}, in {name}"
        raise RunError(
            f"{found}; it changed no weight. {path} names its samples, {self.run.checkpoints}/nonfinite-{number:08d} "
            f"holds the weights of before; {largest}. Lower optimizer.lr, or, against rare bad samples, leave such "
            f"steps out with train.max_nonfinite_steps={allowed + 1}; {self.resume_hint()}"
        )

    def resume_hint(self) -> str:
        """From where a stopped run would."""
        if self.saved is None:
            return "training would begin anew"
        return f"training would go on from step {self.saved.step}, or, that checkpoint removed, from the one before"

    def log_steps(self, factor: float) -> None:
        """A line of metrics for the steps since the last one."""
        state, now = self.state, (self.state.elapsed_s, self.state.tokens, self.batches.waited)
        seconds, tokens, waited = (max(new - old, 1e-9) for new, old in zip(now, self.logged))
        self.logged = now
        if not state.pending_steps:
            return  # all of them were left out
        mean, norm = state.pending_losses / state.pending_steps, state.pending_norm
        state.pending_steps, state.pending_losses, state.pending_norm = 0, 0.0, None
        line = {"train_loss": mean, "lr": self.train_step.optimizers.lr * factor}
        line |= {"grad_norm": norm} if norm is not None else {}
        line |= {"skipped_steps": state.skipped} if state.skipped else {}
        self.log(line | {"data_wait": waited / seconds} | self.speed(tokens / seconds))
        val = f", validation {self.last.loss:.3f}" if self.last else ""
        self.bar.set_postfix_str(
            f"step {state.step}, loss {line['train_loss']:.3f}{val}, {tokens / seconds:,.0f} tokens/s", refresh=False
        )

    def is_due(self, every: int | None) -> bool:
        """Whether what happens every so many steps happens after this one. At the run's end all does."""
        return bool(every and self.state.step and self.state.step % every == 0 and self.progress() < 1)

    def evaluation_was_left(self) -> bool:
        """Whether a signal ended the evaluation that belongs to this step."""
        due = self.is_due(self.config.train.eval_every) or self.progress() >= 1
        return bool(self.stopping) and due and self.state.evaluated_at != self.state.step

    def lr_multiplier(self) -> float:
        """What the next step's learning rates are of their peaks."""
        train = self.config.train
        return lr_multiplier(
            self.state.step,
            self.progress(),
            schedule=train.schedule,
            warmup_steps=train.warmup_steps,
            decay_fraction=train.decay_fraction,
            final=train.min_lr_ratio,
        )

    def progress(self) -> float:
        """The share of the run that is done, in [0, 1]: of steps or of time, whichever is further."""
        train = self.config.train
        steps = self.state.step / train.max_steps if train.max_steps else 0.0
        minutes = self.state.elapsed_s / 60 / train.max_minutes if train.max_minutes else 0.0
        return min(1.0, max(steps, minutes))

    def speed(self, tokens_per_second: float) -> dict[str, float]:
        """The keys of a line of metrics that say how fast and how large."""
        line = {"tokens_per_second": tokens_per_second, "peak_memory_bytes": self.memory.peak()}
        peak = peak_flops(self.device, self.config.train.precision)
        if peak is not None:
            line["mfu"] = tokens_per_second * flops_per_token(self.model, self.config.data.seq_len) / peak
        return line

    def log(self, line: dict[str, Any]) -> None:
        """One line to metrics.jsonl and to wandb."""
        line = {"step": self.state.step, "tokens": self.state.tokens, **line, "elapsed_s": self.state.elapsed_s}
        self.run.log(line)
        self.tracker.log(line)

    def evaluate(self) -> None:
        """Measure the validation loss, unless that was done; log it, and keep the weights if they are the best so far.

        A signal ends it without a result. Raises RunError where the loss is not finite.
        """
        state = self.state
        self.read_losses()
        found = None if state.evaluated_at == state.step else self.evaluator(self.model, self.hear)
        if found is None:
            return
        if not math.isfinite(found.loss):
            raise RunError(
                f"step {state.step}: the validation loss is {found.loss}; nothing was saved. Lower optimizer.lr; "
                + self.resume_hint()
            )
        self.last, state.evaluated_at = found, state.step
        line = {"val_loss": found.loss, "val_bits_per_byte": found.bits_per_byte}
        if found.entropy_floor is not None:
            line["entropy_floor"] = found.entropy_floor
        self.log(line)
        if state.best_val_loss is None or found.loss < state.best_val_loss:
            state.best_val_loss = found.loss
            best = checkpoint.checkpoint_files(self.model, {"step": state.step, "val_loss": found.loss})
            self.saver.save("best", state.step, best)

    def save(self) -> None:
        """Write a checkpoint of where the run stands, unless there is one."""
        self.read_losses()
        self.state.scaler = self.train_step.scaler.state_dict()
        if self.state != self.saved:
            tensors = self.train_step.optimizers.tensors()
            files = checkpoint.checkpoint_files(self.model, self.state.model_dump(mode="json"), tensors)
            self.run.check()
            self.run.flush_metrics()
            self.saver.save("step", self.state.step, files)
            self.saved = self.state.model_copy(deep=True)

    def sample(self) -> str:
        """A line from the model as it is now. All ranks ask; only rank 0 gets one."""
        model = plain(self.model) if hasattr(self.model, "unshard") else self.model
        if not self.dist.is_main:
            return ""
        generator = Generator(model, self.corpus.tokenizer)
        prompt, seed = self.config.train.sample_prompt, self.state.step
        completion = generator.generate([prompt], SamplingParams(max_new_tokens=48, temperature=0.8, seed=seed))
        return " ".join((prompt + completion[0].text).split())
