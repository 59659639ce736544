"""model.size=auto: what it chooses, that a config may overrule it, and that a resumed run keeps
it."""

import json
import math

import pytest
import yaml
from conftest import ROOT, run_script
from hypothesis import given
from hypothesis import strategies as st
from training_runs import assert_same_tensors

from thinker.features.auto_size.auto_size import (
    CHOSEN_KEYS,
    DROPOUTS,
    FEW_BYTES,
    MAX_EPOCHS,
    PARAMETERS_PER_BYTE,
    SHAPES,
    choose,
    describe,
)
from thinker.runtime.errors import UserError
from thinker.training.config.load import load_config, validate_config

CONFIG = ROOT / "features" / "auto_size" / "any-text.yaml"
BYTES, MINUTES = st.integers(200, 10**9), st.floats(0.1, 600)
RATES = st.floats(1e10, 1e15)


@given(n_bytes=BYTES, minutes=MINUTES, rate=RATES, is_gpu=st.booleans())
def test_every_choice_is_a_valid_config_and_expects_no_more_epochs_than_help(
    n_bytes, minutes, rate, is_gpu
):
    choice = choose(n_bytes, minutes, rate, is_gpu)
    tree = {}
    for section, key in CHOSEN_KEYS:
        tree.setdefault(section, {})[key] = getattr(choice, key)
    config = validate_config(tree | {"train": tree["train"] | {"max_minutes": minutes}})
    assert (config.model.d_model, config.model.n_layers, config.model.n_heads) in SHAPES
    assert 0 < choice.epochs <= MAX_EPOCHS
    assert (choice.max_steps is not None) == (choice.epochs == MAX_EPOCHS)
    is_smallest = (choice.d_model, choice.n_layers) == SHAPES[0][:2]
    assert is_smallest or choice.n_parameters <= PARAMETERS_PER_BYTE * n_bytes
    assert choice.seq_len >= 16
    assert choice.dropout in [p for _, p in DROPOUTS]
    first, *rest = describe(choice, n_bytes, minutes)
    assert "expected" in first
    assert bool(rest) == (n_bytes < FEW_BYTES)


@given(n_bytes=BYTES, minutes=MINUTES, rate=RATES, factor=st.floats(1, 100))
def test_more_time_or_a_faster_device_never_gives_a_smaller_model(n_bytes, minutes, rate, factor):
    first = choose(n_bytes, minutes, rate)
    for second in (
        choose(n_bytes, factor * minutes, rate),
        choose(n_bytes, minutes, factor * rate),
    ):
        assert second.n_parameters >= first.n_parameters
    assert math.isclose(choose(n_bytes, 2 * minutes, rate / 2).epochs, first.epochs, rel_tol=1e-9)


@given(n_bytes=st.integers(200, 10**7), minutes=MINUTES, rate=RATES, factor=st.integers(2, 100))
def test_more_text_never_gives_more_epochs_or_dropout(n_bytes, minutes, rate, factor):
    first, second = choose(n_bytes, minutes, rate), choose(factor * n_bytes, minutes, rate)
    assert second.dropout <= first.dropout


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["train.max_minutes=null", "train.max_steps=5"],
            "model.size=auto needs train.max_minutes; set it",
        ),
        (
            ["run.init_from=runs/x"],
            "model.size=auto cannot be combined with run.init_from; remove one of them",
        ),
        (["model.size=large"], "model.size is 'large'; it must be auto or null"),
    ],
)
def test_what_it_cannot_do_is_refused(overrides, message):
    with pytest.raises(UserError) as error:
        load_config(CONFIG, ["data.path=x.txt", *overrides])
    assert message.replace("auto or null", "auto") in str(error.value)


