"""Loss, gradients and updates for every division of a batch, compared with its documents alone."""

import argparse
import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from thinker.benchmarks.rank_launcher import launch_ranks
from thinker.data.batches.prefetch import Batch
from thinker.data.batches.windows import PackedDataset
from thinker.data.corpus.shard_writer import ShardWriter
from thinker.data.corpus.shards import Shard, TokenShards
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.model import Thinker, ThinkerConfig
from thinker.runtime.constants import IGNORE_INDEX
from thinker.runtime.ranks import SINGLE_PROCESS, DistContext, full_tensor
from thinker.training.callback import Callback, TrainingParts
from thinker.training.config.load import validate_config
from thinker.training.objective import Loss, Objective, next_token_loss
from thinker.training.settings.resolve import resolve_settings
from thinker.training.step import TrainingStep

CPU = torch.device("cpu")
ROWS = 16  # sequences of a batch
SEQ_LEN = 24
N_STEPS = 3  # of which the updates are compared
CLIP = 1.0
LR = 0.01
FORMS = ((1, "ddp"), (2, "ddp"), (4, "ddp"), (2, "fsdp"), (4, "fsdp"))  # ranks, train.parallel
# No width here is a multiple of 2 or 4, so FSDP2 shares nothing evenly.
CONFIG = ThinkerConfig(
    vocab_size=257, d_model=31, n_layers=2, n_heads=3, n_kv_heads=1, head_dim=10, d_ff=77, max_seq_len=SEQ_LEN,
)  # fmt: skip
EXTRA = 1e-2  # weight of the extra loss

Piece = tuple[Tensor, Tensor]  # tokens and targets of a text that is computed alone, (n,) each
PieceLoss = Callable[[Tensor, Tensor], Tensor]  # logits (n, V), targets (n,) -> a sum
Tensors = dict[str, Tensor]


class Case(NamedTuple):
    """A batch, and the pieces of text that it consists of."""

    name: str
    batch: Batch
    pieces: list[Piece]


class Gradients(Callback):
    """Keeps the gradients of each step, as they are before clipping."""

    def setup(self, parts: TrainingParts) -> None:
        """Remember the model."""
        self.model = parts.model

    def before_clip(self) -> None:
        """Copy the gradients of the whole batch."""
        self.found = {}
        for name, parameter in self.model.named_parameters():
            self.found[name] = full_tensor(parameter.grad.detach()).clone()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """This benchmark has no flags."""


# ------------------------------------------------------------------ text


def write_shards(folder: Path, is_chat: bool) -> TokenShards:
    """Documents of random tokens. Some are long, and of conversations only a few answers are
    targets."""
    numbers = np.random.default_rng(1)
    tokenizer = make_tokenizer("byte", [])
    name = "chat" if is_chat else "text"
    writer = ShardWriter(folder, name, tokenizer)
    lengths = [3, 60, 9, 1, 23, 5, 31, 12, 7, 24, 2, 14, 4, 26, 11]
    for number, length in enumerate(lengths):
        ids = numbers.integers(0, 256, length)
        mask = None
        if is_chat:
            # Most conversations have one answer of a token or two; every fifth is nearly all answer.
            n_targets = length - 1 if number % 5 == 0 else number % 3
            mask = np.arange(length) >= length - n_targets
        writer.add(ids, length, loss_mask=mask)
    writer.close()
    return TokenShards.open(folder, writer.files, tokenizer)


def make_cases(folder: Path) -> list[Case]:
    """Text and conversations, in each packing, with and without masks between documents."""
    cases = []
    for is_chat in (False, True):
        tokens = write_shards(folder, is_chat)
        kind = "chats" if is_chat else "text"
        packings = ("contiguous", "documents", "best_fit")
        if is_chat:
            packings = packings[1:]  # for conversations, contiguous means documents
        for packing in packings:
            for is_masked in (False, True):
                windows = PackedDataset(tokens, SEQ_LEN, packing, document_masking=is_masked)
                name = f"{kind}, {packing}"
                if is_masked:
                    name += ", masked"
                pieces = [as_piece(tokens.shards[0], parts) for parts in spans(windows, is_masked)]
                cases.append(Case(name, batch_of(windows), pieces))
    return cases


