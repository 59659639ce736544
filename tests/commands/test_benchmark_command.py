"""scripts/benchmark.py as a user meets it, on a model small enough to be timed in seconds."""

import json
import math

import numpy as np
import pytest
import torch
import yaml
from conftest import ROOT, run_script
from hypothesis import given, settings
from hypothesis import strategies as st

from thinker.benchmarks.ablation import ALWAYS, CONFIGS, FORMS
from thinker.benchmarks.scaling import PowerLaw
from thinker.benchmarks.training_runs import Training, train_all
from thinker.model import Thinker, ThinkerConfig
from thinker.model.patterns import NAMES
from thinker.runtime.errors import UserError
from thinker.training.config import load_config
from thinker.training.metrics import flops_per_token

BENCHMARK = ROOT / "scripts" / "benchmark.py"


def test_decode_beside_transformers_from_any_folder(tmp_path):
    done = run_script(
        BENCHMARK, "decode", "--shape", "tiny", "--device", "cpu", "--prompt", "8", "--new", "6", "--repeats", "2",
        "--subjects", "transformers-fp32,fp32,bf16@3,int8", "--out", "line.json", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert json.loads((tmp_path / "line.json").read_text()) == result
    assert [(row["name"], row["batch"]) for row in result["rows"]] == [
        ("transformers-fp32", 1), ("fp32", 1), ("bf16", 3), ("int8", 1),
    ]  # fmt: skip
    # 2 layers of 4·64² + 3·64·128 weights, a head of 512·64, and 5 gains of 64, in fp32; K and V at 8 + 3 positions.
    weights = 2 * (4 * 64**2 + 3 * 64 * 128) + 512 * 64 + 5 * 64
    assert result["rows"][1]["step_bytes"] == 4 * weights + 2 * 2 * 64 * 11 * 4
    assert result["rows"][0]["step_bytes"] == result["rows"][1]["step_bytes"]
    assert all(row["decode_tokens_per_second"] > 0 for row in result["rows"])
    assert {"command", "date", "processor", "torch"} <= result["machine"].keys()


def test_lengths_and_their_picture(tmp_path):
    done = run_script(
        BENCHMARK, "decode", "--shape", "tiny", "--device", "cpu", "--lengths", "--repeats", "2", "--png", "a.png",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])["lengths"]
    assert [row["length"] for row in rows] == [64, 128, 256, 512, 1024, 2048, 4096]
    assert rows[-1]["full_cache_bytes"] == 64 * rows[0]["full_cache_bytes"]
    assert rows[-1]["window_cache_bytes"] == rows[0]["window_cache_bytes"]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--subjects", "fp33"], "fp33 is nothing to measure"),
        (["--new", "1"], "--new and --prompt must be at least 2"),
        (["--device", "gpu"], "the device gpu is not there"),
    ],
)
def test_mistakes(arguments, says):
    done = run_script(BENCHMARK, "decode", "--shape", "tiny", *arguments)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert says in done.stderr


