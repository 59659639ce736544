"""The command scripts/prune.py: remove parts of a model, and write the new one."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from thinker.runtime.cli import ArgumentParser
from thinker.runtime.errors import UserError
from thinker.runtime.process.invocation import other_command
from thinker.runtime.registry import features

if TYPE_CHECKING:
    from torch import Tensor

    from thinker.features.pruning.saliency import Scores
    from thinker.model import Thinker

METHODS = ("gradient", "activation", "magnitude", "random")
EXAMPLES = (
    "runs/quickstart --neurons 0.5 --heads 0.33 --out runs/pruned",
    "runs/quickstart --layers 1 --by activation --out runs/pruned",
    "runs/quickstart --weights 0.5 --by activation --out runs/sparse",
    "runs/gradually-pruned --zeros --out runs/smaller",
)


def main() -> int:
    """Score, remove, measure and write. Returns the exit status."""
    arguments = parse_arguments()

    from thinker import checkpoint
    from thinker.interop import load
    from thinker.runtime.device import choose_device
    from thinker.training.data.open_run import sample_sequences

    model, tokenizer = load(arguments.path, choose_device(arguments.device), arguments.checkpoint)
    if tokenizer is None:
        raise UserError(
            f"{arguments.path} has no tokenizer, so it cannot read text; use a model saved with one"
        )
    with tempfile.TemporaryDirectory() as scratch:
        path, text = Path(arguments.path), arguments.text
        texts = sample_sequences(model, tokenizer, path, text, arguments.texts, Path(scratch))
    before = measure(model, texts)  # before weights become zero in place
    pruned, removed = prune(model, texts, arguments)
    after = measure(pruned, texts)
    checkpoint.save(arguments.out, pruned, {"step": 0})
    tokenizer.save(arguments.out)

    by = "zeros" if arguments.zeros else arguments.by
    if arguments.json:
        result = {"by": by, "before": before, "removed": removed, "after": after}
        print(json.dumps(result))
        return 0
    print(f"removed by {by}: {', '.join(removed)}")
    for name, row in (("before", before), ("after", after)):
        size = f"{row['parameters'] / 1e6:.2f}M parameters"
        print(f"{name:>6}: {size}, {row['loss']:.4f} nats per token")
    print_next_step(arguments)
    return 0


def print_next_step(arguments: argparse.Namespace) -> None:
    """Say where the model is, and how to train it on."""
    out, path = shlex.quote(str(arguments.out)), shlex.quote(str(arguments.path))
    if arguments.zeros:
        print(f"wrote {out}", file=sys.stderr)
        return
    advice, options = "train it on", f"run.init_from={out}"
    if any(feature.name == "distillation" for feature in features()):
        advice += ", with its original as a teacher"
        options += f" train.distill.teacher={path}"
    print(f"wrote {out}; {advice}:", file=sys.stderr)
    if arguments.weights:  # keeps the zeros
        options += f" train.prune.weights={arguments.weights:g}"
    print(f"  {other_command('train')} CONFIG {options} run.dir=...", file=sys.stderr)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line. Raises UserError for flags that cannot be combined."""
    description = (
        "Remove the least important heads, neurons and layers, or set weights to "
        "zero, and write the new model."
    )
    parser = ArgumentParser(description=description, examples=EXAMPLES)
    parser.add_model("path", "PATH")
    out_help = "folder for the smaller model"
    parser.add_argument("--out", type=Path, metavar="FOLDER", required=True, help=out_help)

    group = parser.add_argument_group("what to remove")
    neurons_help = "fraction of the neurons in the MLP of each layer"
    group.add_argument("--neurons", type=float, default=0.0, help=neurons_help)
    heads_help = "fraction of the KV heads in each layer, with the query heads that share them"
    group.add_argument("--heads", type=float, default=0.0, help=heads_help)
    group.add_argument("--layers", type=int, default=0, help="number of layers")
    weights_help = (
        "fraction of the weights in each matrix of the blocks to set to zero; the "
        "file stays as large"
    )
    group.add_argument("--weights", type=float, default=0.0, help=weights_help)
    zeros_help = (
        "remove KV heads and neurons whose weights are zero after training with train.prune"
    )
    group.add_argument("--zeros", action="store_true", help=zeros_help)
    by_help = (
        f"how to score them: {', '.join(METHODS)}; for weights, activation is Wanda "
        f"(default: gradient)"
    )
    group.add_argument("--by", choices=METHODS, metavar="METHOD", help=by_help)
    group.add_argument("--seed", type=int, help="seed of --by random (default: 0)")

    group = parser.add_argument_group("text and output")
    text_help = "text file (default: the run's validation split)"
    group.add_argument("--text", type=Path, metavar="FILE", help=text_help)
    texts_help = "number of sequences to score the parts on"
    group.add_argument("--texts", type=int, default=64, metavar="N", help=texts_help)
    group.add_argument("--json", action="store_true", help="print one JSON object")
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")

    arguments = parser.parse_args()
    check_arguments(arguments)
    arguments.by = arguments.by or "gradient"
    return arguments


