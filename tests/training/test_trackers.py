"""Each tracker has every step of a run once, with the values of metrics.jsonl, read back with its
own reader."""

import json
import signal
import struct

import numpy as np
import pytest
from conftest import run_script, start_script
from tracker_readers import (
    read_csv,
    read_metrics_csv,
    read_scalars,
    read_tensorboard,
    read_texts,
    read_trackio,
    read_wandb,
    read_wandb_summary,
)
from training_runs import TIMING_KEYS, checkpoint_steps, last_step, read_metrics, wait_for

# A tracker of a user, on a page: it appends what it gets, and says how far it has got.
OWN_TRACKER = """
import json

from thinker import TRACKERS, Tracker


class Lines(Tracker):
    def __init__(self, settings):
        self.name = settings.tracking.name

    def start(self, run):
        self.path = run.directory / "own.jsonl"
        lines = []
        if self.path.exists():
            lines = [json.loads(line) for line in self.path.read_text().splitlines()]
        lines = [line for line in lines if line["step"] < run.step]
        self.path.write_text("".join(json.dumps(line) + "\\\\n" for line in lines))
        return max((line["step"] for line in lines if "sample" not in line), default=-1)

    def write(self, **line):
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\\\\n")

    def log(self, step, values):
        if values:
            self.write(step=step, values=dict(values))


TRACKERS.register("lines", Lines)
TRACKERS.register("wrong", lambda settings: "a text")
""".replace("\\\\n", "\\n")


@pytest.fixture(scope="module", autouse=True)
def trackio_folder(tmp_path_factory):
    """The database of trackio, whose place is fixed when a process first imports it."""
    folder = tmp_path_factory.mktemp("trackio")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    """Trackers read no settings of this machine, and leave nothing outside tmp_path."""
    for name in ("HOME", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path))


@pytest.fixture
def own_args(train_args, tmp_path):
    """train_args with a config that has the user's trackers."""
    (tmp_path / "own_tracker.py").write_text(OWN_TRACKER)
    script, base, *overrides = train_args
    config = tmp_path / "own.yaml"
    config.write_text(f"{base.read_text()}\nextensions: ['own_tracker @ {tmp_path}']\n")
    return [script, config, *overrides]


def read_own(run):
    """[(step, {key: value})] of the tracker of a user."""
    lines = map(json.loads, (run / "own.jsonl").read_text().splitlines())
    return [(line["step"], line["values"]) for line in lines]


READERS = {"csv": read_metrics_csv, "tensorboard": read_scalars, "lines": read_own}


def steps_of(run):
    """{step: {key: value}} of metrics.jsonl, whose lines of a step are joined."""
    steps = {}
    for line in read_metrics(run):
        steps.setdefault(line["step"], {}).update(line)
    return {step: {k: v for k, v in line.items() if k != "step"} for step, line in steps.items()}


def assert_equals_metrics(run, name, pairs):
    """Each step occurs once, with all its values; TensorBoard rounds them to float32."""
    expected = steps_of(run)
    assert [step for step, _ in pairs] == list(expected), name
    for step, values in pairs:
        wanted = expected[step]
        if name == "tensorboard":
            wanted = {key: float(np.float32(value)) for key, value in wanted.items()}
        assert values == wanted, (name, step)


def kill_ahead_of_a_checkpoint(run, command):
    """Train until steps after the last checkpoint are tracked, and kill the process."""
    is_ahead = False
    while not is_ahead:
        kill_after(10, run, command)
        steps = [step for step, _ in read_metrics_csv(run)]
        is_ahead = max(steps) > max(checkpoint_steps(run), default=0)


def kill_after(n_steps, run, command):
    end = last_step(run) + n_steps
    process = start_script(*command, "train.max_steps=100000")
    assert wait_for(lambda: last_step(run) >= end, process)
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.mark.more
def test_killed_twice_and_resumed_each_step_is_there_once(own_args, tmp_path):
    run = tmp_path / "run"
    options = ["tracking.trackers=[tensorboard,csv,lines,trackio]", "tracking.wandb=offline",
               "train.decay_fraction=0", "train.save_every=15", "train.eval_every=7",
               "train.log_every=2", "train.sample_every=5", "train.sample_prompt=Line"]  # fmt: skip
    command = [*own_args, f"run.dir={run}", *options]
    for _ in range(2):
        kill_ahead_of_a_checkpoint(run, command)
    end = last_step(run) + 9
    done = run_script(*command, f"train.max_steps={end}")
    assert done.returncode == 0, done.stderr

    for name, read in READERS.items():
        assert_equals_metrics(run, name, read(run))
    # These keep the steps that they got before a kill, whose times are not those of metrics.jsonl.
    expected = steps_of(run)
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    steps = sorted(expected.keys() | {sample["step"] for sample in samples})
    for name, pairs in (("wandb", read_wandb(run)), ("trackio", read_trackio(run)[:-2])):
        assert [step for step, _ in pairs] == steps, name
        for step, values in pairs:
            for key, value in expected.get(step, {}).items():
                assert key in TIMING_KEYS or values[key] == value, (name, step, key)
            assert ("sample" in values) == (step % 5 == 0), (name, step)

    rows = [(int(row["step"]), row["prompt"], row["text"]) for row in read_csv(run, "samples.csv")]
    assert rows == [(each["step"], each["prompt"], each["text"]) for each in samples]
    texts = [(each["step"], each["prompt"] + each["text"]) for each in samples]
    assert read_texts(run, "sample") == texts
    assert [step for step, _ in texts] == list(range(5, end + 1, 5))


