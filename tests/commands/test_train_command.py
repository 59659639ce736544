"""train.py as a user meets it: runs, resumes, signals, mistakes. Every test starts the real
command."""

import contextlib
import math
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
import torch
import yaml
from conftest import ROOT, TINY_OVERRIDES, run_script, start_script
from pseudo_terminal import open_terminal
from safetensors.torch import load_file
from training_runs import (
    assert_same_tensors,
    checkpoint_steps,
    last_step,
    read_metrics,
    train_losses,
    wait_for,
)

from thinker import checkpoint
from thinker.interop import load


def test_a_run_leaves_what_is_promised(tiny_run):
    lines = read_metrics(tiny_run)
    train = [line for line in lines if "train_loss" in line]
    val = [line for line in lines if "val_loss" in line]
    assert [line["step"] for line in train] == list(range(1, 41))
    assert [line["step"] for line in val] == [*range(3, 40, 3), 40]
    assert not any("train_loss" in line and "val_loss" in line for line in lines)
    needed = {"tokens", "lr", "grad_norm", "tokens_per_second", "peak_memory_bytes", "elapsed_s"}
    assert all(needed <= line.keys() for line in train)
    assert all("val_bits_per_byte" in line for line in val)
    assert (
        40 * 4 * 32 - 32 <= train[-1]["tokens"] <= 40 * 4 * 32
    )  # an epoch's last window may be shorter
    assert val[-1]["val_loss"] < val[0]["val_loss"]
    assert [line["elapsed_s"] for line in lines] == sorted(line["elapsed_s"] for line in lines)
    resolved = yaml.safe_load((tiny_run / "config.yaml").read_text())
    assert resolved["model"]["d_model"] == 32
    unset = {key for key, value in resolved["model"].items() if value is None}
    assert unset == {
        "window",
        "rope_scaling",
        "attn_logit_softcap",
        "no_rope_layers",
        "n_kv_heads_per_layer",
        "rope_dim",
        "window_rope_theta",
        "attention_scale",
        "logit_softcap",
    }  # what there is to follow is followed
    assert resolved["train"]["micro_batch_size"] == 4
    assert resolved["train"]["precision"] == "fp32"
    assert (tiny_run / "loss.png").read_bytes().startswith(b"\x89PNG")
    names = sorted(path.name for path in (tiny_run / "checkpoints").iterdir())
    assert [name for name in names if name.startswith("step-")] == [
        "step-00000038",
        "step-00000040",
    ]
    best = min(val, key=lambda line: line["val_loss"])["step"]
    assert [name for name in names if name.startswith("best-")] == [f"best-{best:08d}"]


def test_a_line_for_several_steps_holds_their_mean(train_args, tiny_run, tmp_path):
    run = tmp_path / "run"
    done = run_script(
        *train_args,
        f"run.dir={run}",
        "train.max_steps=40",
        "train.log_every=7",
        "train.eval_every=null",
    )
    assert done.returncode == 0, done.stderr
    each = {line["step"]: line for line in read_metrics(tiny_run) if "train_loss" in line}
    lines = [line for line in read_metrics(run) if "train_loss" in line]
    assert [line["step"] for line in lines] == [7, 14, 21, 28, 35]
    for line in lines:
        seven = [each[step]["train_loss"] for step in range(line["step"] - 6, line["step"] + 1)]
        assert line["train_loss"] == pytest.approx(sum(seven) / 7, rel=1e-9)
        assert (line["grad_norm"], line["lr"]) == (
            each[line["step"]]["grad_norm"],
            each[line["step"]]["lr"],
        )


NO_EVAL_NO_SAVE = ["train.eval_every=null", "train.save_every=null"]


