"""Sample from a Thinker: python generate.py PATH --prompt TEXT."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from dataclasses import asdict

from errors import UserError, run_command


def parse_arguments() -> argparse.Namespace:
    """The command line; argparse itself ends with status 2 on a flag that does not fit."""
    parser = argparse.ArgumentParser(description="Sample from a trained Thinker; text goes to standard output.")
    parser.add_argument("path", help="a run directory, such as runs/quickstart, or a checkpoint in it")
    parser.add_argument("--prompt", default="", help="how the text begins (default: at the beginning of a text)")
    parser.add_argument("--checkpoint", default="latest", help="of a run directory: latest, best or a name")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="at most so many (default 256)")
    parser.add_argument("--temperature", type=float, help="0 is greedy (default 0.8)")
    parser.add_argument("--top-k", type=int, help="keep the K likeliest tokens")
    parser.add_argument("--top-p", type=float, help="keep the likeliest tokens that together have probability P")
    parser.add_argument(
        "--min-p", type=float, help="keep tokens with at least this share of the likeliest's probability"
    )
    parser.add_argument("--repetition-penalty", type=float, default=1.0, help="above 1: fewer repetitions")
    parser.add_argument("--seed", type=int, help="the same seed gives the same text (default: a new one each time)")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before TEXT; may be repeated")
    parser.add_argument("--num-samples", type=int, default=1, help="how many texts, ended by a line --- (default 1)")
    parser.add_argument("--greedy", action="store_true", help="always the likeliest token")
    parser.add_argument("--no-cache", action="store_true", help="recompute every position at every step, to compare")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    parser.add_argument(
        "--precision", default="auto", choices=["auto", "fp32", "bf16", "fp16"], help="of weights and cache"
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object a sample, with tokens and log-probabilities"
    )
    return parser.parse_args()


def main() -> int:
    """Load, sample, print. Returns the exit status."""
    arguments = parse_arguments()
    if arguments.num_samples < 1:
        raise UserError(f"--num-samples is {arguments.num_samples}; it must be at least 1")
    if arguments.greedy and arguments.temperature:
        raise UserError(f"--greedy and --temperature {arguments.temperature} contradict each other; leave one out")
    temperature = 0.0 if arguments.greedy else 0.8 if arguments.temperature is None else arguments.temperature
    if temperature == 0 and arguments.num_samples > 1:
        raise UserError("a greedy answer (temperature 0) is always the same: leave out --num-samples")

    from generation import Completion, Generator, SamplingParams
    from model.device import DTYPES, choose_device
    from storage import load

    seed = secrets.randbelow(2**31) if arguments.seed is None else arguments.seed
    params = SamplingParams(
        max_new_tokens=arguments.max_new_tokens,
        temperature=temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        repetition_penalty=arguments.repetition_penalty,
        seed=seed,
        stop=tuple(arguments.stop),
    )
    device = choose_device(arguments.device)
    thinker, tokenizer = load(arguments.path, device, arguments.checkpoint)
    if tokenizer is None:
        raise UserError(f"{arguments.path} has no tokenizer, so it cannot read a prompt")
    precision = arguments.precision
    if precision == "auto":
        precision = "bf16" if device.type == "cuda" else "fp32"
    generator = Generator(thinker.to(DTYPES[precision]), tokenizer, use_cache=not arguments.no_cache)
    generator.encode(arguments.prompt)  # refuses one that is too long before anything is printed
    if arguments.seed is None and temperature > 0:
        print(f"seed {seed}", file=sys.stderr)

    if arguments.json:
        completions = generator.generate([arguments.prompt] * arguments.num_samples, params)
        for index, completion in enumerate(completions):
            print(json.dumps({**asdict(completion), "seed": seed + index}, ensure_ascii=False), flush=True)
        return 0
    for index in range(arguments.num_samples):
        if index:
            print("\n---\n")
        completion = Completion(arguments.prompt)
        print(arguments.prompt, end="", flush=True)
        for piece in generator.stream_into(completion, SamplingParams(**{**asdict(params), "seed": seed + index})):
            print(piece, end="", flush=True)
        print(flush=True)
    return 0


if __name__ == "__main__":
    run_command(main)
