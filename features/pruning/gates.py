"""Learned gates: every KV group of heads has one, and a budget says how many may stay open.

A gate multiplies what a group's heads compute. While it learns it is random, with a hard concrete distribution (Louizos
et al. 2018, arXiv:1712.01312; for heads Voita et al. 2019, arXiv:1905.09418): it is exactly 0 or 1 with some
probability, and has a gradient in between. A penalty drives the expected number of open gates to the budget. At the end
the gates that are least open are closed for good.
"""

import contextlib
import hashlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from thinker.data.batches.prefetch import Batch
from thinker.features.pruning.keys import PruneConfig
from thinker.features.pruning.pruning import least_important
from thinker.model import Thinker
from thinker.model.layers import Linear
from thinker.runtime.errors import UserError
from thinker.runtime.process_group import DistContext
from thinker.training.after_step import AfterStep

TEMPERATURE, LOW, HIGH = 2 / 3, -0.1, 1.1  # of the distribution, as in the paper
OPEN_AT_FIRST = 3.0  # log_alpha of a gate that is open in 99% of the steps
DECIDED = 1e3  # its absolute value once a gate is open or closed for good
NO_NOISE = 1 - 1e-6  # with which every gate is open
LEARNING_RATE = 0.1
PENALTY = 30.0  # nats per squared difference between the share of open gates and the budget


class GatedLinear(Linear):
    """An output projection whose input, (..., H · D), is multiplied by a gate per KV group, (K,)."""

    def __init__(self, plain: Linear, gates: Tensor) -> None:
        with torch.device("meta"):  # shares the weight and bias of `plain`
            super().__init__(plain.in_features, plain.out_features)
        self.weight, self.bias, self.gates = plain.weight, plain.bias, gates

    def forward(self, x: Tensor) -> Tensor:
        """(..., n_in) -> (..., n_out), in x's dtype."""
        x = (
            x.unflatten(-1, (len(self.gates), -1)) * self.gates.to(x.dtype)[:, None]
        )  # (..., K, H / K · D)
        return super().forward(x.flatten(-2))


def hard_concrete(log_alpha: Tensor, noise: Tensor) -> Tensor:
    """Gates in [0, 1] for uniform noise in (0, 1)."""
    return (torch.sigmoid((noise.logit() + log_alpha) / TEMPERATURE) * (HIGH - LOW) + LOW).clamp(
        0, 1
    )


def without_noise(log_alpha: Tensor) -> Tensor:
    """The gates that evaluations use and checkpoints contain."""
    return (torch.sigmoid(log_alpha) * (HIGH - LOW) + LOW).clamp(0, 1)


def open_share(log_alpha: Tensor) -> Tensor:
    """The expected share of gates that are not 0."""
    return torch.sigmoid(log_alpha - TEMPERATURE * math.log(-LOW / HIGH)).mean()


