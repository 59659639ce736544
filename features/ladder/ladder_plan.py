"""The plan of a ladder: the model whose loss is wanted, the sizes below it, and how long they
take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from thinker.data.corpus.corpus import Corpus
from thinker.features.ladder.rungs import STEP, Rung, make_rung, plan_rungs, rung_values
from thinker.features.sweeps.grid import Setting
from thinker.features.sweeps.sweep import Sweep
from thinker.runtime.device import choose_device
from thinker.runtime.errors import UserError
from thinker.training.config.config import Config
from thinker.training.config.load import load_config
from thinker.training.data.run_corpus import prepare_training_data
from thinker.training.data.training_batches import open_loader
from thinker.training.reports.plan import time_steps
from thinker.training.settings.memory_bound import check_run_fits
from thinker.training.settings.resolve import resolve_precision, resolve_settings

TOKENS_PER_PARAMETER = 20.0  # of a config without train.max_steps (Hoffmann et al. 2022)
GAP = 8.0  # between the FLOPs of the target and of the largest size below it
MIN_GAP = 2.0
# Every size ends at a length of its own, and only its last loss counts.
OF_LADDER = ("train.max_minutes", "train.patience", "train.eval_every", "train.sample_every")


@dataclass
class LadderPlan:
    """A config with overrides, the model that it describes, and smaller copies of it.

    Use make_ladder_plan().
    """

    config: Path
    overrides: list[str]  # with those of all sizes
    corpus: Corpus
    target: Rung
    rungs: list[Rung]  # smallest first
    has_fit: bool = False  # thinker train may fit the model to pairs, which no size here does

    def sweep(self, rungs: Sequence[Rung], seeds: int, folder: Path) -> Sweep:
        """The runs of some sizes."""
        settings = []
        for rung in rungs:
            values = rung_values(rung)
            overrides = tuple(f"{key}={value}" for key, value in values.items())
            folder_name = f"{rung.name}-{rung.steps}"
            settings.append(Setting(rung.name, folder_name, values, overrides))
        return Sweep(self.config, self.overrides, settings, seeds, None, folder)

    def epochs(self, rung: Rung) -> float | None:
        """How often the run of a size reads the text; None if the text has no end."""
        config = self._config(rung)
        loader = open_loader(config, self.corpus, rung.model.prefix, progress=False)
        if loader.dataset.is_endless:
            return None
        return max(loader.epochs(rung.steps))

    def seconds(self, rung: Rung) -> float:
        """Seconds that the run of a size will take here, from a few timed steps."""
        config = self._config(rung)
        device = choose_device(config.train.device)
        check_run_fits(config, device)
        precision = resolve_precision(config, device)
        settings = resolve_settings(config, rung.model, device, precision)
        first, each = time_steps(settings, device, repeats=2)
        return first + (rung.steps - 1) * each

    def _config(self, rung: Rung) -> Config:
        values = [f"{key}={value}" for key, value in rung_values(rung).items()]
        return load_config(self.config, [*self.overrides, *values])


def make_ladder_plan(
    config: Path, overrides: list[str], n_sizes: int, ratio: float | None = None, gap: float = GAP
) -> LadderPlan:
    """Plan the sizes below the model of a config. Reads the text.

    Args:
        ratio: tokens per parameter of all sizes; None: as train.max_steps says, or 20 without it.
        gap: the target's FLOPs, divided by those of the largest size below it.

    Raises UserError for a config that has no such sizes.
    """
    read = load_config(config, overrides)
    if read.run.init_from is not None:
        raise UserError("a ladder trains from the beginning; remove run.init_from")
    if "size" in type(read.model).model_fields and read.model.size is not None:
        raise UserError(
            "a ladder needs the size of the model; set model.d_model, n_layers and n_heads instead "
            "of model.size"
        )
    overrides = [*overrides, *(f"{key}=null" for key in OF_LADDER)]
    if getattr(read.train, "eval_suite", None) is not None:
        keys = ("eval_suite", "eval_suite_every", "eval_suite_limit")
        overrides += [f"train.{key}=null" for key in keys]
    # Only the larger sizes could afford it, and a law through both kinds would be wrong.
    overrides.append("train.fit_bigrams=off")
    if read.train.max_steps is None:
        overrides.append("train.max_steps=1")  # each size sets its own
    corpus = prepare_training_data(read, None)
    model = read.thinker_config(corpus.tokenizer.vocab_size)
    seq_len = read.data.seq_len
    tokens_per_step = read.train.batch_size * seq_len
    if ratio is None and read.train.max_steps is not None:
        one = make_rung(model, 1.0, seq_len, tokens_per_step)
        ratio = read.train.max_steps * tokens_per_step / one.parameters
    target = make_rung(model, ratio or TOKENS_PER_PARAMETER, seq_len, tokens_per_step)
    rungs = plan_rungs(target, n_sizes, gap, seq_len)
    has_fit = read.train.fit_bigrams == "auto"
    return LadderPlan(config, overrides, corpus, target, rungs, has_fit)


def gap_of_budget(target: Rung, n_runs_of_a_size: int, n_sizes: int, flops: float) -> float:
    """The gap at which all runs below the target cost so many FLOPs together."""
    of_largest = sum(STEP**-number for number in range(n_sizes)) * n_runs_of_a_size
    return max(MIN_GAP, target.flops * of_largest / flops)
