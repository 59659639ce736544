"""Conversations: the ids and the mask that transformers makes by the same template, and what is
refused."""

import datetime
import json
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tokenizers import AddedToken

from thinker.data.batches.windows import PackedDataset
from thinker.data.chat import chat, chat_template
from thinker.data.chat.messages import check_messages
from thinker.data.corpus.corpus import prepare_corpus
from thinker.data.tokenizers import tokenizer_conversion
from thinker.data.tokenizers.saved_tokenizer import load_tokenizer
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.runtime.constants import IGNORE_INDEX
from thinker.runtime.errors import UserError

transformers = pytest.importorskip("transformers")

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}"
    "{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# As Qwen3: what an assistant thought is told of its last turn only.
FORGETFUL = CHATML.replace(
    "m.content +", "(m.content if loop.last or m.role != 'assistant' else m.content[-3:]) +"
)
OPEN = (
    "{% for m in messages %}{{ m.role + ': ' + m.content }}{% if not loop.last %}{{ '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\nassistant: ' }}{% endif %}"
)
TALK = [
    {"role": "system", "content": "You are a naïve cat."},
    {"role": "user", "content": "Where is the mat? 12345"},
    {"role": "assistant", "content": "Under the dog 🐕."},
    {"role": "user", "content": "And the dog?"},
    {"role": "assistant", "content": "On the mat, don't you see?"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A byte-level BPE with chat tokens, as a Hugging Face folder; the end of a turn ends texts, as
    in Qwen."""
    folder = tmp_path_factory.mktemp("chat")
    base = make_tokenizer("bpe:400", ["the cat sat on the mat and the dog sat on the cat " * 20])
    tokenizer_conversion.write(base, folder, 128)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    theirs.add_tokens([AddedToken(name, special=True) for name in ("<|im_start|>", "<|im_end|>")])
    theirs.chat_template = CHATML
    theirs.eos_token = "<|im_end|>"
    theirs.save_pretrained(folder)
    return folder


@pytest.fixture
def tokenizer(folder):
    return load_tokenizer(folder)


def encode(tokenizer, messages):
    """The ids and targets of a conversation that is one row."""
    (row,) = chat.encode(tokenizer, chat.Conversation(messages))
    return row.ids, row.is_target


def answers_of(tokenizer, messages):
    """The text of the targets, row by row."""
    rows = chat.encode(tokenizer, chat.Conversation(messages))
    return [text_of(tokenizer, row.ids[row.is_target].tolist()) for row in rows]


def text_of(tokenizer, ids):
    names = {number: name for name, number in tokenizer.special_tokens.items()}
    return b"".join(
        names[i].encode() if i in names else tokenizer.token_bytes(i) for i in ids
    ).decode()


def test_the_tokens_and_the_mask_of_transformers(folder, tokenizer):
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    marked = tokenizer.with_chat_template(MARKED)
    known = theirs.apply_chat_template(
        TALK,
        chat_template=MARKED,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    ids, answers = encode(marked, TALK)
    assert ids.tolist() == known["input_ids"]
    assert answers.tolist() == [bool(x) for x in known["assistant_masks"]]
    plain_ids, plain_answers = encode(tokenizer, TALK)  # the same where nothing is marked
    assert (
        plain_ids.tolist()
        == theirs.apply_chat_template(TALK, tokenize=True, return_dict=True)["input_ids"]
    )
    assert plain_answers.tolist() == answers.tolist()
    assert chat.render(tokenizer, TALK) == theirs.apply_chat_template(TALK, tokenize=False)
    asked = theirs.apply_chat_template(TALK[:2], add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]
    assert chat.encode_prompt(tokenizer, TALK[:2])[-len(asked) :] == asked
    answered = text_of(tokenizer, ids[answers].tolist())
    assert answered == "Under the dog 🐕.<|im_end|>On the mat, don't you see?<|im_end|>"


@pytest.mark.parametrize(("eos", "bos"), [(0, None), ([0, 1], 0), (None, None)])
def test_templates_get_the_names_of_the_tokenizers_own_file(folder, tmp_path, eos, bos):
    """Whatever config.json says ends a text; and what ends an answer is not the line break behind
    that name."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    base = json.loads((folder / "tokenizer.json").read_text())["added_tokens"][0]
    values = {
        "bos_token_id": bos if bos is None else base["id"],
        "eos_token_id": eos if eos is None else base["id"],
    }
    (tmp_path / "config.json").write_text(
        json.dumps({name: x for name, x in values.items() if x is not None})
    )
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    if bos is not None:
        config["bos_token"] = None
    config["pad_token"] = "<|im_start|>"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = (
        load_tokenizer(tmp_path),
        transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path),
    )
    template = "{{ bos_token }} {{ eos_token }} {{ pad_token }} {{ unk_token }}"
    known = theirs.apply_chat_template(TALK, chat_template=template, tokenize=False)
    assert chat.render(ours.with_chat_template(template), TALK) == known
    assert known.split(" ")[1:3] == ["<|im_end|>", "<|im_start|>"]
    assert answers_of(chat.with_answer_end(ours), TALK) == [
        "Under the dog 🐕.<|im_end|>On the mat, don't you see?<|im_end|>"
    ]
    (tmp_path / "again").mkdir()
    ours.save(tmp_path / "again")
    again = load_tokenizer(tmp_path / "again")
    assert (again.special_tokens_map, again.content_hash, again.bos_id) == (
        ours.special_tokens_map,
        ours.content_hash,
        ours.bos_id,
    )
    (tmp_path / "out").mkdir()
    tokenizer_conversion.write(ours, tmp_path / "out", 128)
    out = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (out.eos_token, out.bos_token) == (theirs.eos_token, theirs.bos_token)


def test_marks_of_answers_are_found_however_they_are_written(tokenizer):
    plus = MARKED.replace("{% generation %}", "{%+ generation %}")
    comment = CHATML + "{# {% generation %} #}"
    for template in (plus, comment):
        answers = answers_of(tokenizer.with_chat_template(template), TALK)
        assert answers == ["Under the dog 🐕.<|im_end|>On the mat, don't you see?<|im_end|>"]


def test_a_template_that_renders_turns_differently_later_gives_a_row_per_answer(tokenizer):
    forgetful = tokenizer.with_chat_template(FORGETFUL)
    rows = chat.encode(forgetful, chat.Conversation(TALK))
    assert [text_of(tokenizer, row.ids[row.is_target].tolist()) for row in rows] == [
        "Under the dog 🐕.<|im_end|>",
        "On the mat, don't you see?<|im_end|>",
    ]
    for row, n_before in zip(rows, (2, 4), strict=True):
        context = row.ids[: row.is_target.argmax()].tolist()
        asked = chat.encode_prompt(forgetful, TALK[:n_before])
        assert context == asked[len(tokenizer.bos_prefix) :]
    assert len(chat.encode(forgetful, chat.Conversation(TALK[:3]))) == 1
    # What is rendered where a chat asks for the answer is no beginning of what is trained.
    other = tokenizer.with_chat_template(CHATML.replace("assistant\\n", "model\\n"))
    with pytest.raises(UserError, match=r"mark them with \{% generation %\}"):
        chat.encode(other, chat.Conversation(TALK))


def test_what_a_template_refuses_and_what_is_missing(tokenizer):
    with pytest.raises(UserError, match="rejects a conversation: no system"):
        chat.render(tokenizer.with_chat_template("{{ raise_exception('no system') }}"), TALK)
    with pytest.raises(UserError, match="rejects a conversation"):
        chat.render(tokenizer.with_chat_template("{% for m in messages %}"), TALK)
    for program, message in [
        ("{{ 1 / 0 }}", "division"),
        ("{{ messages[9].x.y }}", "no element 9"),
    ]:
        with pytest.raises(UserError, match=f"rejects a conversation: .*{message}"):
            chat.render(tokenizer.with_chat_template(program), TALK)
    with pytest.raises(UserError, match="need a chat template"):
        chat.render(make_tokenizer("byte", []), TALK)


LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
PROGRAMS = {
    "power": "{{ 2 ** (2 ** 40) }}",
    "a list": "{% set n = namespace(x=['x']) %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "a condition": CHATML + "{% if messages[0].content == 'go' %}" + LOOP + "{% endif %}",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_template_without_end_is_one_line_and_the_next_one_works(tokenizer, monkeypatch, program):
    chat_template._renderer().close()
    monkeypatch.setattr(chat_template, "CPU_SECONDS", 1)
    with pytest.raises(UserError, match="the chat template needs more than 1 s or 2 GB"):
        chat.render(
            tokenizer.with_chat_template(PROGRAMS[program]), [{"role": "user", "content": "go"}]
        )
    assert (
        chat.render(tokenizer, TALK[:1]) == "<|im_start|>system\nYou are a naïve cat.<|im_end|>\n"
    )


def test_a_template_that_writes_too_much(tokenizer, monkeypatch):
    chat_template._renderer().close()
    with pytest.raises(UserError, match="renders more than .* characters for one conversation"):
        chat.render(tokenizer.with_chat_template("{{ 'x' * 99999000 }}"), TALK)


def test_rendering_is_ended_with_its_process(tokenizer):
    renderer = chat_template._renderer()
    chat.render(tokenizer, TALK)
    os.killpg(
        renderer.process.pid, signal.SIGKILL
    )  # a group of its own, which Ctrl-C does not reach
    renderer.process.wait()
    with pytest.raises(UserError, match="needs more than"):
        chat.render(tokenizer, TALK)
    assert chat.render(tokenizer, TALK).startswith("<|im_start|>system")


def test_threads_that_render_at_once_get_their_own_conversations(tokenizer):
    """As tokenizing does, which gives each thread about 64 KB of text."""
    talks = [[{"role": "user", "content": f"{i} " * (1 + i % 9)}] for i in range(600)]
    with ThreadPoolExecutor(8) as pool:
        rendered = list(pool.map(lambda talk: chat.render(tokenizer, talk), talks))
    assert rendered == [f"<|im_start|>user\n{talk[0]['content']}<|im_end|>\n" for talk in talks]


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "talk.jsonl"
    talks = [
        [{**TALK[1], "content": f"Number {i}?"}, {**TALK[2], "content": f"It is {i * i}."}]
        for i in range(60)
    ]
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    return path


@pytest.mark.parametrize("packing", ["contiguous", "documents"])
def test_only_answers_are_targets(tmp_path, tokenizer, rows, packing):
    options = {
        "source": "jsonl",
        "path": str(rows),
        "tokenizer": tokenizer,
        "cache_dir": tmp_path,
        "progress": False,
    }
    corpus = prepare_corpus(**options, assistant_only_loss=True, val_fraction=0.2)
    windows = PackedDataset(corpus.train, 64, packing)
    learned = []
    for index in range(len(windows)):
        inputs, targets = windows[index]
        counted = targets != IGNORE_INDEX
        learned += targets[counted].tolist()
        assert (targets[:-1][counted[:-1]] == inputs[1:][counted[:-1]]).all()
    text = text_of(tokenizer, learned)
    assert text.count("<|im_end|>") == corpus.train.n_documents
    assert set(text.replace("<|im_end|>", "").split(".")) <= {
        *(f"It is {i * i}" for i in range(60)),
        "",
    }
    everything = prepare_corpus(**options, val_fraction=0.2)
    assert everything.sha256 != corpus.sha256
    everything_learned = PackedDataset(everything.train, 64, packing)
    assert sum(int((targets != IGNORE_INDEX).sum()) for _, targets in everything_learned) > 2 * len(
        learned
    )
    again = prepare_corpus(**options, assistant_only_loss=True, val_fraction=0.2)
    assert (again.folder, again.sha256) == (corpus.folder, corpus.sha256)


def test_a_call_that_the_template_does_not_read_is_no_empty_answer(tmp_path, tokenizer):
    rows = [json.dumps({"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "Yes."}]})
            for i in range(40)]  # fmt: skip
    calls = [{"type": "function", "function": {"name": "add", "arguments": "{}"}}]
    rows[3] = json.dumps(
        {"messages": [{"role": "assistant", "content": None, "tool_calls": calls}]}
    )
    (tmp_path / "talks.jsonl").write_text("\n".join(rows))
    options = {
        "source": "jsonl",
        "path": str(tmp_path / "talks.jsonl"),
        "cache_dir": tmp_path,
        "progress": False,
    }
    with pytest.raises(
        UserError,
        match="row 3 of .*talks.jsonl: a message has only tool_calls, which the chat templ",
    ):
        prepare_corpus(**options, tokenizer=tokenizer, val_fraction=0.2)
    reading = tokenizer.with_chat_template(
        CHATML.replace("m.content", "(m.content or m.tool_calls[0].function.name)")
    )
    assert prepare_corpus(**options, tokenizer=reading, val_fraction=0.2).train.n_documents > 20


def test_an_answer_that_the_boundary_ends_learns_the_boundary(tmp_path, rows):
    """Of a tokenizer made here, whose template writes no end: the BOS token after the conversation
    is it."""
    plain = make_tokenizer("byte", []).with_chat_template(OPEN)
    corpus = prepare_corpus(
        source="jsonl", path=str(rows), tokenizer=plain, cache_dir=tmp_path, progress=False, assistant_only_loss=True,
        val_fraction=0.2,
    )  # fmt: skip
    inputs, targets = PackedDataset(corpus.train, 64, "documents")[0]
    counted = targets[targets != IGNORE_INDEX]
    assert counted[-1] == plain.bos_id or plain.bos_id in counted
    assert plain.decode(counted.tolist()).startswith("It is ")
    assert inputs[0] == plain.bos_id
    assert (np.diff(np.flatnonzero(targets == plain.bos_id)) > 0).all()


def test_an_answer_left_open_is_ended_by_the_token_that_ends_texts(tmp_path, rows):
    """Of a tokenizer with an EOS token beside its BOS token, which is no target."""
    base = make_tokenizer("byte", [])
    tokens = [base.token_bytes(i) for i in range(256)] + [None, None]
    plain = Tokenizer("hf", tokens, {"<s>": 256, "</s>": 257}, "<s>", eos_ids=[257])
    within = OPEN.replace("m.content", "(bos_token if m.role == 'user' else '') + m.content")
    for template, conversation in [(OPEN, ""), (within, "<s>")]:
        corpus = prepare_corpus(
            source="jsonl", path=str(rows), tokenizer=plain.with_chat_template(template), cache_dir=tmp_path,
            progress=False, assistant_only_loss=True, val_fraction=0.2,
        )  # fmt: skip
        windows = PackedDataset(corpus.train, 64, "documents")
        learned = [
            targets[targets != IGNORE_INDEX]
            for _, targets in (windows[i] for i in range(len(windows)))
        ]
        text = text_of(plain, np.concatenate(learned).tolist())
        assert text.count("It is") == text.count(".</s>") == corpus.train.n_documents
        assert "<s>" not in text
        if conversation:
            everything = prepare_corpus(source="jsonl", path=str(rows), tokenizer=corpus.tokenizer, cache_dir=tmp_path,
                                 progress=False, val_fraction=0.2)  # fmt: skip
            all_windows = PackedDataset(everything.train, 64, "documents")
            counted = sum(
                int((all_windows[i][1] != IGNORE_INDEX).sum()) for i in range(len(all_windows))
            )
            assert counted > sum(map(len, learned))
            with pytest.raises(UserError, match="BOS token inside conversations"):
                PackedDataset(corpus.train, 64, "documents", document_masking=True)
        else:
            inputs, _ = windows.batch([0])
            starts = (
                PackedDataset(corpus.train, 64, "documents", document_masking=True)
                .document_ids(inputs)
                .diff(dim=1)
                .nonzero()
            )
            assert (inputs[:, 1:][starts[:, 0], starts[:, 1]] == 256).all()


def test_a_message_that_a_library_turned_into_a_date_is_named():
    message = {"role": "assistant", "content": datetime.date(2024, 1, 1)}
    with pytest.raises(
        UserError, match="row 3: .* was parsed as a date; write all messages as text"
    ):
        check_messages([message], "row 3")


def test_a_message_without_content_is_named():
    rows = [{"role": "user", "contnt": "Who?"}, {"role": "assistant", "content": "Noah."}]
    message = (
        "row 3: a message has no content, only role, contnt; did you mean content instead of contnt"
    )
    with pytest.raises(UserError, match=message):
        check_messages(rows, "row 3")
    with pytest.raises(UserError, match="a message has no content, only role$"):
        check_messages([{"role": "user", "content": None}, rows[1]], "row 3")
    call = {"role": "assistant", "content": None, "tool_calls": []}
    assert check_messages([call], "row 3") == [{"role": "assistant", "tool_calls": []}]


@pytest.mark.parametrize(
    "content", [[{"type": "text", "text": "Noah."}], {"text": "Noah."}, 5, 1.5, True]
)
def test_content_that_is_no_text_is_refused(content):
    rows = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": content}]
    with pytest.raises(
        UserError,
        match=f"^row 3: the content of a message is a {type(content).__name__}; it must be",
    ):
        check_messages(rows, "row 3")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"messages": [{"role": "user", "content": "x"}]}] * 3, "has no answer"),
        ([{"messages": [{"content": "x"}]}] * 3, "is not a conversation"),
        ([{"messages": ["x"]}] * 3, "is not a conversation"),
        ([{"text": "x"}, {"text": "y"}], "needs conversations"),
    ],
)
def test_rows_that_are_no_conversations_are_named(tmp_path, tokenizer, lines, message):
    path = tmp_path / "talk.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UserError, match=message):
        prepare_corpus(
            source="jsonl",
            path=str(path),
            tokenizer=tokenizer,
            cache_dir=tmp_path,
            progress=False,
            assistant_only_loss=True,
        )


