"""Callbacks: the contract of those of the road and of a user's, their order, and what is
refused."""

import json
import shutil
import signal

import pytest
import torch
from training_contract import check_resumes, small_config
from training_runs import read_metrics

from thinker.runtime.errors import UserError
from thinker.training.callback import Callback, evaluated_weights, find_callback
from thinker.training.callbacks.weight_average import WeightAverage
from thinker.training.reports import summary
from thinker.training.run import build_trainer, train

pytestmark = pytest.mark.usefixtures("one_thread")


class Drift(Callback):
    """A user's callback with every kind of state: moves the norm by the sum of all that it has
    seen."""

    def __init__(self):
        self.n_steps = 0
        self.total = torch.zeros(2, 3)

    def setup(self, parts):
        self.model = parts.model

    def after_step(self, info):
        self.n_steps += 1
        self.total += float(info.batch.inputs.sum() % 7)
        with torch.no_grad():
            self.model.norm.weight += 1e-4 * self.n_steps * self.total.mean()

    def metrics(self):
        return {"drift": float(self.total.sum())}

    def state_dict(self):
        return {"drift_steps": self.n_steps}

    def load_state_dict(self, state):
        self.n_steps = state["drift_steps"]

    def tensors(self):
        return {"drift.total": self.total}

    def load_tensors(self, tensors):
        self.total.copy_(tensors["drift.total"])


