"""Tokenizers in GGUF files: the ids are those of llama.cpp."""

import copy
import json
from itertools import islice

import pytest
from conftest import ROOT, random_model

from thinker.data.tokenizers.saved_tokenizer import load_tokenizer
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.interop import load
from thinker.interop.gguf.gguf_tokenizer import PATTERNS, WHOLE_WORDS, read_tokenizer
from thinker.interop.gguf.sentencepiece_header import has_equal_ids
from thinker.interop.gguf.verify_gguf import verify_gguf
from thinker.interop.gguf.write_gguf import write_gguf
from thinker.interop.verify_export import adversarial_texts
from thinker.runtime.errors import UserError

gguf = pytest.importorskip("gguf")
from gguf_files import REMOVE, rewrite  # noqa: E402

SAMPLE = (ROOT / "README.md").read_text(encoding="utf-8")
BPE = make_tokenizer("bpe:600", [SAMPLE, "1000 2026 12345 x12 a1b2 ***== 1,000.50\n" * 200])
N_TEXTS = 2000
KEY = "tokenizer.ggml."


@pytest.fixture(scope="module")
def bpe_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("bpe") / "bpe.gguf"
    model = random_model(vocab_size=BPE.vocab_size, d_model=32, n_layers=1, qk_norm=False)
    write_gguf(model, BPE, path, "f32")
    return path


def compare_with_llama_cpp(path, n_texts=N_TEXTS):
    llama_cpp = pytest.importorskip("llama_cpp")
    tokenizer = load(path)[1]
    llama = llama_cpp.Llama(str(path), n_ctx=32, vocab_only=True, verbose=False)
    names = list(tokenizer.special_tokens)
    for text in islice(adversarial_texts(names), n_texts):
        if "\0" in text:  # which ends a string in C
            continue
        theirs = llama.tokenize(text.encode(), add_bos=False, special=True)
        assert tokenizer.encode(text, allow_special=True) == theirs, text
    begun = llama.tokenize(b"Hi", add_bos=True, special=True)
    assert [*tokenizer.bos_prefix, *tokenizer.encode("Hi")] == begun
    vocab = llama_cpp.llama_model_get_vocab(llama.model)
    assert all(llama_cpp.llama_vocab_is_eog(vocab, number) for number in tokenizer.eos_ids)
    llama.close()
    return tokenizer


@pytest.mark.parametrize("pre", PATTERNS)
def test_byte_level_ids_are_those_of_llama_cpp(tmp_path, bpe_file, pre):
    rewrite(bpe_file, tmp_path / "x.gguf", {KEY + "pre": pre, KEY + "add_bos_token": REMOVE})
    tokenizer = compare_with_llama_cpp(tmp_path / "x.gguf")
    assert bool(tokenizer.bos_prefix) == (pre in WHOLE_WORDS)


def test_special_tokens_are_read(tmp_path, bpe_file):
    tokens = list(gguf.GGUFReader(bpe_file).get_field(KEY + "tokens").contents())
    types = list(gguf.GGUFReader(bpe_file).get_field(KEY + "token_type").contents())
    for number, (name, kind) in {400: ("<|end|>", 3), 401: ("<think>", 4), 402: ("<x", 5)}.items():
        tokens[number], types[number] = name, kind
    changes = {
        KEY + "tokens": tokens,
        KEY + "token_type": types,
        KEY + "eot_token_id": (400, gguf.GGUFValueType.UINT32),
        "tokenizer.chat_template": "{{ messages }}",
    }
    rewrite(bpe_file, tmp_path / "x.gguf", changes)
    tokenizer = compare_with_llama_cpp(tmp_path / "x.gguf", 500)
    assert tokenizer.eos_ids == [BPE.bos_id, 400]
    assert tokenizer.bos_prefix == [BPE.bos_id]
    assert tokenizer.chat_template == "{{ messages }}"
    assert tokenizer.encode("<think>") == [401]
    assert tokenizer.encode("<|end|>") != [400]
    assert tokenizer.encode("<|end|>", allow_special=True) == [400]


@pytest.fixture(scope="module")
def sentencepiece_header(tmp_path_factory):
    """The header that llama.cpp's converter writes for a tokenizer of SentencePiece."""
    sentencepiece = pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("spm")
    (folder / "text.txt").write_text(SAMPLE * 3, encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"),
        model_prefix=str(folder / "spm"),
        model_type="bpe",
        vocab_size=700,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=["<tool>"],
        control_symbols=["<turn>"],
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "spm.model"))
    tokens, types, scores = [], [], []
    for number in range(processor.vocab_size()):
        tokens.append(processor.id_to_piece(number))
        scores.append(float(processor.get_score(number)))
        kind = 1
        if processor.is_unknown(number):
            kind = 2
        elif processor.is_control(number):
            kind = 3
        elif processor.is_byte(number):
            kind = 6
        elif tokens[-1] == "<tool>":
            kind = 4
        types.append(kind)
    return {
        KEY + "model": "llama",
        KEY + "pre": "default",
        KEY + "tokens": tokens,
        KEY + "token_type": types,
        KEY + "scores": scores,
        KEY + "merges": REMOVE,
        KEY + "add_bos_token": REMOVE,
        KEY + "bos_token_id": (1, gguf.GGUFValueType.UINT32),
        KEY + "eos_token_id": (2, gguf.GGUFValueType.UINT32),
    }


