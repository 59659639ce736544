"""Training of a plain GPT with nanoGPT's recipe, whose schedule ends after a given time.

AdamW with betas 0.9 and 0.95, decay 0.1 of the matrices, gradients clipped to 1, a linear warm-up,
then a cosine to a tenth of the learning rate. The model is compiled. With "muon", torch's Muon
trains the matrices of the blocks, and AdamW the rest.
"""

import math
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from thinker.benchmarks.baselines import PlainGPT
from thinker.benchmarks.environment import synchronize
from thinker.data.batches.prefetch import Batch
from thinker.runtime.device import DTYPES

RATES = {"adamw": 6e-4, "muon": 0.02}  # nanoGPT's, and that of Muon's author
MUON_REST_RATE = 0.0036  # of AdamW beside Muon, also that of its author
WARMUP = 0.05  # share of the time
MIN_RATIO = 0.1  # of the learning rate at the end


class PlainTraining:
    """A plain GPT and its optimizers. `seconds` is the clock: steps and their batches, until the
    device has finished; not compiling, and not evaluating.

    batches: the batch of a step (from 0). total: seconds at which the schedule ends.
    """

    def __init__(
        self,
        model: PlainGPT,
        optimizer: str,
        rate: float,
        batches: Callable[[int], Batch],
        total: float,
        micro_batch_size: int,
        precision: str,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.rate = rate
        self.batches = batches
        self.total = total
        self.micro_batch_size = micro_batch_size
        self.dtype = DTYPES[precision]
        self.device = model.lm_head.weight.device
        self.compiled = torch.compile(model)
        self.optimizers = make_optimizers(model, optimizer, rate)
        self.step = 0
        self.tokens = 0
        self.seconds = 0.0
        self._next: Batch | None = None

    @property
    def progress(self) -> float:
        """The share of the time that has passed, at most 1."""
        return min(1.0, self.seconds / self.total)

    def warm_up(self, batch: Batch) -> None:
        """Compile with two steps on any batch of the right shape, then forget them."""
        before = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        for _ in range(2):
            self._update(batch, 1.0)
        size = self.micro_batch_size
        self.losses(batch.inputs[:size], batch.targets[:size])
        self.model.load_state_dict(before)
        self.optimizers = make_optimizers(self.model, self.optimizer, self.rate)
        synchronize(self.device)

    def train_step(self) -> None:
        """A step on the next batch; the clock runs until the device has finished it."""
        if self._next is None:
            self._next = self.batches(0)
        start = time.perf_counter()
        batch = self._next
        self._update(batch, lr_factor(self.progress))
        self.step += 1
        self.tokens += batch.n_targets
        self._next = self.batches(self.step)
        synchronize(self.device)
        self.seconds += time.perf_counter() - start

    @torch.no_grad()
    def losses(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The sum of the losses of a micro-batch (B, T), in nats."""
        return self._loss(inputs, targets) * targets.numel()

    def _update(self, batch: Batch, factor: float) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * factor
        n_rows = len(batch.inputs)
        for start in range(0, n_rows, self.micro_batch_size):
            part = batch.rows(slice(start, start + self.micro_batch_size), self.device)
            share = len(part.inputs) / n_rows
            (self._loss(part.inputs, part.targets) * share).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        inputs, targets = inputs.to(self.device), targets.to(self.device)
        is_mixed = self.dtype != torch.float32
        with torch.autocast(self.device.type, self.dtype, enabled=is_mixed):
            return self.compiled(inputs, targets)


def make_optimizers(model: PlainGPT, optimizer: str, rate: float) -> list[torch.optim.Optimizer]:
    """New optimizers: AdamW alone, or Muon for the matrices of the blocks and AdamW for the rest.

    rate: of the first one. Each group keeps it as `peak_lr`.
    """
    in_blocks = {id(parameter) for parameter in model.blocks.parameters()}
    matrices, rest, vectors = [], [], []
    for parameter in model.parameters():
        if parameter.dim() < 2:
            vectors.append(parameter)
        elif id(parameter) in in_blocks:
            matrices.append(parameter)
        else:
            rest.append(parameter)
    made: list[torch.optim.Optimizer] = []
    adamw_rate = rate
    if optimizer == "muon":
        made.append(torch.optim.Muon(matrices, lr=rate, weight_decay=0.1))
        adamw_rate = MUON_REST_RATE
    else:
        rest += matrices
    groups = [{"params": rest, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    made.append(torch.optim.AdamW(groups, lr=adamw_rate, betas=(0.9, 0.95), fused=True))
    for each in made:
        for group in each.param_groups:
            group["peak_lr"] = group["lr"]
    return made


def lr_factor(progress: float) -> float:
    """The learning rate as a factor of its peak, when a share of the time has passed."""
    if progress < WARMUP:
        return (progress + WARMUP / 100) / (WARMUP * 1.01)
    falling = (progress - WARMUP) / (1 - WARMUP)
    return MIN_RATIO + (1 - MIN_RATIO) * 0.5 * (1 + math.cos(math.pi * falling))
