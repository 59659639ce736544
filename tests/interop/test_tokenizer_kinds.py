"""Tokenizers of every family encode and decode as transformers does, here and after an export.

THINKER_HARD_TEXTS_SEED=NUMBER tries other texts.
"""

import json
import os
import sys
from itertools import islice
from random import Random

import pytest

transformers = pytest.importorskip("transformers")
sentencepiece = pytest.importorskip("sentencepiece")

import tokenizers  # noqa: E402
from tokenizer_kinds import KINDS, build, build_older_files, build_sentencepiece  # noqa: E402

from thinker.data.chat import chat  # noqa: E402
from thinker.data.corpus.corpus import prepare_corpus  # noqa: E402
from thinker.data.tokenizers import older_files, tokenizer_conversion  # noqa: E402
from thinker.data.tokenizers.saved_tokenizer import has_tokenizer, load_tokenizer  # noqa: E402
from thinker.data.tokenizers.tokenizer import Tokenizer  # noqa: E402
from thinker.generation.streaming import TextStreamer  # noqa: E402
from thinker.interop.verify_export import adversarial_texts  # noqa: E402
from thinker.runtime.errors import UserError  # noqa: E402

SEED = int(os.environ.get("THINKER_HARD_TEXTS_SEED", "57"))
N_TEXTS = 2000
# Two files for one tokenizer: in `make test` one of them.
TWINS = ("gpt_neo", "olmo", "olmo3", "gemma", "gemma3_text", "qwen2", "smollm", "mistral")
OLDER = {"gpt2": build_older_files, "opt": build_older_files, "gpt_neo": build_older_files}
OLDER |= dict.fromkeys(("llama", "mistral", "phi3", "gemma", "gemma3_text"), build_sentencepiece)
MODEL_FILES = ("config.json", "generation_config.json")


def case(name):
    return pytest.param(name, marks=pytest.mark.more if name in TWINS else ())


NAMES = [case(name) for name in KINDS]


def open_there(kind, folder):
    """The tokenizer of transformers that does what the folder says."""
    if kind.follows_file:
        return transformers.AutoTokenizer.from_pretrained(folder)
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


def hard_texts(names, count=N_TEXTS):
    """Random texts, and short ones at which tokenizers differ."""
    short = ["", " ", "  ", "a", " a", "a ", "\n", "▁", "▁▁a", "<0x0A>", "▁ x", "a\0b"]
    short += [f" {name} " for name in names[:20]] + [f"{name}{name}\n\nYes" for name in names[:20]]
    return [*short, *islice(adversarial_texts(names, SEED), count)]


def check_equal(ours, theirs, texts):
    """Ids with and without special tokens, and decoded texts, as a whole and token by token."""
    ids_there = theirs(texts, add_special_tokens=False)["input_ids"]
    begun_there = theirs(texts)["input_ids"]
    adds_space = ours.decode_bytes(ours.encode("a")).startswith(b" ")
    shown = {ours.special_tokens[name] for name in ours.non_special_added_tokens}
    # transformers hides the token that Gemma's class calls its mask, whatever the file says.
    hidden = shown & set(theirs.all_special_ids)
    assert hidden <= {ours.special_tokens.get("<mask>")}
    for text, expected, begun in zip(texts, ids_there, begun_there):
        ids = ours.encode(text, allow_special=True)
        assert ids == expected, text
        assert ours.bos_prefix + ids == begun, text
        decoded = ours.decode(ids)
        if not hidden & set(ids):
            assert decoded == theirs.decode(ids, skip_special_tokens=True), text
        streamer = TextStreamer(ours, drops_space=adds_space)
        streamed = "".join([streamer.feed(i) for i in ids])
        assert streamed + streamer.finish() == decoded, text


def check_plain_text(ours, theirs, texts):
    """Names of special tokens are plain text unless they are asked for."""
    hidden = set(ours.special_tokens) - set(ours.non_special_added_tokens)
    special = {ours.special_tokens[name] for name in hidden}
    for text in texts:
        ids = ours.encode(text)
        assert not special & set(ids), text
        if not any(name in text for name in hidden):
            assert ids == ours.encode(text, allow_special=True), text