@pytest.fixture(scope="module")
def wide_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("wide") / "wide.gguf"
    model = random_model(vocab_size=700, d_model=32, n_layers=1, qk_norm=False)
    write_gguf(model, BPE, path, "f32")
    return path


@pytest.mark.parametrize("adds_space", [True, False, None])
def test_sentencepiece_ids_are_those_of_llama_cpp(
    tmp_path, wide_file, sentencepiece_header, adds_space
):
    changes = dict(sentencepiece_header)
    if adds_space is not None:
        changes[KEY + "add_space_prefix"] = adds_space
    rewrite(wide_file, tmp_path / "x.gguf", changes)
    tokenizer = compare_with_llama_cpp(tmp_path / "x.gguf")
    assert tokenizer.bos_prefix == [1]
    for text in ("Hello  world", "naïve 🙂\n\n x", " a"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def header(path, **changes):
    fields = {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}
    for name, value in changes.items():
        fields[KEY + name] = value
        if value is None:
            del fields[KEY + name]
    return fields


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "t5"}, "of the kind 't5'; those that are read: gpt2, llama"),
        ({"model": None}, "of the kind None"),
        ({"pre": "tekken"}, "splits texts as 'tekken'; those that are read: llama-bpe"),
        ({"pre": ["gpt-2"]}, r"splits texts as \['gpt-2'\]"),
        ({"tokens": None}, "it has no list of tokens"),
        ({"tokens": []}, "it has no list of tokens"),
        ({"tokens": [1, 2]}, "it has no list of tokens"),
        ({"tokens": ["a"] * 5, "token_type": [1] * 5}, "it has a token twice"),
        ({"tokens": [str(i) for i in range(601)]}, "it has 601 tokens, but its model has 600"),
        ({"token_type": [1]}, "not one type for each token"),
        ({"merges": None}, "it has no list of merges"),
        ({"merges": [1]}, "it has no list of merges"),
        ({"bos_token_id": 10**6}, "bos_token_id is 1000000, which is no token"),
        ({"eos_token_id": "x"}, r"EOS tokens \['x'\] are not ids"),
        ({"eos_token_id": None}, r"EOS tokens \[\] are not ids"),
        ({"add_eos_token": True}, "ends every text with the EOS token"),
        ({"model": "llama"}, "not one score for each token"),
        ({"model": "llama", "scores": [0.0] * 600}, "only 0 of 256 tokens for bytes"),
    ],
    ids=str,
)
def test_other_tokenizers_are_refused(bpe_file, changes, message):
    with pytest.raises(UserError, match=message):
        read_tokenizer(header(bpe_file, **changes), BPE.vocab_size)


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ({"ab": -1.0, "bc": -1.0}, "several of its tokens have the score -1.0"),
        ({"ab": -1.0, "abx": -2.0, "xx": -3.0, "xxab": -4.0}, "has a character that is no token"),
    ],
)
def test_sentencepiece_vocabularies_that_leave_merges_open_are_refused(bpe_file, pieces, message):
    tokens = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "a", "b", "c", *pieces]
    types = [2, 3, *[6] * 256, *[1] * (3 + len(pieces))]
    scores = [0.0] * 258 + [-10.0, -11.0, -12.0, *pieces.values()]
    changes = {"model": "llama", "tokens": tokens, "token_type": types, "scores": scores}
    changes |= {"bos_token_id": 1, "eos_token_id": 1}
    with pytest.raises(UserError, match=message):
        read_tokenizer(header(bpe_file, **changes), BPE.vocab_size)


SENTENCEPIECE = ["llama", "mistral", "phi3", "gemma", "gemma2", "gemma3_text"]
FROM_MODEL_FILES = ["gemma tokenizer.model", "gemma2 tokenizer.model"]


def sentencepiece_tokenizer(name, folder):
    """The tokenizer of a family, from tokenizer.json or from tokenizer.model."""
    kinds = pytest.importorskip("tokenizer_kinds")
    kind, _, file = name.partition(" ")
    make = kinds.build_sentencepiece if file else kinds.build
    make(kind, folder)
    return load_tokenizer(folder)


