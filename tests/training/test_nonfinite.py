"""A step that is not finite changes nothing, says what it was made of, and stops the run, or is
left out."""

import json
import math

import pytest
import torch
from conftest import examples, run_script
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from test_step import CONFIG, CPU, a_batch
from training_runs import read_metrics

from thinker import checkpoint
from thinker.data.batches.batch_loader import BatchLoader
from thinker.data.batches.dataset import ShuffledDataset
from thinker.data.batches.windows import PackedDataset
from thinker.data.corpus.corpus import prepare_corpus
from thinker.training.config.load import load_config, validate_config
from thinker.training.data.run_corpus import prepare_training_data
from thinker.training.nonfinite import diagnose
from thinker.training.optim.muon import Muon
from thinker.training.settings.resolve import resolve_settings
from thinker.training.state.resume import restore
from thinker.training.state.run_state import RunState
from thinker.training.step import TrainingStep, build_model


def make_step(optimizer="muon", **train):
    train = {
        "precision": "fp32",
        "compile": False,
        "micro_batch_size": 2,
        "batch_size": 4,
        "max_steps": 9,
        **train,
    }
    config = validate_config({"train": train, "optimizer": {"name": optimizer}})
    return TrainingStep(build_model(CONFIG, 1, CPU), resolve_settings(config, CONFIG, CPU))


def everything(step):
    return {**dict(step.model.state_dict()), **step.optimizers.tensors()}


def copy_of(step):
    return {name: tensor.clone() for name, tensor in everything(step).items()}


def same_bits(a, b):
    return a.keys() == b.keys() and all(
        a[name].numpy().tobytes() == b[name].numpy().tobytes() for name in a
    )


def poison(step, value, where):
    """From now on one entry of one parameter's gradient is `value`; the loss stays as it is."""

    def spoil(gradient):
        gradient = gradient.clone()
        gradient.view(-1)[3] = value
        return gradient

    return dict(step.model.named_parameters())[where].register_hook(spoil)


VALUES = [math.nan, math.inf, -math.inf]
PLACES = ["blocks.1.attention.q_proj.weight", "norm.weight", "embedding.weight"]


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize(
    ("value", "where"),
    [
        pytest.param(
            value,
            where,
            marks=pytest.mark.stress if VALUES.index(value) != PLACES.index(where) else (),
        )
        for value in VALUES
        for where in PLACES
    ],
)
@pytest.mark.parametrize("clip", [1.0, None])
def test_a_gradient_that_is_not_finite_changes_no_bit(optimizer, value, where, clip):
    step = make_step(optimizer, max_nonfinite_steps=1, grad_clip=clip)
    step(a_batch(0), 1.0)
    before = copy_of(step)
    hook = poison(step, value, where)
    loss, norm = step(a_batch(1), 1.0)
    assert loss.isfinite()
    assert not norm.isfinite()
    assert same_bits(before, everything(step))
    hook.remove()
    other = make_step(optimizer, grad_clip=clip)
    other(a_batch(0), 1.0)
    for each in (step, other):
        each(a_batch(2), 0.5)
    assert same_bits(everything(step), everything(other))  # as if it had never been


def test_a_loss_that_is_not_finite_changes_no_bit():
    step = make_step()
    step(a_batch(0), 1.0)
    embedding, token = step.model.embedding.weight, int(a_batch(1).inputs[0, 7])
    with torch.no_grad():
        kept = embedding[token].clone()
        embedding[token] = math.inf
    before = copy_of(step)
    loss, _ = step(a_batch(1), 1.0)
    assert not loss.isfinite()
    assert same_bits(before, everything(step))
    with torch.no_grad():
        embedding[token] = kept
    before = copy_of(step)
    step(a_batch(2), 1.0)  # one more than may be left out: nothing moves until the host has looked
    assert same_bits(before, everything(step))


