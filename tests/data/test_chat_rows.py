"""What a row of a table says about a conversation: all of it is trained as written, or refused."""

import itertools
import json

import numpy as np
import pytest
from metaspace_tokenizer import metaspace_tokenizer

from thinker.data.batches.windows import PackedDataset
from thinker.data.chat import chat
from thinker.data.chat.chat_report import ChatReport
from thinker.data.corpus.corpus import prepare_corpus
from thinker.data.corpus.encoding import encode_document
from thinker.data.text.document import Document
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
from thinker.training.reports.before_training import _amount

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


@pytest.mark.parametrize(
    ("row", "hint"),
    [
        ({"mesages": TALK}, "has mesages.; did you mean messages instead of mesages"),
        ({"promt": "x", "completion": "y"}, "did you mean prompt instead of promt"),
        ({"prompt": "x", "completoin": "y"}, "did you mean completion instead of completoin"),
        ({"text_": "x"}, "did you mean text_"),
        (
            {"instruction": "x", "input": "", "output": "y"},
            "for conversations, append input to instruction, and rename instruction and output to "
            "prompt and completion",
        ),
        ({"prompt": "x", "response": "y"}, "rename prompt and response to prompt and completion"),
        ({"question": "x", "answer": "y"}, "rename question and answer to prompt and completion"),
    ],
)
def test_rows_in_another_form_get_a_hint(tmp_path, row, hint):
    with pytest.raises(UserError, match=hint):
        documents(tmp_path, row)


def test_a_misspelled_column_in_a_later_row_is_pointed_out(tmp_path):
    with pytest.raises(UserError, match="not in row 1 .*did you mean messages instead of mesages"):
        documents(tmp_path, {"messages": TALK}, {"mesages": TALK})


@pytest.mark.parametrize("role", ["asistant", "Assistant", "assistent"])
def test_a_misspelled_role_is_refused(tmp_path, tokenizer, role):
    odd = {"role": role, "content": "Yes"}
    with pytest.raises(UserError, match=f"no answer, only the roles user and {role}; did you mean"):
        documents(tmp_path, {"messages": [TALK[0], odd]})
    (document,) = documents(tmp_path, {"messages": [TALK[0], odd, *TALK]})
    error = f"row 0 of .*message 2 has the role {role}; did you mean assistant"
    with pytest.raises(UserError, match=error):
        encode_document(tokenizer, document, True)
    with pytest.raises(UserError, match="message 1 has the role usr; did you mean user"):
        chat.encode_prompt(tokenizer, [{"role": "usr", "content": "Hi"}])


def test_roles_of_ones_own_are_rendered(tmp_path, tokenizer):
    talk = [{"role": "narrator", "content": "Night."}, *TALK]
    (document,) = documents(tmp_path, {"messages": talk})
    ((text, _),) = trained_text(tokenizer, document)
    assert text.startswith("narrator: Night.")
    # A template may know a role whose name is close to another.
    template = TEMPLATE + "{% if messages[0].role == 'User' %}{% endif %}"
    asked = [{"role": "User", "content": "Hi"}]
    assert chat.encode_prompt(tokenizer.with_chat_template(template), asked)


@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize(("good", "bad"), [("arguments", "argments"), ("name", "nmae")])
def test_a_misspelled_key_of_a_call_is_pointed_out(tmp_path, tokenizer, is_wrapped, good, bad):
    call = {"name": "weather", "arguments": {"place": "Rome"}}
    call[bad] = call.pop(good)
    if is_wrapped:
        call = {"type": "function", "function": call}
    message = {"role": "assistant", "content": "Yes", "tool_calls": [call]}
    (document,) = documents(tmp_path, {"messages": [TALK[0], message]})
    template = TEMPLATE + "{% for m in messages %}{{ m.tool_calls }}{% endfor %}"
    tokenizer = tokenizer.with_chat_template(template)
    error = f"row 0 of .*a call of a tool has no {good}; did you mean {good} instead of {bad}"
    with pytest.raises(UserError, match=error):
        encode_document(tokenizer, document, True)


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
    reading = tokenizer.with_chat_template(
        TEMPLATE.replace("m.content", "(m.thinking or '') + m.content")
    )
    ((_, answer),) = trained_text(reading, document)
    assert answer == "xYes"
    # A word in the template is not enough.
    only_set = tokenizer.with_chat_template("{% set x = messages[-1].thinking %}" + TEMPLATE)
    with pytest.raises(UserError, match="row 0 of .* does not render the reasoning_content of mes"):
        encode_document(only_set, document, True)


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
    assert windows.lost_targets() == (n_all - expected, 0, n_all)
    assert PackedDataset(corpus.train, 400, packing).lost_targets() == (0, 0, n_all)


