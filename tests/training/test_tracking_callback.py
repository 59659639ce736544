"""The callback that feeds trackers: what it sends when, on one rank and on several."""

import signal
from pathlib import Path

import fork_server
import pytest
from tracker_readers import read_csv, read_metrics_csv
from training_contract import BASE, SMALL, small_config
from training_runs import read_metrics
from training_workers import train_each

from thinker.training.callback import Callback
from thinker.training.reports import summary
from thinker.training.run import train
from thinker.training.tracking.tracker import Tracker
from thinker.training.tracking.tracking_callback import Tracking

pytestmark = pytest.mark.usefixtures("one_thread")


class Recorder(Tracker):
    """Notes its calls. has: the last step that it says it has when it starts."""

    def __init__(self, has=-1):
        self.has = has
        self.calls = []

    def start(self, run):
        self.run = run
        return self.has

    def sample(self, step, prompt, text):
        self.calls.append(("sample", step))

    def log(self, step, values):
        self.calls.append(("log", step, sorted({"train_loss", "val_loss"} & values.keys())))

    def summary(self, summary):
        self.calls.append(("summary", "val_loss" in summary.values))

    def picture(self, path):
        self.calls.append(("picture", path.name))

    def finish(self):
        self.calls.append(("finish",))


BOTH = ["train_loss", "val_loss"]


def test_a_step_is_sent_when_it_is_complete(tmp_path):
    """Its samples, then its numbers, of training and evaluation together."""
    config = small_config(
        tmp_path, "run", ["train.sample_every=2", "train.log_every=3", "train.eval_every=3"]
    )
    tracker = Recorder()
    assert train(config, callbacks=[Tracking([tracker])]) == 0
    assert tracker.calls == [
        *(("sample", 2), ("log", 2, []), ("log", 3, BOTH)),
        *(("sample", 4), ("log", 4, []), ("sample", 6), ("log", 6, BOTH)),
        *(("summary", True), ("picture", "loss.png"), ("finish",)),
    ]
    assert tracker.run.directory == Path(config.run.dir)
    assert (tracker.run.name, tracker.run.step) == ("run", 0)
    assert tracker.run.config["train"]["log_every"] == 3


def test_each_tracker_gets_the_steps_that_it_lacks(tmp_path):
    config = small_config(tmp_path, "run", ["train.eval_every=3"])
    assert train(config) == 0
    trackers = [Recorder(), Recorder(has=4), Recorder(has=100)]
    assert train(config, callbacks=[Tracking(trackers)]) == 0
    for tracker, first in zip(trackers, (1, 5, 7)):
        steps = [call[1] for call in tracker.calls if call[0] == "log"]
        assert steps == list(range(first, 7))
        assert tracker.run.step == 6


class Interrupt(Callback):
    """Sends this process a signal when a step is to be evaluated."""

    def __init__(self, step):
        self.step = step

    def after_step(self, info):
        self.now = info.step

    def before_eval(self):
        if self.now == self.step:
            self.step = None  # a second signal would end the process unsaved
            signal.raise_signal(signal.SIGTERM)


def test_a_step_whose_evaluation_is_interrupted_is_sent_once_it_is_complete(tmp_path, monkeypatch):
    monkeypatch.setattr(summary, "print_summary", lambda *arguments: None)
    more = ["train.eval_every=2", "train.save_every=null", "train.sample_every=null"]
    config = small_config(tmp_path, "run", more)
    first = Recorder()
    assert train(config, callbacks=[Interrupt(4), Tracking([first])]) == 128 + signal.SIGTERM
    assert first.calls == [
        *(("log", 1, BOTH[:1]), ("log", 2, BOTH), ("log", 3, BOTH[:1]), ("finish",))
    ]
    assert read_metrics(tmp_path / "run")[-1]["step"] == 4
    second = Recorder(has=3)
    assert train(config, callbacks=[Tracking([second])]) == 0
    assert second.run.step == 4
    assert second.calls == [
        *(("log", 4, BOTH), ("log", 5, BOTH[:1]), ("log", 6, BOTH), ("finish",))
    ]


def test_of_several_ranks_one_writes(tmp_path):
    """And each step once, as the others would write the same files."""
    run = tmp_path / "run"
    where = [f"data.cache_dir={tmp_path / 'cache'}", f"run.dir={run}", "train.parallel=ddp"]
    tracked = ["tracking.trackers=[csv,tensorboard]", "train.sample_every=2"]
    done = fork_server.run_ranks(2, train_each, str(BASE), [[*SMALL, *where, *tracked]])
    assert done == [[0], [0]]
    assert [step for step, _ in read_metrics_csv(run)] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in read_csv(run, "samples.csv")] == ["2", "4", "6"]
    assert len(list((run / "tensorboard").iterdir())) == 1
