"""Tokenizers as Hugging Face's files: 20,000 fuzzed strings have the same ids, whichever way they
went."""

import json
import random
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinker.data.tokenizers import tokenizer_conversion
from thinker.data.tokenizers.hf_tokenizer import HFTokenizer
from thinker.data.tokenizers.saved_tokenizer import load_tokenizer
from thinker.data.tokenizers.text_bytes import token_byte_lengths
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.data.tokenizers.tokenizer_conversion import GPT2
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.runtime.errors import UserError

transformers = pytest.importorskip("transformers")
import tokenizers  # noqa: E402
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers  # noqa: E402

SAMPLE = (
    Path(__file__).read_text(encoding="utf-8") + "naïve café 日本語 🎉 don't we'll 12345 "
) * 2
# cl100k's own words, with its possessive quantifiers; o200k's and llama's are of the same kind
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BY_CATEGORY: dict[str, list[str]] = {}
for point in range(sys.maxunicode + 1):
    BY_CATEGORY.setdefault(unicodedata.category(chr(point)), []).append(chr(point))
del BY_CATEGORY["Cs"], BY_CATEGORY["Cn"]
NAMES = ["<|bos|>", "<|endoftext|>", "<|fim|>", "<think>", "<s>", "<unk>", "<|im_end|>", "</s>"]


def fuzzed(count, seed):
    """Strings of every Unicode category, runs of digits and spaces, controls, contractions, names
    of specials."""
    rng = random.Random(seed)
    categories = sorted(BY_CATEGORY)
    common = ["e", " the", "'s", "'LL", "don't", "x1", " ", "é"]
    pieces = [
        lambda: "".join(
            rng.choice(BY_CATEGORY[rng.choice(categories)]) for _ in range(rng.randrange(1, 8))
        ),
        lambda: "".join(rng.choices("0123456789", k=rng.randrange(1, 12))),
        lambda: "".join(rng.choices(" \t\n\r\u00a0\u3000\x0b", k=rng.randrange(1, 9))),
        lambda: "".join(chr(rng.randrange(32)) for _ in range(3)),
        lambda: rng.choice(NAMES),
        lambda: "".join(rng.choices(common, k=rng.randrange(1, 6))),
        lambda: SAMPLE[(start := rng.randrange(len(SAMPLE))) : start + rng.randrange(30)],
    ]
    return ["".join(rng.choice(pieces)() for _ in range(rng.randrange(1, 5))) for _ in range(count)]


def differing(ours, theirs, texts):
    """Texts that get other ids, as a whole or as plain text."""
    expected = theirs(texts, add_special_tokens=False)["input_ids"]
    return [
        text for text, ids in zip(texts, expected) if ours.encode(text, allow_special=True) != ids
    ]


def with_gaps(pattern=CL100K):
    """A trained vocabulary under another split, with special tokens whose ids leave gaps, as
    cl100k's do."""
    base = make_tokenizer("bpe:600", [SAMPLE])
    tokens = [base.token_bytes(i) for i in range(base.vocab_size - 1)]
    tokens += [None] * (612 - len(tokens))
    special = {"<|endoftext|>": 600, "<|fim|>": 603, "<|bos|>": 611}
    return Tokenizer("tiktoken:gappy", tokens, special, "<|endoftext|>", pattern)


OURS = {spec: make_tokenizer(spec, [SAMPLE]) for spec in ("byte", "char", "bpe:600")}
OURS["gpt2-like"] = with_gaps(GPT2)
OURS["cl100k-like"] = with_gaps()


