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
from thinker.model import Thinker, ThinkerConfig
from thinker.runtime.constants import IGNORE_INDEX
from thinker.runtime.ranks import DistContext
from thinker.training.config.config import Config
from thinker.training.metrics import flops_per_token
from thinker.training.objective import Objective, next_token_loss
from thinker.training.settings.settings import Settings

SHARE_OF_RUN = 0.03  # of the FLOPs of max_steps, and of max_minutes, that the fit may take
MAX_SECONDS = 60.0
MAX_VOCAB_SIZE = 1 << 16
MAX_TOKENS = 4_000_000  # to count
MAX_STEPS = 100
MIN_STEPS = 10  # fewer end far from the pairs
HELD_OUT_EVERY = 10  # batches
CHECK_EVERY = 10  # steps
EMBEDDING_LR = 0.3
HEAD_LR = 3.2  # divided by d_model
DECAY_FRACTION = 0.6  # of the steps
SHARE_OF_BOTH = 0.75  # of the steps; in the others, only the LM head learns
RANDOM_SHARE = 0.5
MAX_LOGITS = 1 << 22  # at a time
TOLERANCE = 1e-4  # of the loss, by rounding


class PairCounts:
    """How often each token follows each other one.

    batches: of (inputs, targets), each (B, T) int64.
    """

    def __init__(
        self, batches: list[tuple[Tensor, Tensor]], vocab_size: int, device: torch.device
    ) -> None:
        pairs = [torch.zeros(0, dtype=torch.int64)]
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
    config: Config, model_config: ThinkerConfig, loader: BatchLoader, objective: Objective
) -> bool:
    """Whether a new run may begin with the fit: it learns the text of its config, from tables that
    start as usual."""
    if config.train.fit_bigrams == "off" or config.run.init_from is not None:
        return False
    if model_config.tie_embeddings or model_config.vocab_size > MAX_VOCAB_SIZE:
        return False
    if model_config.init != "fan_in" or model_config.head_init_std > 0:
        return False
    if loader.dataset.is_endless or not loader.reads_corpus:
        return False
    return objective is next_token_loss


def start_from_bigrams(
    model: Thinker, loader: BatchLoader, settings: Settings, dist: DistContext
) -> None:
    """Fit a new model to the pairs of tokens in its first training batches, on the main process.
    DDP gives all ranks its weights.

    The model stays as it is if the fit would take more than SHARE_OF_RUN, or if its blocks have an
    effect.
    """
    if dist.world_size > 1 and settings.train.parallel == "fsdp":
        return  # the model need not fit on a device
    if dist.is_main:
        fit_bigrams(model, loader, settings, dist.world_size)
    dist.broadcast_object()  # the other ranks wait


def fit_bigrams(
    model: Thinker, loader: BatchLoader, settings: Settings, world_size: int = 1
) -> bool:
    """Fit the model, see start_from_bigrams(). Prints how low the loss is then."""
    started = time.perf_counter()
    n_steps = affordable_steps(model, settings, world_size)
    if n_steps < MIN_STEPS:
        return False
    seconds = allowed_seconds(settings)
    counts, held_out = count_pairs(loader, settings, model.device, seconds / 3)
    if counts.total == 0 or held_out.total == 0:
        return False
    if not is_bigram_model(model, loader, settings):
        return False

    before_loss = time.perf_counter()
    loss = pair_loss(model, held_out)
    now = time.perf_counter()
    if seconds < math.inf:
        step_seconds = 5 * (now - before_loss)  # with the backward pass, AdamW and checks
        n_steps = min(n_steps, int((seconds - (now - started)) / step_seconds))
    if n_steps < MIN_STEPS:
        return False
    fitted_loss = fit_weights(model, counts, held_out, n_steps, loss)
    if fitted_loss >= loss:
        return False
    print(
        f"fitted the embedding and the LM head to {counts.total:,} pairs of tokens in "
        f"{time.perf_counter() - started:.1f} s; loss on held-out text: {fitted_loss:.3f} nats",
        file=sys.stderr,
    )
    return True


