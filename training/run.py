"""Train from a config: open the run, resolve settings, prepare data, build the model, restore,
fit."""

import sys
import time
from collections.abc import Sequence

import torch

from thinker.checkpoint import CheckpointManager
from thinker.checkpoint.run_directory import RunDirectory
from thinker.data.batches.dataset import AnyDataset
from thinker.data.tokenizers.tokenizer_factory import is_path
from thinker.model import Thinker
from thinker.runtime.backend import configure_backend, enable_determinism
from thinker.runtime.device import choose_device
from thinker.runtime.errors import UserError
from thinker.runtime.ranks import SINGLE_PROCESS, DistContext
from thinker.runtime.registry import offers
from thinker.training.bigram_fit import can_fit_bigrams, start_from_bigrams
from thinker.training.callback import Callback
from thinker.training.callbacks.setup import callbacks_of_output, callbacks_of_weights
from thinker.training.config.config import Config
from thinker.training.data.run_corpus import prepare_training_data
from thinker.training.data.training_batches import build_batches
from thinker.training.metrics import MemoryMeter
from thinker.training.objective import Objective, build_objective
from thinker.training.reports.before_training import before_training
from thinker.training.settings.memory_bound import check_run_fits
from thinker.training.settings.resolve import (
    check_batch_split,
    resolve_open_keys,
    resolve_precision,
    resolve_settings,
)
from thinker.training.settings.settings import Settings
from thinker.training.state.run_folder import create_run, open_run
from thinker.training.state.saved_state import collect_state, describe_machine
from thinker.training.step import TrainingStep, build_model
from thinker.training.trainer import Trainer

# Of a core, for saves in the background, as training needs every core
# (docs/benchmarks/exactness.md).
BACKGROUND_CPU_SHARE = 0.005


def train(
    config: Config,
    dist: DistContext = SINGLE_PROCESS,
    callbacks: Sequence[Callback] = (),
    objective: Objective | None = None,
    dataset: AnyDataset | None = None,
    model: type[Thinker] = Thinker,
) -> int:
    """Start or resume the run of a config. Returns the exit status: 0, or 128 + the signal that
    ended it.

    Args:
        callbacks: what happens around steps, in this order (training/callback.py). To resume a run,
            pass the same ones.
        objective: what a step minimizes (training/objective.py). None: the cross-entropy with the
            text.
        dataset: the training windows (data/batches/dataset.py), such as a list of pairs (inputs,
            targets), or any object with len() and window(index). None: those of the config, which
            also has the tokenizer and the text for validation. To resume a run, pass an equal one.
        model: a subclass of Thinker, which is made with its ThinkerConfig alone. List its module in
            `extensions`, so that commands can open the run.
    """
    return build_trainer(config, dist, callbacks, objective, dataset, model).train()


