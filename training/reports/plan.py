"""Plan a run: estimate its memory, FLOPs, tokens and time before it starts."""

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from thinker.data.batches.batch_loader import BatchLoader
from thinker.data.batches.dataset import Sample
from thinker.data.batches.prefetch import Batch
from thinker.data.corpus.corpus import Corpus
from thinker.model import KVCache, Thinker
from thinker.runtime.backend import configure_backend
from thinker.runtime.constants import IGNORE_INDEX
from thinker.runtime.device import DTYPES, choose_device
from thinker.training.callback import Callback
from thinker.training.callbacks.setup import callbacks_of_weights
from thinker.training.config.config import Config
from thinker.training.data.run_corpus import prepare_training_data
from thinker.training.data.training_batches import open_loader
from thinker.training.initial_model import load_initial_model
from thinker.training.metrics import MemoryMeter, flops_per_token, peak_flops, planned_model
from thinker.training.objective import Objective, build_objective, next_token_loss
from thinker.training.reports.plan_operations import describe_operations
from thinker.training.reports.plan_table import OPTIMAL_TOKENS, recommendation
from thinker.training.settings.memory_bound import check_run_fits
from thinker.training.settings.memory_estimate import estimate_memory, free_memory, usable_fraction
from thinker.training.settings.resolve import resolve_open_keys, resolve_precision, resolve_settings
from thinker.training.settings.settings import Settings
from thinker.training.step import TrainingStep, build_model

SAMPLED_SEQUENCES = 1000  # to estimate the number of targets per sequence


def time_steps(
    settings: Settings,
    device: torch.device,
    repeats: int = 3,
    objective: Objective = next_token_loss,
    callbacks: Sequence[Callback] = (),
) -> tuple[float, float]:
    """Seconds of the first step, including compilation, and the median of `repeats` more, on random
    tokens.

    callbacks: those of the objective.
    """
    model = build_model(settings.model, settings.run.seed, device)
    all_callbacks = [*callbacks, *callbacks_of_weights(settings)]
    step = TrainingStep(model, settings, objective, all_callbacks)
    tokens = torch.randint(
        settings.model.vocab_size, (settings.train.batch_size, settings.data.seq_len)
    )
    batch = Batch(tokens, tokens, tokens.numel())
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        float(step(batch, 1e-3)[0])
        times.append(time.perf_counter() - start)
    return times[0], statistics.median(times[1:])


def make_plan(config: Config, measure: bool = True) -> dict[str, Any]:
    """Estimate the bytes, FLOPs, tokens, epochs and seconds of a run on this machine, with
    recommendations. Measures the speed in four steps, if the run fits.

    If model.vocab_size is set, the corpus, which may be large, is not read, and the number of
    epochs is unknown.
    """
    device = choose_device(config.train.device)
    configure_backend(device)
    precision = resolve_precision(config, device)
    reads_corpus = config.model.vocab_size is None
    given = config.model.model_fields_set
    config = resolve_open_keys(config, device, precision)
    size_is_chosen = "d_model" in config.model.model_fields_set - given
    config, _, tokenizer = load_initial_model(config)
    if measure:
        check_run_fits(config, device)
    corpus = loader = None
    vocab_size = config.model.vocab_size
    if reads_corpus:
        corpus = prepare_training_data(config, tokenizer)
        vocab_size = corpus.tokenizer.vocab_size
    model_config = config.thinker_config(vocab_size)
    settings = resolve_settings(config, model_config, device, precision)
    train = settings.train
    n_positions = train.batch_size * config.data.seq_len
    tokens_per_step = n_positions
    if corpus is not None:
        # Raises UserError if the text is shorter than a sequence.
        loader = open_loader(settings, corpus, model_config.prefix)
    plan = _describe_run(settings, device)
    if loader is not None:  # padding and prompts have no loss
        tokens_per_step = train.batch_size * _targets_per_sequence(loader, train.max_steps)
    plan["tokens_per_step"] = round(tokens_per_step)
    plan["size_is_chosen"] = size_is_chosen
    plan["optimal_tokens"] = None
    if not config.run.init_from:  # otherwise it is trained already
        plan["optimal_tokens"] = OPTIMAL_TOKENS * plan["parameters"]
    if measure and plan["peak_bytes"] > plan["usable_bytes"]:
        measure = False  # the steps could take the memory of every program of the machine
        print("not measuring the speed, as the run does not fit", file=sys.stderr)
    if measure:
        text = "measuring speed and memory in four steps; thinker plan --no-steps skips them"
        print(text, file=sys.stderr)
        plan |= _measure_speed(config, settings, corpus, device)
        plan["tokens_per_second"] = n_positions / plan["step_s"]
        plan["trained_tokens_per_second"] = tokens_per_step / plan["step_s"]
        peak = peak_flops(device, train.precision)
        if peak:
            plan["mfu"] = plan["flops_per_token"] * plan["tokens_per_second"] / peak
    plan |= _predict_length(settings, plan, loader, tokens_per_step)
    return plan | {"recommendation": recommendation(plan)}


