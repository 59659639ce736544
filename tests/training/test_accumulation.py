"""A step is the same however its batch is packed and divided, and each document is as if alone.

What is compared, and the plain formula in fp64, are in benchmarks/systems/accumulation.py.
"""

import json
import random

import pytest
import torch
from fork_server import run_ranks
from training_contract import BASE, SMALL
from training_runs import metrics_without_times
from training_workers import compare_with_plain, train_each

from thinker.benchmarks.systems import accumulation
from thinker.benchmarks.systems.accumulation import ROWS
from thinker.data.batches.prefetch import Batch
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.runtime.constants import IGNORE_INDEX
from thinker.runtime.errors import UserError
from thinker.runtime.ranks import SINGLE_PROCESS
from thinker.training.config.load import validate_config
from thinker.training.settings.resolve import resolve_settings

pytestmark = pytest.mark.usefixtures("one_thread")
# Ten times what rounding to fp32 does here.
LOSS_LIMIT, GRADIENT_LIMIT = 2e-6, 5e-5
UPDATE_LIMITS = {"adamw": 1e-3, "muon": 1e-3}
RANKS = [form for form in accumulation.FORMS if form[0] > 1]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The folder with what all forms are compared with."""
    folder = tmp_path_factory.mktemp("plain")
    accumulation.prepare(folder)
    return folder


def assert_near(rows):
    for row in rows:
        assert row["loss_error"] <= LOSS_LIMIT, row
        assert row["gradient_error"] <= GRADIENT_LIMIT, row


def test_packed_rows_have_the_targets_of_the_documents(tmp_path):
    """Each target once, and those of conversations as their masks say, up to where they are cut."""
    cases = accumulation.make_cases(tmp_path)
    assert len({case.name for case in cases}) == len(cases) == 10
    for case in cases:
        packed = case.batch.targets[case.batch.targets != IGNORE_INDEX]
        alone = torch.cat([targets[targets != IGNORE_INDEX] for _, targets in case.pieces])
        assert torch.equal(packed.sort().values, alone.sort().values)
        assert case.batch.n_targets == len(packed)
        by_row = (case.batch.targets != IGNORE_INDEX).sum(dim=1)
        assert by_row.max() >= 5 * max(1, by_row.min())


def test_a_mistake_would_be_seen(tmp_path):
    """On these batches, what other trainers did differs by far more than the limits."""
    for case in accumulation.make_cases(tmp_path):
        for name, error in accumulation.wrong_losses(case).items():
            assert abs(error) > 100 * LOSS_LIMIT, (case.name, name)


def test_micro_batches_and_packing_change_nothing(plain):
    """One, four (the last of one sequence) and sixteen micro-batches."""
    assert_near(accumulation.measure_gradients(SINGLE_PROCESS, str(plain), "ddp", [16, 5, 1]))


@pytest.mark.more
def test_no_size_of_micro_batches_changes_anything(plain):
    rows = accumulation.measure_gradients(SINGLE_PROCESS, str(plain), "ddp")
    assert {row["size"] for row in rows} == {*range(1, ROWS + 1)}
    assert_near(rows)


@pytest.mark.parametrize(
    ("n_ranks", "parallel", "sizes"),
    [
        (2, "ddp", [3]),
        (4, "fsdp", [3]),
        *(pytest.param(*form, None, marks=pytest.mark.more) for form in RANKS),
    ],
)
def test_ranks_change_nothing(plain, n_ranks, parallel, sizes):
    """Also where some have no targets at all, and where their last micro-batch is smaller."""
    for rows in run_ranks(n_ranks, compare_with_plain, str(plain), parallel, sizes):
        assert len(rows) >= 20
        assert_near(rows)


def assert_updates_near(rows):
    for row in rows:
        assert row["error"] <= UPDATE_LIMITS[row["optimizer"]], row


def test_updates_are_those_of_the_plain_gradients(plain):
    """Three steps: AdamW is compared with torch's in fp64, Muon with one micro-batch."""
    rows = accumulation.measure_updates(SINGLE_PROCESS, str(plain), "ddp", [3])
    assert {row["optimizer"] for row in rows} == {"adamw", "muon"}
    assert_updates_near(rows)


