"""A run that stores the figures of its validation set, watched by the server and by generate.py."""

import json
import shlex
import shutil

import httpx
import pytest
from conftest import ROOT, run_script
from server_process import wait_until

from thinker.features.monitoring.monitor import FILE_NAME

LONG = ("--max-new-tokens", 140, "--seed", 1, "--logit-bias", "299=-inf")


@pytest.fixture(scope="module")
def watched_run(train_args, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "watched"
    done = run_script(
        *train_args, f"run.dir={folder}", "train.max_steps=8", "data.seq_len=160", "train.log_attention_every=4",
        "model.attention=[full,window(8)]", "train.eval_every=6",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def drifting_run(watched_run, tmp_path):
    """As if the first layer had attended to few tokens on the validation set."""
    folder = shutil.copytree(watched_run, tmp_path / "drifting")
    stored = json.loads((folder / FILE_NAME).read_text())
    entropy = stored["figures"]["blocks.0.attention_entropy"]
    entropy["mean"] = [0.1 for _ in entropy["mean"]]
    entropy["std"] = [0.01 for _ in entropy["std"]]
    (folder / FILE_NAME).write_text(json.dumps(stored))
    return folder


def decode_until(server, condition):
    """Ask for texts until something is true: how many it takes depends on the machine."""
    body = {"model": "m", "prompt": "Line", "max_tokens": 150, "logit_bias": {"299": -1e9}}
    wait_until(
        lambda: (
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).is_success
            and condition()
        )
    )


def test_metrics_per_layer(drifting_run, start_server):
    server = start_server(f"m={drifting_run}", "--monitor")
    assert server.metric("thinker_measured_positions_total", model="m") == 0
    decode_until(server, lambda: server.metric("thinker_measured_positions_total", model="m") > 2)
    for layer in "01":
        for name in (
            "attention_entropy",
            "attention_max_logit",
            "attention_first_token",
            "layer_cache_used",
        ):
            names = {"model": "m", "layer": layer}
            text = httpx.get(f"{server.url}/metrics", timeout=60).text
            assert f'thinker_{name}{{layer="{layer}",model="m"}}' in text, (name, names)
    for layer in "01":
        assert 0 < server.metric("thinker_layer_cache_used", model="m", layer=layer) <= 1
    assert 0 < server.metric("thinker_token_entropy", model="m") < 6
    assert server.metric("thinker_drifting_figures", model="m") >= 1
    (line,) = [
        line
        for line in server.log.splitlines()
        if line.startswith("warning: m: layer 0: attention entropy")
    ]
    assert "is above the 0." in line
    server.stop()


def test_without_stored_figures_a_server_says_so(served_run, start_server):
    server = start_server(f"m={served_run}", "--monitor")
    assert "warning: m: drift is not reported: no figures are stored with " in server.log
    assert "thinker_attention_entropy" in httpx.get(f"{server.url}/metrics", timeout=60).text
    assert (
        'thinker_drifting_figures{model="m"}'
        not in httpx.get(f"{server.url}/metrics", timeout=60).text
    )
    server.stop()
    plain = start_server(f"m={served_run}")
    assert "thinker_attention_entropy" not in httpx.get(f"{plain.url}/metrics", timeout=60).text
    plain.stop()


def test_generate_shows_what_it_measured(watched_run, drifting_run):
    command = (ROOT / "generate.py", watched_run, *LONG, "--num-samples", 12)
    watched = run_script(*command, "--monitor", "--json")
    plain = run_script(*command, "--json")
    assert watched.returncode == 0, watched.stderr
    ours, theirs = (
        [json.loads(line) for line in done.stdout.splitlines()] for done in (watched, plain)
    )
    summaries = [completion.pop("monitor") for completion in ours]
    assert ours == theirs
    assert all(summary == summaries[0] for summary in summaries)
    figures = {"attention_entropy", "max_logit", "first_token_share", "cache_used"}
    layers = summaries[0]["layers"]
    assert len(layers) == 2
    assert all(layer.keys() == figures for layer in layers)
    assert type(summaries[0]["drift"]) is list
    text = run_script(*command, "--monitor")
    assert "\nmonitor: " in text.stderr
    assert text.stdout == run_script(*command).stdout


def test_generate_reports_drift_after_the_text(drifting_run):
    """Not within it, where both are shown in one terminal."""
    done = run_script(ROOT / "generate.py", drifting_run, *LONG, "--monitor")
    *_, last = done.stderr.splitlines()
    assert last.startswith("warning: layer 0: attention entropy ")
    assert done.stderr.count("warning: ") == 1
    done = run_script(ROOT / "generate.py", drifting_run, *LONG, "--monitor", "--json")
    assert "warning: layer 0: attention entropy " in done.stderr


GUIDE = ROOT / "features" / "monitoring" / "guide.md"


def guide_command(*words):
    """The flags of the first command of the guide that has these words."""
    lines = GUIDE.read_text(encoding="utf-8").splitlines()
    command = next(line for line in lines if all(word in line for word in words))
    return shlex.split(command)[3:]


def test_the_commands_of_the_guide_measure_every_text(watched_run):
    """A small model that decodes a text faster than 1% of the time would measure a position."""
    flags = guide_command("thinker generate", "--monitor")
    at = flags.index("--seed") + 1
    for seed in range(1, 11):
        flags[at] = str(seed)
        done = run_script(ROOT / "generate.py", watched_run, *flags)
        assert done.returncode == 0, done.stderr
        assert "\nlayer 1: attention entropy " in done.stderr, done.stderr
        assert "drift is not reported" not in done.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--monitor", "--no-cache"], "monitor needs the KV cache"),
        (["--monitor", "--score", "-"], "--monitor has no effect with --score; remove it"),
        (["--monitor", "--interactive"], "--monitor has no effect with --interactive; remove it"),
    ],
)
def test_where_it_does_not_apply(flags, message, watched_run):
    done = run_script(ROOT / "generate.py", watched_run, *flags)
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr


def test_figures_of_another_step_are_not_compared(watched_run, tmp_path):
    command = [ROOT / "generate.py", "--monitor", "--max-new-tokens", 2]
    done = run_script(*command, watched_run, "--checkpoint", 6)
    assert "is of step 8, not of step 6" in done.stderr
    assert "drift is not reported" not in run_script(*command, watched_run).stderr
    damaged = shutil.copytree(watched_run, tmp_path / "damaged")
    (damaged / FILE_NAME).write_text('{"step": 8}')
    done = run_script(*command, damaged)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"{FILE_NAME} is damaged" in done.stderr