def check_arguments(arguments: argparse.Namespace) -> None:
    """Raise UserError for values that are out of range, and for flags that cannot be combined."""
    for name in ("neurons", "heads", "weights"):
        share = getattr(arguments, name)
        if not 0 <= share < 1:
            raise UserError(f"--{name} is {share:g}; use a fraction of at least 0 and below 1")
    has_share = bool(arguments.neurons or arguments.heads or arguments.layers or arguments.weights)
    if not (has_share or arguments.zeros):
        raise UserError(
            "nothing would be removed; set --neurons, --heads, --layers, --weights or --zeros"
        )
    if arguments.zeros and (has_share or arguments.by):
        raise UserError(
            "--zeros removes only what is zero; leave out --neurons, --heads, --layers, "
            "--weights and --by"
        )
    if arguments.seed is not None and arguments.by != "random":
        raise UserError("--seed has no effect without --by random; remove it")
    if arguments.texts < 1 or arguments.layers < 0:
        raise UserError("--texts and --layers must not be negative, and --texts must be at least 1")


def prune(
    model: Thinker, texts: tuple[Tensor, Tensor], arguments: argparse.Namespace
) -> tuple[Thinker, list[str]]:
    """The pruned model, and what was removed, in words. texts: sequences to score on, tokens and
    targets."""
    from thinker.features.pruning import pruning, zeros
    from thinker.features.pruning.saliency import score_parts

    if arguments.zeros:
        model, removed = zeros.remove_zeros(model)
        if not removed:
            raise UserError(
                f"{arguments.path} has no KV heads or neurons that are zero; train with "
                f"train.prune first"
            )
        return model, removed
    scores = score_parts(model, *texts, arguments.by, arguments.seed or 0)
    removed = []
    n_layers = len(model.blocks)
    layers = scores.layers.argsort()[: arguments.layers].tolist()
    kept = [layer for layer in range(n_layers) if layer not in layers]
    if layers:
        model = pruning.prune_layers(model, layers)
        numbers = ", ".join(map(str, sorted(layers)))
        removed.append(f"{len(layers)} of {n_layers} layers ({numbers})")
    if arguments.heads:
        model = _prune_heads(model, scores, kept, arguments.heads, removed)
    if arguments.neurons:
        model = _prune_neurons(model, scores, kept, arguments.neurons, removed)
    if arguments.weights:
        _zero_weights(model, texts, arguments, removed)
    return model, removed


def _prune_heads(
    model: Thinker, scores: Scores, kept: list[int], share: float, removed: list[str]
) -> Thinker:
    from thinker.features.pruning import pruning

    chosen, counts = [], []
    for i, layer in enumerate(kept):
        groups = scores.groups[layer]
        count = round(share * len(groups))
        counts.append((count, len(groups)))
        chosen += [(i, int(group)) for group in groups.argsort()[:count]]
    count, n_groups = counts[0]
    if not chosen:
        raise UserError(f"--heads {share:g} removes none of {n_groups} KV heads; raise it")
    removed.append(f"{count} of {n_groups} KV heads in each layer")
    return pruning.prune(model, chosen)


def _prune_neurons(
    model: Thinker, scores: Scores, kept: list[int], share: float, removed: list[str]
) -> Thinker:
    from thinker.features.pruning import pruning

    n = len(scores.neurons[kept[0]])
    n_kept = max(1, n - round(share * n))
    if n_kept == n:
        raise UserError(f"--neurons {share:g} removes none of {n} neurons; raise it")
    best = [scores.neurons[layer].argsort(descending=True)[:n_kept] for layer in kept]
    removed.append(f"{n - n_kept} of {n} neurons in each layer")
    return pruning.prune_neurons(model, best)


def _zero_weights(
    model: Thinker, texts: tuple[Tensor, Tensor], arguments: argparse.Namespace, removed: list[str]
) -> None:
    from thinker.features.pruning import weight_pruning

    share = weight_pruning.zero_share(model)
    by, wanted = arguments.by, arguments.weights
    scores = weight_pruning.score_weights(model, *texts, by, arguments.seed or 0)
    weight_pruning.zero_weights(model, scores, wanted, by_row=by == "activation")
    zeros = weight_pruning.zero_share(model)
    if zeros == share:
        raise UserError(
            f"--weights {wanted:g} sets no weight to zero ({share:.1%} are zero); raise it"
        )
    removed.append(f"{zeros:.1%} of the weights in the blocks, which are zero now")


def measure(model: Thinker, texts: tuple[Tensor, Tensor]) -> dict[str, float]:
    """The number of parameters of a model, and its loss on sequences, tokens and targets."""
    from thinker.evaluation.sequence_losses import sequence_losses

    nats, counts = sequence_losses(model, *texts)
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"parameters": n_parameters, "loss": float(nats.sum() / counts.sum())}