@settings(max_examples=examples(30), deadline=None)
@given(
    st.integers(0, 99), st.lists(st.booleans(), min_size=1, max_size=5), st.sampled_from([0.0, 0.3])
)
def test_muon_leaves_everything_where_a_gpu_would_tell_it_to(seed, bad, decay):
    """What the host does not know: `found_inf` on the device, as torch's fused AdamW reads it."""
    shapes = [(16, 16), (24, 16), (16, 24), (24, 16)]
    ours, plain = ([torch.nn.Parameter(torch.randn(shape, generator=g)) for shape in shapes]
                   for g in (torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed)))  # fmt: skip
    told, untold = (
        Muon(each, dtype=torch.float32, lr=0.1, weight_decay=decay) for each in (ours, plain)
    )
    generator = torch.Generator().manual_seed(seed + 1)
    for is_bad in bad:
        for mine, theirs in zip(ours, plain):
            mine.grad = torch.randn(mine.shape, generator=generator)
            theirs.grad = mine.grad.clone()
            if is_bad:
                mine.grad[0, 0] = math.nan
        told.found_inf = torch.tensor(float(is_bad))
        told.step()
        if not is_bad:
            untold.step()
    for mine, theirs in zip(ours, plain):
        assert torch.equal(mine, theirs)
        for key, value in untold.state[theirs].items():
            assert torch.equal(told.state[mine][key], value), key


def test_how_many_were_left_out_is_restored(tmp_path):
    step = make_step(max_nonfinite_steps=3)
    step(a_batch(0), 1.0)
    before = copy_of(step)
    checkpoint.save(tmp_path / "step-00000001", step.model, {}, step.optimizers.tensors())
    other = make_step(max_nonfinite_steps=3)
    restore(tmp_path / "step-00000001", other, RunState(step=1, skipped=3))
    assert same_bits(before, everything(other))
    assert int(other.n_nonfinite) == 3
    hook = poison(other, math.nan, "norm.weight")
    other(a_batch(1), 1.0)
    hook.remove()
    other(a_batch(2), 1.0)  # the fourth was one too many
    assert same_bits(before, everything(other))


def test_where_fp16_overflows_the_scale_falls_and_the_step_is_no_bad_one():
    step = make_step()
    step.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = copy_of(step)
    hook = poison(step, math.inf, "blocks.0.mlp.up_proj.weight")
    step(a_batch(0), 1.0)
    assert same_bits(before, everything(step))
    assert (step.scaler.get_scale(), int(step.n_nonfinite)) == (512.0, 0)
    hook.remove()
    step(a_batch(1), 1.0)
    assert not same_bits(before, everything(step))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_diagnosis_names_where_the_numbers_end_and_touches_nothing(
    text_file, tmp_path, random_model, value
):
    corpus = prepare_corpus(
        source="text", path=text_file, tokenizer="byte", cache_dir=tmp_path, progress=False
    )
    windows = PackedDataset(corpus.train, 16, "contiguous")
    loader = BatchLoader(ShuffledDataset(windows, 1), 3)
    model = random_model(vocab_size=257).train()
    healthy = diagnose(model, loader, corpus.tokenizer, 5)
    assert healthy["first_not_finite"] is None
    assert healthy["gradients_not_finite"] == []
    for row, sample in enumerate(healthy["samples"]):
        inputs, targets = loader.batch(5, slice(row, row + 1))
        loss, count = model(inputs, targets=targets)
        assert sample["loss"] == pytest.approx((loss / count).item())
        assert sample["text"] == corpus.tokenizer.decode(inputs[0].tolist())
    with torch.no_grad():
        model.blocks[1].mlp.up_proj.weight[0, 0] = value
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ill = diagnose(model, loader, corpus.tokenizer, 5)
    assert ill["first_not_finite"] == "blocks.1.mlp.up_proj"
    assert "embedding.weight" in ill["gradients_not_finite"]
    assert [sample["loss"] for sample in ill["samples"]] == [None] * 3
    assert ill["largest_weight"][0] == "blocks.1.mlp.up_proj.weight"
    assert same_bits(before, dict(model.state_dict()))
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


# ------------------------------------------------------------------ the real command