CASES = {
    "nothing": ([], list),
    "average": (["train.ema_decay=0.9"], list),
    "samples": (["train.sample_every=2"], list),
    "a user's": ([], lambda: [Drift()]),
    "average and a user's": (["train.ema_decay=0.9"], lambda: [Drift()]),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_with_callbacks_resumes_bit_for_bit(case, tmp_path, monkeypatch):
    more, make_callbacks = CASES[case]
    whole = check_resumes(tmp_path, monkeypatch, more, make_callbacks)
    lines = [line for line in read_metrics(whole) if "train_loss" in line]
    assert all(("drift" in line) == ("user" in case) for line in lines)


HOOKS = [name for name in vars(Callback) if not name.startswith("_")]


class Recorder(Callback):
    """Notes its hooks in a list that several share."""

    def __init__(self, name, calls):
        for hook in HOOKS:
            setattr(self, hook, self.noting(f"{name}.{hook}", getattr(self, hook), calls))

    def noting(self, text, hook, calls):
        def noted(*arguments):
            calls.append(text)
            return hook(*arguments)

        return noted


def test_hooks_run_in_the_order_of_the_list(tmp_path, monkeypatch):
    monkeypatch.setattr(summary, "print_summary", lambda *arguments: None)
    calls = []
    more = ["train.max_steps=2", "train.save_every=null", "train.sample_every=null"]
    config = small_config(tmp_path, "run", more)
    assert train(config, callbacks=[Recorder("a", calls), Recorder("b", calls)]) == 0
    asked = {
        "has_final_form",
        "progress_text",
        "state_dict",
        "tensors",
    }  # at any time, as they change nothing
    calls = [call for call in calls if call.split(".")[1] not in asked]
    updates = ("a.before_clip", "b.before_clip", "a.after_step", "b.after_step")
    logs = ("a.metrics", "b.metrics", "a.on_log", "b.on_log", "a.on_step_end", "b.on_step_end")
    assert calls == [
        *("a.setup", "b.setup", "a.on_start", "b.on_start"),
        *updates,
        *logs[:2],
        *("a.before_batch", "b.before_batch"),
        *logs[2:],
        *updates,
        *logs,
        *("a.before_eval", "b.before_eval", "a.on_log", "b.on_log", "b.after_eval", "a.after_eval"),
        *("a.before_eval", "b.before_eval", "b.after_eval", "a.after_eval"),
        *("a.on_save", "b.on_save", "a.on_end", "b.on_end"),
    ]


def test_no_batch_is_prepared_once_a_run_is_interrupted(tmp_path, monkeypatch):
    """What samples with the model would do so for nothing."""
    calls = []
    config = small_config(tmp_path, "run", ["train.max_steps=3", "train.sample_every=null"])
    assert train(config, callbacks=[Recorder("a", calls), InterruptAt(2)]) == 130
    assert calls.count("a.after_step") == 2
    assert calls.count("a.before_batch") == 1


class SampleList(Callback):
    """Keeps the samples that it is told of."""

    def __init__(self):
        self.samples = []

    def on_sample(self, step, prompt, text):
        self.samples.append({"step": step, "prompt": prompt, "text": text})


def test_samples_are_written_and_told_and_cut_when_the_run_resumes(tmp_path, monkeypatch):
    """A sample depends on the weights and its step, so the run that resumes repeats those that it
    has cut."""
    monkeypatch.setattr(summary, "print_summary", lambda *arguments: None)
    config = small_config(tmp_path, "run", ["train.sample_every=2", "train.sample_prompt=One"])
    told = SampleList()
    assert train(config, callbacks=[told]) == 0
    path = tmp_path / "run" / "samples.jsonl"
    whole = path.read_text()
    assert [json.loads(line) for line in whole.splitlines()] == told.samples
    assert [sample["step"] for sample in told.samples] == [2, 4, 6]
    assert all(sample["prompt"] == "One" for sample in told.samples)
    assert all(sample["text"] for sample in told.samples)

    for step in (4, 5, 6):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{step:08d}")
    again = SampleList()
    assert train(config, callbacks=[again]) == 0
    assert again.samples == told.samples[1:]
    assert path.read_text() == whole


def test_weights_come_back_after_an_error():
    calls = []

    def fail():
        with evaluated_weights([Recorder("a", calls), Recorder("b", calls)]):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert calls == ["a.before_eval", "b.before_eval", "b.after_eval", "a.after_eval"]


def test_a_callback_finds_another():
    average = WeightAverage(0.9)
    assert find_callback([Callback(), average], WeightAverage) is average
    assert find_callback([Callback()], WeightAverage) is None


def test_a_run_that_resumes_needs_its_callbacks(tmp_path, monkeypatch):
    monkeypatch.setattr(summary, "print_summary", lambda *arguments: None)
    first = small_config(tmp_path, "run", ["train.max_steps=2", "train.decay_fraction=0"])
    more = small_config(tmp_path, "run", ["train.max_steps=3", "train.decay_fraction=0"])
    assert train(first, callbacks=[Drift()]) == 0
    with pytest.raises(UserError, match="drift_steps, which this run does not read; pass the call"):
        build_trainer(more)
    assert train(more, callbacks=[Drift()]) == 0
    other = small_config(tmp_path, "other", ["train.max_steps=2", "train.decay_fraction=0"])
    assert train(other) == 0
    other = small_config(tmp_path, "other", ["train.max_steps=3", "train.decay_fraction=0"])
    with pytest.raises(UserError, match="was saved without the callback Drift"):
        build_trainer(other, callbacks=[Drift()])


class SummaryKeeper(Callback):
    """Keeps the summaries, and how many of them there were when the run ended."""

    def __init__(self):
        self.summaries = []
        self.n_at_end = []

    def on_summary(self, summary):
        self.summaries.append(summary)

    def on_end(self, is_evaluated):
        self.n_at_end.append(len(self.summaries))


class InterruptAt(Callback):
    """Interrupts the run after a step."""

    def __init__(self, step):
        self.step = step

    def after_step(self, info):
        if info.step == self.step:
            signal.raise_signal(signal.SIGINT)


def test_the_summary_comes_once_per_finished_run_and_before_its_end(tmp_path, capsys):
    config = small_config(tmp_path, "run")
    paused = SummaryKeeper()
    assert train(config, callbacks=[paused, InterruptAt(4)]) == 130
    assert (paused.summaries, paused.n_at_end) == ([], [0])
    capsys.readouterr()
    for _ in ("resumed", "finished already"):
        keeper = SummaryKeeper()
        assert train(config, callbacks=[keeper]) == 0
        (said,) = keeper.summaries
        assert keeper.n_at_end == [1]
        printed = capsys.readouterr().out.splitlines()
        loss_curve = f"loss curve {tmp_path / 'run' / 'loss.png'}"
        advice = [f"advice: {text}" for text in said.advice]
        body = [*said.result, *said.assessment, loss_curve, *said.next_commands, *advice]
        assert printed == body
        assert said.verdict
        assert said.fit.endswith(said.verdict)
        last = [line for line in read_metrics(tmp_path / "run") if "val_loss" in line][-1]
        assert last.items() <= said.values.items()
        assert said.values["step"] == 6
        for name, bits in said.baselines.items():
            assert said.values[f"baseline_bits_per_byte/{name}"] == bits
