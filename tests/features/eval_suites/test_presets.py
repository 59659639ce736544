"""The suites of lm-eval's tasks run on lm-eval's own task files, with tiny data sets in place of
those of the hub, and add up."""

import json
import math
import sys
from pathlib import Path

import pytest
import yaml
from conftest import random_model
from local_datasets import CORE, blimp, write_datasets

from thinker import interop
from thinker.commands import eval_command
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.features.eval_suites.accuracy import Accuracy
from thinker.features.eval_suites.presets import CORE_TASKS, PRESETS, mean_accuracy, run_preset
from thinker.runtime.errors import UserError

lm_eval = pytest.importorskip("lm_eval")
pytestmark = pytest.mark.usefixtures("one_thread")
TASKS = Path(lm_eval.__file__).parent / "tasks"


@pytest.fixture(scope="module")
def model_and_tokenizer():
    tokenizer = make_tokenizer("bpe:300", ["The cat sat on the mat. It ran off."] * 3)
    return random_model(vocab_size=tokenizer.vocab_size, max_seq_len=512), tokenizer


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """A folder that `datasets` reads in place of the hub, and nothing else."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "data"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_hellaswag_and_lambada(offline, model_and_tokenizer, tmp_path, monkeypatch, capsys):
    """By the command; the accuracy is that of the adapter's own scores."""
    from lm_eval.api.instance import Instance

    from thinker.evaluation.lm_eval_harness import ThinkerLM

    write_datasets(offline, CORE, n_rows=9)
    model, tokenizer = model_and_tokenizer
    interop.save(model, tokenizer, tmp_path / "model")
    values = {}
    for name in ("hellaswag", "lambada"):
        line = ["thinker eval", str(tmp_path / "model"), "--suite", name, "--device", "cpu"]
        monkeypatch.setattr(sys, "argv", [*line, "--json"])
        assert eval_command.main() == 0
        values[name] = json.loads(capsys.readouterr().out.splitlines()[-1])
        (row,) = values[name]["accuracies"]
        assert (row["n_items"], row["shots"], row["version"]) == (9, 0, "1.0")
        assert values[name]["lm_eval"] == lm_eval.__version__
        assert row["low"] <= row["accuracy"] <= row["high"]

    assert values["hellaswag"]["tasks"]["hellaswag (0 shots)"]["dataset_path"] == "Rowan/hellaswag"
    adapter = ThinkerLM(model, tokenizer)
    rows = (offline / "EleutherAI/lambada_openai/default-test.jsonl").read_text().splitlines()
    requests = []
    for number, text in enumerate(rows):
        context, _, last = json.loads(text)["text"].rpartition(" ")
        requests.append(Instance("loglikelihood", {}, (context, f" {last}"), number))
    n_right = sum(is_greedy for _, is_greedy in adapter.loglikelihood(requests))
    assert values["lambada"]["accuracies"][0]["accuracy"] == pytest.approx(n_right / 9)


@pytest.mark.more
def test_core(offline, model_and_tokenizer):
    """All 13 tasks with their shots."""
    write_datasets(offline, CORE)
    result = run_preset(*model_and_tokenizer, "core", limit=4)
    *rows, mean = result.accuracies
    assert [(row.name, row.shots, row.chance, row.n_items) for row in rows] == [
        (task.task, task.shots, task.chance, 4) for task in CORE_TASKS
    ]
    centered = [(row.accuracy - row.chance) / (1 - row.chance) for row in rows]
    assert mean.accuracy == pytest.approx(sum(centered) / 13)
    assert "13 of CORE's 22" in mean.name
    assert len(result.settings["tasks"]) == 13


@pytest.mark.more
def test_babylm(offline, model_and_tokenizer):
    group = yaml.safe_load((TASKS / "blimp" / "_blimp.yaml").read_text())
    names = [task.removeprefix("blimp_") for task in group["task"]]
    configs = [yaml.safe_load(file.read_text()) for file in (TASKS / "blimp").glob("[!_]*.yaml")]
    sets = {("nyu-mll/blimp", config["dataset_name"]): (blimp, ("train",)) for config in configs}
    write_datasets(offline, sets, n_rows=5)
    result = run_preset(*model_and_tokenizer, "babylm")
    *rows, mean = result.accuracies
    assert len(rows) == len(names) == 67
    assert {row.n_items for row in rows} == {5}
    assert mean.accuracy == pytest.approx(sum(row.accuracy for row in rows) / 67)
    assert (mean.chance, mean.n_items) == (0.5, 67 * 5)


def test_missing_data_is_one_sentence(offline, model_and_tokenizer):
    with pytest.raises(UserError, match="cannot run hellaswag: .*check the network, or see") as e:
        run_preset(*model_and_tokenizer, "hellaswag")
    assert "\n" not in str(e.value)


def test_the_mean_and_its_error():
    """By the formula for independent binomials: centered, and not."""
    rows = [Accuracy("a", 0.7, 0, 1, 0.25, 100), Accuracy("b", 0.6, 0, 1, 0.5, 50)]
    errors = [math.sqrt(0.7 * 0.3 / 100) / 0.75, math.sqrt(0.6 * 0.4 / 50) / 0.5]
    mean = mean_accuracy(PRESETS["core"], rows, 0.95)
    assert mean.accuracy == pytest.approx((0.45 / 0.75 + 0.1 / 0.5) / 2)
    spread = 1.959964 * math.hypot(*errors) / 2
    assert (mean.low, mean.high) == pytest.approx((mean.accuracy - spread, mean.accuracy + spread))
    assert mean.chance == 0
    plain = mean_accuracy(PRESETS["babylm"], rows, 0.95)
    assert (plain.accuracy, plain.chance) == pytest.approx((0.65, 0.375))


def test_every_task_is_in_lm_eval():
    """Under this name, in this folder. That each has its metric is shown by running it."""
    from thinker.evaluation.lm_eval_harness import find_tasks

    for preset in PRESETS.values():
        for task in preset.tasks:
            folder = TASKS / (task.folder or task.task)
            assert task.task in find_tasks([], folder).all_tasks, task