@pytest.mark.parametrize("packing", ["contiguous", "documents", "best_fit"])
@pytest.mark.parametrize("prefix_len", [0, 1, 2, 23, 40])
def test_lost_targets_are_those_that_no_window_counts(tmp_path, tokenizer, packing, prefix_len):
    """Also those in the bidirectional prefix of a window, which depends on where it begins."""
    corpus = prepare_corpus(
        source="jsonl", path=str(long_rows(tmp_path)), tokenizer=tokenizer, cache_dir=tmp_path,
        progress=False, assistant_only_loss=True, val_fraction=0,
    )  # fmt: skip
    (shard,) = corpus.train.shards
    n_all = int(shard.loss_mask[1:].sum())
    for seq_len in (60, 90, 400):
        windows = PackedDataset(corpus.train, seq_len, packing, prefix_len=prefix_len)
        all_windows = PackedDataset(corpus.train, seq_len, packing)
        n_trained = sum(int((targets != IGNORE_INDEX).sum()) for _, targets in windows)
        n_inside = sum(int((targets != IGNORE_INDEX).sum()) for _, targets in all_windows)
        assert windows.lost_targets() == (n_all - n_inside, n_inside - n_trained, n_all)
        assert (n_inside > n_trained) == (prefix_len > 22)  # questions have 22 characters
        # Of the first windows.
        first = [windows[index][1] for index in range(3)]
        lost = windows.lost_targets(limit=3)
        n_counted = sum(int((targets != IGNORE_INDEX).sum()) for targets in first)
        assert lost.n_targets - lost.n_cut - lost.n_in_prefix == n_counted
    if prefix_len == 40:
        line = f"targets ({(n_inside - n_trained) / n_all:.1%}) are lost in the bidirectional pre"
        assert line in windows.lost_targets().lines("data.seq_len=400", 40)[0]


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
        "6 of 6 answers end with <|im_end|>, which does not end texts of this model; <|bos|> is added"
        in capsys.readouterr().err
    )


def test_answers_without_an_end_get_one_and_are_named(tmp_path, capsys):
    corpus = prepare(tmp_path, base_tokenizer(NO_END))
    said = capsys.readouterr().err
    assert "3 of 3 conversations are trained as one row per answer (6 rows)" in said
    assert "ends 6 of 6 answers with no special token; <|bos|> is added" in said
    assert corpus.train.n_documents == 6
    assert corpus.train.n_conversations == 3
    assert _amount(corpus.train).endswith(" tokens in 3 conversations (6 rows)")
    (shard,) = corpus.train.shards
    targets = shard.tokens[:][shard.loss_mask[:] == 1]
    assert targets.tolist() == 6 * [*b"Yes\n", 256]
    # Each answer is asked for as it was trained.
    asked = chat.encode_prompt(corpus.tokenizer, [*TALK, TALK[0]])
    assert bytes(asked[1:]) == b"user: Hi\nassistant: Yes\nuser: Hi\nassistant: "
    starts = shard.offsets[:]
    assert shard.tokens[int(starts[1]) : int(starts[1]) + len(asked)].tolist() == asked


def test_what_was_said_is_said_again_when_the_tokens_are_cached(tmp_path, capsys):
    tokenizer = base_tokenizer(NO_END)
    path = tmp_path / "talks.jsonl"
    path.write_text(json.dumps({"messages": [*TALK, *TALK], "systm": "Be kind."}) + "\n")

    def prepare_again(progress):
        prepare_corpus(
            source="jsonl", path=str(path), tokenizer=tokenizer, cache_dir=tmp_path,
            assistant_only_loss=True, val_fraction=0, progress=progress,
        )  # fmt: skip

    prepare_again(True)
    first = capsys.readouterr().err
    prepare_again(True)
    second = capsys.readouterr().err.splitlines()
    assert len(second) == 3
    for line, part in zip(second, ["not read: systm", "one row per answer", "no special token"]):
        assert part in line
        assert line in first
    prepare_again(False)
    assert capsys.readouterr().err == ""


