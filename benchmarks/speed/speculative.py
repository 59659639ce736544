"""Speedup of speculative decoding by draft length and precision, and quality loss of int8."""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from thinker.benchmarks.training_runs import ROOT
from thinker.generation import Completion, Generator, SamplingParams
from thinker.runtime.device import DTYPES
from thinker.runtime.process.progress import Progress
from thinker.training.config.load import load_config
from thinker.training.run import build_trainer
from thinker.training.trainer import Trainer

NGRAM = 4  # tokens; a text that repeats more n-grams than real texts do is looping
LN_2 = 0.6931471805599453


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    config_help = "config to train if --run is not finished (default: configs/pysource.yaml)"
    parser.add_argument(
        "--config", type=Path, default=ROOT / "configs" / "pysource.yaml", help=config_help
    )
    parser.add_argument("--run", default="runs/pysource", help="run directory of --config")
    parser.add_argument("--prompt", type=int, default=96, help="tokens in each prompt")
    parser.add_argument("--new", type=int, default=128, help="tokens to generate")
    parser.add_argument("--prompts", type=int, default=20, help="number of prompts")
    parser.add_argument(
        "--drafts", type=int, nargs="+", default=[2, 3, 5, 8, 15], help="draft lengths"
    )
    parser.add_argument(
        "--temperatures", type=float, nargs="+", default=[0.0, 0.3, 0.8], help="temperatures"
    )
    parser.add_argument(
        "--precisions", default="fp32,bf16,int8", metavar="NAME,...", help="precisions"
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="timing rounds; medians are reported"
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the cost of int8 and the gain of speculation, and print a table."""
    trainer = build_trainer(
        load_config(arguments.config, [f"run.dir={arguments.run}", "train.device=cpu"])
    )
    trainer.train()
    result = measure_int8(trainer, 300)
    bits = result["bits_per_byte"]
    print(
        f"bits per byte: {bits['int8']:.5f} in int8, {bits['fp32']:.5f} in fp32: {result['int8_excess']:+.3%}"
    )
    result |= measure_speculation(trainer, arguments)
    print("precision  temperature  draft  texts  speedup  accepted  drafted per token  same tokens")
    for row in result["speculation"]:
        print(
            f"{row['precision']:9} {row['temperature']:12} {row['draft']:6} {row['texts']:6} {row['speedup']:8.2f} "
            f"{row['accepted']:9.2f} {row['drafted_per_token']:18.2f} {row['same_tokens']:12.2f}"
        )
    return result


def measure_int8(trainer: Trainer, n_windows: int) -> dict[str, Any]:
    """Bits per byte of validation text in fp32 and in int8."""
    tokenizer, windows = trainer.corpus.tokenizer, trainer.evaluator.windows
    passages = windows.batch(np.arange(min(n_windows, len(windows))))[0].tolist()
    nats, n_bytes = {"fp32": 0.0, "int8": 0.0}, 0
    generators = {
        "fp32": Generator(trainer.model, tokenizer, dtype=torch.float32),
        "int8": Generator(trainer.model, tokenizer, dtype=torch.float32, bits=8),
    }
    for passage in Progress(passages, desc="int8", leave=False):
        text = tokenizer.decode(passage)
        for name, generator in generators.items():
            score = generator.score(text)
            nats[name] += score.nats
        n_bytes += score.n_bytes
    bits = {name: value / n_bytes / LN_2 for name, value in nats.items()}
    return {"bytes": n_bytes, "bits_per_byte": bits, "int8_excess": bits["int8"] / bits["fp32"] - 1}


def measure_speculation(trainer: Trainer, arguments: argparse.Namespace) -> dict[str, Any]:
    """Time plain and speculative decoding alternately, on continuations of validation texts that do
    not loop."""
    tokenizer, windows = trainer.corpus.tokenizer, trainer.evaluator.windows
    chosen = np.arange(0, len(windows), max(1, len(windows) // 1000))
    passages = [passage.tolist() for passage in windows.batch(chosen)[0]]
    # A BOS token inside a passage would be padding or begin another text.
    passages = [passage for passage in passages if tokenizer.bos_id not in passage]
    ratios = sorted(
        distinct_ngram_ratio(passage[arguments.prompt : arguments.prompt + arguments.new])
        for passage in passages
    )
    threshold = ratios[len(ratios) // 10]
    prompts = [tokenizer.decode(passage[: arguments.prompt]) for passage in passages]
    rows = []
    for precision in arguments.precisions.split(","):
        options: dict[str, Any] = (
            {"bits": 8} if precision == "int8" else {"dtype": DTYPES[precision]}
        )
        plain = Generator(trainer.model, tokenizer, **options)
        speculative = {
            n: Generator(trainer.model, tokenizer, speculate=n, **options) for n in arguments.drafts
        }
        for temperature in arguments.temperatures:
            params = SamplingParams(max_new_tokens=arguments.new, temperature=temperature, seed=1)
            texts, n_examined = find_varied_texts(
                plain, prompts, params, threshold, arguments.prompts
            )
            row = {
                "precision": precision,
                "temperature": temperature,
                "texts": len(texts),
                "examined": n_examined,
            }
            if texts:
                rows += [
                    row | gains
                    for gains in time_drafts(plain, speculative, texts, params, arguments.repeats)
                ]
    return {"distinct_threshold": threshold, "speculation": rows}


def distinct_ngram_ratio(tokens: list[int]) -> float:
    """The share of distinct n-grams among all n-grams: 1 if none occurs twice."""
    ngrams = [tuple(tokens[i : i + NGRAM]) for i in range(len(tokens) - NGRAM + 1)]
    return len(set(ngrams)) / len(ngrams)


def find_varied_texts(
    generator: Generator, prompts: list[str], params: SamplingParams, threshold: float, count: int
) -> tuple[list[tuple[str, list[int]]], int]:
    """Up to `count` prompts with continuations that do not loop, and the number of prompts
    tried."""
    texts: list[tuple[str, list[int]]] = []
    n_examined = 0
    while n_examined < len(prompts) and len(texts) < count:
        batch = prompts[n_examined : n_examined + 16]
        n_examined += len(batch)
        for prompt, completion in zip(batch, generator.generate(batch, [params] * len(batch))):
            tokens = completion.token_ids
            if (
                len(tokens) > params.max_new_tokens // 2
                and distinct_ngram_ratio(tokens) >= threshold
            ):
                texts.append((prompt, tokens))
    return texts[:count], n_examined


def time_drafts(
    plain: Generator, speculative: dict[int, Generator], texts: list[tuple[str, list[int]]], params: SamplingParams,
    repeats: int,
) -> list[dict[str, float]]:  # fmt: skip
    """For each draft length the speedup over plain decoding, and what came of the drafted
    tokens."""
    plain_seconds: list[float] = []  # per token
    seconds: dict[int, list[float]] = {n: [] for n in speculative}
    completions: dict[int, list[Completion]] = {n: [] for n in speculative}
    for prompt, _ in Progress(texts, desc=f"temperature {params.temperature}", leave=False):
        for _ in range(repeats):
            plain_seconds.append(time_per_token(plain, prompt, params)[0])
            for n, generator in speculative.items():
                duration, completion = time_per_token(generator, prompt, params)
                seconds[n].append(duration)
                completions[n].append(completion)
    references = [tokens for _, tokens in texts for _ in range(repeats)]
    rows = []
    for n in speculative:
        n_drafted = sum(completion.drafted for completion in completions[n])
        n_accepted = sum(completion.accepted for completion in completions[n])
        n_same = sum(
            completion.token_ids == tokens for completion, tokens in zip(completions[n], references)
        )
        rows.append(
            {
                "draft": n,
                "plain_tokens_per_second": 1 / statistics.median(plain_seconds),
                "speedup": sum(plain_seconds) / sum(seconds[n]),
                "median_speedup": statistics.median(
                    a / b for a, b in zip(plain_seconds, seconds[n])
                ),
                "accepted": n_accepted / max(n_drafted, 1),
                "drafted_per_token": n_drafted / sum(len(tokens) for tokens in references),
                "same_tokens": n_same / len(references),
            }
        )
    return rows


def time_per_token(
    generator: Generator, prompt: str, params: SamplingParams
) -> tuple[float, Completion]:
    """Seconds per generated token, and the completion."""
    start = time.perf_counter()
    completion = generator.generate([prompt], params)[0]
    return (time.perf_counter() - start) / len(completion.token_ids), completion
