"""Training on a mixture: losses by source, ranks and workers, kills, changed weights, and
mistakes."""

import json
import math
import random
import shutil

import numpy as np
import pytest
import torch
from conftest import ROOT, run_script
from data_runs import check_killed_runs, check_samples, train_whole, trainer_of, write_config
from installed import needs
from training_runs import assert_same_tensors, read_metrics

from thinker.features.mixtures.mixed_evaluator import split_limit
from thinker.features.mixtures.mixture_reports import comparable_losses, losses_of_equal_texts
from thinker.runtime.constants import IGNORE_INDEX
from thinker.runtime.errors import UserError
from thinker.training.config.load import load_config
from thinker.training.data.open_run import load_validation_data
from thinker.training.data.run_corpus import prepare_training_data

NAMES = ["tales", "code", "numbers", "chat"]
STEPS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A config with four sources, a schedule and a budget, beside its files."""
    folder = tmp_path_factory.mktemp("mixture")
    draw = random.Random(1)
    rows = [
        {"body": " ".join(str(draw.randrange(99)) for _ in range(draw.randrange(5, 60)))}
        for _ in range(60)
    ]
    (folder / "numbers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for i in range(12):
        (folder / "code").mkdir(exist_ok=True)
        lines = (
            f"def f{i}_{j}(x): return x + {draw.randrange(9)}" for j in range(draw.randrange(3, 30))
        )
        (folder / "code" / f"{i}.py").write_text("\n".join(lines))
    (folder / "chat.txt").write_text("".join(f"Who is {i}? {i} is a cat.\n" for i in range(300)))
    sources = [
        {"source": "tales", "max_documents": 60, "weight": {0: 0.5, 0.7: 0.2}},
        {
            "source": "text",
            "path": str(folder / "code"),
            "weight": {0: 0.3, 0.7: 0.6},
            "val_fraction": 0.3,
        },
        {
            "source": "jsonl",
            "path": str(folder / "numbers.jsonl"),
            "column": "body",
            "weight": 0.15,
            "max_epochs": 1,
        },
        {"source": "text", "path": str(folder / "chat.txt"), "weight": 0.05},
    ]
    write_config(
        folder, {"sources": sources}, max_steps=STEPS, batch_size=8, eval_every=8, save_every=2
    )
    return folder


@pytest.fixture(scope="module")
def whole(folder):
    """The run that nobody kills, and what it printed."""
    return train_whole(folder)


def test_the_command_describes_the_mixture(whole):
    _, done = whole
    lines = done.stderr.splitlines()
    assert [
        line.split()[0] for line in lines if line.startswith("  ") and "%" in line and ";" in line
    ] == NAMES
    assert any("tales    50.0%, 20.0% from step 17;" in line and "epoch" in line for line in lines)
    assert "by source, nats per token (bits per byte): tales " in done.stdout


def test_losses_by_source_add_up_to_the_loss(whole):
    path, _ = whole
    lines = read_metrics(path)
    train = [line for line in lines if "train_loss" in line]
    assert len(train) == STEPS
    for line in train:
        parts = [line[key] for key in line if key.startswith("train_loss/")]
        assert min(parts) - 1e-5 <= line["train_loss"] <= max(parts) + 1e-5
    assert {key for line in train for key in line if "/" in key} == {
        f"train_loss/{name}" for name in NAMES
    }
    shares = dict(
        zip(NAMES, (0.41, 0.39, 0.15, 0.05))
    )  # 70% of the run with the first weights, then the others
    vals = [line for line in lines if "val_loss" in line]
    assert len(vals) == 3
    for line in vals:
        assert line["val_loss"] == pytest.approx(
            sum(share * line[f"val_loss/{n}"] for n, share in shares.items()), rel=0.003
        )


def test_the_loss_of_a_source_is_that_of_its_sequences(folder, tmp_path):
    """Also with micro-batches and padding, and in steps without a sequence of some source."""
    options = ["train.micro_batch_size=2", "data.packing=documents", f"data.cache_dir={tmp_path}"]
    trainer = trainer_of(folder, tmp_path, *options)
    for step in (0, 5):
        batch, sums = trainer.batches.batch(step), torch.zeros(4, 2)
        assert batch.sources.tolist() == [sample.source for sample in trainer.loader.samples(step)]
        with torch.no_grad():
            for source, inputs, targets in zip(batch.sources, batch.inputs, batch.targets):
                loss, _ = trainer.model(inputs[None], targets=targets[None])
                sums[source] += torch.stack((loss, (targets != IGNORE_INDEX).sum()))
        loss, _ = trainer.step(batch, 0.0)
        torch.testing.assert_close(trainer.step.part_sums, sums)
        assert loss.item() == pytest.approx(sums[:, 0].sum().item() / batch.n_targets, rel=1e-5)
    trainer.batches.close()


@pytest.mark.parametrize(("size", "workers"), [(1, 0), (1, 4), (2, 1), (4, 2)])
def test_samples_do_not_depend_on_ranks_and_workers(folder, tmp_path, whole, size, workers):
    """Nor do the losses of the sources, up to rounding."""
    check_samples(folder, tmp_path, size, workers, STEPS)
    alone, together = (
        [{key: x for key, x in line.items() if "loss" in key} for line in read_metrics(run)]
        for run in (whole[0], tmp_path / "run")
    )
    assert [line.keys() for line in alone] == [line.keys() for line in together]
    for one, other in zip(alone, together):
        assert other == pytest.approx(one, rel=2e-4)


def test_killed_runs_end_at_the_same_bits(folder, whole, tmp_path, stress):
    """30 kills with --stress, at random moments, of training and of preparing the data."""
    check_killed_runs(folder, whole[0], tmp_path / "run", 30 if stress else 2, STEPS)


def test_other_weights_read_the_same_cache(folder, whole, tmp_path):
    """Nothing is tokenized again, and no tokenizer is trained, for other weights, budgets, names
    and orders of rows."""
    before = {path: path.stat().st_mtime_ns for path in (folder / "cache").rglob("*")}
    options = [
        "data.sources.0.weight=0.9",
        "data.sources.2.max_epochs=null",
        "data.sources.1.name=python",
    ]
    done = run_script(
        ROOT / "train.py", folder / "config.yaml", *options, f"run.dir={tmp_path / 'run'}"
    )
    assert done.returncode == 0, done.stderr
    assert {path: path.stat().st_mtime_ns for path in (folder / "cache").rglob("*")} == before
    assert "tokenizing" not in done.stderr
    assert "python" in done.stdout


def test_a_resumed_run_finds_its_cached_tokens(folder, tmp_path):
    """Its files may be missing or move, but its sources must not change."""
    place, run = tmp_path / "place", tmp_path / "run"
    shutil.copytree(folder, place, ignore=shutil.ignore_patterns("whole"))
    text = (place / "config.yaml").read_text().replace(str(folder), str(place))
    (place / "config.yaml").write_text(text)
    train = [
        ROOT / "train.py",
        place / "config.yaml",
        f"run.dir={run}",
        "data.sources.0.weight=0.5",
    ]
    plain = ["data.sources.1.weight=0.3", "train.max_steps=10"]
    assert run_script(*train, *plain).returncode == 0
    longer = [*train, "data.sources.1.weight=0.3", "train.max_steps=12"]
    (place / "chat.txt").rename(tmp_path / "chat.txt")
    done = run_script(*longer)
    assert done.returncode == 0, done.stderr
    assert "does not exist; using the cached tokens of the run" in done.stderr
    moved = [*train, "data.sources.1.weight=0.3", f"data.sources.3.path={tmp_path / 'chat.txt'}"]
    assert run_script(*moved, "train.max_steps=14").returncode == 0
    changed = run_script(*train, "data.sources.1.weight=0.4", "train.max_steps=16")
    assert changed.returncode == 2
    assert "data.sources has changed since the run in" in changed.stderr
    (tmp_path / "chat.txt").rename(tmp_path / "talk.txt")
    renamed = [
        *train,
        "data.sources.1.weight=0.3",
        f"data.sources.3.path={tmp_path / 'talk.txt'}",
        "train.max_steps=15",
    ]
    done = run_script(*renamed)
    assert done.returncode == 2
    assert (
        "a source that was moved needs the name that it had: tales, code, numbers, chat"
        in done.stderr
    )
    assert run_script(*renamed, "data.sources.3.name=chat").returncode == 0
    (tmp_path / "talk.txt").rename(tmp_path / "chat.txt")
    (tmp_path / "chat.txt").write_text("x" * 9000)
    changed = run_script(*moved, "train.max_steps=16")
    assert changed.returncode == 2
    assert "has changed since the run in" in changed.stderr


@needs("cleaning")
def test_a_cleaned_mixture_resumes_with_each_packing(folder, tmp_path):
    """Cleaning, packing and mixtures together: 4 steps and 4 more are 8 to the last bit."""
    clean = [
        "data.clean.duplicates=near",
        "data.clean.min_characters=30",
        "data.document_masking=true",
    ]
    last = ["data.sources.3.source=tales", "data.sources.3.path=null", "data.sources.3.max_documents=70",
            "data.sources.3.name=more"]  # fmt: skip
    flat = [f"data.sources.{i}.weight={weight}" for i, weight in enumerate((0.5, 0.3))]
    for packing in ("contiguous", "documents", "best_fit"):
        options = [*clean, *last, *flat, f"data.packing={packing}", "data.sources.0.max_tokens=900"]
        runs = tmp_path / packing
        for run, steps in (("whole", 8), ("parts", 4), ("parts", 8)):
            lengths = [
                f"train.max_steps={steps}",
                "train.eval_every=null",
                "train.decay_fraction=0",
            ]
            where = [f"run.dir={runs / run}", *lengths]
            done = run_script(ROOT / "train.py", folder / "config.yaml", *options, *where)
            assert done.returncode == 0, done.stderr
        assert_same_tensors(runs / "whole", runs / "parts", 8)


def test_weights_that_change_fix_the_length_of_a_run(folder, whole):
    done = run_script(
        ROOT / "train.py", folder / "config.yaml", f"run.dir={whole[0]}", "train.max_steps=30"
    )
    assert done.returncode == 2
    assert "train.max_steps is 30, but the run in" in done.stderr


def test_commands_on_a_run_of_a_mixture(folder, whole, tmp_path):
    """The validation split of all sources is evaluated; a sample comes from the model."""
    run, _ = whole
    done = run_script(ROOT / "scripts/eval.py", run)
    assert done.returncode == 0, done.stderr
    assert (
        "all tokens of tales, code, numbers, chat, not weighted; --part NAME for one of them"
        in done.stdout
    )
    last = read_metrics(run)[-1]
    for name in NAMES:
        done = run_script(ROOT / "scripts/eval.py", run, "--part", name, "--json")
        assert json.loads(done.stdout)["losses"][0]["nats_per_token"]["mean"] == pytest.approx(
            last[f"val_loss/{name}"]
        )
    done = run_script(ROOT / "scripts/eval.py", run, "--part", "tale")
    assert (done.returncode, "choose from tales, code, numbers, chat" in done.stderr) == (2, True)
    plan = run_script(ROOT / "scripts/plan.py", folder / "config.yaml")
    assert plan.returncode == 0, plan.stderr
    corpus = prepare_training_data(load_config(run / "config.yaml", []))
    _, val = load_validation_data(run, corpus.tokenizer, "--text", tmp_path)
    assert val.n_tokens == sum(part.val.n_tokens for part in corpus.parts.values())
    shutil.copytree(run, tmp_path / "copy")
    text = (run / "config.yaml").read_text().replace(str(folder / "cache"), str(tmp_path / "empty"))
    (tmp_path / "copy" / "config.yaml").write_text(text)
    with pytest.raises(
        UserError, match="add --read-data to read the files in its config .*numbers.jsonl"
    ):
        load_validation_data(tmp_path / "copy", corpus.tokenizer, "--text", tmp_path)
    _, again = load_validation_data(
        tmp_path / "copy", corpus.tokenizer, "--text", tmp_path, read_data=True
    )
    assert again.n_tokens == val.n_tokens


def test_a_source_without_validation_split(folder, tmp_path):
    options = ["data.sources.0.val_fraction=0", "train.eval_sequences=4"]
    trainer = trainer_of(folder, tmp_path, *options)
    evaluation = trainer.evaluator(trainer.model)
    parts = {name: each(trainer.model) for name, each in trainer.evaluator.evaluators.items()}
    trainer.batches.close()
    assert list(parts) == NAMES[1:]
    assert list(evaluation.metrics)[::2] == [f"val_loss/{name}" for name in NAMES[1:]]
    shares = np.array([0.39, 0.15, 0.05])
    losses = [part.loss for part in parts.values()]
    assert list(evaluation.metrics.values())[::2] == losses
    assert evaluation.loss == pytest.approx(float(shares @ losses / shares.sum()), rel=0.003)
    assert [evaluator.n_windows for evaluator in trainer.evaluator.evaluators.values()] == [3, 1, 1]
    nats = evaluation.loss / math.log(2)
    sizes = [part.n_bytes / part.n_tokens for part in parts.values()]
    assert evaluation.bits_per_byte == pytest.approx(
        nats / float(shares @ sizes / shares.sum()), rel=0.003
    )


def test_the_limit_of_sequences_is_split_in_proportion():
    assert split_limit(None, [5, 2]) == [None, None]
    assert split_limit(100, [600, 300, 1]) == [67, 33, 1]


def test_training_and_validation_losses_are_compared_over_the_same_sources():
    """A source without validation split and one that was used up do not count; absent values are
    the last ones."""
    lines = [
        {
            "train_loss": 9.0,
            "train_loss/a": 2.0,
            "train_loss/b": 4.0,
            "train_loss/c": 50.0,
            "train_loss/d": 7.0,
        }
    ]
    lines += [
        {"train_loss": 2.0, "train_loss/a": 2.0 + i % 2, "train_loss/b": 4.0} for i in range(30)
    ]
    lines += [{"train_loss": 2.0, "train_loss/a": 2.0}]
    lines += [{"val_loss": 3.0, "val_loss/a": 2.5, "val_loss/b": 4.1, "val_loss/d": 8.0}]
    *train, val = comparable_losses(lines, {"a": 0.3, "b": 0.3, "c": 0.3, "d": 0.1})
    assert val["val_loss"] == pytest.approx((2.5 + 4.1) / 2)
    assert train[-1]["train_loss"] == pytest.approx((2.4 + 4.0) / 2, abs=0.06)
    assert comparable_losses(lines, {"c": 1.0}) == []


def test_losses_before_pruning_are_left_out(folder, tmp_path):
    trainer = trainer_of(folder, tmp_path)
    trainer.batches.close()
    losses = {1: 5.0, 2: 3.0, 3: 4.0}  # the best weights are those of step 3, after pruning
    lines = [
        {"step": step, "train_loss": 6.0 - step, "train_loss/code": 6.0 - step} for step in losses
    ]
    lines += [
        {"step": step, "val_loss": loss, "val_loss/code": loss} for step, loss in losses.items()
    ]
    compared = losses_of_equal_texts(trainer.corpus, trainer.loader, lines, 4.0)
    assert [line["val_loss"] for line in compared if "val_loss" in line] == [5.0, 4.0]


def test_budgets_count_in_the_shares(folder, tmp_path):
    """A source that is soon used up hardly counts in the validation loss."""
    options = [
        "data.sources.0.max_tokens=40",
        "data.sources.1.max_epochs=null",
        "train.eval_sequences=8",
    ]
    trainer = trainer_of(folder, tmp_path, *options)
    shares = trainer.loader.dataset.mixture.mean_token_shares()
    trainer.batches.close()
    taken = trainer.loader.dataset.mixture.taken(STEPS * 8)
    assert shares[0] < 0.02
    assert shares.sum() == pytest.approx(1)
    assert shares == pytest.approx(taken / taken.sum(), abs=0.03)


MISTAKES = [
    (
        ["data.sources.4.weight=1"],
        "data.sources.4.weight=1: the config has 4 data.sources, numbered from 0",
    ),
    (
        ["data.sources.0.weight=-1"],
        "data.sources.0.weight is -1.0; weights must be from 0 to 1e9, and their starts",
    ),
    (["data.sources.0.weight={0.5: 1}"], "it needs a weight for 0, the start of the run"),
    (
        ["data.sources.0.weight={0: 1, 1: 1}"],
        "weights must be from 0 to 1e9, and their starts at least 0 and below 1",
    ),
    (
        ["data.sources.0.weight=0"],
        "data.sources.0.weight is 0 for the whole run; remove the source",
    ),
    (
        ["data.sources.0.wieght=2"],
        "unknown config key data.sources.0.wieght; did you mean data.sources.0.weight?",
    ),
    (["data.sources=[{}]"], "data.sources.0.source is missing; set it"),
    (["data.sources=[]"], "data.sources is empty; add a source, or remove the key"),
    (["data.sources=tales"], "data.sources is 'tales'; it must be a list"),
    (
        ["data.path=x"],
        "data.path cannot be combined with data.sources; remove it, or set it in one of the sources",
    ),
    (["data.source=tales"], "data.source cannot be combined with data.sources"),
    (
        ["data.sources.0.name=a/b"],
        "data.sources.0.name is 'a/b'; it must be letters, digits, dots, _ and -",
    ),
    (
        ["data.sources.0.name=.."],
        "data.sources.0.name is '..'; it must be letters, digits, dots, _ and -",
    ),
    (
        ["data.sources.0.name=code"],
        "data.sources has two sources called code; give one of them another name",
    ),
    (
        ["train.max_steps=null", "train.max_minutes=1"],
        "weights that change, which need train.max_steps; set it",
    ),
    (["data.sources.0.source=tael"], "tael in data.sources: data.source=tael: choose from tales"),
    (["data.sources.3.path=none.txt"], "none in data.sources: data.path=none.txt does not exist"),
    (["data.sources.2.column=x"], "numbers in data.sources: data.column=x is not in row 0"),
    (
        ["data.sources.1.assistant_only_loss=true"],
        "code in data.sources: data.assistant_only_loss=true needs conver",
    ),
    (
        [f"data.sources.{i}.val_fraction=0" for i in range(4)],
        "no source of the mixture has a validation split",
    ),
    (
        [f"data.sources.{i}.weight={{0: 1, 0.5: 0}}" for i in range(4)],
        "no source with a weight above 0 is left after 96",
    ),
    (
        [f"data.sources.{i}.max_epochs=0.1" for i in range(4)],
        "no source with a weight above 0 is left after",
    ),
]


@pytest.mark.parametrize(
    ("overrides", "message"), MISTAKES, ids=lambda x: x[0] if isinstance(x, list) else ""
)
def test_mistakes_end_in_one_line(folder, tmp_path, overrides, message):
    done = run_script(
        ROOT / "train.py", folder / "config.yaml", f"run.dir={tmp_path / 'run'}", *overrides
    )
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert (done.returncode, len(errors)) == (2, 1), done.stderr
    assert message in errors[0]
    assert not (tmp_path / "run").exists()
