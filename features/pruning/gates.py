"""Learned gates: every KV group of heads has one, and a budget says how many may stay open.

A gate multiplies what a group's heads compute. While it learns it is random, with a hard concrete
distribution (Louizos et al. 2018, arXiv:1712.01312; for heads Voita et al. 2019, arXiv:1905.09418):
it is exactly 0 or 1 with some probability, and has a gradient in between. A penalty drives the
expected number of open gates to the budget. At the end the gates that are least open are closed for
good.
"""

import hashlib
import math

import torch
from torch import Tensor, nn

from thinker.features.pruning.keys import PruneConfig
from thinker.features.pruning.model_checks import check_prunable
from thinker.features.pruning.pruning import least_important
from thinker.model.layers import Linear
from thinker.runtime.errors import UserError
from thinker.training.callback import Callback, StepInfo, TrainingParts

TEMPERATURE, LOW, HIGH = 2 / 3, -0.1, 1.1  # of the distribution, as in the paper
OPEN_AT_FIRST = 3.0  # log_alpha of a gate that is open in 99% of the steps
DECIDED = 1e3  # its absolute value once a gate is open or closed for good
NO_NOISE = 1 - 1e-6  # with which every gate is open
LEARNING_RATE = 0.1
PENALTY = 30.0  # nats per squared difference between the share of open gates and the budget


