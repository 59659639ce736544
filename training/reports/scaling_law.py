"""An estimate of what more time, more text or a larger model would gain, from a scaling law.

The law: loss = E + A / N**ALPHA + B / D**BETA + K / S**GAMMA, where N is the number of parameters
outside embeddings, D the bytes of distinct training text and S the training tokens processed. A
single run does not determine A, B and K, so predict_loss_changes() splits its reducible loss over
the three terms by rules of thumb. The result is an estimate that may be right only in its order of
magnitude; use it to choose what to try first.
"""

from dataclasses import dataclass

import torch

from thinker.model import Thinker, ThinkerConfig

# Starting values, not yet fitted to runs of this toolkit. ALPHA and BETA are near those of Hoffmann
# et al. 2022.
ALPHA = 0.34  # exponent of parameters
BETA = 0.28  # exponent of distinct text
GAMMA = 0.35  # exponent of training tokens
SMALLEST_SHARE = 1e-9  # of the text, for runs that have read an unknown share of it
IRREDUCIBLE_BITS_PER_BYTE = 0.55  # E: the loss that no model of such text goes below
# Where time and size help equally (Hoffmann et al. 2022, arXiv:2203.15556).
BALANCED_TOKENS_PER_PARAMETER = 20
FACTOR = 2  # by which time, text or parameters grow


@dataclass(frozen=True)
class LossChanges:
    """By how much the validation loss would fall (nats per token) if one doubles and the others
    stay the same."""

    time: float
    text: float
    parameters: float


def predict_loss_changes(
    val_loss: float,
    bits_per_byte: float,
    train_loss: float,
    n_parameters: int,
    n_tokens: int,
    epochs: float,
) -> LossChanges | None:
    """Estimate what twice the training tokens, twice the text and twice the parameters would gain.

    The text term is the gap between the validation and the training loss. The rest is split between
    time and size so that, at 20 tokens per parameter, 1% more of either lowers the loss equally. A
    model with fewer tokens per parameter has a larger time term, one with more a larger size term.

    Args:
        val_loss, train_loss: in nats per token.
        bits_per_byte: the validation loss in bits per byte of text.
        n_parameters: outside embeddings. n_tokens: trained on.
        epochs: passes over the training text; 0 if it is only known that there was less than one.

    Returns None if the loss is not above the assumed irreducible loss.
    """
    if bits_per_byte <= IRREDUCIBLE_BITS_PER_BYTE:
        return None
    epochs = max(epochs, SMALLEST_SHARE)
    reducible = val_loss * (1 - IRREDUCIBLE_BITS_PER_BYTE / bits_per_byte)
    text = min(max(val_loss - train_loss, 0.0), reducible)
    # At equal compute N S, both terms move away from the balance: N by balance**-0.5, S by
    # balance**0.5.
    balance = n_tokens / n_parameters / BALANCED_TOKENS_PER_PARAMETER
    size_weight = balance ** (ALPHA / 2) / ALPHA
    time_weight = balance ** (-GAMMA / 2) / GAMMA
    size = (reducible - text) * size_weight / (size_weight + time_weight)
    time = reducible - text - size
    seen = min(epochs, 1.0)  # a share of the text; a longer run sees more of it, up to all
    seen_in_twice = min(FACTOR * epochs, 1.0)
    return LossChanges(
        time=_fall(time, FACTOR, GAMMA) + _fall(text, seen_in_twice / seen, BETA),
        text=_fall(text, min(epochs, FACTOR) / seen, BETA),  # of the same number of tokens
        parameters=_fall(size, FACTOR, ALPHA),
    )


def count_parameters(config: ThinkerConfig) -> int:
    """Number of parameters in the blocks and the last norm, outside of embeddings and LM head."""
    with torch.device("meta"):
        model = Thinker(config)
    inner = [*model.blocks.parameters(), *model.norm.parameters()]
    return sum(parameter.numel() for parameter in inner)


def _fall(term: float, factor: float, exponent: float) -> float:
    """By how much a term falls if its quantity grows by a factor."""
    return term * (1 - factor**-exponent)
