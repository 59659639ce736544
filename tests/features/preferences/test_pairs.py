"""Pairs in table rows: every form of them, what is refused, and their tokens."""

import json

import numpy as np
import pytest
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st
from installed import if_installed

from thinker.data.chat import chat
from thinker.data.corpus.corpus import prepare_corpus
from thinker.data.text.tables.any_rows import _kind
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.features.preferences.pair_windows import PADDING, PairWindows
from thinker.features.preferences.pairs import read_pair
from thinker.runtime.constants import IGNORE_INDEX
from thinker.runtime.errors import UserError
from thinker.training.config.load import load_config

BYTES = make_tokenizer("byte", [])
CHAT = BYTES.with_chat_template((ROOT / "configs" / "chat.jinja").read_text())
BASE = ROOT / "tests" / "fixtures" / "base.yaml"


def message(role, content):
    return {"role": role, "content": content}


HI, YES, NO = message("user", "Hi"), message("assistant", "Yes"), message("assistant", "No way")
FORMS = {
    "texts": {"prompt": "Hi", "chosen": "Yes", "rejected": "No way"},
    "answers as messages": {"prompt": [HI], "chosen": [YES], "rejected": [NO]},
    "prompt as text": {"prompt": "Hi", "chosen": [YES], "rejected": [NO]},
    "conversations": {"chosen": [HI, YES], "rejected": [HI, NO]},
    "prompt in the conversations, too": {"prompt": "Hi", "chosen": [HI, YES], "rejected": [HI, NO]},
    "null prompt": {"prompt": None, "chosen": [HI, YES], "rejected": [HI, NO]},
}


def encode(row, tokenizer=CHAT):
    return read_pair(row, "row 0 of a.jsonl").encode(tokenizer)


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_have_the_same_tokens(form):
    """The prompt is what a chat asks the model, and an answer what it is to say."""
    prompt = chat.encode_prompt(CHAT, [HI])[1:]  # without BOS
    for (ids, is_target), answer in zip(encode(FORMS[form]), ("Yes", "No way")):
        n = len(prompt)
        assert ids[:n].tolist() == prompt
        assert not is_target[:n].any()
        targets = ids[is_target].tolist()
        assert targets == [*CHAT.encode(answer), CHAT.eos_id]
        assert is_target[n : n + len(targets)].all()


def test_texts_without_a_chat_template_are_continuations():
    rows = encode({"prompt": "Once ", "chosen": "upon", "rejected": "more"}, BYTES)
    for (ids, is_target), text in zip(rows, ("Once upon", "Once more")):
        assert ids.tolist() == BYTES.encode(text)
        assert is_target.tolist() == [False] * 5 + [True] * 4
    with pytest.raises(UserError, match="need a chat template"):
        encode(FORMS["conversations"], BYTES)


def test_earlier_answers_are_no_targets():
    earlier = [message("user", "A?"), message("assistant", "A!")]
    row = {"prompt": [*earlier, HI], "chosen": [YES], "rejected": [NO]}
    for (ids, is_target), answer in zip(encode(row), ("Yes", "No way")):
        assert ids[is_target].tolist() == [*CHAT.encode(answer), CHAT.eos_id]
    system = {"system": "Be kind.", "chosen": [HI, YES], "rejected": [HI, NO]}
    for ids, _ in encode(system):
        assert "Be kind." in CHAT.decode(ids.tolist())


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"prompt": "a", "chosen": None, "rejected": "c"}, "chosen is null; give both answers"),
        (
            {"chosen": [HI, YES], "rejected": [HI, YES | {"weight": 1}]},
            "chosen and rejected have the same tokens",
        ),
        (
            {"chosen": [HI, YES], "rejected": [HI, NO], "chat_template_kwargs": {"thinkng": 1}},
            "has thinkng, which the chat template ignores",
        ),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "tools": [{}]}, "has tools, which the"),
        ({"chosen": [HI, YES]}, r"has no column rejected \(has chosen\)"),
        ({"choosen": [HI, YES], "rejected": [HI, NO]}, "no column chosen .*did you mean choosen"),
        ({"chosen": "Yes", "rejected": "No"}, "chosen is a text without a prompt; add the column"),
        ({"prompt": "Hi", "chosen": 3, "rejected": "No"}, "chosen is int; it must be text or a"),
        ({"prompt": "Hi", "chosen": "No", "rejected": "No"}, "are equal, so there is nothing"),
        ({"chosen": [HI, YES], "rejected": [HI]}, "rejected has no answer"),
        ({"chosen": [HI, YES, HI], "rejected": [HI, NO]}, "chosen does not end with an answer"),
        (
            {"chosen": [HI, YES], "rejected": [message("user", "Ho"), NO]},
            "do not begin with the same message",
        ),
        ({"chosen": [HI, YES], "rejected": [HI, {"role": "assistant"}]}, "a message has no content"),
    ],
)  # fmt: skip
def test_mistakes_in_rows(row, text):
    with pytest.raises(UserError, match=text):
        encode(row)


def test_an_answer_without_text():
    with pytest.raises(UserError, match="the chosen answer has no tokens"):
        encode({"prompt": "Hi", "chosen": "", "rejected": "No"}, BYTES)


