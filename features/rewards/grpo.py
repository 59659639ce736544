"""Group-relative policy optimization (Shao et al. 2024, arXiv:2402.03300).

The model answers each prompt several times, verifiers reward the answers, and answers that are
better than the others of their group become more probable.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from thinker.data.batches.prefetch import Batch
from thinker.features.rewards.exact.engine_log_probs import EngineLogProbs, with_values
from thinker.features.rewards.keys import GRPOConfig
from thinker.features.rewards.policy_loss import policy_losses
from thinker.features.rewards.prompts import Prompt, digest_of
from thinker.features.rewards.reference_policy import ReferencePolicy
from thinker.features.rewards.rollout_dataset import RolloutDataset
from thinker.features.rewards.rollouts import Rollouts, Sampler, empty_rollouts, make_rollouts
from thinker.features.rewards.token_log_probs import token_log_probs
from thinker.features.rewards.verifiers.load_verifier import file_digests
from thinker.features.rewards.verifiers.verifier_process import VerifierProcess
from thinker.runtime.constants import IGNORE_INDEX
from thinker.runtime.errors import RunError, UserError
from thinker.runtime.files import make_folder
from thinker.runtime.process.progress import Progress
from thinker.training.callback import Callback, StepInfo, TrainingParts, TrainingRun
from thinker.training.kernels import without_kernels
from thinker.training.objective import Loss
from thinker.training.reports.run_summary import RunSummary

TENSORS = ("inputs", "targets", "sampled", "reference", "advantages", "is_used")
EARLY = 10  # steps
PICTURE = "reward.png"  # in the run directory
LOG = "verifiers.log"  # in the run directory: what verifiers print
NO_SIGNAL = (
    "advice: nothing was learned, as all answers to the same prompt had the same reward; if no "
    "answer is right yet, reward partial progress"
)


class GRPOLoss(Callback):
    """The loss of sampled answers: an objective of training.

    As a callback it samples new answers after every train.grpo.updates steps. `train_loss` in the
    log is the cross-entropy of the answers in nats per token.
    """

    def __init__(
        self, options: GRPOConfig, vocab_size: int, engine: EngineLogProbs | None = None
    ) -> None:
        """`vocab_size`: of the tokenizer. `engine`: with train.exact, the kernels that sample."""
        self.options = options
        self.vocab_size = vocab_size
        self.engine = engine
        self.rollouts: Rollouts  # of the next step
        self.prompts: list[Prompt] = []
        self.answer_metrics: dict[str, float] = {}  # of the step before
        self.prompts_digest = ""  # of the run that resumes
        self.file_digests: dict[str, str] = {}  # of the verifiers of the run that resumes
        self.has_signal = False  # in any step of the run
        self.reference: ReferencePolicy | None = None

    def setup(self, parts: TrainingParts) -> None:
        """Load the reference, if there is one."""
        if parts.dist.world_size > 1 and parts.settings.train.parallel == "fsdp":
            raise UserError("train.grpo needs whole models to sample; set train.parallel=ddp")
        self.parts = parts
        self.n_answers = parts.settings.train.batch_size
        self.first = -1  # the number of the first of the answers; -1: there are none
        self.rollouts = empty_rollouts(self.n_answers, parts.settings.data.seq_len)
        self.mismatch = torch.zeros((), device=parts.model.device)  # of the newest answers
        if self.options.kl:
            self.reference = ReferencePolicy(
                parts.settings.run.init_from, parts.model, self.vocab_size, self.options.temperature
            )

    def on_start(self, run: TrainingRun) -> None:
        """Load prompts and verifiers, and sample the first answers."""
        self.run = run
        self.dataset: RolloutDataset = run.loader.dataset
        self.prompts = self.dataset.prompts
        digest = digest_of(self.prompts)
        if self.prompts_digest not in ("", digest):
            raise UserError(
                "the training prompts, or the rows that verifiers read, have changed since this "
                "run started; restore them, or choose another run.dir"
            )
        self.prompts_digest = digest
        self._say_what_has_changed()
        make_folder(run.directory.path, "run.dir")  # rank 0 may not have made it yet
        verifiers = VerifierProcess(
            list(self.options.rewards), self.options.timeout, run.directory.path / LOG
        )
        seed = self.parts.settings.run.seed
        self.sampler = Sampler(
            self.options, run.corpus.tokenizer, verifiers, seed, exact=self.engine is not None
        )
        self.dataset.sampler = self.sampler
        is_over = run.state.progress(self.parts.settings.train) >= 1
        try:
            # A run that could not sample is saved with the answers of the step before.
            if not is_over and self.first != self._first_answer(run.state.step):
                self._sample(run.state.step)
        except BaseException:
            verifiers.close()
            raise
        self.dataset.rollouts = self.rollouts

    def after_step(self, info: StepInfo) -> None:
        """Check the mismatch."""
        if self._is_first(info.step - 1):
            mismatch = self._check_mismatch(info.step)
            if math.isfinite(mismatch):  # a line of the log, in JSON, cannot have NaN
                self.rollouts.metrics["policy_mismatch"] = mismatch
        self.answer_metrics = self.rollouts.metrics
        self.has_signal = self.has_signal or bool(self.rollouts.is_used.any())
        if info.step == EARLY and not self.has_signal and self.parts.dist.is_main:
            Progress.write(f"{NO_SIGNAL} (in the first {EARLY} steps)", file=sys.stderr)

    def before_batch(self, info: StepInfo) -> None:
        """Sample the answers of the next step, if they are due."""
        if self._is_first(info.step):
            self._sample(info.step)
            self.dataset.rollouts = self.rollouts

    def metrics(self) -> dict[str, float]:
        """The answers of the step, and how their probabilities differ from those of sampling."""
        return self.answer_metrics

    def progress_text(self) -> str:
        """The mean reward of the answers of the step."""
        if "reward" not in self.answer_metrics:
            return ""
        return f"reward {self.answer_metrics['reward']:.3f}"

    def on_summary(self, summary: RunSummary) -> None:
        """Draw the rewards of the run, and say if nothing was learned from them."""
        lines = list(self.run.directory.read_metrics())
        if not self.has_signal:
            print(NO_SIGNAL, file=sys.stderr)
        if not any("reward" in line for line in lines):
            return
        from thinker.features.rewards.judging.reward_plot import plot_rewards

        path = self.run.directory.path / PICTURE
        plot_rewards(lines, path, f"{path.parent.name}: rewards of sampled answers")
        print(f"reward curve {path}", file=sys.stderr)

    def on_end(self, is_evaluated: bool) -> None:
        """End the verifiers, and say how many answers they could not judge."""
        failures = self.sampler.verifiers.failures
        for reason, n in failures.most_common():
            answers = "1 answer" if n == 1 else f"{n:,} answers"
            print(f"{answers} could not be judged: {reason}", file=sys.stderr)
        self.sampler.verifiers.close()

    def state_dict(self) -> dict[str, Any]:
        """What the log says about the answers of the next step."""
        digest = "" if self.reference is None else self.reference.digest
        return {
            "grpo_first": self.first,
            "grpo_metrics": self.rollouts.metrics,
            "grpo_reference": digest,
            "grpo_prompts": self.prompts_digest,
            "grpo_verifiers": self.file_digests,
            "grpo_has_signal": self.has_signal,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what was saved. Raises UserError if the reference has other weights."""
        self.first = state["grpo_first"]
        self.loaded_metrics = state["grpo_metrics"]
        # Earlier versions have not saved these.
        self.prompts_digest = state.get("grpo_prompts", "")
        self.file_digests = state.get("grpo_verifiers", {})
        self.has_signal = state.get("grpo_has_signal", True)
        if self.reference is not None:
            self.reference.check(state["grpo_reference"])

    def tensors(self) -> dict[str, Tensor]:
        """The answers of the next step. Token ids are exact in fp32."""
        return {f"grpo.{name}": getattr(self.rollouts, name).float() for name in TENSORS}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take the answers of the next step."""
        found = {name: tensors[f"grpo.{name}"].cpu() for name in TENSORS}
        for name in ("inputs", "targets"):
            found[name] = found[name].long()
        found["is_used"] = found["is_used"].bool()
        self.rollouts = Rollouts(**found, metrics=self.loaded_metrics)

    def __call__(self, model: nn.Module, batch: Batch) -> Loss:
        """The loss of the answers in a micro-batch."""
        options = self.options
        is_target = batch.targets != IGNORE_INDEX  # (B, T)
        n_targets = is_target.sum()
        log_probs, entropy = token_log_probs(
            model, batch.inputs, batch.targets, self.vocab_size, options.temperature
        )  # (B, T) each
        if batch.windows is None:  # random tokens, to measure the time of a step
            return Loss(-log_probs.sum(), n_targets)
        if self.engine is not None:
            log_probs = self._with_engine_values(log_probs, batch)
        device = batch.inputs.device
        rows = batch.windows
        sampled = self.rollouts.sampled[rows].to(device)  # (B, T)
        advantages = self.rollouts.advantages[rows].to(device)[:, None]  # (B, 1)
        reference = None
        if options.kl:
            reference = self.rollouts.reference[rows].to(device)  # (B, T)
        losses = policy_losses(log_probs, sampled, advantages, options.clip, options.kl, reference)
        weights = self._token_weights()[rows].to(device)[:, None] * is_target  # (B, T)
        weighted_loss = (losses.loss * weights).sum()
        with torch.no_grad():  # what the log says
            difference = ((log_probs - sampled).abs() * is_target).max()
            self.mismatch = torch.maximum(self.mismatch, difference.float())
            loss_parts = {
                "policy_loss": (weighted_loss.detach(), weights.sum()),
                "policy_entropy": (entropy.sum(), n_targets),
                "clipped": ((losses.is_clipped * is_target).sum(), n_targets),
            }
            if options.kl:
                loss_parts["policy_kl"] = ((losses.kl * is_target).sum(), n_targets)
            nats = -log_probs.sum()
        # The step divides by the targets of the whole batch; the weights are those of a mean.
        return Loss(weighted_loss * batch.n_targets, n_targets, loss_parts, nats)

    def _with_engine_values(self, log_probs: Tensor, batch: Batch) -> Tensor:
        """The values that the kernels of sampling compute, with the gradient of the model,
        (B, T)."""
        policy = self.parts.model
        with without_kernels(policy, self.parts.kernels):
            values = self.engine(policy, batch.inputs, batch.targets)
        return with_values(log_probs, values)

    def _say_what_has_changed(self) -> None:
        """Print which verifiers of the user have changed since the run was saved."""
        digests = file_digests(list(self.options.rewards))
        for path, digest in digests.items():
            if self.file_digests.get(path, digest) != digest and self.parts.dist.is_main:
                print(
                    f"{path} has changed since the last save; rewards before and after may differ",
                    file=sys.stderr,
                )
        self.file_digests = digests

    def _token_weights(self) -> Tensor:
        """How much a token of each answer of the batch counts, (R,) fp32."""
        rollouts = self.rollouts
        n_used = rollouts.is_used.sum().clamp(min=1)
        lengths = (rollouts.targets != IGNORE_INDEX).sum(1).clamp(min=1)
        if self.options.normalize == "none":
            lengths = torch.full_like(lengths, self.options.max_new_tokens)
        return rollouts.is_used / (lengths * n_used)

    def _first_answer(self, step: int) -> int:
        """The number of the first answer that a step (from 0) learns from."""
        return step // self.options.updates * self.n_answers

    def _is_first(self, step: int) -> bool:
        """Whether a step (from 0) is the first with its answers."""
        return step % self.options.updates == 0

    def _check_mismatch(self, step: int) -> float:
        """The largest difference of ln P between sampling and the first update, of all ranks."""
        gathered = self.parts.dist.all_gather_scalars(float(self.mismatch))
        largest = float(np.max([values[0] for values in gathered]))  # NaN if one is
        if self.engine is not None and largest != 0:
            raise RunError(
                f"step {step}: ln P of a sampled token differs by {largest:.2g} between sampling "
                "and training, although train.exact is set; if the run has moved to another "
                "processor, resume it with train.exact=false"
            )
        limit = self.options.max_mismatch
        if limit is None:
            return largest
        if math.isnan(largest) or largest > limit:
            raise RunError(
                f"step {step}: ln P of a sampled token differs by {largest:.2g} between sampling "
                f"and training, more than train.grpo.max_mismatch={limit:g}"
            )
        return largest

    def _sample(self, step: int) -> None:
        """Answer the prompts that come next."""
        self.mismatch = torch.zeros_like(self.mismatch)
        first = self._first_answer(step)
        self.rollouts = make_rollouts(
            self.sampler,
            self.parts.model,
            self.prompts,
            first,
            self.n_answers,
            self.parts.settings.data.seq_len,
            self.parts.dist,
        )
        if self.reference is not None:
            self.reference.add(self.rollouts, self.engine)
        self.first = first