@pytest.fixture(scope="module")
def small(text_file, tmp_path_factory):
    """A run of any-text.yaml in 12 steps, and the same one in two parts; their messages."""
    folder, messages = tmp_path_factory.mktemp("small"), []
    for name, parts in (("whole", [12]), ("parts", [5, 12])):
        for n_steps in parts:
            keys = [f"train.max_steps={n_steps}", "train.max_minutes=500", "train.decay_fraction=0",
                    "train.batch_size=2", "model.dropout=0.25", "train.ema_decay=0.9",
                    f"data.cache_dir={folder / 'cache'}", "train.compile=false", "train.device=cpu",
                    "model.n_layers=1", "train.precision=fp32"]  # fmt: skip
            done = run_script(
                "train.py", CONFIG, f"data.path={text_file}", *keys, f"run.dir={folder / name}"
            )
            assert done.returncode == 0, done.stderr
            messages.append(done.stderr)
    return folder, messages


def test_a_config_may_overrule_it(small):
    folder, messages = small
    tree = yaml.safe_load((folder / "whole" / "config.yaml").read_text())
    assert "size" not in tree["model"]  # the run's own config says what was chosen
    assert (tree["train"]["batch_size"], tree["model"]["dropout"], tree["model"]["n_layers"]) == (
        2,
        0.25,
        1,
    )
    assert (tree["model"]["d_model"], tree["data"]["tokenizer"]) == (64, "char") or tree["model"][
        "d_model"
    ] > 64
    (line,) = [line for line in messages[0].splitlines() if ", dropout 0.25" in line]
    assert "1 layers of width" in line
    assert "epochs" not in line  # the rule's expectation is for its own choice


def test_a_resumed_run_keeps_its_choice_to_the_bit(small):
    folder, messages = small
    assert ", dropout 0.25" not in messages[2]
    assert "resuming from step 5" in messages[2]
    assert_same_tensors(folder / "whole", folder / "parts", 12)
    again = run_script("train.py", folder / "parts" / "config.yaml")
    assert again.returncode == 0
    assert "is finished" in again.stderr


def test_a_plan_chooses_as_training_does(text_file, tmp_path):
    done = run_script(
        "scripts/plan.py",
        CONFIG,
        f"data.path={text_file}",
        f"data.cache_dir={tmp_path}",
        "--no-steps",
    )
    assert done.returncode == 0, done.stderr
    assert "24 epochs expected; ends before 10 minutes" in done.stderr
    assert "parameters" in done.stdout


@pytest.mark.parametrize("dropout", [None, 0.0])
@pytest.mark.parametrize("words", ["the same words again and again ", "日本語の文章です。"])
def test_the_expected_epochs_are_those_of_the_text(tmp_path, words, dropout):
    """However many tokens it has: no start advises against what the rule has chosen."""
    lines = [f"{words}{i * 7919 % 10007}" for i in range(6000)]
    (tmp_path / "a.txt").write_text("\n".join(lines))
    keys = [f"data.cache_dir={tmp_path}", "train.device=cpu", "train.compile=false"]
    most = 24.0
    if dropout is not None:
        keys.append(f"model.dropout={dropout}")
        most = 10.0
    options = [CONFIG, f"data.path={tmp_path / 'a.txt'}", "train.max_minutes=600", *keys]
    done = run_script("scripts/plan.py", *options, "--no-steps", "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert f"{most:.0f} epochs expected; ends before 600 minutes" in done.stderr
    assert 0.98 * most < plan["epochs"] <= most
    assert plan["recommendation"] == ["the run fits; no changes needed"]


def test_a_run_that_the_rule_ends_is_not_advised_against_it(text_file, tmp_path):
    keys = ["train.max_minutes=600", f"data.cache_dir={tmp_path}", "train.eval_every=null",
            "train.compile=false", "train.device=cpu", "train.sample_every=null"]  # fmt: skip
    done = run_script(
        "train.py", CONFIG, f"data.path={text_file}", f"run.dir={tmp_path / 'run'}", *keys
    )
    assert done.returncode == 0, done.stderr
    assert "24 epochs expected; ends before 600 minutes" in done.stderr
    printed = done.stdout + done.stderr
    for words in ("memorize it", "train longer", "underfitted", "twice the minutes"):
        assert words not in printed
