"""Training on sources that are tokenized meanwhile: kills, ranks and workers, mixtures, commands,
and mistakes."""

import json
import os
import random
import shutil
import signal
import threading

import pytest
import rank_workers
import yaml
from conftest import ROOT, run_script, start_script
from data_runs import check_killed_runs, check_samples, train_whole, trainer_of, write_config
from fork_server import run_ranks
from installed import missing_feature, needs
from training_runs import (
    assert_same_run,
    assert_same_tensors,
    checkpoint_steps,
    last_step,
    read_metrics,
    train_losses,
    wait_for,
)

from thinker.data.text.tables import jsonl, rows

STEPS, BUFFER = 30, 4 * 6 * 4 * 32  # blocks of 768 tokens, 6 steps


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A config with a stream of four files, which a run of STEPS steps reads more than once."""
    folder = tmp_path_factory.mktemp("stream")
    draw = random.Random(1)
    (folder / "rows").mkdir()
    for i in range(4):
        lines = (
            " ".join(str(draw.randrange(99)) for _ in range(draw.randrange(5, 60)))
            for _ in range(12)
        )
        (folder / "rows" / f"{i}.jsonl").write_text(
            "".join(json.dumps({"text": line}) + "\n" for line in lines)
        )
    data = {
        "source": "jsonl",
        "path": str(folder / "rows"),
        "buffer_tokens": BUFFER,
        "val_fraction": 0.2,
    }
    write_config(folder, data, max_steps=STEPS, batch_size=4, eval_every=10, save_every=3)
    return folder


@pytest.fixture(scope="module")
def whole(folder):
    """The run that nobody kills, and what it printed."""
    return train_whole(folder)


def test_the_command_trains_on_a_stream(whole):
    path, done = whole
    assert "data: a stream for training, " in done.stderr
    assert [file.name for file in (path / "streams" / "jsonl").iterdir()] == ["blocks.jsonl"]
    blocks = [
        json.loads(line)
        for line in (path / "streams" / "jsonl" / "blocks.jsonl").read_text().splitlines()
    ]
    assert blocks[-1]["epoch"] >= 1
    assert list(train_losses(path)) == list(range(1, STEPS + 1))
    assert "epochs: " in done.stdout


def test_killed_runs_end_at_the_same_bits(folder, whole, tmp_path, stress):
    """30 kills with --stress, at random moments, of training and of writing blocks, which are
    sometimes lost."""

    def lose_blocks(draw):
        if draw.random() < 0.3:
            shutil.rmtree(tmp_path / "run" / "streams", ignore_errors=True)

    check_killed_runs(folder, whole[0], tmp_path / "run", 30 if stress else 2, STEPS, lose_blocks)


def test_a_finished_run_resumes(folder, whole, tmp_path):
    """Its blocks were removed; also from an earlier checkpoint, and in a folder that has moved."""
    short, longer = ([f"train.max_steps={n}", "train.decay_fraction=0"] for n in (12, 24))
    command = [ROOT / "train.py", folder / "config.yaml"]
    assert run_script(*command, f"run.dir={tmp_path / 'whole'}", *longer).returncode == 0
    assert run_script(*command, f"run.dir={tmp_path / 'parts'}", *short).returncode == 0
    shutil.copytree(folder / "rows", tmp_path / "moved")
    moved = f"data.path={tmp_path / 'moved'}"
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "step-00000012")
    done = run_script(*command, f"run.dir={tmp_path / 'parts'}", *longer, moved)
    assert done.returncode == 0, done.stderr
    assert "resuming from step 9" in done.stderr
    assert_same_tensors(tmp_path / "whole", tmp_path / "parts", 24)
    with (tmp_path / "moved" / "0.jsonl").open("a") as file:
        file.write('{"text": "more"}\n')
    done = run_script(
        *command, f"run.dir={tmp_path / 'parts'}", *longer, moved, "train.max_steps=30"
    )
    assert done.returncode == 2
    assert "has changed since the run in" in done.stderr


@pytest.mark.parametrize(("size", "workers"), [(1, 0), (1, 4), (2, 1), (4, 2)])
def test_samples_do_not_depend_on_ranks_and_workers(folder, tmp_path, size, workers):
    check_samples(folder, tmp_path, size, workers, STEPS)


@pytest.fixture(scope="module")
def mixture(folder):
    """A config that mixes two streams and a source that is tokenized first."""
    config = yaml.safe_load((folder / "config.yaml").read_text())
    for key in ("source", "path", "buffer_tokens", "val_fraction"):
        del config["data"][key]
    config["data"]["sources"] = [
        {"source": "tales", "max_documents": 60, "weight": 0.4, "buffer_tokens": BUFFER},
        {
            "source": "pysource",
            "max_documents": 3,
            "val_fraction": 0.5324,
            "weight": {0: 0.2, 0.5: 0.4},
        },
        {
            "source": "jsonl",
            "path": str(folder / "rows"),
            "weight": 0.4,
            "buffer_tokens": BUFFER,
            "max_tokens": 900,
        },
    ]
    (folder / "mixture.yaml").write_text(yaml.safe_dump(config))
    return folder / "mixture.yaml"


@needs("mixtures")
def test_streams_in_a_mixture(mixture, tmp_path):
    """Two runs that were interrupted are the same as one that was not; each source counts, until
    its budget ends."""
    command, runs = [ROOT / "train.py", mixture], [tmp_path / "whole", tmp_path / "parts"]
    done = run_script(*command, f"run.dir={runs[0]}")
    assert done.returncode == 0, done.stderr
    assert [
        line.split("; ")[1]
        for line in done.stderr.splitlines()
        if "%" in line and "; a stream" in line
    ]
    process = start_script(*command, f"run.dir={runs[1]}")
    assert wait_for(lambda: last_step(runs[1]) >= 11, process)
    process.kill()
    process.wait()
    assert run_script(*command, f"run.dir={runs[1]}").returncode == 0
    assert_same_run(*runs, STEPS)
    lines = [line for line in read_metrics(runs[0]) if "train_loss" in line]
    assert any("train_loss/rows" in line for line in lines[:5])
    assert not any("train_loss/rows" in line for line in lines[-5:])
    assert sorted(path.name for path in (runs[0] / "streams").iterdir()) == ["rows", "tales"]


@pytest.fixture(params=["stream", pytest.param("mixture", marks=needs("mixtures"))])
def config_with_streams(request, folder):
    """A config of one stream, and one that mixes streams."""
    if request.param == "mixture":
        return request.getfixturevalue("mixture")
    return folder / "config.yaml"


def test_commands_on_a_config_with_streams(config_with_streams, tmp_path):
    done = run_script(ROOT / "scripts/plan.py", config_with_streams)
    assert done.returncode == 0, done.stderr
    assert "epoch" not in done.stdout
    page = tmp_path / "page.html"
    done = run_script(ROOT / "scripts/data.py", config_with_streams, "--step", 9, "--html", page)
    assert done.returncode == 0, done.stderr


def test_commands_on_a_run_with_a_stream(folder, whole, tmp_path):
    run, _ = whole
    done = run_script(ROOT / "scripts/eval.py", run, "--json")
    assert done.returncode == 0, done.stderr
    loss = json.loads(done.stdout)["losses"][0]["nats_per_token"]["mean"]
    assert loss == pytest.approx(read_metrics(run)[-1]["val_loss"])
    page = tmp_path / "page.html"
    trainer = trainer_of(folder, tmp_path)
    ids = trainer.loader.sample_ids(9)
    trainer.batches.close()
    done = run_script(ROOT / "scripts/data.py", folder / "config.yaml", "--step", 9, "--html", page)
    assert done.returncode == 0, done.stderr
    assert f"jsonl, sequence {ids[0]:,}, epoch 0." in page.read_text()


def test_a_run_that_reads_a_part_of_an_unknown_whole(folder, tmp_path):
    """A streamed dataset without a known size: the summary does not know the share that was
    read."""
    options = ["data.source=hub", "train.max_steps=8", f"run.dir={tmp_path / 'run'}"]
    done = run_script(ROOT / "train.py", folder / "config.yaml", *options)
    assert done.returncode == 0, done.stderr
    assert "after less than 1 epoch" in done.stdout
    before = sorted(path.name for path in (tmp_path / "run").rglob("*"))
    again = run_script(ROOT / "train.py", folder / "config.yaml", *options)
    assert again.returncode == 0, again.stderr
    assert "is finished" in again.stderr
    assert sorted(path.name for path in (tmp_path / "run").rglob("*")) == before  # nothing was read


def test_a_finished_run_does_not_need_its_text(folder, tmp_path):
    shutil.copytree(folder / "rows", tmp_path / "rows")
    options = [f"data.path={tmp_path / 'rows'}", "train.max_steps=4", f"run.dir={tmp_path / 'run'}"]
    assert run_script(ROOT / "train.py", folder / "config.yaml", *options).returncode == 0
    shutil.rmtree(tmp_path / "rows")
    done = run_script(ROOT / "train.py", folder / "config.yaml", *options)
    assert done.returncode == 0, done.stderr
    done = run_script(ROOT / "train.py", folder / "config.yaml", *options, "train.max_steps=8")
    assert done.returncode == 2
    assert f"data.path={tmp_path / 'rows'} does not exist" in done.stderr.splitlines()[-1]


def test_a_text_that_fits_into_the_buffer(folder, tmp_path):
    options = ["data.buffer_tokens=40000", "train.max_steps=2", f"run.dir={tmp_path / 'run'}"]
    done = run_script(ROOT / "train.py", folder / "config.yaml", *options)
    assert done.returncode == 0, done.stderr
    assert (
        "tokens of jsonl fit into its buffer; without buffer_tokens, it is tokenized once"
        in done.stderr
    )


def test_a_run_that_starts_over_leaves_no_blocks(folder, tmp_path):
    options = [f"run.dir={tmp_path / 'run'}", "train.save_every=null", "train.max_steps=100000"]
    process = start_script(ROOT / "train.py", folder / "config.yaml", *options)
    assert wait_for(lambda: last_step(tmp_path / "run") >= 5, process)
    process.kill()
    process.wait()
    assert list((tmp_path / "run" / "streams" / "jsonl").glob("block-*"))
    done = run_script(
        ROOT / "train.py", folder / "config.yaml", options[0], "data.buffer_tokens=null"
    )
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "run" / "streams").exists()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_that_is_not_finite_is_reported_after_its_block_is_gone(folder, tmp_path, ranks):
    options = ["optimizer.name=adamw", "optimizer.lr=5e37", "train.warmup_steps=0", "train.eval_every=null",
               "train.save_every=null", "train.log_every=30", f"run.dir={tmp_path / 'run'}"]  # fmt: skip
    if ranks == 1:
        done = run_script(ROOT / "train.py", folder / "config.yaml", *options)
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1].startswith("error: step 2: loss nan")
    else:
        with pytest.raises(AssertionError, match="step 2: loss nan"):
            run_ranks(2, rank_workers.train_and_record_inputs, str(folder / "config.yaml"), options)
    report = json.loads((tmp_path / "run" / "nonfinite-step-00000002.json").read_text())
    assert report["samples"] == []
    assert len(report["sample_ids"]) == 4


def test_a_signal_does_not_wait_for_the_text(folder, tmp_path, monkeypatch):
    """Of a source that hangs, here in the second epoch: the step that is done is saved."""
    hangs, waits, ends, read_rows = (
        threading.Event(),
        threading.Event(),
        threading.Event(),
        jsonl.read_rows,
    )
    read = []

    def read_until_it_hangs(path):
        if threading.current_thread().name == "stream":
            read.append(path)
            if len(read) > len(set(read)) + 1:
                hangs.set()
                ends.wait()
        yield from read_rows(path)

    def send_signal():
        hangs.wait()
        waits.clear()
        waits.wait()
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setitem(rows.READERS, "jsonl", read_until_it_hangs)
    trainer = trainer_of(folder, tmp_path, "train.max_steps=1000", "train.save_every=null")
    make_batch = trainer.batches.batch
    trainer.batches.batch = lambda step, is_interrupted: make_batch(
        step, lambda: waits.set() or is_interrupted()
    )
    threading.Thread(target=send_signal).start()
    assert trainer.train() == 128 + signal.SIGTERM
    ends.set()
    assert checkpoint_steps(tmp_path / "run") == [last_step(tmp_path / "run")]


def test_an_error_in_the_text_saves_first(folder, tmp_path):
    shutil.copytree(folder / "rows", tmp_path / "rows")
    options = [
        f"run.dir={tmp_path / 'run'}",
        f"data.path={tmp_path / 'rows'}",
        "data.max_documents=44",
    ]
    command = [ROOT / "train.py", folder / "config.yaml", *options]
    lines = (tmp_path / "rows" / "3.jsonl").read_text().splitlines()
    process = start_script(*command, "train.save_every=null", "train.max_steps=100000")
    assert wait_for(lambda: last_step(tmp_path / "run") >= 5, process)
    (tmp_path / "rows" / "3.jsonl").write_text("\n".join([*lines[:5], "{broken"]))
    assert process.wait() == 2
    last = process.output()[1].splitlines()[-1]
    assert "3.jsonl cannot be read: line 6 is not valid JSON" in last
    (step,) = checkpoint_steps(tmp_path / "run")
    assert f"saved step {step}" in last
    assert last_step(tmp_path / "run") == step


MISTAKES = [
    (["data.buffer_tokens=1000"], "buffer_tokens=1000 of jsonl is too small for train.batch_size=4, data.seq_len=32"),
    (["data.buffer_tokens=0"], "data.buffer_tokens"),
    (["data.clean.min_characters=9"], "data.clean cannot be combined with buffer_tokens"),
    (["data.shift_windows=true"], "data.shift_windows has no effect with buffer_tokens; remove it"),
    (["data.source=text", "data.path=README.md"], "data.path=README.md is a single text; set it to null"),
    (["data.path=none"], "data.path=none does not exist"),
    (["data.column=x"], "data.column=x is not in row 0"),
    (["data.sources=[{source: tales}]", "data.source=null", "data.path=null"], "buffer_tokens cannot be combined with"),
    (
        ["data.sources=[{source: tales, buffer_tokens: 9, max_epochs: 1}]", "data.source=null", "data.path=null",
         "data.buffer_tokens=null"],
        "max_epochs cannot be combined with buffer_tokens, as the size is unknown; set max_tokens",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "message"), MISTAKES, ids=lambda x: x[0] if isinstance(x, list) else ""
)
def test_mistakes_end_in_one_line(folder, tmp_path, overrides, message):
    feature = missing_feature(" ".join(overrides))
    if feature:
        pytest.skip(f"needs the feature {feature}")
    done = run_script(
        ROOT / "train.py", folder / "config.yaml", f"run.dir={tmp_path / 'run'}", *overrides
    )
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert (done.returncode, len(errors)) == (2, 1), done.stderr
    assert message in errors[0]
    assert not (tmp_path / "run").exists()