def test_train_beside_transformers(tmp_path):
    done = run_script(
        BENCHMARK, "train", "--shape", "tiny", "--device", "cpu", "--precision", "fp32", "--repeats", "2",
        "--no-compile", "--png", "rates.png", "--out", "train.jsonl", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result == json.loads((tmp_path / "train.jsonl").read_text())
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")
    assert min(result["peak_memory_bytes"].values()) > 0
    names = {"thinker eager, adamw", "thinker eager, muon", "transformers eager, adamw"}
    assert result["tokens_per_second"].keys() == names
    for name in names:
        assert result["tokens_per_second"][name] == pytest.approx(4 * 32 / result["step_s"][name])
    speeds = result["tokens_per_second"]
    ratio = speeds["thinker eager, adamw"] / speeds["transformers eager, adamw"]
    assert result["ratios"] == {"thinker eager to transformers eager": pytest.approx(ratio)}


def test_head_beside_the_plain_one(tmp_path):
    done = run_script(
        BENCHMARK, "linear_cross_entropy", "--rows", "4096", "--width", "16", "--vocab", "5000", "--device", "cpu",
        "--precision",
        "fp32", "--repeats", "1", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["peak_bytes"]["plain"] > 2 * 4 * 4096 * 5000  # logits and their gradient
    assert result["ratios"]["memory"] < 1 / 3


def small_config(train_args, folder, name, *overrides):
    """The tiny run's config as a file of its own."""
    config = load_config(str(train_args[1]), [*train_args[2:], *overrides])
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return path


def test_race_to_a_loss(train_args, tmp_path):
    slow = small_config(
        train_args, tmp_path, "slow", "optimizer.name=adamw", "optimizer.lr=0.001", "train.eval_every=null"
    )
    fast = small_config(train_args, tmp_path, "fast", "train.eval_every=2")
    done = run_script(
        BENCHMARK, "train", "--configs", slow, fast, "--tune", "optimizer.lr=0.00001,0.001", "--set",
        "train.max_steps=10", "--png", "race.png", "--out", "race.jsonl", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result == json.loads((tmp_path / "race.jsonl").read_text())
    lazy, tuned, mine = result["rows"]
    assert tuned["val_loss"] < lazy["val_loss"]
    assert result["slow"] == tuned["name"] == "slow optimizer.lr=0.001"
    assert [row["step"] for row in result["rows"]] == [10, 10, 10]
    assert mine["val_loss"] < tuned["val_loss"]
    reached = result["reached"]
    assert reached["val_loss"] <= tuned["val_loss"]
    assert reached["step"] in (2, 4, 6, 8, 10)
    assert result["ratios"] == {key: reached[key] / tuned[key] for key in ("step", "tokens", "elapsed_s")}
    assert all(row["peak_memory_bytes"] > 0 for row in result["rows"])
    assert (tmp_path / "race.png").read_bytes().startswith(b"\x89PNG")
    done = run_script(BENCHMARK, "train", "--configs", fast, slow, "--set", "train.max_steps=4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["reached"], result["ratios"]) == (None, {})
    assert "slow does not come down to" in done.stdout


def test_where_one_training_fails_the_next_does_not_begin(tmp_path):
    configs = [ROOT / "configs" / f"{name}.yaml" for name in ("pysource", "quickstart")]
    trainings = [Training(config.stem, config, [], tmp_path / config.stem) for config in configs]
    (tmp_path / "pysource").write_text("a file is no folder for a run")
    with pytest.raises(UserError, match="^pysource: "):
        train_all(trainings)
    assert not (tmp_path / "quickstart").exists()


def test_race_against_gpt2(train_args, tmp_path):
    slow = small_config(
        train_args, tmp_path, "slow", "optimizer.name=adamw", "optimizer.lr=0.001", "optimizer.weight_decay=0.1",
        "train.max_steps=20", "model.n_kv_heads=null",
    )  # fmt: skip
    fast = small_config(train_args, tmp_path, "fast", "train.max_steps=5")
    done = run_script(BENCHMARK, "train", "--configs", slow, fast, "--gpt2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    theirs, ours = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert (theirs["step"], ours["step"]) == (20, 5)
    assert 20 * 4 * 32 - 32 * 20 <= theirs["tokens"] <= 20 * 4 * 32
    assert theirs["val_loss"] < math.log(300)  # it learned


def test_sweep_around_a_config(train_args, tmp_path):
    config = small_config(train_args, tmp_path, "small", "model.n_kv_heads=null", "train.eval_every=null")
    command = [
        BENCHMARK, "sweep", config, "train.max_steps=8", "--vary", "optimizer.head_lr=x0.5", "--jobs", "2", "--png",
        "sweep.png",
    ]  # fmt: skip
    done = run_script(*command, "--shapes", "16x1x2,32x1x2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert [(row["shape"], row["key"], row["value"]) for row in rows] == [
        (shape, *neighbour) for shape in ("16x1x2", "32x1x2") for neighbour in (("", ""), ("optimizer.head_lr", "x0.5"))
    ]
    runs = tmp_path / "runs" / "sweep"
    for row in rows:
        name = f"{row['shape']}-head_lr-x0.5" if row["key"] else row["shape"]
        last = (runs / name / "metrics.jsonl").read_text().splitlines()[-1]
        assert json.loads(last)["val_loss"] == row["loss"]
        best = min(other["loss"] for other in rows if other["shape"] == row["shape"])
        assert row["above"] == row["loss"] / best - 1
        if row["key"]:
            assert row["at"] == 0.5 * row["config_at"] == 0.5 * 0.025  # the rule's 0.05, for 4 sequences a step
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    weights = runs / "16x1x2" / "checkpoints" / "step-00000008" / "model.safetensors"
    written = weights.stat().st_mtime_ns
    again = run_script(*command, "--shapes", "16x1x2", cwd=tmp_path)
    assert json.loads(again.stdout.splitlines()[-1])["rows"] == rows[:2]
    assert weights.stat().st_mtime_ns == written  # not trained again


def test_a_ladder_of_sizes_and_its_law(train_args, tmp_path):
    config = small_config(train_args, tmp_path, "small", "model.n_kv_heads=null")
    done = run_script(
        ROOT / "scripts" / "scaling.py", config, "train.eval_every=null", "--shapes", "8x1x2,16x1x2,24x1x2,32x1x2",
        "--tokens-per-parameter", "0.1", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert [row["shape"] for row in result["rows"]] == ["8x1x2", "16x1x2", "24x1x2", "32x1x2"]
    for row in result["rows"]:
        assert row["tokens"] == pytest.approx(0.1 * row["parameters"], abs=128 + 32)
        with torch.device("meta"):
            width, layers, heads = map(int, row["shape"].split("x"))
            model = Thinker(
                ThinkerConfig(vocab_size=300, d_model=width, n_layers=layers, n_heads=heads, max_seq_len=32)
            )
        assert row["parameters"] == sum(parameter.numel() for parameter in model.parameters())
        assert row["flops"] == flops_per_token(model, 32) * row["tokens"]
    assert not result["floor_known"]
    assert (tmp_path / "runs" / "scaling" / "scaling.png").read_bytes().startswith(b"\x89PNG")
    assert "ten times the largest one's compute" in done.stdout


@settings(max_examples=25, deadline=None)
@given(st.floats(0.3, 3), st.floats(0.5, 3), st.floats(0.05, 0.4), st.booleans())
def test_a_law_is_found_again(floor, above, exponent, known):
    compute = np.geomspace(1e12, 1e16, 6)
    scale = above * 1e12**exponent
    losses = floor + scale * compute**-exponent
    law = PowerLaw.fit(list(compute), list(losses), floor if known else None)
    assert law(1e17) == pytest.approx(floor + scale * 1e17**-exponent, rel=1e-9 if known else 1e-3)
    assert law.floor == pytest.approx(floor, abs=1e-9 if known else 0.02)
    assert law.exponent == pytest.approx(exponent, rel=1e-6 if known else 0.05)


def test_a_law_that_cannot_be():
    with pytest.raises(UserError, match="3 sizes do not show a law; it takes 4"):
        PowerLaw.fit([1, 2, 3], [3.0, 2.0, 1.0])
    with pytest.raises(UserError, match=r"a loss of 1.0000 lies below the floor of 1.5000"):
        PowerLaw.fit([1, 2, 3], [3.0, 2.0, 1.0], 1.5)


def test_what_exact_resume_costs(train_args, tmp_path):
    done = run_script(
        BENCHMARK,
        "checkpoint_overhead",
        *train_args[1:],
        "--rounds",
        "2",
        "--saves",
        "2",
        "--out",
        tmp_path / "line.json",
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert json.loads((tmp_path / "line.json").read_text()) == result
    assert result["foreground_save_s"] > result["copy_s"] > 0
    assert result["bookkeeping"] > 0
    assert {"delay_s", "delay_error_s", "after_s", "step_s", "parameters"} <= result.keys()


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["train", "--configs", "a.yaml", "b.yaml"], "there is no config a.yaml"),
        (["train", "--configs", "a.yaml", "b.yaml", "--tune", "optimizer.lr"], "names no values"),
        (
            ["train", "--configs", *[ROOT / "configs" / f"{name}.yaml" for name in ("pysource", "quickstart")]],
            "read different data",
        ),
        (["train", "--configs", *[ROOT / "configs" / "pysource.yaml"] * 2, "--gpt2"], "it needs optimizer.name=adamw"),
        (["sweep", "a.yaml", "--vary", "optimizer.lr"], "names no values"),
        (["sweep", "a.yaml", "--vary", "optimizer.lr=1", "--shapes", "64x4"], "'64x4' is no shape"),
        (["sweep", ROOT / "configs" / "pysource.yaml", "--vary", "optimizer.lr=xx"], "xx is no multiple"),
        (["sweep", ROOT / "configs" / "pysource.yaml", "--vary", "run.dir=x2"], "can only multiply a number"),
    ],
)
def test_mistakes_about_trainings(command, says, tmp_path):
    done = run_script(BENCHMARK, *command, cwd=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert says in done.stderr


def test_attention_by_form_kernel_and_length(tmp_path):
    done = run_script(
        BENCHMARK, "attention", "--forms", "full", "window(16)", "topk(4)", "linear(8)", "--kernels", "auto", "fold",
        "--lengths", "64,128,512", "--heads", "2", "--head-dim", "8", "--repeats", "1", "--png", "a.png", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    rows = {(row["form"], row["kernel"], row["length"]): row for row in result["rows"]}
    cases = [
        ("full", "auto"),
        ("window(16)", "auto"),
        ("window(16)", "fold"),
        ("topk(4)", "auto"),
        ("linear(8)", "auto"),
    ]
    assert [(fit["form"], fit["kernel"]) for fit in result["fits"]] == cases
    assert len(rows) == 3 * len(cases)
    assert rows["full", "auto", 512]["forward_flops"] == 4 * 2 * 8 * 512 * 513 / 2
    assert rows["window(16)", "auto", 64]["forward_flops"] == 4 * 2 * 8 * (64 * 16 - 15 * 16 / 2)
    assert rows["topk(4)", "auto", 64]["forward_flops"] == rows["full", "auto", 64]["forward_flops"]
    assert result["fits"][1]["memory_exponent"] < result["fits"][3]["memory_exponent"]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    wrong = run_script(BENCHMARK, "attention", "--lengths", "64,32")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)


def test_every_form_of_the_ablation_is_a_config(tmp_path):
    for file, batch_size, _ in CONFIGS.values():
        for keys in FORMS.values():
            config = load_config(ROOT / "benchmarks" / "configs" / file, [*ALWAYS, *keys])
            assert config.thinker_config(vocab_size=100).patterns
            assert config.train.batch_size >= batch_size
    spoken = " ".join(key for keys in FORMS.values() for key in keys)
    assert {name for name in NAMES if name != "full" and name not in spoken} == {"random"}  # which bigbird has
    wrong = run_script(BENCHMARK, "ablation", "--only", "linear(65)")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
    assert "there is no form 'linear(65)'; there are: full; window(32)" in wrong.stderr
