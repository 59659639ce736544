"""What the tests of mixtures and of streams share: a small run of a config, its kills, and its
samples."""

import itertools
import random
import shutil
import signal
import time

import rank_workers
import yaml
from conftest import ROOT, run_script, start_script
from fork_server import run_ranks
from training_runs import assert_same_run, last_step, wait_for

from thinker.training.config.load import load_config
from thinker.training.run import build_trainer


def write_config(folder, data, **train):
    """Write config.yaml of a tiny model to a folder, with these keys of data and train."""
    config = {
        "model": {"d_model": 32, "n_layers": 1, "n_heads": 2},
        "data": {"tokenizer": "bpe:300", "seq_len": 32, "cache_dir": str(folder / "cache"), **data},
        "train": {"precision": "fp32", "compile": False, "device": "cpu", **train},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))


def train_whole(folder):
    """The run of config.yaml that nobody kills, and what it printed."""
    done = run_script(ROOT / "train.py", folder / "config.yaml", f"run.dir={folder / 'whole'}")
    assert done.returncode == 0, done.stderr
    return folder / "whole", done


def trainer_of(folder, tmp_path, *overrides):
    """A trainer of config.yaml with the run directory tmp_path/run."""
    return build_trainer(
        load_config(folder / "config.yaml", [f"run.dir={tmp_path / 'run'}", *overrides])
    )


def check_killed_runs(folder, whole, run, count, n_steps, after_kill=lambda draw: None):
    """Kill runs of config.yaml at `count` random moments. Each resumes and ends at the bits of the
    run `whole`."""
    draw, kills = random.Random(3), 0
    command = [ROOT / "train.py", folder / "config.yaml", f"run.dir={run}"]
    while kills < count:
        shutil.rmtree(run, ignore_errors=True)
        process, at = start_script(*command), draw.randrange(n_steps)
        if wait_for(lambda at=at: last_step(run) >= at, process):
            time.sleep(draw.random() * 0.05)
            process.kill()
        process.wait()
        if process.returncode == 0:
            continue  # it ended before the kill
        assert process.returncode == -signal.SIGKILL, process.output()
        kills += 1
        after_kill(draw)
        assert run_script(*command).returncode == 0
        assert_same_run(whole, run, n_steps)


def check_samples(folder, tmp_path, size, n_workers, n_steps):
    """Ranks with some number of workers train on the samples that one rank reads with the default
    one."""
    options = [f"run.dir={tmp_path / 'run'}", f"data.num_workers={n_workers}", "train.parallel=ddp"]
    seen = run_ranks(
        size, rank_workers.train_and_record_inputs, str(folder / "config.yaml"), options
    )
    trainer = trainer_of(folder, tmp_path / "other")
    expected = [trainer.loader.batch(step)[0].tolist() for step in range(n_steps)]
    trainer.batches.close()
    rows = [list(itertools.chain(*parts)) for parts in zip(*seen, strict=True)]
    assert [[list(row) for row in step] for step in rows] == expected