def test_it_writes_the_end_to_standard_output_and_progress_to_standard_error(train_args, tmp_path):
    done = run_script(*train_args, f"run.dir={tmp_path / 'run'}")
    assert done.returncode == 0
    assert "finished: 6 steps, 768 tokens" in done.stdout
    assert "validation loss" in done.stdout
    assert "loss.png" in done.stdout
    assert "tokens/s" in done.stderr


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_run_in_two_parts_equals_one_in_one(train_args, tmp_path, optimizer):
    """With dropout and accumulation, so that random state and micro-batches matter."""
    options = [f"optimizer.name={optimizer}", "model.dropout=0.1", "train.micro_batch_size=2", "train.schedule=wsd",
               "train.decay_fraction=0"]  # fmt: skip
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run_script(*train_args, f"run.dir={whole}", *options).returncode == 0
    assert (
        run_script(*train_args, f"run.dir={parts}", *options, "train.max_steps=3").returncode == 0
    )
    done = run_script(*train_args, f"run.dir={parts}", *options)
    assert done.returncode == 0, done.stderr
    assert "resuming from step 3" in done.stderr
    assert_same_tensors(whole, parts, 6)
    assert train_losses(whole) == train_losses(parts)


def test_the_same_command_after_the_end_changes_nothing(train_args, tiny_run):
    before = (tiny_run / "metrics.jsonl").read_bytes()
    config = (tiny_run / "config.yaml").read_bytes()
    done = run_script(*train_args, f"run.dir={tiny_run}", "train.max_steps=40", "optimizer.lr=0.5")
    assert done.returncode == 0
    assert "is finished; raise train.max_steps" in done.stderr
    assert "finished: 40 steps" in done.stdout
    assert (tiny_run / "metrics.jsonl").read_bytes() == before
    assert (tiny_run / "config.yaml").read_bytes() == config


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGHUP, 129), (signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_a_signal_saves_and_the_same_command_resumes(train_args, tmp_path, number, status):
    run = tmp_path / "run"
    command = [*train_args, f"run.dir={run}", "train.max_steps=100000", *NO_EVAL_NO_SAVE]
    process = start_script(*command)
    assert wait_for(lambda: last_step(run) >= 5, process), process.output()
    process.send_signal(number)
    _, stderr = process.communicate()
    assert process.returncode == status
    assert f"\n{number.name}: finishing this step and saving" in stderr
    assert "run the same command again to resume" in stderr
    assert "Traceback" not in stderr
    saved = checkpoint.list_checkpoints(run / "checkpoints")[-1]
    step = checkpoint.read_json(saved / "state.json")["step"]
    assert step == last_step(run) >= 5  # nothing that was logged is lost
    done = run_script(*command, f"train.max_steps={step + 3}")
    assert done.returncode == 0, done.stderr
    assert f"resuming from step {step}" in done.stderr
    assert list(train_losses(run)) == list(range(1, step + 4))


def test_a_kill_costs_no_more_than_the_steps_since_the_last_save(train_args, tmp_path):
    run = tmp_path / "run"
    command = [*train_args, f"run.dir={run}", "train.eval_every=null"]
    process = start_script(*command, "train.max_steps=100000")
    assert wait_for(lambda: max(checkpoint_steps(run), default=0) >= 12, process), process.output()
    process.kill()
    process.wait()
    before = last_step(run)
    done = run_script(*command, f"train.max_steps={before + 10}")
    assert done.returncode == 0, done.stderr
    resumed = int(done.stderr.split("resuming from step ")[1].split()[0])
    assert resumed >= max(12, before - 2)
    assert list(train_losses(run)) == list(range(1, before + 11))


def test_a_half_written_checkpoint_is_passed_over_and_said_so(train_args, tiny_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    newest = run / "checkpoints" / "step-00000040" / "training.safetensors"
    os.truncate(newest, newest.stat().st_size // 2)
    done = run_script(*train_args, f"run.dir={run}", "train.max_steps=41")
    assert done.returncode == 0
    assert f"skipping a damaged checkpoint: {newest} is damaged" in done.stderr
    assert "resuming from step 38" in done.stderr
    assert list(train_losses(run)) == list(range(1, 42))


@pytest.mark.parametrize("keep_last", [1, 2])
def test_a_damaged_checkpoint_never_costs_a_good_one(train_args, tiny_run, tmp_path, keep_last):
    """It counts neither as one of the last nor as the end of the run that is trained again."""
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    newest = run / "checkpoints" / "step-00000040"
    os.truncate(newest / "model.safetensors", 100)
    done = run_script(
        *train_args, f"run.dir={run}", "train.max_steps=40", f"train.keep_last={keep_last}"
    )
    assert done.returncode == 0
    assert "resuming from step 38" in done.stderr
    assert len(checkpoint.list_checkpoints(run / "checkpoints")) == keep_last
    checkpoint.verify(newest)
    assert (newest.parent / "damaged-step-00000040" / "model.safetensors").stat().st_size == 100


def test_what_a_killed_first_attempt_left_is_no_hindrance(train_args, tmp_path):
    """Lines without a checkpoint, the last of them cut off, and half a checkpoint under its
    temporary name."""
    run = tmp_path / "run"
    (run / "checkpoints" / ".step-00000003.77.tmp").mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"step": 6, "val_loss": 0.1}\n{"step": 1, "tok')
    done = run_script(*train_args, f"run.dir={run}")
    assert done.returncode == 0, done.stderr
    lines = read_metrics(run)
    assert [line["step"] for line in lines if "train_loss" in line] == list(range(1, 7))
    assert lines[-1]["val_loss"] > 1
    assert not [path for path in (run / "checkpoints").iterdir() if path.name.startswith(".")]


def test_the_best_of_a_run_that_was_killed_before_its_first_save_is_put_aside(
    train_args, tiny_run, tmp_path
):
    """With the tokenizer that it belongs to, although the run that begins anew has another."""
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    for folder in checkpoint.list_checkpoints(run / "checkpoints"):
        shutil.rmtree(folder)
    (best,) = checkpoint.list_checkpoints(run / "checkpoints", "best")
    done = run_script(*train_args, f"run.dir={run}", "data.tokenizer=byte")
    assert done.returncode == 0, done.stderr
    assert list(train_losses(run)) == list(range(1, 7))
    kept, tokenizer = load(run / "checkpoints" / f"earlier-{best.name}")
    assert kept.config.vocab_size == tokenizer.vocab_size == 300
    assert load(run)[1].vocab_size == 257


def test_a_worse_model_never_replaces_the_best_after_going_back(train_args, tiny_run, tmp_path):
    """Going on from an older checkpoint, with rates that learn nothing."""
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    shutil.rmtree(run / "checkpoints" / "step-00000040")
    (best,) = checkpoint.list_checkpoints(run / "checkpoints", "best")
    assert best.name == "best-00000040"
    before = checkpoint.read_json(best / "state.json")
    slow = [f"optimizer.{name}=1e-6" for name in ("lr", "embedding_lr", "head_lr", "norm_lr")]
    done = run_script(*train_args, f"run.dir={run}", "train.max_steps=40", *slow)
    assert done.returncode == 0, done.stderr
    assert "changed since the last save: " in done.stderr
    assert "optimizer.norm_lr 0.005 -> 1e-06" in done.stderr
    assert checkpoint.read_json(best / "state.json") == before
    assert (
        checkpoint.read_json(run / "checkpoints/step-00000040/state.json")["best_val_loss"]
        == before["val_loss"]
    )
    # Measured on other windows, the numbers do not compare: what is best is found anew.
    again = run_script(
        *train_args, f"run.dir={run}", "train.max_steps=41", "train.eval_sequences=2", *slow
    )
    assert again.returncode == 0, again.stderr
    assert [p.name for p in checkpoint.list_checkpoints(run / "checkpoints", "best")] == [
        "best-00000041"
    ]


@pytest.mark.parametrize("replaced", [False, True])
def test_a_training_whose_folder_was_removed_stops_and_writes_into_no_other(
    train_args, tmp_path, replaced
):
    run = tmp_path / "run"
    process = start_script(
        *train_args, f"run.dir={run}", "train.max_steps=100000", "train.save_every=20"
    )
    assert wait_for(lambda: checkpoint_steps(run), process), process.output()
    run.rename(tmp_path / "away")
    if replaced:
        (run / "checkpoints").mkdir(parents=True)
        (run / ".lock").write_text("of another")
    _, stderr = process.communicate()
    assert process.returncode == 1
    assert "during training; set run.dir to its new path" in stderr.splitlines()[-1]
    assert "Traceback" not in stderr
    assert not run.exists() or not list((run / "checkpoints").iterdir())


def test_links_in_a_run_directory_lead_nowhere(train_args, tiny_run, tmp_path):
    run, mine = tmp_path / "run", tmp_path / "mine"
    shutil.copytree(tiny_run, run)
    mine.write_text("precious")
    for name in ("config.yaml", "tracking.json", ".owner", "loss.png"):
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(mine)
    done = run_script(*train_args, f"run.dir={run}", "train.max_steps=42")
    assert done.returncode == 0, done.stderr
    assert mine.read_text() == "precious"
    (run / ".lock").unlink()
    (run / ".lock").symlink_to(mine)
    assert run_script(*train_args, f"run.dir={run}", "train.max_steps=43").returncode == 2
    assert mine.read_text() == "precious"


def test_a_finished_run_without_its_metrics_says_so(train_args, tiny_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    (run / "metrics.jsonl").write_text('{"step": 40, "val_loss": "x"}\n')
    done = run_script(*train_args, f"run.dir={run}", "train.max_steps=40")
    assert done.returncode == 0, done.stderr
    assert "metrics.jsonl does not contain the result" in done.stderr


@pytest.mark.parametrize("stderr", ["closed", "/dev/full"])
def test_a_training_needs_no_standard_error(train_args, tmp_path, stderr):
    assert start_script(*train_args, f"run.dir={tmp_path / 'run'}", stderr=stderr).wait() == 0


@pytest.mark.parametrize("moment", ["verify", "load_model"])
def test_a_run_can_be_read_while_it_is_trained(tiny_run, tmp_path, monkeypatch, moment):
    """The training may save a new checkpoint and remove the one that is just being verified or
    loaded."""
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    old, new = (run / "checkpoints" / f"step-000000{step}" for step in (38, 40))
    away = new.rename(tmp_path / new.name)
    module = sys.modules[
        "thinker.checkpoint.listing" if moment == "verify" else "thinker.interop.load"
    ]
    function, calls = getattr(module, moment), []

    def train_first(folder, *args):
        calls.append(folder.name)
        if not new.exists():
            away.rename(new)
            shutil.rmtree(old)
        return function(folder, *args)

    monkeypatch.setattr(module, moment, train_first)
    model, _ = load(run)
    assert calls == ["step-00000038", "step-00000040"]
    expected = checkpoint.load_model(new)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True)
    )


def test_a_key_that_is_newer_than_a_run_is_no_change(train_args, tiny_run, tmp_path):
    """A run of an earlier version goes on where the new key has its default."""
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    folder = run / "checkpoints" / "step-00000040"
    state = checkpoint.read_json(folder / "state.json")
    del state["settings"]["model"]["head_init_std"], state["settings"]["data"]["streaming"]
    files = {name: load_file(folder / f"{name}.safetensors") for name in ("model", "training")}
    files = {f"{name}.safetensors": tensors for name, tensors in files.items()}
    files |= {"config.json": checkpoint.read_json(folder / "config.json"), "state.json": state}
    checkpoint.write_checkpoint(folder, files)
    done = run_script(*train_args, f"run.dir={run}", "train.max_steps=41")
    assert done.returncode == 0, done.stderr
    refused = run_script(
        *train_args, f"run.dir={run}", "train.max_steps=42", "model.head_init_std=0.1"
    )
    assert refused.returncode == 2
    assert "model.head_init_std is 0.1, but the run in" in refused.stderr


def test_two_trainings_do_not_share_a_directory(train_args, tmp_path):
    run = tmp_path / "run"
    process = start_script(*train_args, f"run.dir={run}", "train.max_steps=100000")
    try:
        assert wait_for(lambda: last_step(run), process), process.output()
        done = run_script(*train_args, f"run.dir={run}", "train.max_steps=100000")
        assert done.returncode == 2
        owner = rf"another process is training in .* \(process {process.pid} on .*\)"
        assert re.search(owner, done.stderr.splitlines()[-1])
    finally:
        process.kill()
        process.wait()
    assert (run / ".lock").exists()
    assert (
        run_script(
            *train_args, f"run.dir={run}", f"train.max_steps={last_step(run) + 4}"
        ).returncode
        == 0
    )


def test_a_run_that_diverges_keeps_what_it_had(train_args, tmp_path):
    run = tmp_path / "run"
    assert run_script(*train_args, f"run.dir={run}", "optimizer.name=adamw").returncode == 0
    options = ["optimizer.name=adamw", "optimizer.lr=1e38", "train.max_steps=20"]
    done = run_script(*train_args, f"run.dir={run}", *options)
    assert done.returncode == 1
    assert "the weights are unchanged" in done.stderr.splitlines()[-1]
    assert "Lower optimizer.lr" in done.stderr.splitlines()[-1]
    for kind in ("step", "best"):
        kept = checkpoint.list_checkpoints(run / "checkpoints", kind)
        assert kept
        for folder in kept:
            checkpoint.verify(folder)
            tensors = load_file(folder / "model.safetensors").values()
            assert all(tensor.isfinite().all() for tensor in tensors)


def test_accumulation_changes_nothing_but_rounding(train_args, tmp_path):
    losses = []
    for micro in (4, 1):
        run = tmp_path / str(micro)
        options = [
            "optimizer.name=adamw",
            "optimizer.lr=0.002",
            "optimizer.eps=1e-6",
            f"train.micro_batch_size={micro}",
        ]
        assert run_script(*train_args, f"run.dir={run}", *options).returncode == 0
        losses.append(list(train_losses(run).values()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_time_ends_a_run_and_its_schedule(train_args, tmp_path):
    """By the run's own clock: the first step that ends after max_minutes is the last, and the rate
    follows."""
    run = tmp_path / "run"
    done = run_script(*train_args, f"run.dir={run}", "train.max_steps=null", "train.max_minutes=0.02",
                      "train.warmup_steps=0", "train.schedule=cosine", "train.min_lr_ratio=0",
                      "train.fit_bigrams=off", *NO_EVAL_NO_SAVE)  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line for line in read_metrics(run) if "train_loss" in line]
    ends = [line["elapsed_s"] for line in lines]
    assert ends[-1] >= 1.2
    assert all(end < 1.2 for end in ends[:-1])
    for line, begin in zip(lines, [0.0, *ends]):
        assert line["lr"] == pytest.approx(
            0.02 * (1 + math.cos(math.pi * begin / 1.2)) / 2, abs=1e-4
        )


# Train without the C++ that inductor would compile, for a minute: what dynamo has traced is run
# operation by operation.
TRACE_ONLY = """
import functools, runpy, sys
import torch

torch.compile = functools.partial(torch.compile, backend="aot_eager")
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.stress), "bf16"])
def test_compiled_equals_eager(train_args, tmp_path, precision, stress):
    losses = []
    script = tmp_path / "trace_only.py"
    script.write_text(TRACE_ONLY)
    for compiled in ("false", "true"):
        run = tmp_path / compiled
        options = [
            "optimizer.name=adamw",
            "optimizer.lr=0.002",
            "optimizer.eps=1e-6",
            f"train.precision={precision}",
        ]
        command = [
            *([] if stress else [script]),
            *train_args,
            f"run.dir={run}",
            *options,
            f"train.compile={compiled}",
        ]
        assert start_script(*command).wait() == 0
        losses.append(list(train_losses(run).values()))
        names = load_file(run / "checkpoints" / "step-00000006" / "model.safetensors").keys()
        assert not any("_orig_mod" in name for name in names)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_bf16_follows_fp32(train_args, tmp_path):
    ends = []
    for precision in ("fp32", "bf16"):
        run = tmp_path / precision
        assert (
            run_script(
                *train_args, f"run.dir={run}", f"train.precision={precision}", "train.max_steps=30"
            ).returncode
            == 0
        )
        ends.append(read_metrics(run)[-1]["val_loss"])
    assert ends[1] == pytest.approx(ends[0], rel=0.02)


def test_samples_appear_while_training(train_args, tmp_path):
    done = run_script(*train_args, f"run.dir={tmp_path / 'run'}", "train.sample_every=3", "train.sample_prompt=Line",
                      "train.save_every=3")  # fmt: skip
    assert "step 3: Line" in done.stderr
    assert "step 6: Line" in done.stderr


def test_a_log_has_whole_lines_of_progress(train_args, tmp_path):
    """Tokenizing, steps, samples, saves, evaluations: nothing is drawn over itself."""
    done = run_script(*train_args, f"run.dir={tmp_path / 'run'}", "train.sample_every=3", "train.save_every=3",
                      "train.eval_every=2", f"data.cache_dir={tmp_path / 'cache'}")  # fmt: skip
    assert done.returncode == 0
    assert "\r" not in done.stderr
    lines = done.stderr.splitlines()
    assert any(
        re.match(r"tokenizing: 100%, [\d,]+ tokens, [\d,]+ tokens/s \[", line) for line in lines
    )
    last = [line for line in lines if re.match(r"\d+%, step", line)][-1]
    form = r"100%, step 6, epoch [\d.]+, loss [\d.]+, validation [\d.]+, [\d,]+ tokens/s .*\[\d+:\d+<00:00\]"
    assert re.fullmatch(form, last), last
    assert ", saving" not in done.stderr
    assert ", sampling" not in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudo-terminals")
def test_the_bar_on_a_terminal_says_why_it_stands_still(train_args, tmp_path):
    ours, its = open_terminal()
    command = [sys.executable, *train_args, f"run.dir={tmp_path / 'run'}"]
    process = subprocess.Popen([*command, "train.sample_every=3", "train.save_every=3"], cwd=ROOT,
                               stdout=subprocess.DEVNULL, stderr=its)  # fmt: skip
    os.close(its)
    shown = b""
    with contextlib.suppress(OSError):  # on Linux, when the process has ended
        while part := os.read(ours, 4096):
            shown += part
    os.close(ours)
    assert process.wait() == 0
    assert b"step 3, saving" in shown
    assert b"step 3, sampling" in shown
    assert b"\r100%|" in shown


# ------------------------------------------------------------------ mistakes: one line, status 2,
# nothing written


def mistake(tmp_path, *arguments, name="run"):
    done = run_script(
        ROOT / "train.py",
        *arguments,
        f"run.dir={tmp_path / name}",
        f"data.cache_dir={tmp_path / 'c'}",
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert len(lines) == 1, done.stderr
    assert done.stderr.splitlines()[-1] == lines[0]
    assert not (tmp_path / name / "metrics.jsonl").exists()
    return lines[0]


BASE = ROOT / "tests" / "fixtures" / "base.yaml"
TEXT = ["data.source=text", "data.max_documents=null"]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("model.n_layer=3", "did you mean model.n_layers?"),
        ("train.max_steps=many", "train.max_steps is 'many'"),
        ("model.n_kv_heads=3", "use 1, 2, 4"),
        ("model.max_seq_len=1", "is longer than model.max_seq_len (1)"),
        ("data.source=tails", "tales"),
        ("data.tokenizer=bep:4096", "bpe"),
        ("data.path=x.txt", "data.path"),
        ("optimizer.name=sgd", "must be muon or adamw"),
    ],
)
def test_mistakes_in_the_config(tmp_path, override, says):
    assert says in mistake(tmp_path, BASE, override)


def test_a_device_that_is_not_there(tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("here the device is there")
    assert "device 'cuda' is not available (available: cpu)" in mistake(
        tmp_path, BASE, "train.device=cuda"
    )


def test_fp16_on_a_cpu(tmp_path):
    assert "cannot train on a CPU" in mistake(
        tmp_path, BASE, "train.precision=fp16", "train.device=cpu"
    )


def test_vocabulary_smaller_than_the_tokenizers(tmp_path, text_file):
    said = mistake(
        tmp_path,
        BASE,
        *TEXT,
        f"data.path={text_file}",
        "data.tokenizer=byte",
        "model.vocab_size=200",
    )
    assert "model.vocab_size (200) is smaller than the tokenizer's (257)" in said


def test_missing_config(tmp_path):
    said = mistake(tmp_path, "configs/quikstart.yaml")
    assert said.endswith("did you mean configs/quickstart.yaml?")
    (tmp_path / "my-own.yaml").touch()
    said = mistake(tmp_path, tmp_path / "my-won.yaml")
    assert said.endswith(f"did you mean {tmp_path / 'my-own.yaml'}?")


def test_missing_file(tmp_path):
    said = mistake(tmp_path, BASE, *TEXT, f"data.path={tmp_path / 'none.txt'}")
    assert "none.txt" in said


def test_empty_corpus(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    said = mistake(tmp_path, BASE, *TEXT, f"data.path={tmp_path / 'empty.txt'}")
    assert "empty" in said or "no text" in said


def test_a_corpus_shorter_than_one_window(tmp_path):
    (tmp_path / "short.txt").write_text("Too short to fill a window, but not empty.")
    said = mistake(
        tmp_path, BASE, *TEXT, f"data.path={tmp_path / 'short.txt'}", "data.tokenizer=byte"
    )
    assert "data.seq_len" in said


def test_text_that_is_not_utf8(tmp_path):
    (tmp_path / "latin.txt").write_bytes("caf\xe9 ".encode("latin-1") * 1000)
    said = mistake(tmp_path, BASE, *TEXT, f"data.path={tmp_path / 'latin.txt'}")
    assert "UTF-8" in said
    assert "latin.txt" in said


def test_a_run_directory_that_cannot_be_made(tmp_path, text_file):
    (tmp_path / "file").write_text("in the way")
    done = run_script(ROOT / "train.py", BASE, *TINY_OVERRIDES, *TEXT, f"data.path={text_file}",
                      f"run.dir={tmp_path / 'file' / 'run'}", f"data.cache_dir={tmp_path / 'c'}")  # fmt: skip
    assert done.returncode == 2
    assert "run.dir" in done.stderr.splitlines()[-1]


def test_a_text_that_has_changed_its_tokenizer(train_args, tmp_path, text_file):
    mine = tmp_path / "mine.txt"
    mine.write_text(text_file.read_text())
    command = [
        *train_args,
        f"run.dir={tmp_path / 'run'}",
        f"data.path={mine}",
        "data.tokenizer=bpe:270",
    ]
    assert run_script(*command).returncode == 0
    mine.write_text("zebra quagga okapi " * 2000 + text_file.read_text())
    done = run_script(*command, "train.max_steps=8")
    assert done.returncode == 2
    assert (
        f"data.path={mine} has changed since the run in {tmp_path / 'run'} started"
        in done.stderr.splitlines()[-1]
    )


def test_a_sample_prompt_longer_than_the_context(train_args, tmp_path):
    done = run_script(
        *train_args,
        f"run.dir={tmp_path / 'run'}",
        "train.sample_every=3",
        f"train.sample_prompt={'x ' * 99}",
    )
    assert done.returncode == 2
    assert "shorten it" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "change",
    [
        "model.d_model=64",
        "data.seq_len=16",
        "optimizer.name=adamw",
        "run.seed=9",
        "train.batch_size=2",
    ],
)
def test_a_run_cannot_go_on_as_another(train_args, tiny_run, tmp_path, change):
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    before = (run / "metrics.jsonl").read_bytes()
    done = run_script(*train_args, f"run.dir={run}", change)
    assert done.returncode == 2
    assert f"error: {change.split('=')[0]} is" in done.stderr
    assert "choose another run.dir" in done.stderr
    assert (run / "metrics.jsonl").read_bytes() == before


def test_a_run_whose_checkpoints_are_all_broken(train_args, tiny_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    for folder in checkpoint.list_checkpoints(run / "checkpoints"):
        (folder / "manifest.json").unlink()
    done = run_script(*train_args, f"run.dir={run}")
    assert done.returncode == 2
    assert "are damaged" in done.stderr.splitlines()[-1]


def test_a_command_line_without_a_config():
    done = run_script(ROOT / "train.py")
    assert done.returncode == 2
    assert "CONFIG" in done.stderr


def test_scripts_start_from_any_folder(tmp_path):
    done = run_script(ROOT / "train.py", "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert "CONFIG" in done.stdout.upper()


def test_a_run_that_was_copied_does_not_train_the_original(train_args, tmp_path):
    first, copied = tmp_path / "first", tmp_path / "copied"
    assert run_script(*train_args, f"run.dir={first}", "train.max_steps=2").returncode == 0
    shutil.copytree(first, copied)
    again = [train_args[0], copied / "config.yaml", "train.max_steps=3"]
    done = run_script(*again)
    assert done.returncode == 2
    assert done.stderr.strip().endswith(f"add run.dir={copied}")
    assert run_script(*again, f"run.dir={copied}").returncode == 0
    assert run_script(train_args[0], first / "config.yaml", "train.max_steps=4").returncode == 0
    assert [last_step(folder) for folder in (first, copied)] == [4, 3]
