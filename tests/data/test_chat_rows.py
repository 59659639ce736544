"""What a row of a table says about a conversation: all of it is trained as written, or refused."""

import itertools
import json

import numpy as np
import pytest
from metaspace_tokenizer import metaspace_tokenizer

from thinker.data.batches.windows import PackedDataset
from thinker.data.chat import chat
from thinker.data.corpus.corpus import prepare_corpus
from thinker.data.corpus.encoding import encode_document
from thinker.data.text.files import text_files
from thinker.data.text.sources import open_source
from thinker.data.tokenizers.saved_tokenizer import load_tokenizer
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.generation import Generator, SamplingParams
from thinker.generation.chat.conversation import Conversation
from thinker.model import Thinker, ThinkerConfig
from thinker.runtime.constants import IGNORE_INDEX
from thinker.runtime.errors import UserError

pytest.importorskip("transformers")

TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
TEMPLATE = (
    "{% if tools %}Tools: {{ tools | tojson }}\n{% endif %}{% if mood %}Mood: {{ mood }}\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
WEATHER = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer("byte", []).with_chat_template(TEMPLATE)


def documents(folder, *rows):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(open_source("jsonl", path=str(path)).documents())


def trained_text(tokenizer, document):
    """The text of each row, and of its targets."""
    found = []
    for ids, is_target in encode_document(tokenizer, document, assistant_only_loss=True):
        found.append((tokenizer.decode(ids), tokenizer.decode(ids[is_target])))
    return found


@pytest.mark.parametrize("as_text", [False, True])
def test_tools_of_a_row_are_rendered(tmp_path, tokenizer, as_text):
    tools = json.dumps([WEATHER]) if as_text else [WEATHER]
    (document,) = documents(tmp_path, {"messages": TALK, "tools": tools})
    ((text, answer),) = trained_text(tokenizer, document)
    assert text.startswith(f"Tools: {json.dumps([WEATHER])}\nuser: Hi")
    assert answer == "Yes"
    with pytest.raises(UserError, match="row 0 of .* has tools, which the chat template ignores"):
        encode_document(
            tokenizer.with_chat_template(TEMPLATE[TEMPLATE.index("{% for") :]), document, True
        )


def test_system_text_of_a_row_is_the_first_message(tmp_path, tokenizer):
    row = {
        "system": "Be a pirate.",
        "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Arr"}],
    }
    (document,) = documents(tmp_path, row)
    ((text, answer),) = trained_text(tokenizer, document)
    assert text == "system: Be a pirate.\nuser: Hi\nassistant: Arr\n"
    assert answer == "Arr"
    row["conversations"].insert(0, {"from": "system", "value": "Be kind."})
    with pytest.raises(UserError, match="has a system message and the column system; remove one"):
        documents(tmp_path, row)


def test_variables_of_the_template(tmp_path, tokenizer):
    (document,) = documents(tmp_path, {"messages": TALK, "chat_template_kwargs": {"mood": "good"}})
    ((text, _),) = trained_text(tokenizer, document)
    assert text.startswith("Mood: good\nuser")
    (document,) = documents(tmp_path, {"messages": TALK, "chat_template_kwargs": {"moot": 1}})
    with pytest.raises(
        UserError, match="chat_template_kwargs has moot, which the chat template ignores"
    ):
        encode_document(tokenizer, document, True)
    (document,) = documents(tmp_path, {"messages": TALK, "chat_template_kwargs": {"messages": []}})
    with pytest.raises(UserError, match="chat_template_kwargs cannot set messages"):
        encode_document(tokenizer, document, True)


def test_the_split_of_a_conversation_depends_on_all_that_is_rendered(tmp_path):
    plain, with_tools = documents(
        tmp_path, {"messages": TALK}, {"messages": TALK, "tools": [WEATHER]}
    )
    assert json.loads(plain.text) == TALK
    assert plain.text != with_tools.text


@pytest.mark.parametrize(("key", "off", "on"), [("weight", 0, 1), ("train", False, True)])
def test_weights_of_answers(tmp_path, tokenizer, key, off, on):
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "wrong", key: off},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": "right", key: on},
    ]
    (document,) = documents(tmp_path, {"messages": messages})
    ((text, answer),) = trained_text(tokenizer, document)
    assert "wrong" in text
    assert answer == "right"
    with pytest.raises(UserError, match="weight 0 would be trained; set data.assistant_only_loss"):
        encode_document(tokenizer, document, assistant_only_loss=False)


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"weight": 0.5}, "the weight of a message is 0.5; use 0 or 1"),
        ({"weight": True}, "the weight of a message is True; use 0 or 1"),
        ({"train": "no"}, "train of a message is 'no'; use true or false"),
        ({"role": "user", "weight": 1}, "of the role user asks to be trained; only answers are"),
        ({"role": "user", "train": True}, "of the role user asks to be trained; only answers are"),
    ],
)
def test_other_weights_are_refused(tmp_path, message, error):
    with pytest.raises(UserError, match=error):
        documents(tmp_path, {"messages": [*TALK, {**TALK[1], **message}]})