def test_transformers_renders_an_exported_chat_with_the_token_that_begins_texts(tmp_path):
    """Our templates leave it to the tokenizer, whose apply_chat_template() adds none."""
    ours = make_tokenizer("byte", []).with_chat_template(OPEN)
    tokenizer_conversion.write(ours, tmp_path, 64)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    options = {"add_generation_prompt": True, "return_dict": False}
    expected = chat.encode_prompt(ours, TALK)
    assert theirs.apply_chat_template(TALK, **options) == expected
    assert expected[0] == ours.bos_id != expected[1]
    assert chat.encode_prompt(load_tokenizer(tmp_path), TALK) == expected  # and not twice


CLOCK = "{{ strftime_now('%H:%M:%S.%f') }} "


def test_one_conversation_has_one_time(tokenizer):
    """However long it takes to render its beginnings."""
    talking = tokenizer.with_chat_template(CLOCK + CHATML)
    (row,) = chat.encode(chat.with_answer_end(talking), chat.Conversation(TALK))
    text = text_of(tokenizer, row.ids[row.is_target].tolist())
    assert text == "Under the dog 🐕.<|im_end|>On the mat, don't you see?<|im_end|>"
    now = datetime.datetime(2024, 2, 3, 4, 5, 6, 78)
    (row,) = chat.encode(talking, chat.Conversation(TALK, now=now))
    assert text_of(tokenizer, row.ids.tolist()).startswith("04:05:06.000078 <|im_start|>system")
    before = datetime.datetime.now()
    with_date = talking.with_chat_template("{{ strftime_now('%Y-%m-%d %H:%M:%S.%f') }}")
    assert before <= datetime.datetime.fromisoformat(chat.render(with_date, TALK))
    assert datetime.datetime.fromisoformat(chat.render(with_date, TALK)) <= datetime.datetime.now()


def test_a_clock_does_not_hide_what_a_template_leaves_out(tokenizer):
    leaves_out = CLOCK + CHATML.replace("m.content", "(m.content if m.role != 'system' else '')")
    with pytest.raises(UserError, match=r"does not render the content of message 1 \(system\)"):
        chat.encode(tokenizer.with_chat_template(leaves_out), chat.Conversation(TALK))
