"""Time to sample a token with a JSON schema or a regex, compared with a step of the model."""

import argparse
import statistics
import time
from typing import Any

import torch

from thinker.benchmarks.speed.decode import BITS, SHAPES, make_random_model
from thinker.benchmarks.vocabulary import make_vocabulary
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.features.structured_output.constraints import GrammarConstraint
from thinker.generation import Completion, Generator, SamplingParams
from thinker.generation.sequence import Sequence
from thinker.model import KVCache
from thinker.runtime.device import DTYPES
from thinker.runtime.errors import UserError

ROW = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "role": {"enum": ["reader", "writer", "owner"]},
        "tags": {
            "type": "array",
            "maxItems": 3,
            "items": {"type": "string", "pattern": "^[a-z ]{1,12}$"},
        },
        "address": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}},
    },
    "required": ["name", "age", "role", "tags"],
    "additionalProperties": False,
}
CONSTRAINTS = {  # none of them ends before the benchmark does
    "schema": {"json_schema": {"type": "array", "items": ROW, "minItems": 1000}},
    "any-json": {"json_schema": {"type": "array", "minItems": 1000}},
    "words": {"regex": "([a-z]+ )*END"},
    "any-text": {"regex": "(?s:.*)END"},
}
SAMPLING = {"plain": {"temperature": 0.8}, "top-p": {"temperature": 0.8, "top_p": 0.9}}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--shape", default="110m", choices=SHAPES, help="size of the model")
    parser.add_argument(
        "--precisions", default="fp32,bf16,int8", metavar="NAME,...", help="fp32, bf16, int8, int4"
    )
    parser.add_argument(
        "--new", type=int, default=100, help="tokens to generate; medians over them are reported"
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time steps and sampling on the CPU for every precision and constraint, and print a table."""
    precisions = arguments.precisions.split(",")
    if arguments.new < 1 or not {*precisions} <= {"fp32", "bf16", *BITS}:
        raise UserError(
            "--new or --precisions is not valid; use at least --new 1, and of fp32, bf16, int8, int4"
        )
    tokenizer = make_vocabulary(SHAPES[arguments.shape]["vocab_size"])
    model = make_random_model(arguments.shape, arguments.new + 8, torch.device("cpu"))
    with torch.no_grad():
        # Logits then vary as much as those of a trained model, which matters to top-p.
        model.lm_head.weight *= 8
    rows = []
    print(
        "                                    step ms  free ms  constrained ms  of it mask  constrained / step"
    )
    for precision in precisions:
        generator = Generator(
            model, tokenizer, dtype=DTYPES.get(precision, torch.float32), bits=BITS.get(precision)
        )
        for sampling, options in SAMPLING.items():
            for name, constraint in CONSTRAINTS.items():
                params = [
                    SamplingParams(**options, max_new_tokens=arguments.new, **more)
                    for more in ({}, constraint)
                ]
                row = {"precision": precision, "sampling": sampling, "constraint": name}
                row |= measure(generator, *params)
                rows.append(row)
                print(
                    f"{precision:8} {sampling:8} {name:14} {1000 * row['step_s']:11.2f} {1000 * row['free_s']:8.3f} "
                    f"{1000 * row['constrained_s']:15.3f} {1000 * row['mask_s']:11.3f} {row['share']:19.1%}"
                )
    return {
        "shape": arguments.shape,
        "vocab_size": tokenizer.vocab_size,
        "new": arguments.new,
        "rows": rows,
    }


def measure(
    generator: Generator, free_params: SamplingParams, params: SamplingParams
) -> dict[str, float]:
    """Median seconds of a step, and of sampling a token without and with the constraint, which take
    turns."""
    texts = [start_text(generator, one) for one in (free_params, params)]
    seconds: dict[str, list[float]] = {"step": [], "free": [], "constrained": []}
    for _ in range(params.max_new_tokens):
        for name, (sequence, cache) in zip(("free", "constrained"), texts):
            start = time.perf_counter()
            with torch.no_grad():
                logits = generator.decoder.step(torch.tensor([sequence.tokens[-1:]]), cache)
            middle = time.perf_counter()
            sampled = generator.decoder.sample([sequence], cache, logits, 1)
            _, ended = sequence.extend(sampled[0])
            seconds[name].append(time.perf_counter() - middle)
            seconds["step"].append(middle - start)
        assert ended == (len(seconds["free"]) == params.max_new_tokens)
    medians = {f"{name}_s": statistics.median(values) for name, values in seconds.items()}
    mask_s = time_masks(generator.tokenizer, params, texts[1][0].completion.token_ids)
    return medians | {"mask_s": mask_s, "share": medians["constrained_s"] / medians["step_s"]}


def start_text(generator: Generator, params: SamplingParams) -> tuple[Sequence, KVCache]:
    """A text after two tokens, and a cache of the first."""
    tokens = generator.encode("x")
    cache = generator.new_cache(1, len(tokens) + params.max_new_tokens)
    generator.prefill([tokens[:-1]], cache)
    return generator.new_sequence(0, Completion("x"), params, tokens), cache


def time_masks(tokenizer: Tokenizer, params: SamplingParams, tokens: list[int]) -> float:
    """Mean seconds that the constraint needs for a token: most are cheap, those at the end of a
    string are not."""
    constraint, seconds = GrammarConstraint(tokenizer, params.json_schema, params.regex), []
    for token in tokens:
        start = time.perf_counter()
        constraint.append(token)
        seconds.append(time.perf_counter() - start)
    return statistics.fmean(seconds)