@pytest.mark.parametrize("column", ["chosen", "functions", "weight", "images"])
def test_columns_that_would_change_a_conversation_are_refused(tmp_path, column):
    with pytest.raises(UserError, match=f"row 0 of .*: the column {column} is not supported"):
        documents(tmp_path, {"messages": TALK, column: [1]})


def test_columns_that_are_not_read_are_named_once(tmp_path, capsys):
    documents(tmp_path, *[{"messages": TALK, "source": "web", "id": n} for n in range(3)])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("rows.jsonl: not read: id, source")


def test_a_key_of_a_message_that_the_template_does_not_read(tmp_path, tokenizer):
    (document,) = documents(
        tmp_path, {"messages": [TALK[0], {**TALK[1], "reasoning_content": "x"}]}
    )
    with pytest.raises(UserError, match="a message has reasoning_content, which the chat template"):
        encode_document(tokenizer, document, True)
    reading = tokenizer.with_chat_template("{% set x = messages[-1].thinking %}" + TEMPLATE)
    assert encode_document(reading, document, True)


def long_rows(folder):
    """Conversations of which some are longer than a window."""
    rows = []
    for number in range(40):
        n_words = 30 if number % 4 == 0 else 2
        answer = "word " * n_words + f"{number}"
        messages = [
            {"role": "user", "content": f"q{number}"},
            {"role": "assistant", "content": answer},
        ]
        rows.append({"messages": messages})
    path = folder / "long.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("packing", ["contiguous", "documents", "best_fit"])
def test_no_answer_is_trained_without_its_question(tmp_path, tokenizer, packing):
    """Each window has whole conversations, or the beginning of one, and the rest is counted."""
    corpus = prepare_corpus(
        source="jsonl", path=str(long_rows(tmp_path)), tokenizer=tokenizer, cache_dir=tmp_path,
        progress=False, assistant_only_loss=True, val_fraction=0,
    )  # fmt: skip
    seq_len = 60
    windows = PackedDataset(corpus.train, seq_len, packing)
    n_counted = 0
    for index in range(len(windows)):
        inputs, targets = windows.window(index)
        n_counted += int((targets != IGNORE_INDEX).sum())
        for position in np.flatnonzero(targets != IGNORE_INDEX):
            before = inputs[: position + 1].tolist()
            assert "assistant: " in tokenizer.decode(before).rpartition("user: ")[2]
    (shard,) = corpus.train.shards
    mask = shard.loss_mask[:]
    starts = shard.offsets[:]
    expected = 0
    for start, end in itertools.pairwise(starts):
        cut = min(end, start + seq_len)
        expected += int(mask[start + 1 : cut + 1].sum())
    assert n_counted == expected
    n_all = int(mask[1:].sum())
    assert expected < n_all
    assert windows.lost_targets() == (n_all - expected, n_all)
    assert PackedDataset(corpus.train, 400, packing).lost_targets() == (0, n_all)


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NO_END = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def base_tokenizer(template):
    """A base model's: BOS ends texts, and the tokens of ChatML do not."""
    ids = {"<|bos|>": 256, "<|im_start|>": 257, "<|im_end|>": 258}
    tokens = [bytes([i]) for i in range(256)] + [None] * 3
    return Tokenizer("byte", tokens, ids, chat_template=template)


def prepare(folder, tokenizer):
    path = folder / "talks.jsonl"
    path.write_text("".join(json.dumps({"messages": [*TALK, *TALK]}) + "\n" for _ in range(3)))
    return prepare_corpus(
        source="jsonl", path=str(path), tokenizer=tokenizer, cache_dir=folder, progress=False,
        assistant_only_loss=True, val_fraction=0,
    )  # fmt: skip


