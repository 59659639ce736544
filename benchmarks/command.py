"""Command line of the benchmarks, with a subcommand for each."""

import sys
from collections.abc import Collection
from importlib import import_module
from pathlib import Path
from types import ModuleType

from thinker.runtime.cli import ArgumentParser
from thinker.runtime.files import output_file
from thinker.runtime.plot_style import png_file

BENCHMARKS = {  # by room and name, the arguments of two examples
    "losses.ablation": ("--seeds 3 --png ablation.png", "--steps 10 --only 'window(32)' 'topk(16)'"),
    "systems.accumulation": ("",),
    "speed.attention": ("--png attention.png", "--patterns full 'window(128)' --lengths 512,1024"),
    "systems.before_after": ("1071b80", "main~5 --only step-quickstart decode-8 --pairs 3"),
    "losses.bigram": ("", "--minutes 5 --run runs/bigram-5"),
    "systems.checkpoint_overhead": ("configs/quickstart.yaml", "configs/quickstart.yaml train.batch_size=16 --saves 3"),
    "systems.comm_volume": ("", "--ranks 2 --layers 8 --precision fp32"),
    "losses.coordinates": ("--png coordinates.png", "--widths 64 128 --depths 2 4"),
    "speed.decode": ("--shape 124m", "--variants fp32,fp32-eager,int8,bf16@8"),
    "speed.decode_lengths": ("--png lengths.png", "--shape 124m --window 512"),
    "speed.decode_start": ("", "--run runs/chars --repeats 9"),
    "rewards.exact_rewards": ("grpo run.init_from=FOLDER data.path=prompts.jsonl", "sums.yaml --steps 20 --rounds 5"),
    "losses.extrapolation": ("--png extrapolation.png", "--seeds 1 --steps 10"),
    "losses.five-minutes": ("--out results.jsonl", "train.device=cpu"),
    "gpu.gpu": ("--part first --out first", "--part A --out rehearsal --rehearse"),
    "systems.families": ("", "--only gpt2 SmolLM2-135M --rounds 5"),
    "gpu.gpu_corpus": ("--packages debs --folder corpus", "--packages debs --folder corpus --megabytes 100"),
    "gpu.gpu_time_to_loss": ("--corpus corpus --out loss", "--corpus corpus --out loss --sides muon --rehearse"),
    "systems.html_report": ("", "--tokens 256 --layers 6"),
    "speed.kv_cache": ("--runs runs/quickstart", "--shape tiny --lengths 64 --rows 1 --repeats 3"),
    "speed.linear_cross_entropy": ("", "--vocab 32000 --device cpu --precision fp32"),
    "losses.ladder": ("configs/pysource.yaml --tokens-per-parameter 5 --check", "configs/pysource.yaml --minutes 10 --jobs 2"),
    "systems.latency": ("", "--shape tiny --new 64 --repeats 3"),
    "systems.loading": ("rows.jsonl", "rows.jsonl --tokenizer runs/mine --lengths 512"),
    "speed.monitoring": ("", "--shape 2m --precisions fp32 --batches 1"),
    "losses.packing": ("", "--seq-len 256 --tokens 500000 --seeds 1"),
    "pages.pages": ("",),
    "losses.regularization": ("my.txt", "a.txt b.txt --epochs 4 16 --seeds 3 --jobs 2"),
    "losses.rates": ("--png rates.png", "--widths 64 128 --batches 16 --tokens 65536"),
    "speed.retrieval": ("", "--shape 110m --repeats 3"),
    "rewards.rollouts": ("runs/quickstart", "runs/quickstart --answers 16 --repeats 3"),
    "systems.serving": ("", "--precision bf16 --clients 8 --transformers /opt/peer/bin/transformers"),
    "losses.short_context": ("", "--tokens 32 --minutes 1 3"),
    "losses.size_rule": ("my.txt", "my.txt --characters 100000 --minutes 1 --jobs 2"),
    "speed.speculative": ("", "--drafts 4 8 --temperatures 0 --precisions fp32"),
    "speed.step_parts": ("configs/quickstart.yaml", "configs/quickstart.yaml train.batch_size=16 --rounds 50"),
    "systems.step_limit": ("--precision bf16", "--shape tiny --modes eager --no-baseline --repeats 3"),
    "speed.structured": ("", "--shape tiny --precisions int8,int4 --new 20"),
    "losses.time_to_loss": ("BASELINE.yaml CANDIDATE.yaml", "BASELINE.yaml CANDIDATE.yaml --tune optimizer.lr=0.004,0.008"),
    "systems.tokenizing": ("rows.jsonl", "rows.jsonl --tokenizer runs/mine --repeats 1"),
    "losses.tricks": ("--size 12m", "--only both --texts pysource --seeds 1"),
    "speed.train": ("--shape 12m", "--shape 124m --no-baseline --png train.png"),
}  # fmt: skip
FOLDER = Path(__file__).parent
WITHOUT_RESULT = ("gpu", "gpu_time_to_loss", "pages")  # they write their own files


def main() -> int:
    """Run a benchmark and record its result. Returns the exit status."""
    # Only the benchmark that is named is imported, as most of them import torch.
    arguments = make_parser([name for name in names() if name in sys.argv]).parse_args()
    if getattr(arguments, "png", None) is not None:
        png_file(arguments.png)
    from thinker.benchmarks.environment import record_result

    out = None if arguments.benchmark in WITHOUT_RESULT else arguments.out
    record_result(arguments.benchmark, arguments.run_benchmark(arguments), out)
    return 0


def names() -> list[str]:
    """The names of all benchmarks."""
    return [path.partition(".")[2] for path in BENCHMARKS]


def make_parser(with_arguments: Collection[str]) -> ArgumentParser:
    """The parser of the command, which knows the arguments of some of the benchmarks.

    One of these that measures a feature that is not installed is left out.
    """
    description = "Run a benchmark and print its results, with a line of JSON at the end."
    examples = ("decode --shape 124m", "BENCHMARK --help")
    parser = ArgumentParser(description=description, examples=examples)
    commands = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    for path, its_examples in BENCHMARKS.items():
        name = path.partition(".")[2]
        module = None
        if name in with_arguments:
            module = import_benchmark(path)
            if module is None:
                continue
        doc = first_line(path)
        summary = doc[0].lower() + doc[1:]
        command = commands.add_parser(
            name, help=summary, description=f"{doc}.", examples=its_examples
        )
        if module is not None:
            module.add_arguments(command)
            command.set_defaults(run_benchmark=module.run)
            if name not in WITHOUT_RESULT:
                out_help = "append a line of JSON to FILE"
                command.add_argument("--out", type=output_file, metavar="FILE", help=out_help)
    return parser


def import_benchmark(path: str) -> ModuleType | None:
    """The module of a benchmark; None if it measures a feature that is not installed."""
    try:
        return import_module(f"thinker.benchmarks.{path.replace('-', '_')}")
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("thinker.features"):
            raise
        return None


def first_line(path: str) -> str:
    """The first line of a benchmark's docstring, without importing it."""
    file = FOLDER / f"{path.replace('.', '/').replace('-', '_')}.py"
    with file.open(encoding="utf-8") as lines:
        line = lines.readline()
    return line.strip().strip('"').rstrip(".")