def test_an_unread_column_with_a_misspelled_name_is_pointed_out(tmp_path, capsys):
    documents(tmp_path, {"messages": TALK, "systm": "Be kind.", "tool": [WEATHER], "source": "web"})
    (line,) = capsys.readouterr().err.splitlines()
    assert "not read: source, systm, tool; did you mean system instead of systm?" in line
    assert line.endswith("; did you mean tools instead of tool?")


def test_markers_that_are_no_tokens_are_named(tmp_path, capsys):
    tokenizer = make_tokenizer("byte", []).with_chat_template(CHATML)
    prepare(tmp_path, tokenizer)
    said = capsys.readouterr().err
    assert "the chat template writes <|im_start|>, <|im_end|>, for which this tokenizer" in said
    prepare(tmp_path, base_tokenizer(CHATML))
    assert "the chat template writes" not in capsys.readouterr().err


def test_answers_without_text_are_counted(tmp_path, tokenizer, capsys):
    empty = {"role": "assistant", "content": " "}
    rows = [[*TALK], [TALK[0], empty], [TALK[0], {**empty, "weight": 0}, *TALK]]
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    prepare_corpus(
        source="jsonl", path=str(path), tokenizer=tokenizer, cache_dir=tmp_path, progress=False,
        assistant_only_loss=True, val_fraction=0,
    )  # fmt: skip
    assert "1 trained answer without text: the model learns to end" in capsys.readouterr().err


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


def encoded(template, messages, all_tokens=False, **options):
    """Each row: its text with names of special tokens, and that of its targets."""
    tokenizer = base_tokenizer(template)
    names = {number: name.encode() for name, number in tokenizer.special_tokens.items()}

    def text(ids):
        return b"".join(names.get(i, tokenizer.token_bytes(i)) for i in ids.tolist()).decode()

    rows = chat.encode(tokenizer, chat.Conversation(messages, **options), all_tokens)
    return [(text(row.ids), text(row.ids[row.is_target])) for row in rows]