@pytest.mark.parametrize("name", OURS)
def test_what_is_written_gives_the_same_ids_there_and_read_again_here(tmp_path, name):
    ours = OURS[name]
    tokenizer_conversion.write(ours, tmp_path, 128)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    again = load_tokenizer(tmp_path)
    assert type(again) is Tokenizer
    texts = fuzzed(5000, name)
    assert differing(ours, theirs, texts) == []
    assert [text for text in texts if again.encode(text) != ours.encode(text)] == []
    assert theirs(texts[0])["input_ids"] == [
        ours.bos_id,
        *ours.encode(texts[0], allow_special=True),
    ]
    assert theirs("a", "b")["input_ids"] == [
        ours.bos_id,
        *ours.encode("a"),
        ours.bos_id,
        *ours.encode("b"),
    ]
    n_pad_tokens = int(_known(ours) < ours.vocab_size)  # in a gap
    assert (theirs.bos_token_id, theirs.eos_token_id, len(theirs)) == (
        ours.bos_id,
        ours.eos_id,
        _known(ours) + n_pad_tokens,
    )
    assert (again.bos_id, again.eos_ids, again.bos_prefix) == (
        ours.bos_id,
        ours.eos_ids,
        [ours.bos_id],
    )
    assert again.special_tokens == ours.special_tokens
    assert (token_byte_lengths(again) == token_byte_lengths(ours)).all()
    ids = ours.encode("Naïve 日本 42\n")
    assert theirs.decode(ids) == again.decode(ids) == "Naïve 日本 42\n"


def _known(tokenizer):
    return sum(tokenizer.token_bytes(i) != b"" for i in range(tokenizer.vocab_size)) + len(
        tokenizer.special_tokens
    )


# From there to here


def trained(pre_tokenizer, normalizer=None, special=("<|endoftext|>", "<|im_end|>"), **model):
    library = tokenizers.Tokenizer(models.BPE(**model))
    library.pre_tokenizer, library.normalizer, library.decoder = (
        pre_tokenizer,
        normalizer,
        decoders.ByteLevel(),
    )
    trainer = trainers.BpeTrainer(
        vocab_size=800,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator([SAMPLE], trainer)
    return library


def saved(library, folder, **config):
    library.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)


def split(pattern):
    cut = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    return pre_tokenizers.Sequence(
        [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def byte_level(**options):
    return pre_tokenizers.ByteLevel(add_prefix_space=False, **options)


def qwen_like():
    library = trained(split(LLAMA3.replace("{1,3}", "")), normalizers.NFC())
    library.add_tokens([tokenizers.AddedToken("<think>", special=False, normalized=False)])
    return library


def llama3_like():
    library = trained(split(LLAMA3), special=("<|bos|>", "<|endoftext|>"), ignore_merges=True)
    library.post_processor = processors.Sequence(
        [
            processors.ByteLevel(),
            processors.TemplateProcessing("<|bos|> $A", "<|bos|> $A $B", [("<|bos|>", 0)]),
        ]
    )
    return library


def smollm_like():
    digits = pre_tokenizers.Digits(individual_digits=True)
    return trained(pre_tokenizers.Sequence([digits, byte_level(use_regex=True)]))


def mistral_like():
    """As sentencepiece's: spaces become ▁, one of them before the text, and what is unknown becomes
    bytes."""
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    library = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    library.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False)
    library.train_from_iterator([SAMPLE[:3000]], trainer)
    content = json.loads(library.to_str())
    content["added_tokens"] = content["added_tokens"][:3]
    content["decoder"] = {"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}  # fmt: skip
    library = tokenizers.Tokenizer.from_str(json.dumps(content))
    library.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 1)])
    return library


MISTRAL = {"bos_token": "<s>", "eos_token": "</s>"}
THEIRS = {
    "gpt2-like": (lambda: trained(byte_level()), {}, Tokenizer),
    "qwen-like": (qwen_like, {}, Tokenizer),
    "llama3-like": (llama3_like, {"bos_token": "<|bos|>"}, Tokenizer),
    "smollm-like": (smollm_like, {}, Tokenizer),
    "mistral-like": (mistral_like, MISTRAL, HFTokenizer),
    "with-a-prefix-space": (
        lambda: trained(pre_tokenizers.ByteLevel(add_prefix_space=True)),
        {},
        HFTokenizer,
    ),
    "possessive": (lambda: trained(split(r"\p{N}{1,3}+|\p{N}|[^\p{N}]+")), {}, HFTokenizer),
    "lower-case": (lambda: trained(byte_level(), normalizers.Lowercase()), {}, HFTokenizer),
}


