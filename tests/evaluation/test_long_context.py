"""Loss by position, against logits of whole windows taken one at a time."""

import math
import statistics

import pytest
import torch

from thinker.data.batches.windows import PackedDataset
from thinker.data.corpus.corpus import prepare_corpus
from thinker.data.tokenizers.text_bytes import token_byte_lengths
from thinker.evaluation.long_context import long_windows, loss_by_position, override_rope_scaling
from thinker.evaluation.loss import Evaluator
from thinker.model import Thinker, ThinkerConfig
from thinker.runtime.errors import UserError

pytestmark = pytest.mark.usefixtures("one_thread")
YARN = {"type": "yarn", "factor": 4.0, "original_max_seq_len": 16}


@pytest.fixture(scope="module")
def corpus(text_file, tmp_path_factory):
    return prepare_corpus(
        source="text", path=str(text_file), tokenizer="byte", cache_dir=tmp_path_factory.mktemp("c")
    )


@pytest.fixture
def model(random_model):
    return random_model(vocab_size=257, max_seq_len=16)


def by_hand(model, windows, n):
    """Losses (n, T) as lists, None where nothing is counted."""
    rows = []
    for index in range(n):
        inputs, targets = (torch.from_numpy(x) for x in windows[index])
        with torch.no_grad():
            logits = model(inputs[None], document_ids=windows.document_ids(inputs[None]))[0]
        known = logits.double().log_softmax(dim=-1)
        rows.append(
            [-known[at, y].item() if y >= 0 else None for at, y in enumerate(targets.tolist())]
        )
    return rows


@pytest.mark.parametrize(
    "form",
    [{}, {"rope_scaling": YARN}, {"positions": "alibi"}, {"positions": "sinusoidal"}, {"attention": "prefix(5)"},
     {"attention": "window(9)", "positions": "none"}],
    ids=str,
)  # fmt: skip
def test_loss_by_position_equals_a_direct_computation(random_model, corpus, form):
    model = random_model(vocab_size=257, max_seq_len=16, **form)
    windows = long_windows(model.config, corpus.val, 64)
    assert windows.seq_len == 64
    n = len(windows)  # the last of them is not full
    found = loss_by_position(model, windows, 3)
    rows = by_hand(model, windows, n)
    columns = [[loss for loss in column if loss is not None] for column in zip(*rows)]
    assert found.counts.tolist() == [len(column) for column in columns]
    assert len(set(found.counts.tolist())) == (
        3 if "attention" in form and "prefix" in form["attention"] else 2
    )
    expected = [statistics.mean(column) if column else math.nan for column in columns]
    torch.testing.assert_close(
        found.by_position, torch.tensor(expected).double(), rtol=1e-4, atol=1e-4, equal_nan=True
    )

    evaluation = Evaluator(windows, 3, token_byte_lengths(corpus.tokenizer))(model)
    weighted = (found.by_position.nan_to_num() * found.counts).sum() / found.counts.sum()
    assert found.counts.sum() == evaluation.n_tokens
    assert weighted.item() == pytest.approx(evaluation.loss, rel=1e-5)


def test_loss_with_document_masking(random_model, tmp_path):
    corpus = prepare_corpus(
        source="tales", max_documents=60, tokenizer="byte", cache_dir=tmp_path, progress=False
    )
    model = random_model(vocab_size=257, max_seq_len=256)
    windows = PackedDataset(corpus.val, 1024, "contiguous", document_masking=True)
    found = loss_by_position(model, windows, 1, limit=1)
    assert found.by_position.tolist() == pytest.approx(by_hand(model, windows, 1)[0], rel=1e-4)


def test_segments_and_standard_errors(model, corpus):
    windows = long_windows(model.config, corpus.val, 64)
    model.train()
    found = loss_by_position(model, windows, 2, limit=5)
    assert model.training
    parts = found.segments()
    assert [(part.start, part.end) for part in parts] == [
        (0, 8),
        (8, 16),
        (16, 32),
        (32, 48),
        (48, 64),
    ]
    means = [statistics.mean(row[16:32]) for row in by_hand(model.eval(), windows, 5)]
    assert parts[2].n_tokens == 5 * 16
    assert parts[2].loss == pytest.approx(statistics.mean(means), rel=1e-4)
    assert parts[2].error == pytest.approx(statistics.stdev(means) / math.sqrt(5), rel=1e-3)
    assert loss_by_position(model, windows, 2, limit=1).segments()[0].error is None
    assert found.format_table().count("beyond the trained length") == 3


def test_standard_error_of_partial_windows(model, corpus):
    windows = long_windows(model.config, corpus.val, 64)
    found = loss_by_position(model, windows, 8)
    part = found.segment(0, 64)
    rows = [[x for x in row if x is not None] for row in by_hand(model, windows, len(windows))]
    n, mean = sum(map(len, rows)), sum(map(sum, rows)) / sum(map(len, rows))
    spread = sum((sum(row) - mean * len(row)) ** 2 for row in rows)
    assert (part.n_tokens, part.loss) == (n, pytest.approx(mean, rel=1e-5))
    assert part.error == pytest.approx(
        math.sqrt(spread * len(rows) / (len(rows) - 1)) / n, rel=1e-4
    )


def test_windows_end_with_the_learned_positions(random_model, corpus):
    model = random_model(vocab_size=257, max_seq_len=16, positions="learned")
    windows = long_windows(model.config, corpus.val, 64)
    assert windows.seq_len == 16
    assert len(loss_by_position(model, windows, 4, limit=4).segments()) == 2


@pytest.mark.parametrize("given", [YARN, "{type: yarn, factor: 4.0, original_max_seq_len: 16}"])
def test_override_rope_scaling_equals_a_model_built_with_it(model, corpus, given):
    windows = long_windows(model.config, corpus.val, 64)
    before = loss_by_position(model, windows, 4, limit=4).nats
    made = Thinker(ThinkerConfig(**{**model.config.to_dict(), "rope_scaling": YARN})).eval()
    made.load_state_dict(model.state_dict())
    override_rope_scaling(model, given)
    after = loss_by_position(model, windows, 4, limit=4).nats
    assert torch.equal(after, loss_by_position(made, windows, 4, limit=4).nats)
    assert not torch.allclose(before, after)


def test_invalid_rope_scaling_raises(random_model, model):
    with pytest.raises(UserError, match="alibi"):
        override_rope_scaling(random_model(positions="alibi"), YARN)
    for wrong in ("{type: yarn", "4", "{type: jarn, factor: 4}", "{type: linear}"):
        with pytest.raises(UserError):
            override_rope_scaling(model, wrong)