def _describe_run(settings: Settings, device: torch.device) -> dict[str, Any]:
    """What is known of a run without measuring: its choices, parameters, bytes and FLOPs."""
    train = settings.train
    memory = estimate_memory(settings, train.micro_batch_size, device)
    with torch.device("meta"):
        model = Thinker(settings.model)
    max_len = settings.model.max_seq_len
    cache = KVCache(settings.model, 1, max_len, "meta", DTYPES[train.precision])
    plan: dict[str, Any] = {
        "device": str(device),
        "precision": train.precision,
        "micro_batch_size": train.micro_batch_size,
        "compile": train.compile,
        "dropout": settings.model.dropout,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "embedding_parameters": model.embedding.weight.numel(),
    }
    for name, value in asdict(memory).items():
        plan[f"{name}_bytes"] = value
    plan["free_bytes"] = free_memory(device)
    plan["usable_bytes"] = int(usable_fraction(device) * free_memory(device))
    plan["cache_bytes"] = cache.nbytes
    with_adapters = planned_model(settings)
    seq_len = settings.data.seq_len
    plan["flops_per_token"] = flops_per_token(with_adapters, seq_len)
    plan["operations"] = describe_operations(with_adapters, seq_len, DTYPES[train.precision])
    return plan


def _measure_speed(
    config: Config, settings: Settings, corpus: Corpus | None, device: torch.device
) -> dict[str, Any]:
    """Time a few steps, and measure their memory."""
    meter = MemoryMeter(device)
    objective, callbacks = next_token_loss, []
    if corpus is not None:
        objective, callbacks = build_objective(config, settings.model, corpus, device)
    first, seconds = time_steps(settings, device, 3, objective, callbacks)
    return {"first_step_s": first, "step_s": seconds, "measured_peak_bytes": meter.peak()}


def _predict_length(
    settings: Settings, plan: dict[str, Any], loader: BatchLoader | None, tokens_per_step: float
) -> dict[str, Any]:
    """The steps, tokens, epochs and seconds of a run, as far as its limits are known."""
    train = settings.train
    is_measured = "step_s" in plan
    limits = []
    if train.max_steps is not None:
        limits.append(train.max_steps)
    if train.max_minutes is not None and is_measured:
        after_first = 60 * train.max_minutes - plan["first_step_s"]
        limits.append(1 + max(0, int(after_first / plan["step_s"])))
    if not limits:
        return {}
    n_steps = min(limits)
    length = {
        "steps": n_steps,
        "max_steps": train.max_steps,
        "tokens": round(n_steps * tokens_per_step),
        "processed_tokens": n_steps * train.batch_size * settings.data.seq_len,
    }
    if loader is not None and not loader.dataset.is_endless:
        length["epochs"] = max(loader.epochs(n_steps))
    if is_measured:
        length["seconds"] = plan["first_step_s"] + (n_steps - 1) * plan["step_s"]
    return length


def _targets_per_sequence(loader: BatchLoader, max_steps: int | None) -> float:
    """The mean number of targets of a sequence, from a sample of about SAMPLED_SEQUENCES."""
    dataset = loader.dataset
    if dataset.n_sources == 1:
        size = len(dataset)
        indices = np.linspace(0, size - 1, min(size, SAMPLED_SEQUENCES)).round()
        samples = [Sample(int(index)) for index in indices]
    else:  # what the sources contribute may change during the run
        n_steps = 1 + SAMPLED_SEQUENCES // loader.batch_size
        if max_steps is not None:
            n_steps = min(max_steps, n_steps)
        last = (max_steps or n_steps) - 1
        samples = []
        for step in np.linspace(0, last, n_steps).round().astype(int).tolist():
            samples += loader.samples(step)
    counts = []
    for sample in samples:
        _, targets = dataset.window(sample._replace(epoch=0))
        counts.append((targets != IGNORE_INDEX).sum())
    return np.mean(counts)
