"""A step of several ranks is the step of one: gradients, losses, weights, samples, checkpoints."""

import itertools
import json
import random
import shutil
import sys

import pytest
import rank_workers
import torch
from fork_server import run_ranks
from safetensors.torch import load_file
from training_runs import read_metrics

from thinker import checkpoint

STEPS, GRADIENT_STEPS = 10, 4
FORMS = [(2, "ddp"), (4, "ddp"), (2, "fsdp"), (4, "fsdp")]
SAVED_FORMS = [(1, "ddp"), (2, "ddp"), (2, "fsdp"), (4, "fsdp")]


CONFIG = """
model: {d_model: 31, n_layers: 1, n_heads: 3, n_kv_heads: 1, head_dim: 10, d_ff: 77}
data: {source: jsonl, path: PATH, seq_len: 64, tokenizer: "bpe:301", packing: documents}
train: {max_steps: 10, batch_size: 8, eval_every: 5, save_every: null, precision: fp32, compile: false, device: cpu}
"""  # windows of whole documents, few or many, end in padding: ranks count unequally many targets


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    """Train by the config in so many processes, each form once. Returns the run's folder and the
    ranks' samples."""
    folder, made = tmp_path_factory.mktemp("runs"), {}
    draw, words = (
        random.Random(1),
        [
            "the",
            "a",
            "red",
            "old",
            "cat",
            "dog",
            "tree",
            "saw",
            "ate",
            "and",
            "then",
            "slept",
            "under",
            "near",
        ],
    )
    texts = (" ".join(draw.choices(words, k=draw.randrange(4, 60))) for _ in range(44))
    (folder / "texts.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )
    (folder / "config.yaml").write_text(CONFIG.replace("PATH", str(folder / "texts.jsonl")))

    def by(size, *overrides):
        key = " ".join([str(size), *overrides])
        if key not in made:
            path = folder / str(len(made))
            places = [f"run.dir={path}", f"data.cache_dir={folder / 'cache'}", "train.parallel=ddp"]
            made[key] = (
                path,
                run_ranks(
                    size,
                    rank_workers.train_and_record_inputs,
                    str(folder / "config.yaml"),
                    [*places, *overrides],
                ),
            )
        return made[key]

    return by


@pytest.mark.parametrize(
    ("size", "parallel", "optimizer"),
    [
        (2, "ddp", "adamw"),
        (4, "ddp", "muon"),
        (2, "fsdp", "muon"),
        (4, "fsdp", "adamw"),
        pytest.param(2, "ddp", "muon", marks=pytest.mark.stress),
        pytest.param(4, "ddp", "adamw", marks=pytest.mark.stress),
        pytest.param(2, "fsdp", "adamw", marks=pytest.mark.stress),
        pytest.param(4, "fsdp", "muon", marks=pytest.mark.stress),
    ],
)
def test_losses_do_not_depend_on_the_ranks(training, size, parallel, optimizer):
    overrides = [f"optimizer.name={optimizer}", f"train.parallel={parallel}"]
    if optimizer == "adamw":
        overrides.append(
            "optimizer.lr=0.003"
        )  # usual; at 0.03 one process in other micro-batches is 8e-5 off, too
    (theirs, _), (ours, seen) = (training(n, *overrides) for n in (1, size))
    counts = [sum(sum(x != row[0] for x in row) for row in rank[0]) for rank in seen]
    assert len(set(counts)) == size  # the ranks do not learn from equally many tokens
    theirs, ours = read_metrics(theirs), read_metrics(ours)
    assert [line["step"] for line in ours if "train_loss" in line] == [*range(1, STEPS + 1)]
    assert [(line["step"], line["tokens"]) for line in ours] == [
        (line["step"], line["tokens"]) for line in theirs
    ]
    limit = 1e-6 if optimizer == "adamw" else 1e-3
    for key in ("train_loss", "val_loss"):
        pairs = [(a[key], b[key]) for a, b in zip(ours, theirs) if key in a]
        assert max(abs(a - b) / b for a, b in pairs) <= limit


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_two_ranks_are_two_micro_batches_to_the_bit(tmp_path, optimizer):
    options = {"optimizer": optimizer, "micro_batch_size": rank_workers.ROWS // 2}
    ours, theirs = (
        run_ranks(size, rank_workers.train_steps, str(tmp_path / f"{size}"), STEPS, options)
        for size in (2, 1)
    )
    assert ours == [theirs[0]] * 2  # every loss and every norm, known to both ranks
    assert (tmp_path / "2").read_bytes() == (tmp_path / "1").read_bytes()


def test_ranks_accumulate_too(gradients):
    """Two ranks with two micro-batches each; under FSDP2 gradients are summed over ranks at the
    last one only."""
    for parallel in ("ddp", "fsdp"):
        far = run_ranks(
            2,
            rank_workers.compare_gradients,
            str(gradients),
            3,
            {"parallel": parallel, "micro_batch_size": 2},
        )[0]
        assert max(max(step.values()) for step in far) <= 1e-6


@pytest.fixture(scope="module")
def gradients(tmp_path_factory):
    """Weights and gradients of each step of one process."""
    folder = tmp_path_factory.mktemp("gradients")
    run_ranks(1, rank_workers.compare_gradients, str(folder), GRADIENT_STEPS, {"optimizer": "muon"})
    return folder


@pytest.mark.parametrize(("size", "parallel"), FORMS)
def test_every_gradient_is_that_of_one_process(gradients, size, parallel):
    """From the same weights at each step: Muon magnifies the last bit of what went before."""
    far = run_ranks(
        size,
        rank_workers.compare_gradients,
        str(gradients),
        GRADIENT_STEPS,
        {"optimizer": "muon", "parallel": parallel},
    )[0]
    assert len(far) == GRADIENT_STEPS
    assert (
        len(far[0]) == len(load_file(gradients / "0.safetensors")) // 2 + 1
    )  # and the norm of all
    worst = {name: max(step[name] for step in far) for name in far[0]}
    assert max(worst.values()) <= 1e-6, worst


def test_gradients_are_summed_at_the_last_micro_batch_alone():
    assert (
        run_ranks(2, rank_workers.gradients_missing_before_micro_batches, "fsdp")
        == [[True, True]] * 2
    )


def test_gradients_in_bf16_are_as_good_as_one_process_has_them():
    """A token that is every fourth one has its embedding's gradients added in fp32, and ranks
    theirs likewise."""
    (exact, _), (alone, _), *forms = (
        run_ranks(size, rank_workers.gradients_of_a_frequent_token, precision, parallel)[0]
        for size, precision, parallel in (
            (1, "fp32", "ddp"), (1, "bf16", "ddp"), (2, "bf16", "ddp"), (2, "bf16", "fsdp"),
        )
    )  # fmt: skip
    for ours, short in forms:
        assert short < 0.7  # where the ranks' gradients are added in bf16 it is 1
        for name, right in exact.items():
            right, one, two = (torch.tensor(each) for each in (right, alone[name], ours[name]))
            off, limit = ((each - right).norm() / right.norm() for each in (two, one))
            assert off <= 1.5 * limit + 1e-3, name


@pytest.mark.parametrize(("size", "windows"), [(2, 5), (4, 2)])
def test_ranks_evaluate_each_window_once_and_all_hear_of_a_signal(
    training, tmp_path, size, windows
):
    """With batches of one window some ranks have none left; a signal to one rank ends the
    evaluation on all."""
    folder, _ = training(1, "optimizer.name=adamw", "data.num_workers=0", "optimizer.lr=0.003")
    overrides = [
        f"run.dir={tmp_path / 'run'}",
        f"data.cache_dir={folder.parent / 'cache'}",
        "train.micro_batch_size=1",
    ]
    overrides += [f"train.eval_sequences={windows}", "train.parallel=fsdp"]
    alone, told = (
        run_ranks(
            n, rank_workers.evaluate_and_signal, str(folder.parent / "config.yaml"), overrides
        )
        for n in (1, size)
    )
    assert told == [told[0]] * size
    assert told[0][0] == pytest.approx(alone[0][0], rel=1e-6)
    assert told[0][1:] == alone[0][1:]
    assert alone[0][2:] == [None, 15]


def joined_rows(parts):
    """The rows of each step, those of the ranks one after the other."""
    return [list(itertools.chain(*rows)) for rows in zip(*parts, strict=True)]


@pytest.mark.parametrize(
    ("size", "workers"),
    [
        (1, 2),
        (2, 0),
        (4, 2),
        pytest.param(2, 2, marks=pytest.mark.stress),
        pytest.param(4, 0, marks=pytest.mark.stress),
    ],
)
def test_samples_do_not_depend_on_ranks_and_workers(training, size, workers):
    _, alone = training(1, "optimizer.name=adamw", "data.num_workers=0", "optimizer.lr=0.003")
    _, seen = training(
        size, "optimizer.name=adamw", f"data.num_workers={workers}", "optimizer.lr=0.003"
    )
    assert joined_rows(seen) == alone[0]


def test_each_sample_comes_once_an_epoch_though_the_ranks_change(training, tmp_path):
    """2 ranks, then one process, then 4."""
    _, alone = training(1, "optimizer.name=adamw", "data.num_workers=0", "optimizer.lr=0.003")
    order = []
    for size, steps, parallel in ((2, 3, "fsdp"), (1, 6, "ddp"), (4, STEPS, "ddp")):
        overrides = (
            "optimizer.name=adamw",
            "data.num_workers=2",
            f"train.max_steps={steps}",
            f"train.parallel={parallel}",
        )
        _, seen = training(size, f"run.dir={tmp_path}", *overrides)
        order += joined_rows(seen)
    assert order == alone[0]
    rows = [tuple(row) for step in order for row in step]
    windows = len(set(rows))
    assert 2 * windows < len(rows)  # two epochs and more
    assert len(set(rows[:windows])) == len(set(rows[windows : 2 * windows])) == windows
    assert [line["step"] for line in read_metrics(tmp_path) if "train_loss" in line] == [
        *range(1, STEPS + 1)
    ]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of the same two steps, as each form saves them."""
    folder = tmp_path_factory.mktemp("saved")
    for size, parallel in SAVED_FORMS:
        run_ranks(size, rank_workers.save_checkpoints, str(folder), parallel)
    return folder


@pytest.mark.parametrize(
    ("size", "parallel"),
    [
        pytest.param(*form, marks=pytest.mark.stress if form == (4, "fsdp") else [])
        for form in SAVED_FORMS
    ],
)
def test_what_any_ranks_save_any_others_take_up_to_the_bit(saved, size, parallel, stress):
    """No width and no vocabulary here divides by two or four, and of three sinks the fourth rank
    has none.

    Of each form one checkpoint, another one for each of those that take it up; with --stress all
    four.
    """
    kinds = [
        f"{optimizer}-*-{form}" for optimizer in ("adamw", "muon") for form in ("whole", "sharded")
    ]
    places = []
    for number, (saved_size, saved_parallel) in enumerate(
        SAVED_FORMS, SAVED_FORMS.index((size, parallel))
    ):
        for kind in kinds if stress else [kinds[number % 4]]:
            places.append(kind.replace("*", f"{saved_size}-{saved_parallel}"))
    told = run_ranks(size, rank_workers.restore_checkpoints, str(saved), parallel, places)
    assert all(changed == [] for changed, _ in told)
    assert all(losses.keys() == {*places} for _, losses in told)
    for optimizer in ("adamw", "muon"):
        losses = [
            loss
            for _, losses in told
            for name, loss in losses.items()
            if name.startswith(optimizer)
        ]
        assert len(losses) == size * len(places) // 2
        assert max(losses) - min(losses) <= 1e-6 * min(losses)


def test_a_model_is_read_from_files_of_many_ranks(saved):
    """As generate.py does, in one process; the manifest lists the file of each rank."""
    for place in saved.iterdir():
        folder, was = place / "step-00000002", load_file(place / "was.safetensors")
        checkpoint.verify(folder)
        _, size, _, form = place.name.split("-")
        assert len(list(folder.glob("*.safetensors"))) == (int(size) if form == "sharded" else 2)
        listed = checkpoint.read_json(folder / "manifest.json")
        assert {path.name for path in folder.iterdir()} == {*listed["files"], "manifest.json"}
        model = checkpoint.load_model(folder)
        assert all(torch.equal(value, was[name]) for name, value in model.named_parameters())


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_four_ranks_go_on_to_the_bit(training, tmp_path, parallel):
    """In whatever order they sum: with two ranks there is only one. The average of the weights goes
    on, too."""
    form = [f"train.parallel={parallel}", "data.num_workers=0", "train.save_every=2", "train.keep_last=9",
            "train.max_steps=5", "train.eval_sequences=4", "train.ema_decay=0.9"]  # fmt: skip
    straight, _ = training(4, *form)
    shutil.copytree(straight, tmp_path, dirs_exist_ok=True)
    for folder in checkpoint.list_checkpoints(tmp_path / "checkpoints"):
        if folder.name != "step-00000002":
            shutil.rmtree(folder)
    _, seen = training(4, f"run.dir={tmp_path}", *form)
    assert [len(steps) for steps in seen] == [3] * 4
    for name in ("model.safetensors", "training.safetensors"):
        ours, theirs = (
            folder / "checkpoints" / "step-00000005" / name for folder in (tmp_path, straight)
        )
        assert ours.read_bytes() == theirs.read_bytes()


def test_files_of_ranks_that_lost_or_doubled_rows_are_damaged(saved, tmp_path):
    folder = tmp_path / "step-00000002"
    shutil.copytree(saved / "adamw-4-fsdp-sharded" / folder.name, folder)
    parts = sorted(folder.glob("shard-*"))
    kept, more = parts[1].read_bytes(), folder / "shard-00009-model-00001-of-00001.safetensors"
    for spoil, mend in (
        (parts[1].unlink, lambda: parts[1].write_bytes(kept)),
        (lambda: shutil.copy(parts[2], more), more.unlink),
    ):
        spoil()
        with pytest.raises(checkpoint.CorruptCheckpoint, match="has missing or duplicate rows of"):
            checkpoint.load_model(folder)
        mend()
    parts[0].write_bytes(b"{}")
    with pytest.raises(checkpoint.CorruptCheckpoint, match="is damaged"):
        checkpoint.verify(folder)
    with pytest.raises(
        checkpoint.CorruptCheckpoint, match="contains an incomplete safetensors file"
    ):
        checkpoint.load_model(folder)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the names of threads from /proc")
def test_gloo_has_one_thread():
    """Which has dropped the tensors of all collectives once it has dropped those of the last: see
    shutdown()."""
    assert run_ranks(2, rank_workers.count_gloo_threads) == [1, 1]
