"""On a trained model: what speculation gains by draft length and precision, and what int8 costs."""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from thinker.benchmarks.environment import finish
from thinker.generation import Completion, Generator, SamplingParams
from thinker.runtime.device import DTYPES
from thinker.training.config import load_config
from thinker.training.trainer import Trainer

GRAM = 4  # tokens; a text loops where it repeats runs of so many more than real texts do


def distinct(tokens: list[int]) -> float:
    """The share of different runs of GRAM tokens among all of them: 1 where nothing comes twice."""
    grams = [tuple(tokens[i : i + GRAM]) for i in range(len(tokens) - GRAM + 1)]
    return len(set(grams)) / len(grams)


def timed(generator: Generator, prompt: str, params: SamplingParams) -> tuple[float, Completion]:
    """Seconds and what came of it."""
    start = time.perf_counter()
    completion = generator.generate([prompt], params)[0]
    return time.perf_counter() - start, completion


def speculation(trainer: Trainer, arguments: argparse.Namespace) -> dict[str, Any]:
    """Plain decoding and prompt lookup in turns, on continuations of validation texts that do not loop."""
    tokenizer, windows = trainer.corpus.tokenizer, trainer.evaluator.windows
    chosen = np.arange(0, len(windows), max(1, len(windows) // 1000))
    passages = [passage.tolist() for passage in windows.batch(chosen)[0]]
    # Whole ones only: a BOS token inside would be padding, or another text.
    passages = [passage for passage in passages if tokenizer.bos_id not in passage]
    real = sorted(distinct(passage[arguments.prompt : arguments.prompt + arguments.new]) for passage in passages)
    threshold = real[len(real) // 10]
    prompts = [tokenizer.decode(passage[: arguments.prompt]) for passage in passages]
    rows = []
    for precision in arguments.precisions.split(","):
        how: dict[str, Any] = {"int8": True} if precision == "int8" else {"dtype": DTYPES[precision]}
        plain = Generator(trainer.model, tokenizer, **how)
        drafts = {n: Generator(trainer.model, tokenizer, speculate=n, **how) for n in arguments.drafts}
        for temperature in arguments.temperatures:
            params = SamplingParams(max_new_tokens=arguments.new, temperature=temperature, seed=1)
            seconds: dict[int, list[float]] = {n: [] for n in (0, *drafts)}
            counts: dict[int, list[tuple[int, int, bool]]] = {n: [] for n in drafts}
            kept: list[tuple[str, list[int]]] = []  # continuations that do not loop
            looked_at = 0
            while looked_at < len(prompts) and len(kept) < arguments.prompts:
                some = prompts[looked_at : looked_at + 16]
                looked_at += len(some)
                kept += [
                    (prompt, completion.token_ids)
                    for prompt, completion in zip(some, plain.generate(some, [params] * len(some)))
                    if len(completion.token_ids) > arguments.new // 2 and distinct(completion.token_ids) >= threshold
                ]
            kept = kept[: arguments.prompts]
            made = sum(len(tokens) for _, tokens in kept)
            for prompt, tokens in tqdm(kept, desc=f"{precision}, temperature {temperature}", leave=False):
                turns = [(0, plain), *drafts.items()]
                for n, generator in turns * arguments.repeats:
                    took, again = timed(generator, prompt, params)
                    seconds[n].append(took / len(again.token_ids))
                    if n:
                        counts[n].append((again.drafted, again.accepted, again.token_ids == tokens))
            for n in drafts if kept else ():
                drafted, accepted, same = (sum(column) for column in zip(*counts[n]))
                ratios = [a / b for a, b in zip(seconds[0], seconds[n])]
                rows.append(
                    {
                        "precision": precision, "temperature": temperature, "draft": n, "texts": len(kept),
                        "looked_at": looked_at,
                        "plain_tokens_per_second": 1 / statistics.median(seconds[0]),
                        "times_plain": sum(seconds[0]) / sum(seconds[n]),
                        "median_times_plain": statistics.median(ratios),
                        "accepted": accepted / max(drafted, 1),
                        "drafted_a_token": drafted / (made * arguments.repeats),
                        "same_tokens": same / len(counts[n]),
                    }
                )  # fmt: skip
    return {"distinct_threshold": threshold, "speculation": rows}


def int8_cost(trainer: Trainer, n_windows: int) -> dict[str, Any]:
    """Bits a byte of validation text in fp32 and in int8."""
    tokenizer, windows = trainer.corpus.tokenizer, trainer.evaluator.windows
    passages = windows.batch(np.arange(min(n_windows, len(windows))))[0].tolist()
    nats, n_bytes = {"fp32": 0.0, "int8": 0.0}, 0
    generators = {
        "fp32": Generator(trainer.model, tokenizer, dtype=torch.float32),
        "int8": Generator(trainer.model, tokenizer, dtype=torch.float32, int8=True),
    }
    for passage in tqdm(passages, desc="int8", leave=False):
        text = tokenizer.decode(passage)
        for name, generator in generators.items():
            score = generator.score(text)
            nats[name] += score.nats
        n_bytes += score.n_bytes
    bits = {name: value / n_bytes / 0.6931471805599453 for name, value in nats.items()}
    return {"bytes": n_bytes, "bits_per_byte": bits, "int8_costs": bits["int8"] / bits["fp32"] - 1}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `scripts/benchmark.py trained`."""
    root = Path(__file__).resolve().parents[1]
    parser.add_argument("--config", default=str(root / "configs" / "pysource.yaml"), help="trained first if need be")
    parser.add_argument("--run", default="runs/pysource", help="its run directory")
    parser.add_argument("--prompt", type=int, default=96, help="tokens of each prompt (default 96)")
    parser.add_argument("--new", type=int, default=128, help="tokens to make (default 128)")
    parser.add_argument("--prompts", type=int, default=20, help="continuations to time (default 20)")
    parser.add_argument("--drafts", type=int, nargs="+", default=[2, 3, 5, 8, 15], help="draft lengths")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.3, 0.8])
    parser.add_argument("--precisions", default="fp32,bf16,int8")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="append the line of JSON there")


def run(arguments: argparse.Namespace) -> None:
    """Measure, print two tables, end with one line of JSON."""
    trainer = Trainer(load_config(Path(arguments.config), [f"run.dir={arguments.run}", "train.device=cpu"]))
    trainer.train()
    result = {"benchmark": "trained", **int8_cost(trainer, 300)}
    bits = result["bits_per_byte"]
    print(f"int8: {bits['int8']:.5f} bits a byte, fp32 {bits['fp32']:.5f}: {100 * result['int8_costs']:+.3f} %")
    result |= speculation(trainer, arguments)
    print("precision  temperature  draft  texts  times plain  accepted  drafted a token  same tokens")
    for row in result["speculation"]:
        print(
            f"{row['precision']:9} {row['temperature']:12} {row['draft']:6} {row['texts']:6} "
            f"{row['times_plain']:12.2f} "
            f"{row['accepted']:9.2f} {row['drafted_a_token']:16.2f} {row['same_tokens']:12.2f}"
        )
    finish(result, arguments.out)