@pytest.mark.parametrize("name", THEIRS)
def test_what_is_read_gives_the_same_ids_as_there(tmp_path, name):
    make, config, kind = THEIRS[name]
    ours, theirs = saved(make(), tmp_path, **config)
    assert type(ours) is kind
    texts = fuzzed(3000, name)
    assert differing(ours, theirs, texts) == []
    assert ours.bos_prefix == theirs("x")["input_ids"][: -len(ours.encode("x"))]
    hidden = ours.special_tokens.keys() - ours.non_special_added_tokens
    plain = [text for text in texts if not any(special in text for special in hidden)]
    assert [
        text for text in plain if ours.encode(text) != ours.encode(text, allow_special=True)
    ] == []
    for text in plain[:300]:
        ids = ours.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    folder = tmp_path / "again"
    folder.mkdir()
    ours.save(folder)
    again = load_tokenizer(folder)
    assert again.content_hash == ours.content_hash
    assert (again.eos_ids, again.bos_prefix, again.bos_id) == (
        ours.eos_ids,
        ours.bos_prefix,
        ours.bos_id,
    )
    assert [text for text in texts[:300] if again.encode(text) != ours.encode(text)] == []
    (tmp_path / "out").mkdir()
    tokenizer_conversion.write(ours, tmp_path / "out", 128)  # and out again
    assert (
        differing(ours, transformers.AutoTokenizer.from_pretrained(tmp_path / "out"), texts[:300])
        == []
    )


def test_the_second_library_is_made_when_a_text_needs_it(tmp_path):
    """With 268,000 tokens, each takes seconds."""
    ours, theirs = saved(mistral_like(), tmp_path, **MISTRAL)
    assert ours.encode("a</s>b", allow_special=True) == theirs.encode(
        "a</s>b", add_special_tokens=False
    )
    assert "_plain" not in vars(ours)
    assert ours.special_tokens["</s>"] not in ours.encode("a</s>b")
    assert "_plain" in vars(ours)


def test_names_of_special_tokens_are_plain_text_unless_asked(tmp_path):
    for number, (make, config, _) in enumerate([THEIRS["gpt2-like"], THEIRS["mistral-like"]]):
        folder = tmp_path / str(number)
        folder.mkdir()
        ours, theirs = saved(make(), folder, **config)
        name = "</s>" if config else "<|endoftext|>"
        assert ours.special_tokens[name] not in ours.encode(f"a{name}b")
        assert ours.special_tokens[name] in ours.encode(f"a{name}b", allow_special=True)
        assert ours.decode(ours.encode(f"a{name}b")) == f"a{name}b"
        ids = ours.encode(f"a{name}b", allow_special=True)
        assert (
            ours.decode(ids)
            == theirs.decode(ids, skip_special_tokens=True)
            == ("a b" if config else "ab")
        )


def test_bytes_of_pieces_make_up_the_text(tmp_path):
    ours, _ = saved(mistral_like(), tmp_path, **MISTRAL)
    text = "Naïve 日本 🎉  two spaces\n"
    assert ours.decode_bytes(ours.encode(text)) == f" {text}".encode()
    assert ours.decode(ours.encode(text)) == text


