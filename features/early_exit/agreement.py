"""What skipping layers changes: the same text, predicted by all layers and with early exit."""

from dataclasses import dataclass

import torch
from torch import Tensor

from thinker.evaluation.long_context import hidden_states
from thinker.features.early_exit.decoder import EarlyExitDecoder
from thinker.model import Thinker
from thinker.runtime.constants import IGNORE_INDEX
from thinker.runtime.errors import UserError
from thinker.runtime.process.progress import Progress

BATCH_SIZE = 64


@dataclass(frozen=True)
class EarlyExitCost:
    """Early exit compared with all layers, as means over the counted tokens of a text."""

    threshold: float
    n_tokens: int
    mean_layers: float  # layers used per token
    layer_share: float  # of all layers
    loss: float  # nats per token, with all layers
    early_loss: float  # nats per token, with early exit
    kl: float  # KL(all layers || early exit), nats
    changed: float  # share of tokens whose most likely token differs


@torch.no_grad()
def early_exit_cost(
    model: Thinker, tokens: Tensor, targets: Tensor, threshold: float
) -> EarlyExitCost:
    """Predict each target once with all layers and once with early exit, after the same tokens.

    tokens, targets: (N, T); targets that are IGNORE_INDEX do not count. All positions are read as
    decoding steps, so early keys and values add up over the whole context. In generation, those of
    the prompt come from all layers. Raises UserError as EarlyExitDecoder does, and for a
    bidirectional prefix, which cannot be read step by step.
    """
    if model.config.prefix:
        raise UserError(
            "early exit cannot be measured with a bidirectional prefix; use another model"
        )
    early = EarlyExitDecoder(model, threshold)
    sums = torch.zeros(5, dtype=torch.float64)  # layers, losses, early losses, KL, changed tokens
    starts = range(0, len(tokens), BATCH_SIZE)
    for start in Progress(starts, desc=f"P = {threshold:g}", leave=False):
        rows = slice(start, start + BATCH_SIZE)
        inputs = tokens[rows].to(model.device)  # (B, T)
        wanted = targets[rows].to(model.device)  # (B, T)
        hidden = hidden_states(model, inputs)
        cache = model.new_cache(*inputs.shape)
        for position in range(inputs.shape[1]):
            now = slice(position, position + 1)
            full = _log_probs(model.lm_head(hidden[:, now]))  # (B, V)
            exited = _log_probs(early.step(inputs[:, now], cache))
            target = wanted[:, position]  # (B,)
            column = target.clamp(min=0)[:, None]
            values = torch.stack(
                [
                    early.layers_used.to(model.device).float(),
                    -full.gather(1, column)[:, 0],
                    -exited.gather(1, column)[:, 0],
                    (full.exp() * (full - exited)).sum(dim=-1),
                    (full.argmax(dim=-1) != exited.argmax(dim=-1)).float(),
                ]
            )  # (5, B)
            is_counted = target != IGNORE_INDEX
            sums += values[:, is_counted].double().sum(dim=1).cpu()
    n_tokens = int((targets != IGNORE_INDEX).sum())
    if not n_tokens:
        raise UserError("the sequences have no targets; use more of the text")
    layers, *others = (sums / n_tokens).tolist()
    return EarlyExitCost(threshold, n_tokens, layers, layers / len(model.blocks), *others)


def _log_probs(logits: Tensor) -> Tensor:
    """logits (B, 1, V) -> (B, V)."""
    return logits[:, 0].float().log_softmax(dim=-1)


def format_table(costs: list[EarlyExitCost]) -> str:
    """One line per threshold."""
    rows = [["P", "layers per token", "share", "loss", "change", "KL", "other likeliest token"]]
    for cost in costs:
        rows.append(
            [
                f"{cost.threshold:g}",
                f"{cost.mean_layers:.2f}",
                f"{cost.layer_share:.1%}",
                f"{cost.early_loss:.4f}",
                f"{cost.early_loss - cost.loss:+.4f}",
                f"{cost.kl:.4f}",
                f"{cost.changed:.1%}",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows)]
    first = costs[0]
    loss = f"loss with all layers: {first.loss:.4f} nats per token"
    lines = [f"{first.n_tokens:,} tokens; {loss}"]
    for row in rows:
        lines.append("  ".join(cell.rjust(width) for cell, width in zip(row, widths)))
    return "\n".join(lines)