def corpus_of(tmp_path, lengths, **options):
    """A corpus of pairs whose answers have these numbers of bytes."""
    rows = []
    for number, (first, second) in enumerate(lengths):
        prompt = f"{number:03d}"
        rows.append({"prompt": prompt, "chosen": "c" * first, "rejected": "r" * second})
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return prepare_corpus(
        source="preferences",
        path=str(path),
        tokenizer="byte",
        val_fraction=0.0,
        cache_dir=tmp_path / "cache",
        progress=False,
        **options,
    )


LENGTHS = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=2, max_size=20)


@given(lengths=LENGTHS, seq_len=st.integers(12, 60), shard_tokens=st.integers(1, 300))
def test_windows_have_each_pair_that_fits_once(tmp_path_factory, lengths, seq_len, shard_tokens):
    """Whole, with its own targets, and whatever the size of a shard."""
    corpus = corpus_of(tmp_path_factory.mktemp("pairs"), lengths, shard_tokens=shard_tokens)
    sizes = [2 * (1 + 3) + first + second for first, second in lengths]  # BOS, prompt, answer
    fitting = [number for number, size in enumerate(sizes) if size <= seq_len]
    if not fitting:
        with pytest.raises(UserError, match="pairs for training are longer than data.seq_len"):
            PairWindows(corpus.train, seq_len)
        return
    windows = PairWindows(corpus.train, seq_len)
    assert windows.n_pairs == len(lengths)
    assert windows.n_left_out == len(lengths) - len(fitting)
    found = []
    for index in range(len(windows)):
        inputs, targets = windows.window(index)
        sides = windows.sides(index)
        numbers = windows.pairs(index)
        found += numbers
        assert windows.n_chosen(index) == sum(lengths[number][0] + 1 for number in numbers)
        for k, number in enumerate(numbers):
            for side, letter in enumerate("cr"):
                is_side = sides == 2 * k + side
                text = f"{number:03d}" + letter * lengths[number][side]
                assert inputs[is_side].tolist() == [BYTES.bos_id, *BYTES.encode(text)]
                counted = targets[is_side & (targets != IGNORE_INDEX)].tolist()
                assert counted == [*BYTES.encode(text[3:]), BYTES.eos_id]
        assert (targets[sides == PADDING] == IGNORE_INDEX).all()
        assert (np.diff(sides[sides != PADDING]) >= 0).all()
    assert sorted(found) == fitting


GOOD = ["data.source=preferences", "data.path=x.jsonl", "run.init_from=x", "train.dpo.beta=0.1"]


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["data.source=preferences", "data.path=x.jsonl"], "needs train.dpo"),
        (["train.dpo.beta=0.1", "run.init_from=x"], "train.dpo needs pairs of answers"),
        *if_installed("streams", ([*GOOD, "data.buffer_tokens=100000"], "with data.buffer_tokens")),
        *if_installed("pruning", ([*GOOD, "train.prune.weights=0.5"], "with train.prune")),
        ([*GOOD, "data.val_tokens=x"], "cannot be combined with data.val_tokens"),
        ([*GOOD, "train.micro_batch_size=auto"], "with train.micro_batch_size=auto"),
        ([*GOOD, "data.packing=documents"], "cannot be combined with data.packing=documents"),
        ([*GOOD, "data.assistant_only_loss=true"], "with data.assistant_only_loss=true"),
        ([*GOOD, "train.patience=3"], "cannot be combined with train.patience"),
        ([*GOOD, "train.dpo.beta=0"], "train.dpo.beta"),
        ([*GOOD, "data.column=text"], "data.column has no effect with data.source=preferences"),
    ],
)
def test_mistakes_in_configs(overrides, text):
    with pytest.raises(UserError, match=text):
        prepare_config([*overrides, "data.tokenizer=null", "data.max_documents=null"])


def prepare_config(overrides):
    """The corpus of a config."""
    config = load_config(BASE, overrides)
    return prepare_corpus(**config.data.corpus_options(config.data))


def test_where_rows_are_read_from(tmp_path):
    """A name of a dataset is one on the hub; everything else is a path."""
    (tmp_path / "one").mkdir()
    (tmp_path / "both").mkdir()
    for path in ("one/a.jsonl", "both/a.jsonl", "both/b.parquet"):
        (tmp_path / path).write_text("")
    assert _kind(str(tmp_path / "one")) == "jsonl"
    assert _kind(f"{tmp_path}/both/*.parquet") == "parquet"
    with pytest.raises(UserError, match="has Parquet files and others; choose some"):
        _kind(str(tmp_path / "both"))
    for path in ("./pairs", "pairs.txt", "pairs.JSONL", "/absent/pairs", "pairs.json.bz2"):
        assert _kind(path) == "jsonl"
    for path in ("trl-lib/ultrafeedback_binarized", "pairs", "org/data-v1.0"):
        assert _kind(path) == "hub"


def test_the_same_pairs_in_every_form_of_data(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": f"{n}", "chosen": "yes", "rejected": "no"} for n in range(5)]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    digests = set()
    for name in ("saved", "rows.parquet", "rows.jsonl"):
        corpus = prepare_corpus(
            source="preferences",
            path=str(tmp_path / name),
            tokenizer="byte",
            val_fraction=0.0,
            cache_dir=tmp_path / "cache",
            progress=False,
        )
        assert corpus.train.n_conversations == 5
        digests.add(corpus.sha256)
    assert len(digests) == 1
