"""Before the first step: fit the embedding and the LM head to the pairs of adjacent tokens.

After initialization no block adds anything, so the logits at a token depend on this token alone:
the model is a bigram model. Training would take dozens of steps to learn one, from the tokens of
these steps. Here the embedding and the LM head are fitted to the counts of all pairs in millions of
tokens. A step of the fit multiplies V rows by the LM head, however many tokens were counted.
"""

import math
import sys
import time

import torch
import torch.nn.functional as F
from torch import Tensor

from thinker.data.batches.batch_loader import BatchLoader
from thinker.data.batches.dataset import OrderedDataset
from thinker.model import Thinker, ThinkerConfig
from thinker.runtime.constants import IGNORE_INDEX
from thinker.runtime.errors import UserError
from thinker.runtime.ranks import DistContext
from thinker.training.config.config import Config
from thinker.training.metrics import flops_per_token
from thinker.training.objective import Objective, next_token_loss
from thinker.training.settings.settings import Settings

MAX_TOKENS = 4_000_000  # to count
MAX_STEPS = 100
MIN_STEPS = 10  # fewer end far from the pairs
SHARE_OF_RUN = 0.03  # that the fit may take
HELD_OUT = 10  # one of so many batches
CHECK_EVERY = 10  # steps
DECAY_FRACTION = 0.6  # of the steps
EMBEDDING_LR = 0.3
HEAD_LR = 3.2  # times 1 / d_model
STEPS_OF_BOTH = 0.75  # of the steps; in the others, only the LM head learns
RANDOM_PART = 0.5
ROWS = 1024  # of logits in memory


class PairCounts:
    """How often each token follows each other one.

    batches: of (inputs, targets), each (B, T) int64.
    """

    def __init__(
        self, batches: list[tuple[Tensor, Tensor]], vocab_size: int, device: torch.device
    ) -> None:
        pairs = []
        for inputs, targets in batches:
            is_trained = targets != IGNORE_INDEX
            pairs.append(inputs[is_trained] * vocab_size + targets[is_trained])
        unique_pairs, counts = torch.cat(pairs).unique(return_counts=True)  # sorted
        self.vocab_size = vocab_size
        self.pairs = unique_pairs.to(device)
        self.counts = counts.float().to(device)
        self.total = int(counts.sum())

    def rows(self, tokens: slice) -> Tensor:
        """The counts of what follows these tokens, (R, V) fp32."""
        bounds = self.pairs.new_tensor([tokens.start, tokens.stop]) * self.vocab_size
        first, last = torch.searchsorted(self.pairs, bounds).tolist()
        rows = self.counts.new_zeros((tokens.stop - tokens.start) * self.vocab_size)
        rows[self.pairs[first:last] - bounds[0]] = self.counts[first:last]
        return rows.view(-1, self.vocab_size)


def can_fit_bigrams(
    config: Config,
    model_config: ThinkerConfig,
    dataset: OrderedDataset,
    kind: type[Thinker],
    objective: Objective,
) -> bool:
    """Whether a new run may begin with the fit.

    Raises UserError if train.fit_bigrams=true asks for it and it is impossible.
    """
    wanted = config.train.fit_bigrams
    if wanted is False:
        return False
    problem = None
    if config.run.init_from is not None:
        problem = "run.init_from names the weights"
    elif model_config.tie_embeddings:
        problem = "with model.tie_embeddings=true, embedding and LM head are one table"
    elif model_config.init != "fan_in" or model_config.head_init_std > 0:
        problem = "model.init and model.head_init_std choose other weights"
    elif dataset.is_endless:
        problem = "the text is a stream"
    if problem is not None and wanted is True:
        raise UserError(f"train.fit_bigrams=true: {problem}; set it to false")
    if wanted is True:
        return True
    return problem is None and kind is Thinker and objective is next_token_loss


def start_from_bigrams(
    model: Thinker, loader: BatchLoader, settings: Settings, dist: DistContext, is_asked_for: bool
) -> bool:
    """Fit a new model to the pairs of tokens in its first training batches.

    Returns whether it did: unless it is asked for, it may take SHARE_OF_RUN only. The main process
    fits, and all ranks get its weights.
    """
    weights = [model.embedding.weight, model.lm_head.weight]
    fitted = None
    if dist.is_main and fit_bigrams(model, loader, settings, is_asked_for):
        fitted = [weight.detach().cpu() for weight in weights]
    fitted = dist.broadcast_object(fitted)
    if fitted is None:
        return False
    with torch.no_grad():
        for weight, values in zip(weights, fitted):
            weight.copy_(values)
    return True


def fit_bigrams(
    model: Thinker, loader: BatchLoader, settings: Settings, is_asked_for: bool
) -> bool:
    """See start_from_bigrams()."""
    started = time.perf_counter()
    n_steps = MAX_STEPS
    if not is_asked_for:
        n_steps = affordable_steps(model, settings)
    if n_steps < MIN_STEPS:
        return False
    seconds = math.inf  # that the fit may take
    if settings.train.max_minutes is not None and not is_asked_for:
        seconds = SHARE_OF_RUN * 60 * settings.train.max_minutes

    counts, held_out = count_pairs(loader, settings, model.device, seconds / 3)
    before_loss = time.perf_counter()
    loss = pair_loss(model, held_out)
    if seconds < math.inf:
        step_seconds = 3 * (time.perf_counter() - before_loss)  # backward takes twice as long
        seconds -= before_loss - started
        n_steps = min(n_steps, int(seconds / step_seconds))
        if n_steps < MIN_STEPS:
            return False
    loss = fit_weights(model, counts, held_out, n_steps, loss)
    print(
        f"fitted the embedding and the LM head to {counts.total:,} pairs of tokens in "
        f"{time.perf_counter() - started:.1f} s; loss on other pairs: {loss:.3f} nats",
        file=sys.stderr,
    )
    return True