def batch_of(windows: PackedDataset) -> Batch:
    """All windows, filled up to ROWS with sequences of padding alone."""
    inputs, targets = windows.batch(range(len(windows)))
    n_missing = ROWS - len(inputs)
    assert n_missing >= 0
    bos_id = windows.tokens.shards[0].bos_id
    inputs = F.pad(inputs, (0, 0, 0, n_missing), value=bos_id)
    targets = F.pad(targets, (0, 0, 0, n_missing), value=IGNORE_INDEX)
    # Targets are spread over micro-batches and ranks as unequally as can be.
    order = (targets != IGNORE_INDEX).sum(dim=1).argsort(descending=True, stable=True)
    inputs, targets = inputs[order], targets[order]
    n_targets = int((targets != IGNORE_INDEX).sum())
    numbers = torch.arange(ROWS)
    return Batch(inputs, targets, n_targets, windows.document_ids(inputs), windows=numbers)


def spans(windows: PackedDataset, is_masked: bool) -> Iterator[list[tuple[int, int]]]:
    """What a model reads alone: the first input and the last target of its parts.

    With masks these are documents, cut where a window ends. Without, they are the windows.
    """
    shard = windows.tokens.shards[0]
    if not is_masked:
        for index in range(len(windows)):
            yield windows.spans(index)[1]
        return
    offsets = shard.offsets[:].tolist()
    ends_of_windows = range(SEQ_LEN, offsets[-1], SEQ_LEN)
    for start, end in itertools.pairwise(offsets):
        cuts = list(range(start + SEQ_LEN, end, SEQ_LEN))
        if windows.packing == "contiguous":
            cuts = [cut for cut in ends_of_windows if start < cut < end]
        elif shard.loss_mask is not None:
            end = min(end, start + SEQ_LEN)  # the rest of a conversation is left out
            cuts = []
        edges = [start, *cuts, end]
        for first, last in itertools.pairwise(edges):
            yield [(first, last)]


def as_piece(shard: Shard, parts: list[tuple[int, int]]) -> Piece:
    """Tokens and targets of these parts of a shard, one after the other."""
    tokens = np.concatenate([shard.tokens[start:end] for start, end in parts])
    targets = np.concatenate([shard.tokens[start + 1 : end + 1] for start, end in parts])
    targets = targets.astype(np.int64)
    if shard.loss_mask is not None:
        mask = np.concatenate([shard.loss_mask[start + 1 : end + 1] for start, end in parts])
        targets[mask == 0] = IGNORE_INDEX
    return torch.from_numpy(tokens.astype(np.int64)), torch.from_numpy(targets)


# ------------------------------------------------------------------ the plain formula