@pytest.mark.more
@pytest.mark.parametrize(("n_ranks", "parallel"), RANKS)
def test_updates_do_not_depend_on_ranks(plain, n_ranks, parallel):
    for rows in run_ranks(n_ranks, compare_with_plain, str(plain), parallel, [2], True):
        assert_updates_near(rows)


def test_a_batch_without_targets_has_no_gradient():
    step, gradients = accumulation.make_step(SINGLE_PROCESS, "ddp", 3)
    tokens = torch.zeros(ROWS, accumulation.SEQ_LEN, dtype=torch.int64)
    loss, norm = step(Batch(tokens, torch.full_like(tokens, IGNORE_INDEX), 0), 1.0)
    assert loss == norm == 0
    assert not any(gradient.any() for gradient in gradients.found.values())


def test_a_config_has_equal_micro_batches():
    """So no step, and no epoch, ends with a smaller one."""
    for train in (
        {"batch_size": 16, "micro_batch_size": 5},
        {"batch_size": 4, "micro_batch_size": 8},
    ):
        config = validate_config({"train": train | {"max_steps": 1}})
        with pytest.raises(UserError, match="does not divide each rank's share"):
            resolve_settings(config, accumulation.CONFIG, accumulation.CPU)


# ------------------------------------------------------------------ whole runs

TEXTS = {
    "contiguous": ["data.source=tales"],
    "documents": ["data.source=tales", "data.packing=documents", "data.document_masking=true"],
    "best_fit": ["data.source=tales", "data.packing=best_fit", "data.document_masking=true"],
    "chats": ["data.source=jsonl", "data.chat_template=chat.jinja", "data.assistant_only_loss=true",
              "data.packing=best_fit"],
}  # fmt: skip
CHATS = 60


def write_chats(folder):
    """Conversations with answers of one word or of many."""
    numbers = random.Random(1)
    lines = []
    for number in range(CHATS):
        n_words = numbers.choice([1, 1, 1, 4])
        messages = [
            {"role": "user", "content": f"Who is {number}? " + "Tell me. " * numbers.randrange(4)},
            {"role": "assistant", "content": "me " * n_words},
        ]
        lines.append(json.dumps({"messages": messages}))
    path = folder / "chats.jsonl"
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize("text", TEXTS)
def test_runs_log_the_same(tmp_path, text):
    """Steps, tokens and learning rates are equal; losses, gradient norms and evaluations but for
    rounding."""
    options = [*SMALL, *TEXTS[text], "model.dropout=0", "data.seq_len=48", "train.batch_size=8",
               "optimizer.name=adamw", "optimizer.lr=0.003", "train.log_every=1", "train.eval_sequences=5",
               "train.save_every=null", "train.parallel=ddp", f"data.cache_dir={tmp_path / 'cache'}"]  # fmt: skip
    if text == "chats":
        tokenizer = make_tokenizer("byte", []).save(tmp_path)
        options += [f"data.path={write_chats(tmp_path)}", f"data.tokenizer={tokenizer}"]
    by_size = {}
    for size in (8, 1):
        by_size[size] = [
            *options,
            f"train.micro_batch_size={size}",
            f"run.dir={tmp_path / str(size)}",
        ]
    assert run_ranks(1, train_each, str(BASE), list(by_size.values())) == [[0, 0]]
    runs = [tmp_path / "8", tmp_path / "1"]
    if text == "chats":  # where ranks have the least equal numbers of targets
        of_ranks = [*options, "train.micro_batch_size=2", f"run.dir={tmp_path / 'ranks'}"]
        assert run_ranks(2, train_each, str(BASE), [of_ranks]) == [[0], [0]]
        runs.append(tmp_path / "ranks")
    first, *others = (metrics_without_times(run) for run in runs)
    assert [line["step"] for line in first if "train_loss" in line] == [1, 2, 3, 4, 5, 6]
    assert sum("val_loss" in line for line in first) == 2
    for lines in others:
        assert len(lines) == len(first)
        for line, expected in zip(lines, first):
            for key in ("step", "tokens", "processed_tokens", "lr"):
                assert line.get(key) == expected.get(key)
            assert line == pytest.approx(expected, rel=1e-4)
