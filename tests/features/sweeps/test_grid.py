"""Settings of a sweep: values with commas, multipliers, and names of folders."""

import itertools

import pytest
from conftest import ROOT

from thinker.features.sweeps.grid import make_settings, numbers_of, parse_grid, parse_variants
from thinker.training.config.load import load_config

CONFIG = ROOT / "tests" / "fixtures" / "base.yaml"


def test_commas_divide_values_outside_brackets_and_quotes():
    grid = parse_grid(["a.b=1,2e-3", "a.c=[1,2],[3],{x: 1, y: 2}", "a.d='p,q',\"r,s\",t"])
    assert grid == {
        "a.b": ["1", "2e-3"],
        "a.c": ["[1,2]", "[3]", "{x: 1, y: 2}"],
        "a.d": ["'p,q'", '"r,s"', "t"],
    }
    assert parse_variants(["plain:", "a b: c.d=1 e.f=x:y"]) == {
        "plain": {},
        "a b": {"c.d": "1", "e.f": "x:y"},
    }


def test_every_variant_has_every_combination():
    grid = parse_grid(["optimizer.lr=0.01,0.02", "model.d_model=32,64"])
    variants = parse_variants(["plain:", "with dropout: model.dropout=0.1"])
    settings = make_settings(CONFIG, [], grid, variants)
    expected = [
        (name, lr, width)
        for name, lr, width in itertools.product(variants, ("0.01", "0.02"), ("32", "64"))
    ]
    assert [setting.name for setting in settings] == [
        f"{name} optimizer.lr={lr} model.d_model={width}" for name, lr, width in expected
    ]
    assert settings[-1].folder_name == "with-dropout-lr-0.02-d_model-64"
    assert len({setting.folder_name for setting in settings}) == 8
    config = load_config(CONFIG, list(settings[-1].overrides))
    assert (config.optimizer.lr, config.model.d_model, config.model.dropout) == (0.02, 64, 0.1)


@pytest.mark.parametrize(("width", "batch_size"), [(32, 4), (128, 16)])
def test_multipliers_are_of_the_default_at_the_other_values(width, batch_size):
    """Half of the default of the head, and half of a plain key, which the config has as 6."""
    keys = [f"model.d_model={width}", f"train.batch_size={batch_size}", "train.warmup_steps=1"]
    grid = parse_grid(["optimizer.head_lr=x0.5,x1", "train.max_steps=x0.5"])
    half, same = make_settings(CONFIG, keys, grid, {})
    values = [dict(override.split("=") for override in each.overrides) for each in (half, same)]
    rates = [float(each["optimizer.head_lr"]) for each in values]
    assert rates[1] == pytest.approx(2 * rates[0])
    assert values[0]["train.max_steps"] == "3"
    # Of another setting: the same as the default of a config with its values.
    (wide, *_) = make_settings(
        CONFIG, [], parse_grid([f"model.d_model={width}", "optimizer.lr=x1"]), {}
    )
    (plain,) = make_settings(
        CONFIG, [f"model.d_model={width}"], parse_grid(["optimizer.lr=x1"]), {}
    )
    assert wide.overrides[1:] == plain.overrides


def test_numbers_are_plain_or_multipliers():
    assert numbers_of(["0.1", "2"]) == [0.1, 2.0]
    assert numbers_of(["x0.1", "x2"]) == [0.1, 2.0]
    assert numbers_of(["x0.1", "2"]) is None
    assert numbers_of(["full", "2"]) is None
    assert numbers_of(["inf", "2"]) is None