MARKED = (
    "{% for m in messages %}{% if m.content %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|bos|>{% endgeneration %}{% else %}{{ m.content }}{% endif %}\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)


def test_marks_of_an_earlier_answer_are_not_taken_for_another():
    """The generation prompt is no beginning of an answer here, so each becomes a row."""
    messages = [*TALK, {"role": "user", "content": "q2"}, {"role": "assistant", "content": ""}]
    answers = [answer for _, answer in encoded(MARKED, messages)]
    assert answers == ["Yes<|bos|>", ""]
    two = MARKED.replace(
        "{% generation %}", "{% generation %}a{% endgeneration %}-{% generation %}"
    )
    assert [answer for _, answer in encoded(two, TALK)] == ["aYes<|bos|>"]


def test_marks_in_a_macro_are_misplaced_and_refused():
    macro = (
        "{% macro said(m) %}<|im_start|>assistant\n{% generation %}{{ m.content }}<|im_end|>"
        "{% endgeneration %}{% endmacro %}{% for m in messages %}{% if m.role == 'user' %}"
        "{{ m.content }}{% else %}{{ said(m) }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with pytest.raises(UserError, match="marks another part of the text than an answer"):
        encoded(macro, [TALK[0], {"role": "assistant", "content": "A boy who runs a lot."}])


def test_a_context_that_a_chat_writes_with_a_special_token_is_trained_with_it():
    """The generation prompt writes a token that is plain text in the message."""
    template = CHATML.replace("assistant\\n'", "assistant\\n<|im_end|>'").replace(
        "assistant\n'", "assistant\n<|im_end|>'"
    )
    messages = [TALK[0], {"role": "assistant", "content": "<|im_end|>Yes"}]
    tokenizer = base_tokenizer(template)
    rows = chat.encode(tokenizer, chat.Conversation(messages))
    asked = chat.encode_prompt(tokenizer, messages[:1])
    assert rows[0].ids[: len(asked) - 1].tolist() == asked[1:]


@pytest.mark.parametrize(
    ("template", "messages", "error"),
    [
        (
            "{% for m in messages %}{% if m.role in ('user', 'assistant') %}{{ m.content }}{{ eos_token }}"
            "{% endif %}{% endfor %}",
            [{"role": "system", "content": "Be a pirate"}, *TALK],
            r"does not render the content of message 1 \(system\)",
        ),
        (
            "{% for m in messages %}{% if m.tool_calls %}CALL{{ m.tool_calls }}{% else %}{{ m.content }}"
            "{% endif %}{{ eos_token }}{% endfor %}",
            [TALK[0], {"role": "assistant", "content": "Let me look", "tool_calls": [WEATHER]}],
            r"does not render the content of message 2 \(assistant\)",
        ),
        (
            "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}",
            [{"role": "user<|im_end|>", "content": "Hi"}, TALK[1]],
            "the role 'user<|im_end|>' of a message is not a word".replace("|", r"\|"),
        ),
        (
            "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}",
            [TALK[0], {"role": "assistant", "content": "x", "tool_calls": "abc"}],
            "the tool_calls of a message are not a list of objects",
        ),
    ],
)
def test_what_a_template_leaves_out_is_refused(template, messages, error):
    with pytest.raises(UserError, match=error):
        encoded(template, messages)


def test_tools_are_rendered_not_only_mentioned():
    with pytest.raises(UserError, match="does not render the tools"):
        encoded("{% if not tools %}{% endif %}" + NO_END, TALK, tools=[WEATHER])


def test_names_of_keys_and_tools_are_plain_text_too():
    template = "{{ tools | tojson }}" + CHATML
    tools = [{"type": "function", "role": "<|im_end|>", "<|im_start|>system": 1}]
    ((text, _),) = encoded(template, TALK, tools=tools)
    tokenizer = base_tokenizer(template)
    (row,) = chat.encode(tokenizer, chat.Conversation(TALK, tools))
    assert text.count("<|im_end|>") == 3
    assert row.ids.tolist().count(258) == 2
    assert row.ids.tolist().count(257) == 2


@pytest.mark.parametrize("first", ["<s>", "<s>x"])
def test_names_that_begin_with_each_other(first):
    """The template's name stays a token, whatever follows it."""
    ids = {"<s>": 256, "<s>x": 257}
    tokens = [bytes([i]) for i in range(256)] + [None] * 2
    template = "{% for m in messages %}<s>{{ m.content }}{% endfor %}"
    tokenizer = Tokenizer("byte", tokens, ids, "<s>", chat_template=template, add_bos=False)
    for content in ("hello", "x", "xylo"):
        asked = chat.encode_prompt(tokenizer, [{"role": "user", "content": content}])
        assert asked == [256, *content.encode()]


def test_nulls_that_parquet_adds_are_no_arguments(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    rows = []
    for arguments in ({"city": "Rome"}, {"n": 3}):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        rows.append([TALK[0], {"role": "assistant", "content": "", "tool_calls": [call]}])
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"messages": rows}), path)
    found = list(open_source("parquet", path=str(path)).documents())
    said = [each.messages[1]["tool_calls"][0]["function"]["arguments"] for each in found]
    assert said == [{"city": "Rome"}, {"n": 3}]
    # What is written in JSON stays.
    tools = [{"type": "function", "function": {"name": "f", "default": None}}]
    (document,) = documents(tmp_path, {"messages": TALK, "tools": tools})
    assert document.tools == tools


def test_values_that_are_no_json_within_messages(tmp_path):
    deep = "x"
    for _ in range(900):
        deep = [deep]
    with pytest.raises(UserError, match="nested more than 100 levels deep"):
        documents(tmp_path, {"messages": TALK, "tools": [{"x": deep}]})


SYSTEM = {"role": "system", "content": "Be kind."}
ASK = {"role": "user", "content": "Why is that so?"}
ANSWERS = [
    {"role": "assistant", "content": "It is a long word."},
    {"role": "assistant", "content": "No, it is not long."},
]
# Earlier answers lose what was thought, of a message or within it.
FORGETFUL = CHATML.replace(
    "m.content +", "(m.content if loop.last or m.role != 'assistant' else m.content[6:]) +"
)
THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and "
    "loop.index0 == messages | map(attribute='role') | list | length - 1 %}<think>{{ m.content[:6] }}"
    "</think>{% endif %}{{ m.content.split('is')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Mistral's: the system message stands before the newest question.