def plain_logits(weights: Tensors, tokens: Tensor) -> Tensor:
    """Logits (T, V) of one text (T,), by the formulas of the default block."""
    H, K, D = CONFIG.n_heads, CONFIG.n_kv_heads, CONFIG.head_dim
    T = len(tokens)
    causal = torch.ones(T, T, dtype=torch.bool).tril()
    frequencies = CONFIG.rope_theta ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    angles = torch.arange(T, dtype=torch.float64)[:, None, None] * frequencies  # (T, 1, D/2)
    cos, sin = angles.cos(), angles.sin()

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + CONFIG.norm_eps).rsqrt() * weight

    def rotate(x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    x = weights["embedding.weight"][tokens]  # (T, C)
    for layer in range(CONFIG.n_layers):
        prefix = f"blocks.{layer}."
        block = {name.removeprefix(prefix): value for name, value in weights.items()}
        h = norm(x, block["attention_norm.weight"])
        q = (h @ block["attention.q_proj.weight"].T).view(T, H, D)
        k = (h @ block["attention.k_proj.weight"].T).view(T, K, D)
        v = (h @ block["attention.v_proj.weight"].T).view(T, K, D)
        q = rotate(norm(q, block["attention.q_norm.weight"]))
        k = rotate(norm(k, block["attention.k_norm.weight"]))
        k, v = (heads.repeat_interleave(H // K, dim=1) for heads in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / D**0.5
        attention = scores.masked_fill(~causal, -torch.inf).softmax(dim=-1)
        y = torch.einsum("hqk,khd->qhd", attention, v).flatten(1)
        x = x + y @ block["attention.o_proj.weight"].T
        h = norm(x, block["mlp_norm.weight"])
        gate = F.silu(h @ block["mlp.gate_proj.weight"].T)
        x = x + (gate * (h @ block["mlp.up_proj.weight"].T)) @ block["mlp.down_proj.weight"].T
    return norm(x, weights["norm.weight"]) @ weights["lm_head.weight"].T


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Its sum over the targets."""
    return F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")


def cross_entropy_and_extra(logits: Tensor, targets: Tensor) -> Tensor:
    """The cross-entropy, and a loss that keeps logits small."""
    squares = logits.logsumexp(-1).square() * (targets != IGNORE_INDEX)
    return cross_entropy(logits, targets) + EXTRA * squares.sum()


def with_extra(model: nn.Module, batch: Batch) -> Loss:
    """cross_entropy_and_extra() as an objective with a part of its own."""
    logits = model(batch.inputs, document_ids=batch.document_ids)
    is_counted = batch.targets != IGNORE_INDEX
    total = cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
    extra = (logits.logsumexp(-1).square() * is_counted).sum()
    n_targets = is_counted.sum()
    return Loss(total + EXTRA * extra, n_targets, {"extra": (extra, n_targets)})


OBJECTIVES: dict[str, tuple[Objective, PieceLoss]] = {
    "cross-entropy": (next_token_loss, cross_entropy),
    "with an extra loss": (with_extra, cross_entropy_and_extra),
}


def plain_gradients(
    weights: Mapping[str, Tensor], pieces: list[Piece], loss_of: PieceLoss = cross_entropy
) -> tuple[float, Tensors]:
    """Loss per target and its gradients in fp64: every piece alone, one sum, one division."""
    leaves = {name: value.double().requires_grad_() for name, value in weights.items()}
    total = torch.zeros((), dtype=torch.float64)
    n_targets = 0
    for tokens, targets in pieces:
        total = total + loss_of(plain_logits(leaves, tokens), targets)
        n_targets += int((targets != IGNORE_INDEX).sum())
    loss = total / n_targets
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return loss.item(), dict(zip(leaves, gradients))


def plain_updates(weights: Mapping[str, Tensor], cases: list[Case]) -> Tensors:
    """The weights in fp64 after a step of torch's AdamW for each case."""
    parameters = {name: nn.Parameter(value.double()) for name, value in weights.items()}
    optimizer = torch.optim.AdamW(
        parameters.values(), lr=LR, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0
    )
    for case in cases:
        _, gradients = plain_gradients({n: p.detach() for n, p in parameters.items()}, case.pieces)
        for name, parameter in parameters.items():
            parameter.grad = gradients[name]
        nn.utils.clip_grad_norm_(parameters.values(), CLIP)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


# ------------------------------------------------------------------ the training step


def random_model() -> Thinker:
    """A model whose every weight is random, so that no gradient is zero."""
    torch.manual_seed(1)
    model = Thinker(CONFIG)
    with torch.no_grad():
        for parameter in model.parameters():
            mean = 0.0
            if parameter.dim() == 1:  # of a norm
                mean = 0.7
            parameter.normal_(mean, 0.3)
    return model


def make_step(
    dist: DistContext, parallel: str, size: int, optimizer: str = "adamw"
) -> tuple[TrainingStep, Gradients]:
    """The training step of a rank, in micro-batches of `size` sequences."""
    train = {
        "max_steps": N_STEPS,
        "batch_size": ROWS,
        "precision": "fp32",
        "compile": False,
        "parallel": parallel,
        "grad_clip": CLIP,
    }
    options = {"name": optimizer}
    if optimizer == "adamw":
        options["lr"] = LR
    tree = {"train": train, "optimizer": options, "data": {"seq_len": SEQ_LEN}}
    settings = resolve_settings(validate_config(tree), CONFIG, CPU, dist=dist)
    gradients = Gradients()
    step = TrainingStep(random_model(), settings, callbacks=[gradients], dist=dist)
    set_size(step, size)
    return step, gradients


def set_size(step: TrainingStep, size: int) -> None:
    """Set the size of micro-batches, also to one that a config must not have: the last is then
    smaller."""
    step.train = step.train.model_copy(update={"micro_batch_size": size})


def own_rows(batch: Batch, dist: DistContext) -> Batch:
    """The rows of a rank."""
    n_rows = ROWS // dist.world_size
    return batch.rows(slice(dist.rank * n_rows, (dist.rank + 1) * n_rows), CPU)


def relative_error(found: Tensors, expected: Mapping[str, Tensor]) -> float:
    """The largest error of a tensor, relative to its norm."""
    errors = []
    for name, right in expected.items():
        errors.append(float((found[name].double() - right).norm() / right.norm()))
    return max(errors)


def prepare(folder: Path) -> None:
    """Write what every rank compares with: losses and gradients of the plain formula, and weights
    after N_STEPS steps."""
    weights = {name: parameter.detach() for name, parameter in random_model().named_parameters()}
    cases = make_cases(folder)
    expected = {}
    for case in cases:
        for name, (_, loss_of) in OBJECTIVES.items():
            loss, gradients = plain_gradients(weights, case.pieces, loss_of)
            prefix = f"{case.name}: {name}: "
            expected |= {prefix + key: value for key, value in gradients.items()}
            expected[prefix + "loss"] = torch.tensor([loss], dtype=torch.float64)
    save_file(expected, folder / "gradients.safetensors")
    save_file(plain_updates(weights, update_cases(cases)), folder / "adamw.safetensors")
    save_file(train_cases(SINGLE_PROCESS, folder, "ddp", ROWS, "muon"), folder / "muon.safetensors")


def measure_gradients(
    dist: DistContext, folder: str, parallel: str, sizes: list[int] | None = None
) -> list[dict[str, Any]]:
    """Errors of loss and gradients for each case, objective and size of micro-batches (None: all
    sizes)."""
    expected = load_file(Path(folder, "gradients.safetensors"))
    step, gradients = make_step(dist, parallel, 1)
    sizes = sizes or list(range(1, ROWS // dist.world_size + 1))
    rows = []
    for case in make_own_cases(folder, dist):
        batch = own_rows(case.batch, dist)
        for objective_name, (objective, _) in OBJECTIVES.items():
            prefix = f"{case.name}: {objective_name}: "
            right = {}
            for name in expected:
                if name.startswith(prefix):
                    right[name.removeprefix(prefix)] = expected[name]
            loss = float(right.pop("loss"))
            step.objective = objective
            for size in sizes:
                set_size(step, size)
                found, _ = step(batch, 0.0)  # a learning rate of 0: the weights stay
                row = {"case": case.name, "objective": objective_name, "size": size}
                row |= {"ranks": dist.world_size, "parallel": parallel}
                row["loss_error"] = abs(float(found) / loss - 1)
                row["gradient_error"] = relative_error(gradients.found, right)
                rows.append(row)
    return rows


def measure_updates(
    dist: DistContext, folder: str, parallel: str, sizes: list[int]
) -> list[dict[str, Any]]:
    """Errors of the updates of N_STEPS steps, for each optimizer and size of micro-batches."""
    before = {name: parameter.detach() for name, parameter in random_model().named_parameters()}
    rows = []
    for optimizer in ("adamw", "muon"):
        after = load_file(Path(folder, f"{optimizer}.safetensors"))
        right = {name: after[name].double() - before[name] for name in before}
        for size in sizes:
            weights = train_cases(dist, folder, parallel, size, optimizer)
            found = {name: weights[name].double() - before[name] for name in before}
            row = {"optimizer": optimizer, "size": size, "error": relative_error(found, right)}
            rows.append(row | {"ranks": dist.world_size, "parallel": parallel})
    return rows


def make_own_cases(folder: str | Path, dist: DistContext) -> list[Case]:
    """make_cases() in a folder of each rank."""
    own = Path(folder, f"rank-{dist.world_size}-{dist.rank}")
    own.mkdir(exist_ok=True)
    return make_cases(own)


def train_cases(
    dist: DistContext, folder: str | Path, parallel: str, size: int, optimizer: str
) -> Tensors:
    """The weights after a step for each of the cases that updates are compared with."""
    step, _ = make_step(dist, parallel, size, optimizer)
    for case in update_cases(make_own_cases(folder, dist)):
        step(own_rows(case.batch, dist), 1.0)
    parameters = step.model.named_parameters()
    return {name: full_tensor(parameter.detach()).clone() for name, parameter in parameters}


def update_cases(cases: list[Case]) -> list[Case]:
    """The cases of N_STEPS steps."""
    names = ("text, contiguous, masked", "chats, documents, masked", "chats, best_fit")
    by_name = {case.name: case for case in cases}
    return [by_name[name] for name in names]


# ------------------------------------------------------------------ wrong ways


def wrong_losses(case: Case) -> dict[str, float]:
    """What mistakes of other trainers would report, relative to the loss.

    Each sequence is a micro-batch, and four ranks have four sequences each.
    """
    model = random_model()
    sums, counts = [], []
    with torch.no_grad():
        for row in range(ROWS):
            loss = next_token_loss(model, case.batch.rows(slice(row, row + 1), CPU))
            sums.append(float(loss.sum))
            counts.append(int(loss.n_targets))
    right = sum(sums) / sum(counts)
    ranks = [slice(start, start + 4) for start in range(0, ROWS, 4)]
    found = {
        "mean of micro-batches": mean_of_means(sums, counts),
        "mean of ranks": mean_of_means(
            [sum(sums[rank]) for rank in ranks], [sum(counts[rank]) for rank in ranks]
        ),
        "padding counted": sum(sums) / (ROWS * SEQ_LEN),
    }
    return {name: value / right - 1 for name, value in found.items()}


def mean_of_means(sums: list[float], counts: list[int]) -> float:
    """The mean of the means; that of nothing counts as 0."""
    means = [total / max(count, 1) for total, count in zip(sums, counts)]
    return sum(means) / len(means)


# ------------------------------------------------------------------ the benchmark


def measure_form(dist: DistContext, folder: str, parallel: str) -> tuple[list, list]:
    """Errors of gradients with all sizes of micro-batches, and of updates with the smallest and the
    largest."""
    gradients = measure_gradients(dist, folder, parallel)
    sizes = [1, ROWS // dist.world_size]
    return gradients, measure_updates(dist, folder, parallel, sizes)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Compare every form, and print the largest errors of each case."""
    gradients, updates = [], []
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        for n_ranks, parallel in FORMS:
            found = launch_ranks(n_ranks, measure_form, folder, parallel)
            gradients += found[0]
            updates += found[1]
        cases = make_cases(Path(folder))
    rows = []
    for case in cases:
        of_case = [row for row in gradients if row["case"] == case.name]
        counts = (case.batch.targets != IGNORE_INDEX).sum(dim=1)
        row = {"case": case.name, "fewest": int(counts.min()), "most": int(counts.max())}
        row["n_compared"] = len(of_case)
        row["loss_error"] = max(found["loss_error"] for found in of_case)
        for name in ("one", "ddp", "fsdp"):
            row[name] = max(each["gradient_error"] for each in of_case if form_name(each) == name)
        row["wrong"] = wrong_losses(case)
        rows.append(row)
        print(
            f"{case.name:26} loss {row['loss_error']:.1e}, gradients {row['one']:.1e} in one process, "
            f"{row['ddp']:.1e} DDP, {row['fsdp']:.1e} FSDP2"
        )
    errors = {}
    for optimizer in ("adamw", "muon"):
        errors[optimizer] = max(row["error"] for row in updates if row["optimizer"] == optimizer)
        print(f"updates of {optimizer} {errors[optimizer]:.1e}")
    return {"rows": rows, "updates": errors, "n_updates": len(updates)}


def form_name(row: dict[str, Any]) -> str:
    """How the ranks of a row share the model; "one" for one process."""
    if row["ranks"] == 1:
        return "one"
    return row["parallel"]
