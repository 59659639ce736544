"""Time decoding and prefill with the tree that Python imports thinker from.

    python timing_driver.py MODEL '{"measures": ["decode-8"], ...}'

Prints {measure: seconds} as JSON: of a token for decode-BITS, of the prompt for prefill-BITS.
before_after.py starts it for each of two trees, so it uses only public names.
"""

import json
import statistics
import sys
import time
from typing import Any

from thinker import Generator, SamplingParams, load

WEIGHTS = {  # bits per weight, how Generator is told
    "32": {"dtype": "fp32"},
    "16": {"dtype": "bf16"},
    "8": {"dtype": "fp32", "bits": 8},
    "4": {"dtype": "fp32", "bits": 4},
}


def main() -> None:
    """Time each measure, and print the seconds."""
    folder, options = sys.argv[1], json.loads(sys.argv[2])
    model, tokenizer = load(folder, options["device"])
    seconds = {}
    for measure in options["measures"]:
        kind, bits = measure.split("-")
        generator = Generator(model, tokenizer, **WEIGHTS[bits])
        time_measure = {"decode": time_decoding, "prefill": time_prefill}[kind]
        seconds[measure] = time_measure(generator, options)
    print(json.dumps(seconds))


def time_decoding(generator: Generator, options: dict[str, Any]) -> float:
    """Median seconds per token of a text after a short prompt."""
    prompt = list(range(1, 9))
    seconds = [
        time_tokens(generator, prompt, options["new"]) for _ in range(options["repeats"] + 1)
    ]
    return statistics.median(seconds[1:]) / options["new"]  # the first one is a warm-up


def time_prefill(generator: Generator, options: dict[str, Any]) -> float:
    """Median seconds to read a long prompt and sample one token."""
    prompt = [1 + position % 250 for position in range(options["prompt"])]
    seconds = [time_tokens(generator, prompt, 1) for _ in range(options["repeats"] + 1)]
    return statistics.median(seconds[1:])


def time_tokens(generator: Generator, prompt: list[int], n_new: int) -> float:
    """Seconds in which `n_new` tokens are sampled."""
    params = SamplingParams(max_new_tokens=n_new, temperature=0)
    start = time.perf_counter()
    completion = generator.generate([""], params, [prompt])[0]
    seconds = time.perf_counter() - start
    assert len(completion.token_ids) == n_new, "the text has ended early"
    return seconds


if __name__ == "__main__":
    main()
