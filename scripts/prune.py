"""Remove heads, neurons, layers and weights from a model: python scripts/prune.py PATH --out FOLDER."""

import argparse
import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from thinker.runtime.cli import ArgumentParser
from thinker.runtime.errors import UserError, run_command

METHODS = ("gradient", "activation", "magnitude", "random")


def parse_arguments() -> argparse.Namespace:
    """Parse the command line. Raises UserError for flags that cannot be combined."""
    examples = ("runs/quickstart --neurons 0.5 --heads 0.33 --out runs/pruned",
                "runs/quickstart --layers 1 --by activation --out runs/pruned",
                "runs/quickstart --weights 0.5 --by activation --out runs/sparse",
                "runs/gradually-pruned --zeros --out runs/smaller")  # fmt: skip
    description = "Remove the least important heads, neurons and layers, or set weights to zero, and write the new model."
    parser = ArgumentParser(description=description, examples=examples)
    parser.add_model("path", "PATH")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", required=True, help="folder for the smaller model"
    )
    group = parser.add_argument_group("what to remove")
    group.add_argument(
        "--neurons",
        type=float,
        default=0.0,
        help="fraction of the neurons in the MLP of each layer",
    )
    heads_help = "fraction of the KV heads in each layer, with the query heads that share them"
    group.add_argument("--heads", type=float, default=0.0, help=heads_help)
    group.add_argument("--layers", type=int, default=0, help="number of layers")
    weights_help = "fraction of the weights in each matrix of the blocks to set to zero; the file stays as large"
    group.add_argument("--weights", type=float, default=0.0, help=weights_help)
    zeros_help = (
        "remove KV heads and neurons whose weights are zero after training with train.prune"
    )
    group.add_argument("--zeros", action="store_true", help=zeros_help)
    by_help = f"how to score them: {', '.join(METHODS)}; for weights, activation is Wanda (default: gradient)"
    group.add_argument("--by", choices=METHODS, metavar="METHOD", help=by_help)
    group.add_argument("--seed", type=int, help="seed of --by random (default: 0)")
    group = parser.add_argument_group("text and output")
    group.add_argument(
        "--text", type=Path, metavar="FILE", help="text file (default: the run's validation split)"
    )
    group.add_argument(
        "--texts",
        type=int,
        default=64,
        metavar="N",
        help="number of sequences to score the parts on",
    )
    group.add_argument("--json", action="store_true", help="print one JSON object")
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    arguments = parser.parse_args()
    for name in ("neurons", "heads", "weights"):
        if not 0 <= getattr(arguments, name) < 1:
            raise UserError(
                f"--{name} is {getattr(arguments, name):g}; use a fraction of at least 0 and below 1"
            )
    has_share = bool(arguments.neurons or arguments.heads or arguments.layers or arguments.weights)
    if not (has_share or arguments.zeros):
        raise UserError(
            "nothing would be removed; set --neurons, --heads, --layers, --weights or --zeros"
        )
    if arguments.zeros and (has_share or arguments.by):
        raise UserError(
            "--zeros removes only what is zero; leave out --neurons, --heads, --layers, --weights and --by"
        )
    arguments.by = arguments.by or "gradient"
    if arguments.seed is not None and arguments.by != "random":
        raise UserError("--seed has no effect without --by random; remove it")
    if arguments.texts < 1 or arguments.layers < 0:
        raise UserError("--texts and --layers must not be negative, and --texts must be at least 1")
    return arguments


