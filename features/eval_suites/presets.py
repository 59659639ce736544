"""Suites of lm-eval's tasks, with fixed settings.

Prompts, choices and the normalization by length are those of lm-eval's own tasks, whose versions
the result records. What is fixed here: which tasks, the metric of each, the number of examples
before each question, and what guessing reaches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, NamedTuple

from thinker.features.eval_suites.accuracy import Accuracy, share_of_items
from thinker.runtime.errors import UserError, install_command

if TYPE_CHECKING:
    from thinker.data.tokenizers.tokenizer import Tokenizer
    from thinker.model import Thinker


class SuiteTask(NamedTuple):
    """A task of lm-eval and how to run it."""

    task: str
    metric: str  # "acc", or "acc_norm": ln P is divided by the length of an answer in characters
    chance: float  # what guessing reaches, or the most frequent answer
    shots: int = 0  # examples before each question
    folder: str = ""  # of the task in lm-eval's tasks, if it has another name


class Preset(NamedTuple):
    """A suite. `tasks` may name a group of lm-eval, all of whose tasks have the same settings."""

    tasks: Sequence[SuiteTask]
    mean: str  # the name of the mean over the tasks; "" if there is only one
    is_centered: bool = False  # the mean is of (accuracy - chance) / (1 - chance)
    missing: str = ""  # what a reader could expect and does not get


# Shots and chance as in DCLM's eval/mmlu_and_lowvar.yaml and eval/eval_meta_data_v1.csv.
CORE_TASKS = (
    SuiteTask("hellaswag", "acc_norm", 0.25),
    SuiteTask("arc_easy", "acc_norm", 0.25, 10, folder="arc"),
    SuiteTask("arc_challenge", "acc_norm", 0.25, 10, folder="arc"),
    SuiteTask("copa", "acc", 0.5, folder="super_glue/copa"),
    SuiteTask("commonsense_qa", "acc", 0.2, 10),
    SuiteTask("piqa", "acc_norm", 0.5, 10),
    SuiteTask("openbookqa", "acc_norm", 0.25),
    SuiteTask("lambada_openai", "acc", 0.0, folder="lambada"),
    SuiteTask("hellaswag", "acc_norm", 0.25, 10),
    SuiteTask("wsc273", "acc", 0.5),
    SuiteTask("winogrande", "acc", 0.5),
    SuiteTask("boolq", "acc", 0.62, 10, folder="super_glue/boolq"),
    SuiteTask(
        "bigbench_language_identification_multiple_choice",
        "acc",
        0.091,
        10,
        folder="bigbench/multiple_choice",
    ),
)
CORE_MISSING = (
    "this is not CORE: of its 22 tasks, jeopardy is not in lm-eval, agi_eval_lsat_ar runs there "
    "only without examples, and lm-eval compares generated texts in squad, coqa and five of "
    "BIG-bench (qa_wikidata, dyck_languages, cs_algorithms, operators, repeat_copy_logic), where "
    "CORE asks whether the answer is the greedy continuation; prompts are lm-eval's, not DCLM's, "
    "and lengths of answers are in characters, not tokens"
)
BABYLM_MISSING = (
    "of the BabyLM evaluation, lm-eval has BLiMP only, with all pairs, also those whose words the "
    "BabyLM corpus lacks; the supplement, EWoK, entity tracking, COMPS, WUGs, reading times, age "
    "of acquisition and the tasks that finetune (GLUE, MSGS) are missing"
)
PRESETS: Mapping[str, Preset] = {
    "babylm": Preset(
        (SuiteTask("blimp", "acc", 0.5),), "mean of the tasks", missing=BABYLM_MISSING
    ),
    "core": Preset(CORE_TASKS, "13 of CORE's 22, centered", is_centered=True, missing=CORE_MISSING),
    "lambada": Preset((SuiteTask("lambada_openai", "acc", 0.0, folder="lambada"),), ""),
    "hellaswag": Preset((SuiteTask("hellaswag", "acc_norm", 0.25),), ""),
}


class SuiteResult(NamedTuple):
    """Accuracies of all tasks and their mean, and the settings that lm-eval reports."""

    accuracies: list[Accuracy]
    settings: dict[str, Any]


def run_preset(
    model: Thinker,
    tokenizer: Tokenizer,
    name: str,
    limit: int | None = None,
    confidence: float = 0.95,
) -> SuiteResult:
    """Run a suite. `limit`: questions per task. Raises UserError if the package lm-eval or the data
    of a task is missing."""
    try:
        import lm_eval

        from thinker.evaluation import lm_eval_harness
    except ModuleNotFoundError as error:
        remedy = f"run {install_command('eval')}"
        raise UserError(f"--suite {name} needs the {error.name} package; {remedy}") from error
    preset = PRESETS[name]
    # Only these folders, as reading all of lm-eval's tasks takes seconds.
    root = Path(lm_eval.__file__).parent / "tasks"
    folders = sorted({root / (task.folder or task.task) for task in preset.tasks})
    names = sorted({task.task for task in preset.tasks})
    manager = lm_eval_harness.find_tasks(names, *folders)
    accuracies: list[Accuracy] = []
    tasks: dict[str, Any] = {}
    for task in preset.tasks:
        try:
            output = lm_eval_harness.harness_output(
                model, tokenizer, [task.task], manager, task.shots, limit
            )
        except UserError as error:
            if not isinstance(error.__cause__, OSError):  # errors of files and of the network are
                raise
            reason = " ".join(str(error).split())
            raise UserError(
                f"{reason}; its data comes from the Hugging Face hub: check the network, or see "
                "features/eval_suites/guide.md for data in a folder"
            ) from error
        for row in task_accuracies(output, task, confidence):
            accuracies.append(row)
            tasks[f"{row.name} ({row.shots} shots)"] = _describe(output["configs"][row.name], task)
    if preset.mean:
        accuracies.append(mean_accuracy(preset, accuracies, confidence))
    settings = {
        "lm_eval": lm_eval.__version__,
        "batch_size": lm_eval_harness.BATCH_SIZE,
        "tasks": tasks,
    }
    return SuiteResult(accuracies, settings)


def task_accuracies(
    output: Mapping[str, Any], task: SuiteTask, confidence: float
) -> list[Accuracy]:
    """The accuracy of each task in the output of lm-eval, which has several for a group."""
    rows = []
    for name, samples in output["n-samples"].items():
        share = output["results"][name][f"{task.metric},none"]
        n_items = samples["effective"]
        row = share_of_items(name, share * n_items, n_items, task.chance, confidence)
        version = output["versions"][name]
        values = vars(row) | {"version": str(version), "shots": output["n-shot"][name]}
        rows.append(Accuracy(**values))
    return rows


def mean_accuracy(preset: Preset, rows: Sequence[Accuracy], confidence: float) -> Accuracy:
    """The mean over tasks, each with the same weight, with a normal interval from the errors of the
    tasks."""
    values = []
    variance = 0.0
    for row in rows:
        scale = 1.0
        value = row.accuracy
        if preset.is_centered:
            scale = 1 / (1 - row.chance)
            value = (row.accuracy - row.chance) * scale
        values.append(value)
        variance += scale**2 * row.accuracy * (1 - row.accuracy) / row.n_items
    mean = math.fsum(values) / len(values)
    spread = NormalDist().inv_cdf((1 + confidence) / 2) * math.sqrt(variance) / len(values)
    chance = 0.0
    if not preset.is_centered:
        chance = math.fsum(row.chance for row in rows) / len(rows)
    n_items = sum(row.n_items for row in rows)
    return Accuracy(preset.mean, mean, mean - spread, mean + spread, chance, n_items)


def _describe(config: Mapping[str, Any], task: SuiteTask) -> dict[str, Any]:
    """What decides the questions of a task, as lm-eval reports it."""
    names = ("dataset_path", "dataset_name", "doc_to_text", "doc_to_choice", "target_delimiter")
    shown: dict[str, Any] = {"metric": task.metric}
    for name in names:
        if name in config:
            shown[name] = str(config[name])
    return shown