def build_trainer(
    config: Config,
    dist: DistContext = SINGLE_PROCESS,
    callbacks: Sequence[Callback] = (),
    objective: Objective | None = None,
    dataset: AnyDataset | None = None,
    model: type[Thinker] = Thinker,
) -> Trainer:
    """Check the config before writing any file, build the trainer, and restore the newest
    checkpoint of the run."""
    if config.train.deterministic:
        enable_determinism()
    if model is not Thinker and config.run.init_from is not None:
        raise UserError("run.init_from names the model; pass no other one to train()")
    device = choose_device(config.train.device)
    dist.init_process_group(device.type, config.train.dist_timeout_s)

    # Open the run.
    run = RunDirectory(config.run.dir, writes=dist.is_main)
    folder, state = open_run(run, dist)
    previous = state.settings  # None for a new run, as is `folder`
    if previous is not None:
        from thinker.training.data import resumed_data
        from thinker.training.state import resume

    # Resolve the settings that the data needs, and read the data.
    configure_backend(device)
    precision = resolve_precision(config, device, previous, dist)
    config = resolve_open_keys(config, device, precision, previous, dist)
    tokenizer = None
    if previous is not None:
        tokenizer = resumed_data.own_tokenizer(run, previous, config)
    initial_model = None
    has_template = config.data.chat_template is not None or is_path(config.data.tokenizer)
    if config.run.init_from is not None or has_template:
        from thinker.training.initial_model import load_initial_model

        config, initial_model, tokenizer = load_initial_model(
            config, previous, tokenizer, dist.is_main
        )
    if previous is not None:
        sections = config.model_dump(mode="json", exclude={"model", "tracking", "extensions"})
        resume.check_unchanged(run, previous, sections)
    check_batch_split(config, dist)
    check_run_fits(config, device, dist)
    with dist.main_process_first():
        if previous is None:
            corpus = prepare_training_data(config, tokenizer)
        else:
            corpus = resumed_data.read_corpus(run, state, config, tokenizer)
    model_config = config.thinker_config(corpus.tokenizer.vocab_size)
    if previous is not None:
        resume.check_unchanged(run, previous, {"model": model_config.to_dict()})

    # Resolve the rest.
    objective, its_callbacks = build_objective(config, model_config, corpus, device, objective)
    settings = resolve_settings(config, model_config, device, precision, previous, dist)

    # Build batches, model and optimizers.
    batches, evaluator = build_batches(settings, corpus, device, dist, dataset)
    model_device = _model_device(settings, device, dist)
    built = build_model(model_config, settings.run.seed, model_device, initial_model, model)
    if previous is None and can_fit_bigrams(config, model_config, batches.loader, objective):
        started = time.perf_counter()
        start_from_bigrams(built, batches.loader, settings, dist)
        state.elapsed_s = time.perf_counter() - started
    memory = MemoryMeter(device)
    all_callbacks = [
        *its_callbacks,
        *callbacks_of_weights(settings),
        *callbacks,
        *callbacks_of_output(settings, corpus),
    ]
    step = TrainingStep(built, settings, objective, all_callbacks, dist=dist)
    if previous is not None:
        resume.give_state_to_callbacks(state, all_callbacks, folder)

    # All checks are done. Write files from here on.
    create_run(run, is_new=previous is None, dist=dist)
    if previous is not None:
        resume.resume_run(run, folder, state, step, settings, dist)
    run.truncate_logs(state.step, state.evaluated_at)
    state.settings = settings
    state.tokenizer = corpus.tokenizer.content_hash
    state.corpus = corpus.sha256
    state.machine = describe_machine(step, dist, settings.train.parallel)
    collect_state(state, all_callbacks)
    saved = None if previous is None else state.model_copy(deep=True)
    trainer = Trainer(
        settings=settings,
        step=step,
        state=state,
        run=run,
        corpus=corpus,
        batches=batches,
        evaluator=evaluator,
        checkpoints=_checkpoint_manager(run, settings, device, dist),
        memory=memory,
        dist=dist,
        saved=saved,
    )
    if not trainer.is_finished:
        run.write_config(settings.model_dump(mode="json"))
        lines = before_training(settings, corpus, batches.loader, step.kernel_problem)
        for describe_data in offers("describe_data"):
            lines += describe_data(settings, corpus, batches.loader)
        print("\n".join(lines), file=sys.stderr)
    if dist.is_main:
        corpus.tokenizer.save(run.path)
    return trainer


def _model_device(settings: Settings, device: torch.device, dist: DistContext) -> torch.device:
    """Where the model is made: with FSDP2 on the host, as the whole model need not fit on a
    device."""
    is_sharded = dist.world_size > 1 and settings.train.parallel == "fsdp"
    return torch.device("cpu") if is_sharded else device


def _checkpoint_manager(
    run: RunDirectory, settings: Settings, device: torch.device, dist: DistContext
) -> CheckpointManager:
    train = settings.train
    cpu_share = BACKGROUND_CPU_SHARE if device.type == "cpu" else 1.0
    return CheckpointManager(
        run.checkpoints,
        train.keep_last,
        train.keep_every,
        train.async_save,
        cpu_share,
        dist,
        train.save_sharded,
    )
