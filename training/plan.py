"""What a run will need, before it starts: bytes, FLOPs, tokens and time."""

import statistics
import time
from dataclasses import asdict
from typing import Any

import torch

from thinker.data.prefetch import Batch
from thinker.model import KVCache, Thinker
from thinker.runtime.device import DTYPES, choose_device, configure_backend
from thinker.training.config import Config, Settings
from thinker.training.initial_model import load_initial_model
from thinker.training.memory_bound import check_run_fits
from thinker.training.memory_estimate import estimate_memory, free_memory
from thinker.training.metrics import MemoryMeter, flops_per_token, peak_flops
from thinker.training.resolve_settings import resolve_precision, resolve_settings
from thinker.training.step import TrainingStep, build_model
from thinker.training.training_data import prepare_training_data

OPTIMAL_TOKENS = 20  # per parameter: Hoffmann et al. 2022 (arXiv:2203.15556), table 3


def time_steps(settings: Settings, device: torch.device, repeats: int = 3) -> tuple[float, float]:
    """Seconds of the first step (which compiles), and the median of `repeats` more, on random tokens."""
    step = TrainingStep(build_model(settings.model, settings.run.seed, device), settings)
    tokens = torch.randint(settings.model.vocab_size, (settings.train.batch_size, settings.data.seq_len))
    batch = Batch(tokens, tokens, tokens.numel())
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        float(step(batch, 1e-3)[0])
        times.append(time.perf_counter() - start)
    return times[0], statistics.median(times[1:])


def make_plan(config: Config, measure: bool = True) -> dict[str, Any]:
    """The bytes, FLOPs, tokens and seconds of a config on this machine; the corpus is read only for its vocabulary."""
    device = choose_device(config.train.device)
    precision = resolve_precision(config, device)
    config, _, tokenizer = load_initial_model(config)
    if measure:
        check_run_fits(config, device)
    vocab_size = config.model.vocab_size or prepare_training_data(config, tokenizer).tokenizer.vocab_size
    model_config = config.thinker_config(vocab_size)
    configure_backend(device)
    settings = resolve_settings(config, model_config, device, precision)
    train = settings.train
    memory = estimate_memory(settings, train.micro_batch_size, device)
    with torch.device("meta"):
        model = Thinker(model_config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    flops = flops_per_token(model, config.data.seq_len)
    step_tokens = train.batch_size * config.data.seq_len
    cache = KVCache(model_config, 1, model_config.max_seq_len, "meta", DTYPES[train.precision])
    plan: dict[str, Any] = {
        "device": str(device),
        "precision": train.precision,
        "micro_batch_size": train.micro_batch_size,
        "compile": train.compile,
        "parameters": parameters,
        "embedding_parameters": model.embedding.weight.numel(),
        **{f"{name}_bytes": value for name, value in asdict(memory).items()},
        "free_bytes": free_memory(device),
        "cache_bytes": cache.nbytes,
        "flops_per_token": flops,
        "tokens_per_step": step_tokens,
        "optimal_tokens": OPTIMAL_TOKENS * parameters,
    }
    if measure:
        meter = MemoryMeter(device)
        first, seconds = time_steps(settings, device)
        plan |= {"first_step_s": first, "step_s": seconds, "tokens_per_second": step_tokens / seconds}
        plan["measured_peak_bytes"] = meter.peak()
        if peak := peak_flops(device, train.precision):
            plan["mfu"] = flops * step_tokens / seconds / peak
    limits = [] if train.max_steps is None else [train.max_steps]
    if train.max_minutes is not None and measure:
        limits.append(1 + max(0, int((60 * train.max_minutes - first) / seconds)))
    if limits:
        plan |= {"steps": min(limits), "tokens": min(limits) * step_tokens}
        if measure:
            plan["seconds"] = first + (min(limits) - 1) * seconds
    return plan


def format_plan(plan: dict[str, Any]) -> str:
    """A plan as a table for people."""
    gb = {name.removesuffix("_bytes"): f"{n / 1e9:.3g} GB" for name, n in plan.items() if name.endswith("_bytes")}
    blocks = plan["parameters"] - plan["embedding_parameters"]
    peak = f"{gb['peak']} of tensors, {gb['free']} free"
    if "measured_peak_bytes" in plan:
        peak += f", {gb['measured_peak']} measured in four steps, with what the allocator reserves"
    rows = [
        ("parameters", f"{plan['parameters']:,}, {blocks:,} outside the embedding"),
        ("device", f"{plan['device']}, {plan['precision']}, {'compiled' if plan['compile'] else 'not compiled'}"),
        ("sequences at once", f"{plan['micro_batch_size']}"),
        *((name, gb[name]) for name in ("weights", "gradients", "optimizer", "activations")),
        ("peak memory", peak),
        ("cache", f"{gb['cache']} for a sequence of full length, when sampling"),
        ("compute", f"{plan['flops_per_token'] / 1e9:.3g} GFLOP per token"),
    ]
    if "step_s" in plan:
        mfu = f", MFU {plan['mfu']:.2f}" if "mfu" in plan else ""
        rows.append(("speed", f"{plan['step_s']:.3g} s per step, {plan['tokens_per_second']:,.0f} tokens/s{mfu}"))
    if "tokens" in plan:
        share = f"{plan['tokens'] / plan['optimal_tokens']:.2g} of the compute-optimal {plan['optimal_tokens']:,}"
        rows.append(("tokens", f"{plan['tokens']:,} in {plan['steps']:,} steps: {share} (20 per parameter)"))
    if "seconds" in plan:
        minutes = plan["seconds"] / 60
        rows.append(("time", f"{minutes:.1f} minutes" if minutes < 120 else f"{minutes / 60:.1f} hours"))
    return "\n".join(f"{name:<18} {text}" for name, text in rows)