WILD = ["optimizer.name=adamw", "optimizer.lr=5e37", "train.warmup_steps=0", "train.eval_every=null",
        "train.decay_fraction=0"]  # fmt: skip


def test_the_run_stops_with_a_report_and_the_weights_of_before(train_args, tmp_path):
    run, saving = tmp_path / "run", tmp_path / "saving"
    done = run_script(
        *train_args, f"run.dir={run}", *WILD, "train.log_every=4", "train.save_every=null"
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    said = done.stderr.splitlines()[-1]
    assert said.startswith("error: step 2: loss nan")
    assert "the same command starts over" in said
    report = json.loads((run / "nonfinite-step-00000002.json").read_text())
    assert report["loss"] is None
    # The weights are those after step 1, although steps 3 and 4 were made before anybody looked.
    stopped = run_script(*train_args, f"run.dir={saving}", *WILD, "train.save_every=1")
    assert stopped.returncode == 1
    assert "the same command resumes from step 1" in stopped.stderr.splitlines()[-1]
    name = "model.safetensors"
    weights = [
        run / "checkpoints" / "nonfinite-00000002" / name,
        saving / "checkpoints" / "step-00000001" / name,
    ]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    ours = load_file(run / "checkpoints" / "nonfinite-00000002" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in ours.values())
    assert max(float(tensor.abs().max()) for tensor in ours.values()) > 1e37
    checkpoint.verify(run / "checkpoints" / "nonfinite-00000002")
    # The samples are those of the step, and what was found stands beside each.
    config = load_config(train_args[1], [str(part) for part in train_args[2:]])
    windows = PackedDataset(prepare_training_data(config).train, 32, "contiguous")
    loader = BatchLoader(ShuffledDataset(windows, 1), 4)
    assert (
        report["sample_ids"]
        == loader.sample_ids(1)
        == [sample["id"] for sample in report["samples"]]
    )
    assert all(sample["text"] and sample["loss"] is None for sample in report["samples"])
    assert report["first_not_finite"] == "loss"  # the head's huge weights
    assert "lm_head.weight" in report["gradients_not_finite"]
    assert report["largest_weight"][0] == "lm_head.weight"
    assert report["largest_weight"][1] > 1e37


def test_weights_that_are_not_finite_themselves_are_reported_too(train_args, tmp_path):
    """A finite gradient and a rate at which the weights overflow."""
    done = run_script(*train_args, f"run.dir={tmp_path / 'run'}", *WILD, "optimizer.lr=1e38")
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "(largest absolute value: not finite, in " in done.stderr.splitlines()[-1]


def test_a_few_bad_steps_can_be_left_out_and_a_resumed_run_remembers(train_args, tmp_path):
    run = tmp_path / "run"
    options = [*WILD, "train.max_nonfinite_steps=3", "train.save_every=2", "train.max_steps=3"]
    done = run_script(*train_args, f"run.dir={run}", *options)
    assert done.returncode == 1  # the last evaluation finds what two left-out steps did not mend
    assert (
        "the validation loss is nan, so nothing was saved; lower optimizer.lr; the same command resumes"
        in done.stderr
    )
    assert "step 2: loss nan" in done.stderr
    assert "step skipped (1 of 3" in done.stderr
    assert "step skipped (2 of 3" in done.stderr
    assert [line["step"] for line in read_metrics(run)] == [1]
    assert (
        checkpoint.read_json(run / "checkpoints" / "step-00000002" / "state.json")["skipped"] == 1
    )
    report = json.loads((run / "nonfinite-step-00000003.json").read_text())
    assert len(report["sample_ids"]) == 4
    fewer = run_script(*train_args, f"run.dir={run}", *options, "train.max_nonfinite_steps=0")
    assert fewer.returncode == 2
    assert (
        "has already skipped 1 non-finite steps; set train.max_nonfinite_steps to at least 1"
        in fewer.stderr
    )
    again = run_script(*train_args, f"run.dir={run}", *options)
    assert "resuming from step 2" in again.stderr
    assert "step skipped (2 of 3" in again.stderr
