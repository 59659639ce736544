"""The average of the weights: a plain recurrence, what a run evaluates, saves and opens with, and
how it resumes."""

import json
from types import SimpleNamespace

import pytest
import torch
from conftest import run_script
from safetensors.torch import load_file
from training_runs import assert_same_tensors, read_metrics

from thinker import load
from thinker.model import Thinker, ThinkerConfig
from thinker.training.callback import StepInfo, evaluated_weights
from thinker.training.callbacks.weight_average import WeightAverage


def average_of(model):
    average = WeightAverage(0.9)
    average.setup(SimpleNamespace(model=model))
    return average


def test_it_is_the_recurrence_and_leaves_the_weights_alone():
    torch.manual_seed(1)
    model = Thinker(
        ThinkerConfig(vocab_size=11, d_model=16, n_layers=1, n_heads=2, tie_embeddings=True)
    )
    average = average_of(model)
    expected = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
    for step in range(1, 150):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
        average.after_step(StepInfo(step, 0.0, None))
        decay = min(0.9, (1 + step) / (10 + step))
        for name, parameter in model.named_parameters():
            expected[name] = decay * expected[name] + (1 - decay) * parameter.detach().double()
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with evaluated_weights([average]):
        saved = average.tensors()
        assert sorted(saved) == sorted(f"optimizer.{name}.weight" for name in weights)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(
                parameter.detach().double(), expected[name], rtol=1e-5, atol=1e-5
            )
            assert torch.equal(saved[f"optimizer.{name}.weight"], weights[name])
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name])


def test_an_exception_gives_the_weights_back():
    model = Thinker(ThinkerConfig(vocab_size=11, d_model=16, n_layers=1, n_heads=2))
    average = average_of(model)
    with torch.no_grad():
        model.embedding.weight.add_(1)
    before = model.embedding.weight.detach().clone()

    def interrupt():
        with evaluated_weights([average]):
            assert not torch.equal(model.embedding.weight, before)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert torch.equal(model.embedding.weight, before)


@pytest.fixture(scope="module")
def averaged(train_args, tmp_path_factory):
    """A run of 40 steps with an average, and the same one in two parts."""
    folder = tmp_path_factory.mktemp("averaged")
    for name, parts in (("whole", [40]), ("parts", [17, 40])):
        for n_steps in parts:
            options = [
                "train.ema_decay=0.95",
                "train.decay_fraction=0",
                f"train.max_steps={n_steps}",
            ]
            done = run_script(
                *train_args, *options, f"run.dir={folder / name}", "train.eval_every=10"
            )
            assert done.returncode == 0, done.stderr
    return folder


def test_it_resumes_to_the_bit(averaged):
    assert_same_tensors(averaged / "whole", averaged / "parts", 40)


def test_a_run_opens_with_its_average_which_is_what_was_evaluated(averaged, train_args):
    run = averaged / "whole"
    folder = run / "checkpoints" / "step-00000040"
    average, training = (
        load_file(folder / "model.safetensors"),
        load_file(folder / "training.safetensors"),
    )
    model, _ = load(run)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, average[name])
        assert not torch.equal(parameter, training[f"optimizer.{name}.weight"])
    done = run_script("scripts/eval.py", run, "--read-data", "--json")
    assert done.returncode == 0, done.stderr
    evaluated = json.loads(done.stdout)["losses"][0]["nats_per_token"]["mean"]
    last = [line for line in read_metrics(run) if "val_loss" in line][-1]
    assert last["step"] == 40
    assert evaluated == pytest.approx(last["val_loss"], rel=1e-3)


def test_adding_it_later_is_refused(averaged, train_args):
    done = run_script(
        *train_args, f"run.dir={averaged / 'whole'}", "train.ema_decay=0.5", "train.max_steps=41"
    )
    assert done.returncode == 2
    assert "train.ema_decay is 0.5, but the run in" in done.stderr
