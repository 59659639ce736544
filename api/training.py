"""train(): start or resume a run. plan(): what a run needs."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thinker.data.batches.dataset import AnyDataset
from thinker.model import Thinker
from thinker.runtime.errors import RunError, UserError
from thinker.training import run
from thinker.training.callback import Callback
from thinker.training.config.config import Config
from thinker.training.config.load import load_config, validate_config
from thinker.training.distributed.session import distributed_session
from thinker.training.objective import Objective


def train(
    config: Config | dict[str, Any] | str | Path,
    overrides: Sequence[str] = (),
    *,
    callbacks: Sequence[Callback] = (),
    objective: Objective | None = None,
    dataset: AnyDataset | None = None,
    model: type[Thinker] = Thinker,
) -> Path:
    """Start or resume a run, as train.py does. Returns the run directory, which load() opens.

    Args:
        config: a YAML file, the name of a config that comes with Thinker, a run directory, the
            sections as a dictionary, or a Config.
        overrides: changes of a YAML file, such as ["train.max_steps=200"].
        callbacks: what happens around steps, in this order (thinker.training.callback).
        objective: what a step minimizes (thinker.training.objective). None: the loss of the text.
        model: a subclass of Thinker, which is made with its ThinkerConfig alone. List its module in
            `extensions`, so that commands can open the run.
        dataset: the training windows (thinker.data.batches.dataset): an object with len() and
            window(index), or with windows to iterate over. A window is inputs and targets, two
            arrays of data.seq_len token ids. None: the windows of the text that the config names.
            The text also gives the tokenizer and the validation split.

    To resume a run, pass the same arguments. Raises UserError for a mistake in the config,
    KeyboardInterrupt after Ctrl-C and RunError after another signal, when the state is saved.
    """
    checked = _read_config(config, overrides)
    if checked.run.dir is None:
        raise UserError("run.dir is missing; set it, for example to runs/mine")
    with distributed_session() as dist:
        status = run.train(checked, dist, callbacks, objective, dataset, model)
    if status == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if status:
        raise RunError(f"a signal ended the run in {checked.run.dir}; train again to resume it")
    return Path(checked.run.dir)


def plan(
    config: Config | dict[str, Any] | str | Path,
    overrides: Sequence[str] = (),
    *,
    measure: bool = True,
) -> dict[str, Any]:
    """Memory, FLOPs, tokens and time that a run needs on this machine, as `thinker plan` does.

    Args:
        config: as of train().
        overrides: as of train().
        measure: run a few steps to measure speed and memory.

    Returns the values that `thinker plan --json` prints. Raises UserError for a mistake in the
    config, or if the run does not fit into memory.
    """
    from thinker.training.reports.plan import make_plan

    return make_plan(_read_config(config, overrides), measure)


def _read_config(config: Config | dict[str, Any] | str | Path, overrides: Sequence[str]) -> Config:
    if isinstance(overrides, str):
        raise UserError(
            f"overrides is the text {overrides!r}; give a list, such as [{overrides!r}]"
        )
    if isinstance(config, str | Path):
        return load_config(config, list(overrides))
    if overrides:
        raise UserError("overrides are for a config in a file; change the dictionary instead")
    return config if isinstance(config, Config) else validate_config(config)