@pytest.mark.parametrize("name", NAMES)
def test_a_tokenizer_of_each_family_does_the_same_as_there(tmp_path, name):
    kind = build(name, tmp_path)
    theirs = open_there(kind, tmp_path)
    ours = load_tokenizer(tmp_path)
    texts = hard_texts(list(ours.special_tokens))
    check_equal(ours, theirs, texts)
    check_plain_text(ours, theirs, texts[:300])
    assert ours.eos_ids == [ours.special_tokens[kind.eos]]
    # A model may choose any tokens.
    rng = Random(SEED)
    for _ in range(200):
        ids = rng.choices(range(ours.vocab_size), k=6)
        if not set(ids) & {ours.special_tokens.get("<mask>")}:
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("more_ids", [0, 64], ids=["as-many-ids", "more-ids"])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_read_the_same_there_and_here(tmp_path, name, more_ids):
    """In a run directory, and in an export, whatever class transformers has for the model. A model
    with more ids gets a pad token."""
    folder = tmp_path / "given"
    folder.mkdir()
    build(name, folder)
    ours = load_tokenizer(folder)
    texts = hard_texts(list(ours.special_tokens), N_TEXTS // 4)
    export = tmp_path / "export"
    run = tmp_path / "run"
    for out in (export, run):
        out.mkdir()
    ours.save(run)
    tokenizer_conversion.write(ours, export, 128, ours.vocab_size + more_ids)
    for file in MODEL_FILES:
        if (folder / file).exists():
            (export / file).write_text((folder / file).read_text())
    check_equal(ours, transformers.AutoTokenizer.from_pretrained(export), texts)
    assert load_tokenizer(run).content_hash == ours.content_hash
    for again in (load_tokenizer(run), load_tokenizer(export)):
        assert (again.bos_prefix, again.eos_ids) == (ours.bos_prefix, ours.eos_ids)
        for text in texts:
            assert again.encode(text, allow_special=True) == ours.encode(text, allow_special=True)


QUESTION = {"role": "user", "content": "  Who is Ruth, 12345?\n"}
ANSWER = {"role": "assistant", "content": " A brave girl.\n\n It's naïve 🐕 "}
TALKS = {
    "question": [QUESTION],
    "talk": [QUESTION, ANSWER, QUESTION],
    "names": [QUESTION, ANSWER, {"role": "user", "content": "</s><eos><|end|> <|im_end|>"}],
    "system": [{"role": "system", "content": "Be kind."}, QUESTION],
}
CHATS = [
    pytest.param(*case(name).values, talk, marks=case(name).marks)
    for name, kind in KINDS.items()
    for talk in TALKS
    if kind.template is not None
]


@pytest.mark.parametrize(("name", "talk"), CHATS)
def test_a_chat_has_the_same_ids_as_there(tmp_path, name, talk):
    kind = build(name, tmp_path)
    theirs = open_there(kind, tmp_path)
    ours = load_tokenizer(tmp_path)
    options = {"add_generation_prompt": True, "return_dict": True}
    if talk == "system" and not kind.has_system:
        with pytest.raises(UserError, match="System role not supported"):
            chat.encode_prompt(ours, TALKS[talk])
        return
    expected = theirs.apply_chat_template(TALKS[talk], **options)["input_ids"]
    assert chat.encode_prompt(ours, TALKS[talk], allow_special=True) == expected
    written = tmp_path / "written"
    written.mkdir()
    tokenizer_conversion.write(ours, written, 128)
    there = transformers.AutoTokenizer.from_pretrained(written)
    assert there.apply_chat_template(TALKS[talk], **options)["input_ids"] == expected


@pytest.mark.parametrize("name", OLDER)
def test_older_files_are_what_transformers_makes_of_them(tmp_path, name):
    kind = OLDER[name](name, tmp_path)
    assert not (tmp_path / "tokenizer.json").exists()
    assert has_tokenizer(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    check_equal(ours, theirs, hard_texts(list(ours.special_tokens)))
    assert ours.chat_template == theirs.chat_template
    own = ours.special_tokens
    assert (ours.bos_id, ours.eos_ids) == (own[kind.bos], [own[kind.eos]])
    run = tmp_path / "run"
    run.mkdir()
    ours.save(run)
    assert load_tokenizer(run).content_hash == ours.content_hash


@pytest.mark.parametrize("name", ["gemma", "gemma3_text"])
def test_converted_sentencepiece_files_agree_with_sentencepiece(tmp_path, name):
    """In texts without names of tokens. transformers writes Llama's first space otherwise."""
    build_sentencepiece(name, tmp_path)
    ours = load_tokenizer(tmp_path)
    reference = sentencepiece.SentencePieceProcessor(str(tmp_path / "tokenizer.model"))
    n_compared = 0
    for text in islice(adversarial_texts([], SEED), N_TEXTS):
        # It does not encode this character, which ends a string in C, and ▁ is a space to it.
        if "\0" in text or "▁" in text:
            continue
        assert ours.encode(text) == reference.encode(text), text
        n_compared += 1
    assert n_compared > N_TEXTS / 2


@pytest.mark.parametrize(
    ("name", "package"),
    [("gpt2", "transformers"), ("gemma", "transformers"), ("gemma", "sentencepiece")],
)
def test_a_missing_package_is_named(tmp_path, monkeypatch, name, package):
    OLDER[name](name, tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf"has no tokenizer\.json.* needs {package}; run pip"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "file"), [("gpt2", "vocab.json"), ("opt", "merges.txt"), ("gemma", "tokenizer.model")]
)
def test_damaged_older_files_are_one_line(tmp_path, name, file):
    OLDER[name](name, tmp_path)
    (tmp_path / file).write_bytes(b"\x93 no tokenizer")
    with pytest.raises(UserError, match="fails: ") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_one_of_two_older_files_is_no_tokenizer(tmp_path):
    build_older_files("gpt2", tmp_path)
    (tmp_path / "merges.txt").unlink()
    assert older_files.find_older_files(tmp_path) == []
    assert not has_tokenizer(tmp_path)


def test_special_tokens_on_both_sides_of_a_text_are_refused(tmp_path):
    build("llama", tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    parts = content["post_processor"]["single"]
    parts.append({"SpecialToken": {"id": "</s>", "type_id": 0}})
    content["post_processor"]["special_tokens"]["</s>"] = {
        "id": "</s>",
        "ids": [2],
        "tokens": ["</s>"],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="ends every text with a special token"):
        load_tokenizer(tmp_path)


def test_names_that_the_files_leave_to_a_class_come_from_the_model(tmp_path):
    build("gpt2", tmp_path)
    assert "eos_token" not in json.loads((tmp_path / "tokenizer_config.json").read_text())
    ours = load_tokenizer(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for key in ("bos_token", "eos_token"):
        assert ours.special_tokens_map[key] == getattr(theirs, key)


def test_a_pattern_of_tiktoken_is_run_by_tiktoken(tmp_path):
    """Files that were converted from cl100k_base remove what is between the matches."""
    for name in ("llama3", "qwen3", "olmo2", "stablelm", "granite", "cohere"):
        folder = tmp_path / name
        folder.mkdir()
        build(name, folder)
        assert type(load_tokenizer(folder)) is Tokenizer


def test_tokens_that_the_model_has_no_id_for_are_plain_text(tmp_path):
    """As <image_soft_token> of Gemma 3 with 270 million and a billion parameters."""
    build("gemma3_text", tmp_path)
    given = load_tokenizer(tmp_path)
    name = "<image_soft_token>"
    n_ids = given.vocab_size
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    library.add_special_tokens([name])
    library.save(str(tmp_path / "tokenizer.json"))
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    config["added_tokens_decoder"] = {n_ids: {"content": name, "special": True} | flags}
    config |= {"image_token": name, "extra_special_tokens": {"image_token": name}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(tmp_path).vocab_size == n_ids + 1
    model = json.loads((tmp_path / "config.json").read_text()) | {"vocab_size": n_ids}
    (tmp_path / "config.json").write_text(json.dumps(model))
    ours = load_tokenizer(tmp_path)
    assert ours.vocab_size == n_ids
    assert ours.decode(ours.encode(f"a{name}", allow_special=True)) == f"a{name}"
    out = tmp_path / "out"
    out.mkdir()
    tokenizer_conversion.write(ours, out, 128)
    (out / "config.json").write_text(json.dumps(model))
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    assert len(theirs) == n_ids
    check_equal(ours, theirs, [name, *hard_texts(list(ours.special_tokens), 200)])
    assert load_tokenizer(out).content_hash == ours.content_hash


@pytest.mark.parametrize("name", NAMES)
def test_documents_of_a_corpus_have_the_ids_of_transformers(tmp_path, name):
    """With the folder as data.tokenizer of a fine-tuning."""
    folder = tmp_path / "given"
    folder.mkdir()
    kind = build(name, folder)
    theirs = open_there(kind, folder)
    texts = [text for text in islice(adversarial_texts([], SEED), 300) if text.strip()]
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (tmp_path / "texts.jsonl").write_text("".join(lines))
    corpus = prepare_corpus(
        source="jsonl",
        path=str(tmp_path / "texts.jsonl"),
        tokenizer=str(folder),
        cache_dir=tmp_path / "cache",
        val_fraction=0.0,
        progress=False,
    )
    (shard,) = corpus.train.shards
    bos_id, eos_ids = corpus.tokenizer.bos_id, corpus.tokenizer.eos_ids
    found = []
    for start, end in zip(shard.offsets[:-1], shard.offsets[1:]):
        ids = shard.tokens[start:end].tolist()
        assert ids.pop(0) == bos_id
        if bos_id not in eos_ids:
            assert ids.pop() == eos_ids[0]
        found.append(ids)
    expected = theirs(texts, add_special_tokens=False)["input_ids"]
    for text, ids, ids_there in zip(texts, found, expected, strict=True):
        assert ids == ids_there, text
    assert corpus.tokenizer.content_hash == load_tokenizer(folder).content_hash


@pytest.mark.parametrize("name", ["gpt_neo", "mistral", "granite", "phi3", "gpt_neox"])
def test_files_of_older_versions_beside_tokenizer_json(tmp_path, name):
    """special_tokens_map.json and added_tokens.json, which describe the same tokens again."""
    build(name, tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    keys = ("bos_token", "eos_token", "unk_token", "pad_token", "additional_special_tokens")
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    described = {}
    for key in keys:
        value = config.pop(key, None)
        if isinstance(value, list):
            described[key] = value
        elif value is not None:
            described[key] = {"content": value} | flags
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(described))
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    ids = {token["content"]: token["id"] for token in content["added_tokens"]}
    (tmp_path / "added_tokens.json").write_text(json.dumps(ids))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    texts = hard_texts(list(ours.special_tokens), 300)
    check_equal(ours, theirs, texts)
    assert ours.special_tokens_map["eos_token"] == theirs.eos_token
    out = tmp_path / "out"
    out.mkdir()
    tokenizer_conversion.write(ours, out, 128)
    written = transformers.AutoTokenizer.from_pretrained(out)
    check_equal(ours, written, texts)
    assert (written.bos_token, written.eos_token) == (theirs.bos_token, theirs.eos_token)
    assert load_tokenizer(out).special_tokens == ours.special_tokens


WITH_TEMPLATE = [name for name, kind in KINDS.items() if kind.template is not None]


@pytest.mark.parametrize("name", WITH_TEMPLATE)
def test_answers_are_trained_behind_the_tokens_that_a_chat_has(tmp_path, name):
    kind = build(name, tmp_path)
    ours = chat.with_answer_end(load_tokenizer(tmp_path))
    talk = [QUESTION, ANSWER, QUESTION, {"role": "assistant", "content": "Yes.\n\n1. two"}]
    if kind.has_system:
        talk.insert(0, {"role": "system", "content": "Be kind."})
    rows = chat.encode(ours, chat.Conversation(talk))
    trained = []
    for row in rows:
        ids = ours.bos_prefix + row.ids.tolist()
        is_target = [False] * len(ours.bos_prefix) + row.is_target.tolist()
        for position in range(1, len(ids)):
            if is_target[position] and not is_target[position - 1]:
                end = position
                while end < len(ids) and is_target[end]:
                    end += 1
                trained.append((ids[:position], ids[position:end]))
    answers = [number for number, message in enumerate(talk) if message["role"] == "assistant"]
    assert len(trained) == len(answers)
    for number, (context, answer) in zip(answers, trained):
        assert context == chat.encode_prompt(ours, talk[:number])
        assert answer[-1] in ours.eos_ids
        assert talk[number]["content"].strip() in ours.decode(answer)