class GatedLinear(Linear):
    """An output projection whose input, (..., H · D), is multiplied by a gate per KV group,
    (K,)."""

    def __init__(self, plain: Linear, gates: Tensor) -> None:
        with torch.device("meta"):  # shares the weight and bias of `plain`
            super().__init__(plain.in_features, plain.out_features)
        self.weight = plain.weight
        self.bias = plain.bias
        self.gates = gates

    def effective_weight(self) -> Tensor:
        """The weight with the gates in it, (n_out, n_in)."""
        return self.weight * self.gates.repeat_interleave(self.in_features // len(self.gates))

    def forward(self, x: Tensor) -> Tensor:
        """(..., n_in) -> (..., n_out), in x's dtype."""
        groups = x.unflatten(-1, (len(self.gates), -1))  # (..., K, H / K · D)
        gated = groups * self.gates.to(x.dtype)[:, None]
        return super().forward(gated.flatten(-2))


def hard_concrete(log_alpha: Tensor, noise: Tensor) -> Tensor:
    """Gates in [0, 1] for uniform noise in (0, 1)."""
    stretched = torch.sigmoid((noise.logit() + log_alpha) / TEMPERATURE) * (HIGH - LOW) + LOW
    return stretched.clamp(0, 1)


def without_noise(log_alpha: Tensor) -> Tensor:
    """The gates that evaluations use and checkpoints contain."""
    return (torch.sigmoid(log_alpha) * (HIGH - LOW) + LOW).clamp(0, 1)


def open_share(log_alpha: Tensor) -> Tensor:
    """The expected share of gates that are not 0."""
    return torch.sigmoid(log_alpha - TEMPERATURE * math.log(-LOW / HIGH)).mean()


class Gates(Callback):
    """The gates of a model in training. Evaluations and checkpoints have them in the output
    projections' weights."""

    def __init__(self, options: PruneConfig, seed: int) -> None:
        self.options = options
        self.seed = seed
        self.kept: dict[str, Tensor] = {}  # the state, while the model is evaluated

    def setup(self, parts: TrainingParts) -> None:
        """Put an open gate in front of every output projection."""
        model = parts.model
        check_prunable(model, self.options)
        self.is_alone = parts.dist.world_size == 1
        self.sizes = [block.attention.n_kv_heads for block in model.blocks]
        self.n_closed = self._count_closed()
        n, device = sum(self.sizes), model.device
        self.log_alpha = torch.full((n,), OPEN_AT_FIRST, device=device)
        self.noise = torch.full((n,), NO_NOISE, device=device)  # of the gates in use
        self.gates: list[Tensor] = []
        self.projections: list[GatedLinear] = []
        for block, size in zip(model.blocks, self.sizes):
            gates = torch.ones(size, device=device, requires_grad=True)
            block.attention.o_proj = GatedLinear(block.attention.o_proj, gates)
            self.gates.append(gates)
            self.projections.append(block.attention.o_proj)
        self.adam = torch.optim.Adam([self.log_alpha], lr=LEARNING_RATE)
        self.adam.state[self.log_alpha] = {  # there from the start, so that it can be loaded
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros_like(self.log_alpha),
            "exp_avg_sq": torch.zeros_like(self.log_alpha),
        }
        self._use(self.noise)

    def _count_closed(self) -> int:
        """The number of gates to close. Raises UserError if every layer cannot keep one."""
        n, most = sum(self.sizes), sum(size - 1 for size in self.sizes)
        n_closed = round(self.options.heads * n)
        if 1 <= n_closed <= most:
            return n_closed
        closes = f"train.prune.heads={self.options.heads:g} closes {n_closed} of {n} KV heads"
        possible = "no layer has more than one"
        if most:
            possible = f"choose a share that closes 1 to {most}"
        raise UserError(f"{closes}, and every layer keeps at least one; {possible}")

    def has_final_form(self) -> bool:
        """Whether every gate is open or closed for good."""
        return bool((self.log_alpha.abs() == DECIDED).all())

    def after_step(self, info: StepInfo) -> None:
        """Let the gates learn, or close those that are least open, and draw the gates of the next
        step."""
        gradient = torch.cat([gates.grad for gates in self.gates])
        for gates in self.gates:
            gates.grad = None
        start, end = self.options.window
        if info.progress < start or self.has_final_form():
            return
        if info.progress >= end:
            self._decide()
            return
        if not self.is_alone:
            torch.distributed.all_reduce(gradient)
        closed_share = self.options.share(self.n_closed / len(gradient), info.progress)
        self._learn(gradient.nan_to_num(0, 0, 0), 1 - closed_share)
        digest = hashlib.sha256(f"gates:{self.seed}:{info.step}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        self._use(torch.rand(len(gradient), generator=generator).clamp(1e-6, NO_NOISE))

    def _learn(self, gradient: Tensor, target: float) -> None:
        """One step of Adam. gradient: of the loss for the gates in use; target: share of open
        gates."""
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
        self._scale_projections()
        self.log_alpha.fill_(DECIDED)
        for layer, group in closed:
            self.log_alpha.split(self.sizes)[layer][group] = -DECIDED
        self._use(torch.full_like(self.noise, 0.5))

    @torch.no_grad()
    def _use(self, noise: Tensor) -> None:
        """Use the gates of this noise in the next step."""
        self.noise.copy_(noise)
        values = hard_concrete(self.log_alpha, self.noise).split(self.sizes)
        for gates, value in zip(self.gates, values):
            gates.copy_(value)

    def _scale_projections(self) -> None:
        """Multiply the gates without noise into the weights."""
        values = without_noise(self.log_alpha).split(self.sizes)
        for projection, gates in zip(self.projections, values):
            by_group = projection.weight.unflatten(1, (len(gates), -1))  # (C, K, H / K · D)
            by_group.mul_(gates[:, None])

    @torch.no_grad()
    def before_eval(self) -> None:
        """Put the gates without noise into the weights."""
        self.kept = {name: tensor.clone() for name, tensor in self._state().items()}
        self._scale_projections()
        for gates in self.gates:
            gates.fill_(1)

    def after_eval(self) -> None:
        """Take them out again."""
        self.load_tensors(self.kept)
        self.kept = {}

    def tensors(self) -> dict[str, Tensor]:
        """The weights without gates, and the state of the gates."""
        return self.kept or self._state()

    @torch.no_grad()
    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Put what tensors() returned into the gates and the model."""
        for name, tensor in self._state().items():
            tensor.copy_(tensors[name])
        self._use(self.noise)

    def _state(self) -> dict[str, Tensor]:
        state = {}
        for layer, projection in enumerate(self.projections):
            state[f"gates.{layer}.weight"] = projection.weight.detach()
        for name, value in self.adam.state[self.log_alpha].items():
            state[f"gates.{name}"] = value
        return state | {"gates.log_alpha": self.log_alpha, "gates.noise": self.noise}

    def metrics(self) -> dict[str, float]:
        """The expected share of open gates."""
        return {"open_gates": float(open_share(self.log_alpha))}