def test_tokens_that_are_not_special_are_found_in_any_text(tmp_path):
    """As by transformers, in plain text too, whichever library runs it; and their names are what
    they stand for."""
    for number, pre_tokenizer in enumerate(
        [byte_level(), pre_tokenizers.ByteLevel(add_prefix_space=True)]
    ):
        library = trained(pre_tokenizer)
        library.add_tokens(
            [
                tokenizers.AddedToken(name, special=False, normalized=False)
                for name in ("über", "  ")
            ]
        )
        folder = tmp_path / str(number)
        folder.mkdir()
        ours, theirs = saved(library, folder)
        assert type(ours) is (HFTokenizer if number else Tokenizer)
        for text in ["über  x", "an  über über", "x"]:
            assert ours.encode(text) == theirs(text)["input_ids"]
        assert ours.decode_bytes(ours.encode("a  über")).decode().strip() == "a  über"
        assert ours.special_tokens["<|endoftext|>"] not in ours.encode("<|endoftext|>")


def test_a_visible_token_stands_for_its_name(tmp_path):
    ours, theirs = saved(qwen_like(), tmp_path)
    ids = ours.encode("a<think>b", allow_special=True)
    assert len(ids) == 3
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == "a<think>b"


def test_a_model_says_what_ends_a_text_and_what_begins_it(tmp_path):
    library = trained(byte_level())
    (tmp_path / "config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 0}))
    ours, _ = saved(library, tmp_path, eos_token="<|im_end|>", bos_token=None)
    assert (ours.eos_ids, ours.bos_id, ours.bos_prefix) == ([0], 0, [])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 0]}))
    assert load_tokenizer(tmp_path).eos_ids == [1, 0]


# Step 1: which lists of merges tiktoken can follow


def broken(change):
    content = json.loads(trained(byte_level()).to_str())
    change(content["model"])
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def swap(model):
    model["merges"][5], model["merges"][300] = model["merges"][300], model["merges"][5]


def skip_nonfinite_step(model):
    del model["merges"][200]  # its token is never made, and tiktoken would make it


def other_pair(model):
    """The newest token of three bytes is made of the other two parts."""
    vocab = model["vocab"]
    for at in reversed(range(len(model["merges"]))):
        first, second = model["merges"][at]
        whole = first + second
        if (
            len(whole) == 3
            and len(first) == 2
            and whole[1:] in vocab
            and vocab[whole[1:]] < vocab[whole]
        ):
            model["merges"][at] = [whole[0], whole[1:]]
            return
    raise AssertionError("there is none")


@pytest.mark.parametrize("change", [swap, skip_nonfinite_step, other_pair])
def test_merges_that_tiktoken_would_do_otherwise_are_left_to_the_library(tmp_path, change):
    ours, theirs = saved(broken(change), tmp_path)
    assert type(ours) is HFTokenizer
    assert differing(ours, theirs, fuzzed(500, "merges")) == []


def test_further_pairs_of_the_same_token_change_nothing(tmp_path):
    """Lists that were made from a tiktoken encoding name every pair of parts, as Llama 3's does."""

    def every_pair(model):
        merges, vocab = [], model["vocab"]
        for first, second in model["merges"]:
            whole = first + second
            cuts = [(whole[:at], whole[at:]) for at in range(1, len(whole))]
            merges += sorted(
                (cut for cut in cuts if set(cut) <= vocab.keys()),
                key=lambda c: [vocab[p] for p in c],
            )
        assert len(merges) > len(model["merges"])
        model["merges"] = [list(cut) for cut in merges]

    ours, theirs = saved(broken(every_pair), tmp_path)
    assert type(ours) is Tokenizer
    assert differing(ours, theirs, fuzzed(1000, "pairs")) == []


