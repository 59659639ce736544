"""Remove heads, neurons and layers from a model: python scripts/prune.py PATH --out FOLDER."""

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
                "runs/quickstart --layers 1 --by activation --out runs/pruned")  # fmt: skip
    description = "Remove the least important heads, neurons and layers, and write a smaller model."
    parser = ArgumentParser(description=description, examples=examples)
    parser.add_model("path", "PATH")
    parser.add_argument("--out", type=Path, metavar="FOLDER", required=True, help="folder for the smaller model")
    group = parser.add_argument_group("what to remove")
    group.add_argument("--neurons", type=float, default=0.0, help="fraction of the neurons in the MLP of each layer")
    heads_help = "fraction of the KV heads in each layer, with the query heads that share them"
    group.add_argument("--heads", type=float, default=0.0, help=heads_help)
    group.add_argument("--layers", type=int, default=0, help="number of layers")
    by_help = f"how to score the parts: {', '.join(METHODS)}"
    group.add_argument("--by", choices=METHODS, default="gradient", metavar="METHOD", help=by_help)
    group.add_argument("--seed", type=int, help="seed of --by random (default: 0)")
    group = parser.add_argument_group("text and output")
    group.add_argument("--text", type=Path, metavar="FILE", help="text file (default: the run's validation split)")
    group.add_argument("--texts", type=int, default=64, metavar="N", help="number of sequences to score the parts on")
    group.add_argument("--json", action="store_true", help="print one JSON object")
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    arguments = parser.parse_args()
    for name in ("neurons", "heads"):
        if not 0 <= getattr(arguments, name) < 1:
            raise UserError(f"--{name} is {getattr(arguments, name):g}; use a fraction of at least 0 and below 1")
    if not (arguments.neurons or arguments.heads or arguments.layers):
        raise UserError("nothing would be removed; set --neurons, --heads or --layers")
    if arguments.seed is not None and arguments.by != "random":
        raise UserError("--seed has no effect without --by random; remove it")
    if arguments.texts < 1 or arguments.layers < 0:
        raise UserError("--texts and --layers must not be negative, and --texts must be at least 1")
    return arguments


def prune(model: Any, scores: Any, arguments: argparse.Namespace) -> tuple[Any, list[str]]:
    """The smaller model, and what was removed, in words."""
    from thinker.compression import pruning

    words, n_layers = [], len(model.blocks)
    removed = scores.layers.argsort()[: arguments.layers].tolist()
    kept = [layer for layer in range(n_layers) if layer not in removed]
    if removed:
        model = pruning.prune_layers(model, removed)
        words.append(f"{len(removed)} of {n_layers} layers ({', '.join(map(str, sorted(removed)))})")
    if arguments.heads:
        groups = [scores.groups[layer] for layer in kept]
        counts = [round(arguments.heads * len(group)) for group in groups]
        chosen = [(i, int(k)) for i, group in enumerate(groups) for k in group.argsort()[: counts[i]]]
        if not chosen:
            raise UserError(f"--heads {arguments.heads:g} removes none of {len(groups[0])} KV heads; raise it")
        model = pruning.prune(model, chosen)
        words.append(f"{counts[0]} of {len(groups[0])} KV heads in each layer")
    if arguments.neurons:
        neurons = [scores.neurons[layer] for layer in kept]
        n_kept = max(1, len(neurons[0]) - round(arguments.neurons * len(neurons[0])))
        model = pruning.prune_neurons(model, [each.argsort(descending=True)[:n_kept] for each in neurons])
        words.append(f"{len(neurons[0]) - n_kept} of {len(neurons[0])} neurons in each layer")
    return model, words


def main() -> int:
    """Score, remove, measure and write. Returns the exit status."""
    arguments = parse_arguments()

    from thinker import checkpoint
    from thinker.compression.saliency import score_parts
    from thinker.compression.sensitivity import sequence_losses
    from thinker.interop import load
    from thinker.runtime.device import choose_device
    from thinker.training.run_data import sample_sequences

    model, tokenizer = load(arguments.path, choose_device(arguments.device), arguments.checkpoint)
    if tokenizer is None:
        raise UserError(f"{arguments.path} has no tokenizer, so it cannot read text; use a model saved with one")
    with tempfile.TemporaryDirectory() as scratch:
        texts = sample_sequences(model, tokenizer, Path(arguments.path), arguments.text, arguments.texts, Path(scratch))
    scores = score_parts(model, *texts, arguments.by, arguments.seed or 0)
    pruned, words = prune(model, scores, arguments)
    result: dict[str, Any] = {"removed": words, "by": arguments.by}
    for name, each in (("before", model), ("after", pruned)):
        nats, counts = sequence_losses(each, *texts)
        n_parameters = sum(parameter.numel() for parameter in each.parameters())
        result[name] = {"parameters": n_parameters, "loss": float(nats.sum() / counts.sum())}
    checkpoint.save(arguments.out, pruned, {"step": 0})
    tokenizer.save(arguments.out)
    if arguments.json:
        print(json.dumps(result))
        return 0
    print(f"removed by {arguments.by}: {', '.join(words)}")
    for name in ("before", "after"):
        row = result[name]
        print(f"{name:>6}: {row['parameters'] / 1e6:.2f}M parameters, {row['loss']:.4f} nats per token")
    out, path = shlex.quote(str(arguments.out)), shlex.quote(str(arguments.path))
    print(f"wrote {out}; train it on, with its original as a teacher:", file=sys.stderr)
    print(f"  python train.py CONFIG run.init_from={out} train.distill.teacher={path} run.dir=...", file=sys.stderr)
    return 0


if __name__ == "__main__":
    run_command(main)