class Gates(AfterStep):
    """The gates of a model in training. Evaluations and checkpoints have them in the output projections' weights."""

    def __init__(self, model: Thinker, options: PruneConfig, seed: int, dist: DistContext) -> None:
        super().__init__(None)
        self.options, self.seed, self.dist = options, seed, dist
        self.sizes = [block.attention.n_kv_heads for block in model.blocks]
        n, most = sum(self.sizes), sum(size - 1 for size in self.sizes)
        self.n_closed, device = round(options.heads * n), model.device
        if not 1 <= self.n_closed <= most:
            closes = f"train.prune.heads={options.heads:g} closes {self.n_closed} of {n} KV heads"
            possible = (
                f"choose a share that closes 1 to {most}" if most else "no layer has more than one"
            )
            raise UserError(f"{closes}, and every layer keeps at least one; {possible}")
        self.log_alpha = torch.full((n,), OPEN_AT_FIRST, device=device)
        self.noise = torch.full((n,), NO_NOISE, device=device)  # of the gates in use
        self.gates = [torch.ones(size, device=device, requires_grad=True) for size in self.sizes]
        self.projections = []
        for block, gates in zip(model.blocks, self.gates):
            block.attention.o_proj = GatedLinear(block.attention.o_proj, gates)
            self.projections.append(block.attention.o_proj)
        self.adam = torch.optim.Adam([self.log_alpha], lr=LEARNING_RATE)
        zeros = torch.zeros_like(self.log_alpha)
        self.adam.state[self.log_alpha] = {
            "step": torch.tensor(0.0),
            "exp_avg": zeros,
            "exp_avg_sq": zeros.clone(),
        }
        self._use(self.noise)

    @property
    def is_complete(self) -> bool:
        """Whether every gate is open or closed for good."""
        return bool((self.log_alpha.abs() == DECIDED).all())

    def update(self, step: int, progress: float, batch: Batch) -> None:
        """Let the gates learn, or close those that are least open, and draw the gates of the next step."""
        gradient = torch.cat([gates.grad for gates in self.gates])
        for gates in self.gates:
            gates.grad = None
        start, end = self.options.window
        if progress < start or self.is_complete:
            return
        if progress >= end:
            self._decide()
            return
        if self.dist.world_size > 1:
            torch.distributed.all_reduce(gradient)
        self._learn(
            gradient.nan_to_num(0, 0, 0),
            1 - self.options.share(self.n_closed / len(gradient), progress),
        )
        generator = torch.Generator().manual_seed(
            int.from_bytes(
                hashlib.sha256(f"gates:{self.seed}:{step}".encode()).digest()[:7], "little"
            )
        )
        self._use(torch.rand(len(gradient), generator=generator).clamp(1e-6, NO_NOISE))

    def _learn(self, gradient: Tensor, target: float) -> None:
        """One step of Adam. gradient: of the loss for the gates in use; target: share of open gates."""
        log_alpha = self.log_alpha.detach().requires_grad_()
        penalty = PENALTY * (open_share(log_alpha) - target).square()
        (gradient * hard_concrete(log_alpha, self.noise)).sum().add(penalty).backward()
        self.log_alpha.grad = log_alpha.grad
        self.adam.step()

    @torch.no_grad()
    def _decide(self) -> None:
        """Close the gates that are least open, and multiply the others into the weights."""
        by_layer = nn.utils.rnn.pad_sequence(
            self.log_alpha.split(self.sizes), batch_first=True, padding_value=torch.nan
        )
        closed = least_important(by_layer.cpu(), self.n_closed)
        for projection, values in zip(
            self.projections, without_noise(self.log_alpha).split(self.sizes)
        ):
            _scale(projection, values)
        self.log_alpha.fill_(DECIDED)
        for layer, group in closed:
            self.log_alpha.split(self.sizes)[layer][group] = -DECIDED
        self._use(torch.full_like(self.noise, 0.5))

    @torch.no_grad()
    def _use(self, noise: Tensor) -> None:
        """Use the gates of this noise in the next step."""
        self.noise.copy_(noise)
        for gates, values in zip(
            self.gates, hard_concrete(self.log_alpha, self.noise).split(self.sizes)
        ):
            gates.copy_(values)

    @contextlib.contextmanager
    def in_model(self) -> Iterator[dict[str, Tensor]]:
        """Context manager: the weights have the gates without noise in them. Yields the state of the gates."""
        state = {name: tensor.clone() for name, tensor in self._state().items()}
        with torch.no_grad():
            for projection, values in zip(
                self.projections, without_noise(self.log_alpha).split(self.sizes)
            ):
                _scale(projection, values)
            for gates in self.gates:
                gates.fill_(1)
        try:
            yield state
        finally:
            self.load(dict(state))

    def expected_tensors(self) -> dict[str, Tensor]:
        """New tensors like those that in_model() yields, to load them into."""
        return {name: torch.empty_like(tensor) for name, tensor in self._state().items()}

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> None:
        """Put what in_model() yielded into the gates and the model, and remove it from `tensors`."""
        for name, tensor in self._state().items():
            tensor.copy_(tensors.pop(name))
        self._use(self.noise)

    def _state(self) -> dict[str, Tensor]:
        """Everything that is saved: the weights without gates, and the state of the gates."""
        weights = {
            f"gates.{layer}.weight": each.weight.detach()
            for layer, each in enumerate(self.projections)
        }
        adam = {f"gates.{name}": value for name, value in self.adam.state[self.log_alpha].items()}
        return weights | adam | {"gates.log_alpha": self.log_alpha, "gates.noise": self.noise}

    def metrics(self) -> dict[str, float]:
        """The expected share of open gates."""
        return {"open_gates": float(open_share(self.log_alpha))}


@torch.no_grad()
def _scale(projection: Linear, gates: Tensor) -> None:
    """Multiply the gates (K,) into the weight of an output projection."""
    projection.weight.unflatten(1, (len(gates), -1)).mul_(gates[:, None])  # (C, K, H / K · D)
