"""Train from a config: open the run, resolve settings, prepare data, build the model, restore, fit."""

import sys
from functools import partial

import torch

from thinker.checkpoint import CheckpointManager
from thinker.checkpoint.run_directory import RunDirectory
from thinker.data.batches.batches import PackedDataset
from thinker.data.batches.prefetch import Prefetcher
from thinker.data.corpus.corpus import Corpus
from thinker.data.tokenizers.text_bytes import scaled_byte_lengths
from thinker.evaluation.loss import Evaluator
from thinker.features.distillation.teacher import load_teacher
from thinker.features.mixtures.mixture_loss import MixtureEvaluator, split_limit
from thinker.features.mixtures.reports import describe_mixture, make_loader
from thinker.features.streams.make_streams import make_streams
from thinker.generation.prompts import check_prompt
from thinker.runtime.device import choose_device, configure_backend, enable_determinism
from thinker.runtime.process_group import SINGLE_PROCESS, DistContext
from thinker.training import resume
from thinker.training.config.config import Config
from thinker.training.initial_model import load_initial_model
from thinker.training.metrics import MemoryMeter
from thinker.training.reports.advice import before_training
from thinker.training.resumed_data import own_tokenizer, read_corpus
from thinker.training.settings.memory_bound import check_run_fits
from thinker.training.settings.resolve import (
    check_batch_split,
    resolve_open_keys,
    resolve_precision,
    resolve_settings,
)
from thinker.training.settings.settings import Settings
from thinker.training.step import TrainingStep, build_model
from thinker.training.tracking import Tracker
from thinker.training.trainer import Trainer

# Of a core, for background saves, as training needs every core: see docs/benchmarks/exactness.md.
BACKGROUND_CPU_SHARE = 0.005


def train(config: Config, dist: DistContext = SINGLE_PROCESS) -> int:
    """Start or resume the run of a config. Returns the exit status: 0, or 128 + the signal that ended it."""
    return build_trainer(config, dist).train()


def build_trainer(config: Config, dist: DistContext = SINGLE_PROCESS) -> Trainer:
    """Check the config before writing any file, build the trainer, and restore the newest checkpoint of the run."""
    if config.train.deterministic:
        enable_determinism()
    device = choose_device(config.train.device)
    dist.init_process_group(device.type, config.train.dist_timeout_s)

    # Open the run.
    run = RunDirectory(config.run.dir, writes=dist.is_main)
    folder, state = resume.open_run(run, dist)
    previous = state.settings

    # Resolve the settings that the data needs, and read the data.
    configure_backend(device)
    precision = resolve_precision(config, device, previous, dist)
    config = resolve_open_keys(config, device, precision, previous, dist)
    config, initial_model, tokenizer = load_initial_model(
        config, previous, own_tokenizer(run, previous, config)
    )
    if previous is not None:
        resume.check_unchanged(
            run,
            previous,
            config.model_dump(mode="json", exclude={"model", "tracking", "extensions"}),
        )
    check_batch_split(config, dist)
    check_run_fits(config, device, dist)
    with dist.main_process_first():
        corpus = read_corpus(run, state, config, tokenizer)
    model_config = config.thinker_config(corpus.tokenizer.vocab_size)
    if previous is not None:
        resume.check_unchanged(run, previous, {"model": model_config.to_dict()})

    # Resolve the rest.
    teacher = load_teacher(config, model_config, corpus.tokenizer, state, device)
    settings = resolve_settings(config, model_config, device, precision, previous, dist)
    train = settings.train

    # Build batches, model and optimizers.
    batches, evaluator = build_batches(settings, corpus, device, dist)
    memory = MemoryMeter(device)
    is_sharded = (
        dist.world_size > 1 and train.parallel == "fsdp"
    )  # then the whole model need not fit on a device
    model_device = torch.device("cpu") if is_sharded else device
    model = build_model(model_config, settings.run.seed, model_device, initial_model)
    step = TrainingStep(model, settings, dist=dist, teacher=teacher)
    if train.sample_every:
        prompt = [0, *corpus.tokenizer.encode(train.sample_prompt)]
        check_prompt(prompt, corpus.tokenizer, model_config, model_config.max_cached_len)

    # All checks are done. Write files from here on.
    resume.create_run(run, is_new=folder is None, dist=dist)
    if teacher is not None:
        teacher.create_files(run.path, batches, corpus, dist)
    if folder is not None:
        resume.resume_run(run, folder, state, step, settings, dist)
    run.truncate_metrics(state.step, state.evaluated_at)
    tracker = Tracker(settings, run)
    state.settings, state.tokenizer, state.corpus = (
        settings,
        corpus.tokenizer.content_hash,
        corpus.sha256,
    )
    state.machine = resume.describe_machine(step, dist, train.parallel)
    saved = None if folder is None else state.model_copy(deep=True)
    cpu_share = BACKGROUND_CPU_SHARE if device.type == "cpu" else 1.0
    checkpoints = CheckpointManager(
        run.checkpoints,
        train.keep_last,
        train.keep_every,
        train.async_save,
        cpu_share,
        dist,
        train.save_sharded,
    )
    trainer = Trainer(
        settings,
        step,
        state,
        run,
        corpus,
        batches,
        evaluator,
        checkpoints,
        tracker,
        memory,
        dist,
        saved,
    )
    if not trainer.is_finished:
        run.write_config(settings.model_dump(mode="json"))
        lines = before_training(settings, corpus, batches.loader, step.kernel_problem)
        print(
            "\n".join(lines + describe_mixture(settings, corpus, batches.loader)), file=sys.stderr
        )
    if dist.is_main:
        corpus.tokenizer.save(run.path)
    return trainer


def build_batches(
    settings: Settings, corpus: Corpus, device: torch.device, dist: DistContext
) -> tuple[Prefetcher, Evaluator | MixtureEvaluator]:
    """The training batches of this rank, and the evaluator of the validation split."""
    data, train = settings.data, settings.train
    masking = {"document_masking": data.document_masking, "prefix_len": settings.model.prefix}
    pack = partial(PackedDataset, seq_len=data.seq_len, packing=data.packing, **masking)
    streams = make_streams(
        settings, corpus, pack, RunDirectory(settings.run.dir).streams, progress=dist.is_main
    )
    loader = make_loader(settings, corpus, pack(corpus.train), streams)
    n_rows = train.batch_size // dist.world_size
    rows = slice(dist.rank * n_rows, (dist.rank + 1) * n_rows)
    batches = Prefetcher(loader, device.type == "cuda", rows, data.num_workers)
    parts = {name: part for name, part in (corpus.parts or {"": corpus}).items() if part.val.shards}
    val_sets = [
        PackedDataset(part.val, data.seq_len, data.val_packing, **masking)
        for part in parts.values()
    ]
    evaluators = {}
    for name, val_set, limit in zip(
        parts, val_sets, split_limit(train.eval_sequences, [*map(len, val_sets)])
    ):
        byte_lengths = scaled_byte_lengths(parts[name].val, corpus.tokenizer)
        evaluators[name] = Evaluator(
            val_set, train.micro_batch_size, byte_lengths, limit, dist, progress=True
        )
    if corpus.parts:
        return batches, MixtureEvaluator(
            evaluators, dict(zip(corpus.parts, loader.mixture.mean_token_shares()))
        )
    return batches, evaluators[""]