def affordable_steps(model: Thinker, settings: Settings, world_size: int) -> int:
    """How many steps of the fit on one rank have SHARE_OF_RUN of the FLOPs of the run on all; at
    most MAX_STEPS."""
    train = settings.train
    if train.max_steps is None:
        return MAX_STEPS
    seq_len = settings.data.seq_len
    n_tokens = train.max_steps * train.batch_size * seq_len
    run_flops = flops_per_token(model, seq_len) * n_tokens / world_size
    fit_flops = 6 * model.config.vocab_size**2 * model.config.d_model  # of a step
    return min(MAX_STEPS, int(SHARE_OF_RUN * run_flops / fit_flops))


def allowed_seconds(settings: Settings) -> float:
    """How long the fit may take. With train.deterministic, no clock decides."""
    train = settings.train
    if train.deterministic:
        return math.inf
    if train.max_minutes is None:
        return MAX_SECONDS
    return min(MAX_SECONDS, SHARE_OF_RUN * 60 * train.max_minutes)


def count_pairs(
    loader: BatchLoader, settings: Settings, device: torch.device, seconds: float = math.inf
) -> tuple[PairCounts, PairCounts]:
    """The pairs in the first batches, and those in the held-out ones; none if the text is short.

    At most an epoch of them, and as many as can be read in some seconds.
    """
    started = time.perf_counter()
    n_batches = MAX_TOKENS // (loader.batch_size * settings.data.seq_len)
    epochs = max(loader.epochs(n_batches))
    if epochs > 1:
        n_batches = int(n_batches / epochs)
    fitted, held_out = [], []
    if n_batches < HELD_OUT_EVERY:
        n_batches = 0
    for number in range(n_batches):
        split = held_out if number % HELD_OUT_EVERY == 1 else fitted
        split.append(loader.batch(number))
        if len(held_out) > 0 and time.perf_counter() - started > seconds:
            break
    vocab_size = settings.model.vocab_size
    return PairCounts(fitted, vocab_size, device), PairCounts(held_out, vocab_size, device)


@torch.no_grad()
def is_bigram_model(model: Thinker, loader: BatchLoader, settings: Settings) -> bool:
    """Whether the loss of the whole model is that of its embedding and LM head alone, on the first
    sequence and with another LM head."""
    inputs, targets = loader.batch(0, slice(0, 1))
    pairs = PairCounts([(inputs, targets)], settings.model.vocab_size, model.device)
    if pairs.total == 0:
        return False
    head = model.lm_head.weight.clone()
    noise = torch.rand(head.shape, generator=torch.Generator().manual_seed(1))
    model.lm_head.weight.copy_(noise - 0.5)
    was_training = model.training
    model.eval()
    total, _ = model(inputs.to(model.device), targets=targets.to(model.device))
    of_pairs = pair_loss(model, pairs)
    model.train(was_training)
    model.lm_head.weight.copy_(head)
    return abs(float(total) / pairs.total - of_pairs) <= TOLERANCE * of_pairs


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
    head_lr = HEAD_LR / model.config.d_model / model.config.logit_scale
    start_embedding, start_head = embedding.clone(), head.clone()
    n_both = round(SHARE_OF_BOTH * n_steps)
    rates = {embedding: EMBEDDING_LR, head: head_lr}
    if descend(model, rates, counts, held_out, n_both) >= loss:
        return loss
    rows = F.rms_norm(embedding, embedding.shape[-1:])
    embedding.copy_(rows + RANDOM_SHARE * start_embedding)
    fitted_loss = descend(model, {head: head_lr}, counts, held_out, n_steps - n_both)
    if fitted_loss < loss:
        return fitted_loss
    embedding.copy_(start_embedding)
    head.copy_(start_head)
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
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0)
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
        if not new_loss < loss:  # the counted pairs are memorized now
            break
        loss = new_loss
        best = [weight.clone() for weight in rates]
    for weight, values in zip(rates, best):
        weight.copy_(values)
    return loss


def chunks(vocab_size: int) -> list[slice]:
    """All tokens, in slices whose logits have at most MAX_LOGITS entries."""
    size = max(1, MAX_LOGITS // vocab_size)
    starts = range(0, vocab_size, size)
    return [slice(start, min(start + size, vocab_size)) for start in starts]


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