def small_model(tokenizer):
    """A model with more ids than the tokenizer."""
    sizes = {"d_model": 32, "n_layers": 1, "qk_norm": False}
    return random_model(vocab_size=tokenizer.vocab_size + 3, **sizes)


@pytest.mark.parametrize("name", SENTENCEPIECE + FROM_MODEL_FILES)
def test_sentencepiece_tokenizers_are_written(tmp_path, name):
    """llama.cpp has the same ids, and shows each as the same bytes; read back, nothing differs."""
    tokenizer = sentencepiece_tokenizer(name, tmp_path)
    model = small_model(tokenizer)
    path = tmp_path / "x.gguf"
    write_gguf(model, tokenizer, path, "f32")
    again = load(path)[1]
    for text in islice(adversarial_texts(list(tokenizer.special_tokens), seed=2), 500):
        if has_equal_ids(tokenizer, text):
            ids = tokenizer.encode(text, allow_special=True)
            assert again.encode(text, allow_special=True) == ids, text
            assert again.decode(ids) == tokenizer.decode(ids), text
    assert again.bos_prefix == tokenizer.bos_prefix
    assert again.eos_ids == tokenizer.eos_ids
    assert again.chat_template == tokenizer.chat_template

    llama_cpp = pytest.importorskip("llama_cpp")
    assert "2,000 texts" in verify_gguf(model, tokenizer, path, "f32", n_texts=N_TEXTS)
    llama = llama_cpp.Llama(str(path), n_ctx=32, vocab_only=True, verbose=False)
    vocab = llama_cpp.llama_model_get_vocab(llama.model)
    for number in range(tokenizer.vocab_size):
        shown = tokenizer.token_bytes(number)
        is_end = llama_cpp.llama_vocab_is_eog(vocab, number)
        if not is_end and 0 < len(shown) < 32:  # longer ones are b"" there
            assert llama.detokenize([number]) == shown
    llama.close()


def test_the_name_of_a_model_decides_where_spaces_are_taken(tmp_path):
    """llama.cpp knows Phi-3 by its name."""
    for kind, name, written in [
        ("phi3", "mine", "phi-3 mine"),
        ("phi3", "Phi3-x", "Phi3-x"),
        ("llama", "my-phi3", "my-phi 3"),
    ]:
        folder = tmp_path / name
        folder.mkdir()
        tokenizer = sentencepiece_tokenizer(kind, folder)
        path = folder / "x.gguf"
        write_gguf(small_model(tokenizer), tokenizer, path, "f32", name)
        assert header(path)["general.name"] == written
        text = "<s> a</s>  b\n"
        again = load(path)[1]
        assert again.encode(text, allow_special=True) == tokenizer.encode(text, allow_special=True)


def lowercase(content):
    steps = [{"type": "Lowercase"}, *content["normalizer"]["normalizers"]]
    content["normalizer"]["normalizers"] = steps


def metaspace(content):
    content["normalizer"] = None
    step = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    content["pre_tokenizer"] = step


def one_merge_less(content):
    """Of a token that is made by several."""
    merges = content["model"]["merges"]
    results = ["".join(pair) for pair in merges]
    for number, result in enumerate(results):
        if results.count(result) > 1 and len(set(result)) > 1:
            del merges[number]
            return


def other_order(content):
    """One of the merges to a token stands last."""
    merges = content["model"]["merges"]
    results = ["".join(pair) for pair in merges]
    for number, result in enumerate(results):
        if results.count(result) > 1 and len(set(result)) > 1:
            merges.append(merges.pop(number))
            return


def unigram(content):
    pieces = [[piece, -1.0] for piece in content["model"]["vocab"]]
    content["model"] = {"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": True}


def zero(content):
    content["model"]["vocab"]["a\0"] = len(content["model"]["vocab"])


def one_space_before_all(content):
    """Added tokens are found in normalized text, with a space before the whole."""
    for token in content["added_tokens"]:
        token["normalized"] = True


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lowercase, "llama.cpp does not have its step Lowercase"),
        (metaspace, "llama.cpp does not have its step Metaspace"),
        (one_merge_less, "llama.cpp would merge .* for which tokenizer.json has no merge"),
        (other_order, "llama.cpp has no such order of the merges to"),
        (unigram, "it is no BPE"),
        (zero, "llama.cpp cannot read its token"),
        (one_space_before_all, "llama.cpp would tokenize .* otherwise"),
    ],
)
def test_what_llama_cpp_would_tokenize_otherwise_is_not_written(tmp_path, change, message):
    tokenizer = sentencepiece_tokenizer("llama", tmp_path)
    content = copy.deepcopy(tokenizer.content)
    change(content)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    changed = load_tokenizer(tmp_path)
    with pytest.raises(UserError, match=message):
        write_gguf(small_model(changed), changed, tmp_path / "x.gguf", "f32")
    assert not (tmp_path / "x.gguf").exists()