def prune(model: Any, texts: Any, arguments: argparse.Namespace) -> tuple[Any, list[str]]:
    """The pruned model, and what was removed, in words. texts: sequences to score on, tokens and targets."""
    from thinker.features.pruning import pruning, weight_pruning, zeros
    from thinker.features.pruning.saliency import score_parts

    if arguments.zeros:
        model, words = zeros.remove_zeros(model)
        if not words:
            raise UserError(
                f"{arguments.path} has no KV heads or neurons that are zero; train with train.prune first"
            )
        return model, words
    seed = arguments.seed or 0
    scores = score_parts(model, *texts, arguments.by, seed)
    words, n_layers = [], len(model.blocks)
    removed = scores.layers.argsort()[: arguments.layers].tolist()
    kept = [layer for layer in range(n_layers) if layer not in removed]
    if removed:
        model = pruning.prune_layers(model, removed)
        words.append(
            f"{len(removed)} of {n_layers} layers ({', '.join(map(str, sorted(removed)))})"
        )
    if arguments.heads:
        groups = [scores.groups[layer] for layer in kept]
        counts = [round(arguments.heads * len(group)) for group in groups]
        chosen = [
            (i, int(k)) for i, group in enumerate(groups) for k in group.argsort()[: counts[i]]
        ]
        if not chosen:
            raise UserError(
                f"--heads {arguments.heads:g} removes none of {len(groups[0])} KV heads; raise it"
            )
        model = pruning.prune(model, chosen)
        words.append(f"{counts[0]} of {len(groups[0])} KV heads in each layer")
    if arguments.neurons:
        neurons = [scores.neurons[layer] for layer in kept]
        n_kept = max(1, len(neurons[0]) - round(arguments.neurons * len(neurons[0])))
        if n_kept == len(neurons[0]):
            raise UserError(
                f"--neurons {arguments.neurons:g} removes none of {n_kept} neurons; raise it"
            )
        model = pruning.prune_neurons(
            model, [each.argsort(descending=True)[:n_kept] for each in neurons]
        )
        words.append(f"{len(neurons[0]) - n_kept} of {len(neurons[0])} neurons in each layer")
    if arguments.weights:
        share = weight_pruning.zero_share(model)
        by_weight = weight_pruning.score_weights(model, *texts, arguments.by, seed)
        weight_pruning.zero_weights(
            model, by_weight, arguments.weights, by_row=arguments.by == "activation"
        )
        if weight_pruning.zero_share(model) == share:
            raise UserError(
                f"--weights {arguments.weights:g} sets no weight to zero ({share:.1%} are zero); raise it"
            )
        words.append(
            f"{weight_pruning.zero_share(model):.1%} of the weights in the blocks, which are zero now"
        )
    return model, words


def measure(model: Any, texts: Any) -> dict[str, Any]:
    """The number of parameters of a model, and its loss on sequences, tokens and targets."""
    from thinker.features.quantization_study.sensitivity import sequence_losses

    nats, counts = sequence_losses(model, *texts)
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"parameters": n_parameters, "loss": float(nats.sum() / counts.sum())}


def main() -> int:
    """Score, remove, measure and write. Returns the exit status."""
    arguments = parse_arguments()

    from thinker import checkpoint
    from thinker.interop import load
    from thinker.runtime.device import choose_device
    from thinker.training.run_data import sample_sequences

    model, tokenizer = load(arguments.path, choose_device(arguments.device), arguments.checkpoint)
    if tokenizer is None:
        raise UserError(
            f"{arguments.path} has no tokenizer, so it cannot read text; use a model saved with one"
        )
    with tempfile.TemporaryDirectory() as scratch:
        texts = sample_sequences(
            model, tokenizer, Path(arguments.path), arguments.text, arguments.texts, Path(scratch)
        )
    by = "zeros" if arguments.zeros else arguments.by
    result: dict[str, Any] = {
        "by": by,
        "before": measure(model, texts),
    }  # before weights become zero in place
    pruned, words = prune(model, texts, arguments)
    result |= {"removed": words, "after": measure(pruned, texts)}
    checkpoint.save(arguments.out, pruned, {"step": 0})
    tokenizer.save(arguments.out)
    if arguments.json:
        print(json.dumps(result))
        return 0
    print(f"removed by {by}: {', '.join(words)}")
    for name in ("before", "after"):
        row = result[name]
        print(
            f"{name:>6}: {row['parameters'] / 1e6:.2f}M parameters, {row['loss']:.4f} nats per token"
        )
    out, path = shlex.quote(str(arguments.out)), shlex.quote(str(arguments.path))
    if arguments.zeros:
        print(f"wrote {out}", file=sys.stderr)
        return 0
    print(f"wrote {out}; train it on, with its original as a teacher:", file=sys.stderr)
    hold = (
        f" train.prune.weights={arguments.weights:g}" if arguments.weights else ""
    )  # keeps the zeros
    options = f"run.init_from={out} train.distill.teacher={path}{hold} run.dir=..."
    print(f"  python train.py CONFIG {options}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    run_command(main)