@given(st.binary(min_size=1, max_size=12))
def test_split_merges_the_lowest_pair_first(token):
    base = OURS["bpe:600"]
    ranks = {base.token_bytes(i): i for i in range(base.vocab_size - 1)}
    parts = tokenizer_conversion.split(token, ranks, len(ranks))
    assert b"".join(parts) == token
    assert base._encoding._encode_single_piece(token) == (
        [ranks[token]] if token in ranks else [ranks[p] for p in parts]
    )


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", "is not valid JSON"),
        ("tokenizer.json", "[]", "not a JSON object"),
        ("tokenizer.json", "{}", "it has no 'model'"),
        (
            "tokenizer_config.json",
            '{"eos_token": "<|endoftext|>", "pad_token": "<pad>"}',
            "not add the token '<pad>'",
        ),
        (
            "tokenizer_config.json",
            '{"eos_token": "<|endoftext|>", "extra_special_tokens": ["<x>"]}',
            "token '<x>'",
        ),
        (
            "tokenizer_config.json",
            '{"eos_token": "<|endoftext|>", "extra_special_tokens": {"x": "<y>"}}',
            "'<y>'",
        ),
        (
            "tokenizer_config.json",
            '{"added_tokens_decoder": {"0": {"content": "<|endoftext|>", "lstrip": true}}}',
            "its token '<|endoftext|>' with different flags",
        ),
        (
            "tokenizer_config.json",
            '{"eos_token": "<|endoftext|>", "chat_template": ["a"]}',
            "cannot be used",
        ),
        (
            "tokenizer_config.json",
            '{"eos_token": "<|endoftext|>", "chat_template": {"a": 1}}',
            "template is not text",
        ),
        (
            "tokenizer_config.json",
            '{"eos_token": "<|endoftext|>", "add_prefix_space": true}',
            "add_prefix_space is True",
        ),
        (
            "tokenizer_config.json",
            '{"eos_token": "<|endoftext|>", "split_special_tokens": true}',
            "split_special",
        ),
        (
            "generation_config.json",
            '{"eos_token_id": -1}',
            "not valid EOS token ids .eos_token_id in generation_config",
        ),
        ("generation_config.json", '{"eos_token_id": 5000}', "cannot be used"),
        ("config.json", '{"eos_token_id": "x"}', "not valid EOS token ids"),
        ("added_tokens.json", '{"<new>": 900}', "not add the token '<new>'"),
        (
            "special_tokens_map.json",
            '{"unk_token": {"content": "<unk>"}}',
            "not add the token '<unk>'",
        ),
        (
            "tokenizer.json",
            '{"model": {"type": "New"}, "added_tokens": [{"id": 0, "content": "<|endoftext|>"}]}',
            "rejects",
        ),
        ("tokenizer_config.json", "{}", "no BOS or EOS token"),
    ],
)
def test_files_that_are_none_are_refused_by_name(tmp_path, name, content, message):
    saved(trained(byte_level()), tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert "tokenizer" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content["model"].update(dropout=0.1), "dropout"),
        (
            lambda content: content["model"].update(continuing_subword_prefix="##"),
            "continuing_subword_prefix is '##'",
        ),
        (lambda content: content["added_tokens"][0].update(id=float("inf")), "has an invalid id"),
        (
            lambda content: content["added_tokens"].append(content["added_tokens"][0]),
            "a token twice",
        ),
        (
            lambda content: content["added_tokens"].append(
                content["added_tokens"][0] | {"id": 9, "content": "e"}
            ),
            "'e'",
        ),
    ],
)
def test_what_the_library_would_make_otherwise_is_refused(tmp_path, change, message):
    library = trained(byte_level())
    saved(library, tmp_path)
    content = json.loads(library.to_str())
    change(content)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=message):
        load_tokenizer(tmp_path)


def test_added_tokens_that_are_found_in_two_passes_are_left_to_the_library(tmp_path):
    library = trained(byte_level())
    library.add_tokens(
        [tokenizers.AddedToken("x<|im_end|>", normalized=True), tokenizers.AddedToken("<|im")]
    )
    ours, theirs = saved(library, tmp_path)
    texts = [*fuzzed(300, "passes"), "ax<|im_end|>b", "<|im<|im_end|>"]
    assert type(ours) is HFTokenizer
    assert differing(ours, theirs, texts) == []