@pytest.mark.more
def test_a_finished_run_has_its_config_summary_and_picture_once(
    train_args, tmp_path, trackio_folder
):
    """Also if it is started again."""
    run = tmp_path / "run"
    options = ["tracking.trackers=[tensorboard,csv,trackio]", "tracking.wandb=offline"]
    for _ in range(2):
        done = run_script(*train_args, f"run.dir={run}", *options)
        assert done.returncode == 0, done.stderr
    picture = (run / "loss.png").read_bytes()
    size = struct.unpack(">II", picture[16:24])
    (image,) = read_tensorboard(run).Images("loss")
    assert image.encoded_image_string == picture
    assert (image.width, image.height, image.step) == (*size, 6)
    ((step, report),) = read_texts(run, "summary")
    assert step == 6
    assert "validation loss" in report
    assert "train:\n" in read_texts(run, "config")[-1][1]
    assert_equals_metrics(run, "csv", read_metrics_csv(run))
    assert_equals_metrics(run, "tensorboard", read_scalars(run))

    *rows, (_, of_summary), (_, of_picture) = read_trackio(run)
    assert [step for step, _ in rows] == list(range(1, 7))
    assert of_summary["summary"]["_value"].splitlines()[::2] == report.splitlines()
    assert (trackio_folder / "media" / of_picture["loss"]["file_path"]).read_bytes() == picture

    folders = sorted((run / "wandb").glob("offline-run-*"))
    assert len(folders) == 2
    for folder in folders:
        summary = read_wandb_summary(folder)
        assert summary["final/report"] == report
        assert summary["final/val_loss"] == read_metrics(run)[-1]["val_loss"]
        assert (folder / "files" / summary["final/loss"]["path"]).read_bytes() == picture


@pytest.mark.more
def test_steps_of_before_the_tracker_are_there(train_args, tmp_path):
    run = tmp_path / "run"
    for n_steps, trackers in ((2, "null"), (4, "[csv]"), (6, "null"), (8, "[csv,tensorboard]")):
        options = [f"tracking.trackers={trackers}", f"train.max_steps={n_steps}"]
        done = run_script(*train_args, f"run.dir={run}", "train.decay_fraction=0", *options)
        assert done.returncode == 0, done.stderr
    assert len(steps_of(run)) == 8
    assert_equals_metrics(run, "csv", read_metrics_csv(run))
    assert_equals_metrics(run, "tensorboard", read_scalars(run))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["tracking.trackers=[csw]"], "error: tracking.trackers has csw, which is no tracker; use tensorboard, csv, trackio, wandb"),
        (["tracking.trackers=[csv,csv]"], "error: tracking.trackers has csv twice; remove one"),
        (["tracking.trackers=[wandb]", "tracking.wandb=disabled"], "error: tracking.trackers has wandb, but tracking.wandb is disabled; set"),
        (["tracking.trackers=[wrong]"], "the tracker wrong is a str; derive it from thinker.Tracker"),
    ],
)  # fmt: skip
def test_mistakes(own_args, tmp_path, overrides, message):
    done = run_script(*own_args, f"run.dir={tmp_path / 'run'}", *overrides)
    assert done.returncode == 2
    assert message in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("package", ["tensorboard", "trackio", "wandb"])
def test_a_missing_package_is_named_before_anything_is_written(train_args, tmp_path, package):
    """A folder of that name beside the script is no package."""
    (tmp_path / package).mkdir()
    hide = f"""
import importlib.machinery, runpy, sys


class Hide:
    def find_spec(self, name, path=None, target=None):
        if name == "{package}":
            return importlib.machinery.ModuleSpec(name, None, is_package=True)


sys.meta_path.insert(0, Hide())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    (tmp_path / "hide.py").write_text(hide)
    command = [*train_args, f"run.dir={tmp_path / 'run'}", f"tracking.trackers=[{package}]"]
    done = run_script(tmp_path / "hide.py", *command)
    assert done.returncode == 2, done.stderr
    assert f"needs the package {package}, which is not installed; run pip install" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()
