"""Tokenizers in GGUF files: the ids are those of llama.cpp."""

from itertools import islice

import pytest
from conftest import ROOT, random_model

from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.interop import load
from thinker.interop.gguf.gguf_tokenizer import PATTERNS, WHOLE_WORDS, read_tokenizer
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