MOVES_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'user' %}[{% if not messages[loop.index0 + 1:] | "
    "selectattr('role', 'equalto', 'user') | list and messages[0].role == 'system' %}"
    "{{ messages[0].content }}/{% endif %}{{ m.content }}]{% elif m.role == 'assistant' %}"
    "{{ m.content }}<|bos|>{% endif %}{% endfor %}"
)


def joined_targets(template, messages):
    return "".join(answer for _, answer in encoded(template, messages, all_tokens=True))


def test_every_token_of_a_conversation_is_trained_once():
    """Whichever row it is in, and whatever comes after the last answer."""
    for n in range(1, 7):
        messages = [SYSTEM, ASK, ANSWERS[0], ASK, ANSWERS[1], ASK, SYSTEM][:n]
        expected = "".join(
            f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"
            for message in messages
        )
        for template in (CHATML, FORGETFUL):
            assert joined_targets(template, messages) == expected
        without_end = "".join(f"{each['role']}: {each['content']}\n" for each in messages)
        assert joined_targets(NO_END, messages) == without_end


def test_an_answer_is_trained_once_however_it_is_told_again():
    messages = [ASK, ANSWERS[0], ASK, ANSWERS[1], ASK]
    rows = encoded(THINKS, messages, all_tokens=True)
    head = "<|im_start|>user\n that so?<|im_end|>\n"
    answers = ["<|im_start|>assistant\n<think>It is </think> a long word.<|im_end|>",
               "<|im_start|>assistant\n<think>No, it</think> not long.<|im_end|>"]  # fmt: skip
    assert [targets for _, targets in rows] == [
        f"{head}{answers[0]}",
        f"\n{head}{answers[1]}",
        f"\n{head}",
    ]
    assert rows[1][0].startswith(f"{head}<|im_start|>assistant\n a long word.<|im_end|>\n{head}")


def test_a_system_message_that_moves_is_trained_once():
    messages = [SYSTEM, ASK, ANSWERS[0], ASK, ANSWERS[1], ASK]
    rows = encoded(MOVES_SYSTEM, messages, all_tokens=True)
    first = f"[Be kind./{ASK['content']}]{ANSWERS[0]['content']}<|bos|>"
    second = f"[/{ASK['content']}]{ANSWERS[1]['content']}<|bos|>"
    assert [targets for _, targets in rows] == [first, second, f"[/{ASK['content']}]"]
    assert rows[2][0].endswith(f"[Be kind./{ASK['content']}]")


def test_all_tokens_of_a_corpus_are_trained(tmp_path):
    """Each with the end that the last answer needs."""
    messages = [ASK, ANSWERS[0], ASK, ANSWERS[1], ASK]
    path = tmp_path / "talks.jsonl"
    path.write_text(json.dumps({"messages": messages}))
    tokenizer = chat.with_answer_end(base_tokenizer(FORGETFUL))
    corpus = prepare_corpus(
        source="jsonl", path=str(path), tokenizer=tokenizer, cache_dir=tmp_path, progress=False,
        val_fraction=0,
    )  # fmt: skip
    (shard,) = corpus.train.shards
    assert shard.n_documents == 3
    counted = shard.tokens[:][shard.loss_mask[:] == 1].tolist()
    for message in messages:
        said = list(message["content"].encode())
        n_found = sum(counted[i : i + len(said)] == said for i in range(len(counted)))
        assert n_found == sum(each == message for each in messages)


@pytest.mark.parametrize(("end", "n_rows"), [("<|bos|>", 1), ("<|im_end|>", 2), ("", 2)])
def test_marked_parts_of_one_answer_are_one_answer(tmp_path, capsys, end, n_rows):
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        "{% generation %}so: {% endgeneration %}|{% generation %}{{ m.content }}END"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = base_tokenizer(template.replace("END", end))
    report = ChatReport(tokenizer, knows_answers=True)
    for _ in range(3):
        rows = chat.encode(tokenizer, chat.Conversation([*TALK, *TALK]))
        assert len(rows) == n_rows
        report.add(Document("", messages=[*TALK, *TALK]), rows)
    assert report.n_answers == 3 * 2
    assert report.n_open == (6 if end == "" else 0)
    assert dict(report.other_ends) == ({end: 6} if end == "<|im_end|>" else {})