@pytest.mark.parametrize("count", ["{1,3}", "{3}", "{2,}", "{,3}"])
def test_a_count_that_gives_nothing_back_is_left_to_the_library(count):
    """Whether the texts that are compared show it depends on the vocabulary."""
    plain, possessive = (
        {"Regex": rf"\p{{N}}{count}{plus}|[^\p{{N}}]+|\p{{N}}"} for plus in ("", "+")
    )
    steps = json.loads(trained(split("x")).to_str())["pre_tokenizer"]
    for pattern, known in [(plain, plain["Regex"]), (possessive, None)]:
        steps["pretokenizers"][0]["pattern"] = pattern
        assert tokenizer_conversion._pattern(steps) == known


def test_an_empty_list_of_steps_and_unknown_letters(tmp_path):
    library = trained(pre_tokenizers.Sequence([]))
    ours, theirs = saved(library, tmp_path)
    assert type(ours) is HFTokenizer
    assert differing(ours, theirs, ["abc", "a b"]) == []
    unigram = [["<unk>", 0.0], ["</s>", 0.0], ["▁a", -1.0], ["b", -1.0], ["▁", -2.0]]
    content = json.loads(library.to_str()) | {
        "model": {"type": "Unigram", "vocab": unigram, "unk_id": 0}
    }
    content["decoder"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"}
    content["pre_tokenizer"] = content["decoder"]
    flags = {
        "lstrip": False,
        "rstrip": False,
        "single_word": False,
        "normalized": False,
        "special": True,
    }
    content["added_tokens"] = [{"id": 1, "content": "</s>"} | flags]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("a</s>b", allow_special=True) == [2, 1, 4, 3]
    assert 1 not in tokenizer.encode("a</s>b")  # though the library would spell it with its piece
    content["model"]["vocab"][1], content["added_tokens"][0]["content"] = ["▁ab", -1.5], "</s>"
    content["added_tokens"][0]["id"], content["model"]["unk_id"] = 5, None
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("ab a") == [1, 2]
    with pytest.raises(UserError, match="cannot encode 'azb'"):
        tokenizer.encode("azb")


def test_what_would_end_every_text_with_a_token_is_refused(tmp_path):
    library = trained(byte_level())
    library.post_processor = processors.TemplateProcessing(
        "$A <|endoftext|>", "$A $B <|endoftext|>", [("<|endoftext|>", 0)]
    )
    with pytest.raises(UserError, match="ends every text"):
        saved(library, tmp_path)


def test_a_library_that_panics_or_multiplies_is_one_line(tmp_path):
    library = trained(byte_level())
    steps = [
        normalizers.Replace(Regex(""), ""),
        normalizers.Replace(Regex("b*"), "a"),
        normalizers.NFC(),
    ]
    library.normalizer = normalizers.Sequence([*steps, normalizers.NFD()])
    with pytest.raises(UserError, match="the tokenizer cannot encode 'a': index out of bounds"):
        saved(library, tmp_path)
    library.normalizer = normalizers.Sequence([normalizers.Replace("a", "aa")] * 40)
    library.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(
        UserError, match="its normalizer can make a text 1,099,511,627,776 times as long"
    ):
        load_tokenizer(tmp_path)


def test_a_template_with_an_empty_part_is_refused(tmp_path):
    library = trained(byte_level())
    library.post_processor = processors.TemplateProcessing(
        "<|endoftext|> $A", "<|endoftext|> $A $B", [("<|endoftext|>", 0)]
    )
    saved(library, tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    for place in (0, 1):
        parts = content["post_processor"]["single"]
        changed = content["post_processor"] | {"single": [*parts[:place], {}, *parts[place + 1 :]]}
        (tmp_path / "tokenizer.json").write_text(json.dumps(content | {"post_processor": changed}))
        with pytest.raises(UserError, match=r"tokenizer\.json cannot be used"):
            load_tokenizer(tmp_path)