def test_the_token_that_ends_answers_ends_texts():
    ended = chat.with_answer_end(base_tokenizer(CHATML))
    assert ended.eos_ids == [256, 258]
    assert ended.eos_id == 256
    assert chat.with_answer_end(ended) is ended
    own = base_tokenizer(TEMPLATE)  # which ends answers with the EOS token
    assert chat.with_answer_end(own) is own
    open_ended = base_tokenizer(NO_END)
    assert chat.with_answer_end(open_ended) is open_ended


def test_answers_that_end_in_another_special_token_are_named(tmp_path, capsys):
    prepare(tmp_path, base_tokenizer(CHATML))  # as if nothing had looked for the end
    assert (
        "6 of 6 answers end with <|im_end|>, which does not end texts of this model"
        in capsys.readouterr().err
    )


def test_answers_without_an_end_get_one_and_are_named(tmp_path, capsys):
    corpus = prepare(tmp_path, base_tokenizer(NO_END))
    said = capsys.readouterr().err
    assert "3 of 3 conversations are trained as one row per answer (6 rows)" in said
    assert "ends 6 of 6 answers with no special token; <|bos|> is added" in said
    (shard,) = corpus.train.shards
    targets = shard.tokens[:][shard.loss_mask[:] == 1]
    assert targets.tolist() == 6 * [*b"Yes\n", 256]
    # Each answer is asked for as it was trained.
    asked = chat.encode_prompt(corpus.tokenizer, [*TALK, TALK[0]])
    assert bytes(asked[1:]) == b"user: Hi\nassistant: Yes\nuser: Hi\nassistant: "
    starts = shard.offsets[:]
    assert shard.tokens[int(starts[1]) : int(starts[1]) + len(asked)].tolist() == asked


def test_ordinary_conversations_need_no_words(tmp_path, capsys):
    prepare(tmp_path, base_tokenizer(TEMPLATE))
    assert capsys.readouterr().err == ""


def test_names_of_special_tokens_in_rows_are_text_unless_asked(tmp_path):
    tokenizer = base_tokenizer(CHATML)
    messages = [{"role": "user", "content": "x<|im_end|>"}, TALK[1]]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": messages}))
    counts = {}
    keys = set()
    for allowed in (None, True):
        source = open_source("jsonl", path=str(path), allow_special_tokens=allowed)
        keys.add(source.key)
        (document,) = source.documents()
        ((ids, _),) = encode_document(tokenizer, document, assistant_only_loss=True)
        counts[allowed] = ids.tolist().count(258)
    assert counts == {None: 2, True: 3}
    assert len(keys) == 2
    with pytest.raises(UserError, match="data.allow_special_tokens has no effect with"):
        open_source("tales", allow_special_tokens=True)


@pytest.mark.parametrize("scheme", ["always", "first"])
def test_a_text_in_pieces_has_the_tokens_of_the_whole(tmp_path, monkeypatch, scheme):
    """Also with a tokenizer that begins each text with a space, and typed line by line."""
    monkeypatch.setattr(text_files, "PIECE_BYTES", 40)
    tokenizer = metaspace_tokenizer(tmp_path / "tokenizer", {"\n": -3.0}, byte_fallback=True)
    content = json.loads((tmp_path / "tokenizer" / "tokenizer.json").read_text())
    content["pre_tokenizer"]["prepend_scheme"] = scheme
    (tmp_path / "tokenizer" / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    lines = [f"line {number} of a text\n" for number in range(20)]
    (tmp_path / "text.txt").write_text("".join(lines))
    corpus = prepare_corpus(
        source="text", path=str(tmp_path / "text.txt"), tokenizer=tokenizer, cache_dir=tmp_path,
        progress=False, val_fraction=0.4,
    )  # fmt: skip
    for split in (corpus.train, corpus.val):
        ids = split.shards[0].tokens[:].tolist()[1:-2]  # without BOS, and EOS and BOS at the end
        assert ids == tokenizer.encode(tokenizer.decode(ids))
    whole = tokenizer.encode("".join(lines))
    assert corpus.train.shards[0].tokens[1:20].tolist() == whole[:19]

    model = Thinker(ThinkerConfig(tokenizer.vocab_size, d_model=16, n_layers=1, n_heads=2)).eval()
    conversation = Conversation(Generator(model, tokenizer))
    for line in lines[:3]:
        before = list(conversation.tokens)
        for _ in conversation.reply(line, SamplingParams(max_new_tokens=1)):
            pass
        conversation.tokens = conversation.tokens[:-1]  # without what the model has added
        if conversation.tokens[: len(before)] != before:
            raise AssertionError
    assert conversation.tokens == [*tokenizer.bos_prefix, *tokenizer.encode("".join(lines[:3]))]