def affordable_steps(model: Thinker, settings: Settings) -> int:
    """How many steps of the fit have SHARE_OF_RUN of the FLOPs of the run; at most MAX_STEPS."""
    train = settings.train
    if train.max_steps is None:
        return MAX_STEPS
    seq_len = settings.data.seq_len
    n_tokens = train.max_steps * train.batch_size * seq_len
    run_flops = flops_per_token(model, seq_len) * n_tokens
    fit_flops = 6 * model.config.vocab_size**2 * model.config.d_model  # of a step
    return min(MAX_STEPS, int(SHARE_OF_RUN * run_flops / fit_flops))


def count_pairs(
    loader: BatchLoader, settings: Settings, device: torch.device, seconds: float = math.inf
) -> tuple[PairCounts, PairCounts]:
    """The pairs in the first batches, and those in the held-out ones.

    At most an epoch of them, and as many as can be read in some seconds.
    """
    started = time.perf_counter()
    tokens_per_batch = loader.batch_size * settings.data.seq_len
    n_batches = max(2, MAX_TOKENS // tokens_per_batch)
    epochs = max(loader.epochs(n_batches))
    if epochs > 1:
        n_batches = max(2, int(n_batches / epochs))
    fitted, held_out = [], []
    for number in range(n_batches):
        if number > HELD_OUT and time.perf_counter() - started > seconds:
            break
        split = held_out if number % HELD_OUT == 1 else fitted
        split.append(loader.batch(number))
    vocab_size = settings.model.vocab_size
    return PairCounts(fitted, vocab_size, device), PairCounts(held_out, vocab_size, device)


@torch.no_grad()
def fit_weights(
    model: Thinker, counts: PairCounts, held_out: PairCounts, n_steps: int, loss: float
) -> float:
    """Fit the weights, unless they end above `loss`, which they have on held-out pairs.

    Returns what they have then, in nats per token. First both tables learn. Tokens that are
    followed by the same ones then have the same row, but attention must tell them apart. So each
    row gets a part of its random start back, and the LM head learns the rest.
    """
    embedding, head = model.embedding.weight, model.lm_head.weight
    head_lr = HEAD_LR / model.config.d_model
    start = embedding.clone(), head.clone()
    n_both = round(STEPS_OF_BOTH * n_steps)
    rates = {embedding: EMBEDDING_LR, head: head_lr}
    if descend(model, rates, counts, held_out, n_both) >= loss:
        return loss
    rows = F.rms_norm(embedding, embedding.shape[-1:])
    embedding.copy_(rows + RANDOM_PART * start[0])
    fitted = descend(model, {head: head_lr}, counts, held_out, n_steps - n_both)
    if fitted < loss:
        return fitted
    embedding.copy_(start[0])
    head.copy_(start[1])
    return loss


def descend(
    model: Thinker,
    rates: dict[Tensor, float],
    counts: PairCounts,
    held_out: PairCounts,
    n_steps: int,
) -> float:
    """Train the weights that have rates. Those with the lowest loss on held-out pairs remain.

    Returns this loss, nats per token.
    """
    groups = [{"params": [weight], "lr": rate} for weight, rate in rates.items()]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0, fused=True)
    best = [weight.clone() for weight in rates]
    loss = pair_loss(model, held_out)
    for step in range(1, n_steps + 1):
        for group, rate in zip(optimizer.param_groups, rates.values()):
            group["lr"] = rate * min(1.0, (n_steps - step + 1) / (DECAY_FRACTION * n_steps))
        add_gradients(model, counts)
        optimizer.step()
        model.zero_grad()
        if step % CHECK_EVERY and step < n_steps:
            continue
        new_loss = pair_loss(model, held_out)
        if new_loss >= loss:  # what is learned now is the counted text by heart
            break
        loss = new_loss
        best = [weight.clone() for weight in rates]
    for weight, values in zip(rates, best):
        weight.copy_(values)
    return loss


def chunks(vocab_size: int) -> list[slice]:
    """All tokens, in slices of at most ROWS."""
    starts = range(0, vocab_size, ROWS)
    return [slice(start, min(start + ROWS, vocab_size)) for start in starts]


def bigram_logits(model: Thinker, tokens: slice) -> Tensor:
    """The logits after each of these tokens, in a model whose blocks add nothing: (R, V)."""
    ids = torch.arange(tokens.start, tokens.stop, device=model.device)
    return model.lm_head(model.norm(model.embedding(ids)))


@torch.enable_grad()
def add_gradients(model: Thinker, counts: PairCounts) -> None:
    """Add the gradients of the mean loss of all pairs to those of the weights."""
    for tokens in chunks(counts.vocab_size):
        target = counts.rows(tokens)  # (R, V)
        logits = bigram_logits(model, tokens)
        # The gradient of the cross-entropy, summed over all pairs that begin with a token.
        expected = logits.detach().softmax(-1) * target.sum(-1, keepdim=True)
        logits.backward((expected - target) / counts.total)


@torch.no_grad()
def pair_loss(model: Thinker, counts: PairCounts) -> float:
    """The mean cross-entropy of all pairs, nats per token."""
    total = 0.0
    for tokens in chunks(counts.vocab_size):
        target = counts.rows(tokens)
        logits = bigram_logits(model, tokens)
        total -= float((logits.log_softmax(-1) * target).sum())
    return total / counts.total
