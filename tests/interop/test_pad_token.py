"""Exported tokenizers pad with a token that neither begins nor ends texts, as transformers sees them:
its collators keep the labels of EOS tokens, its models train their embedding."""

import json

import pytest
import torch
from conftest import random_model
from metaspace_tokenizer import metaspace_tokenizer

from thinker.data.tokenizers import tokenizer_conversion
from thinker.data.tokenizers.hf_tokenizer import HFTokenizer
from thinker.data.tokenizers.pad_token import NAME, find_pad_token
from thinker.data.tokenizers.saved_tokenizer import load_tokenizer
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.generation import Generator
from thinker.interop import load
from thinker.interop.huggingface import save_pretrained
from thinker.interop.verify_export import verify_hf_export

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")

SAMPLE = "Once upon a time the cat sat on the mat, and the dog sat on the cat. " * 20
BPE = make_tokenizer("bpe:300", [SAMPLE])
TEXTS = ["The cat", "Once upon a time the dog sat", "a"]


def bytes_and(names, **options):
    """Bytes, then special tokens, or gaps where a name is None."""
    tokens = [bytes([b]) for b in range(256)] + [None] * len(names)
    special = {name: 256 + i for i, name in enumerate(names) if name is not None}
    return Tokenizer("hf", tokens, special, names[0], **options)


def unigram(folder):
    tokenizer = metaspace_tokenizer(folder / "tokenizer", {"▁the": -1.5}, byte_fallback=True)
    assert isinstance(tokenizer, HFTokenizer)
    path = folder / "tokenizer" / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(config))
    return load_tokenizer(path.parent)


MAKERS = {
    "bpe": lambda folder: BPE,
    "two ends": lambda folder: bytes_and(["<s>", "<|im_end|>"], eos_ids=[256, 257]),
    "unigram": unigram,
    "gap": lambda folder: bytes_and(["<s>", None, "</s>"], eos_ids=[258]),
}


def export(tokenizer, folder, n_free=3):
    model = random_model(vocab_size=tokenizer.vocab_size + n_free)
    folder.mkdir(exist_ok=True)
    save_pretrained(model, tokenizer, folder)
    tokenizer_conversion.write(tokenizer, folder, 64, model.config.vocab_size)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return model, theirs, transformers.AutoTokenizer.from_pretrained(folder)


def check_batches(tokenizer, theirs, their_tokenizer):
    """A batch of padded prompts goes on as each prompt alone."""
    batch = their_tokenizer(TEXTS, return_tensors="pt", padding=True, padding_side="left")
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    together = theirs.generate(**batch, **options)
    for text, output in zip(TEXTS, together):
        ids = [*tokenizer.bos_prefix, *tokenizer.encode(text)]
        alone = theirs.generate(torch.tensor([ids]), **options)[0]
        assert output[-12:].tolist() == alone[len(ids) :].tolist()


@pytest.mark.parametrize("kind", MAKERS)
def test_a_free_id_becomes_the_pad_token(tmp_path, kind):
    tokenizer = MAKERS[kind](tmp_path)
    _, theirs, their_tokenizer = export(tokenizer, tmp_path / "out")
    expected = 257 if kind == "gap" else tokenizer.vocab_size
    assert (their_tokenizer.pad_token, their_tokenizer.pad_token_id) == (NAME, expected)
    assert theirs.config.pad_token_id == theirs.generation_config.pad_token_id == expected
    assert expected not in [tokenizer.bos_id, *tokenizer.eos_ids]
    assert their_tokenizer.decode([expected], skip_special_tokens=True) == ""

    # Labels are the tokens, except pads.
    ends = tokenizer.eos_ids
    rows = [[*tokenizer.bos_prefix, *tokenizer.encode(text), *ends, 65] for text in TEXTS]
    collator = transformers.DataCollatorForLanguageModeling(their_tokenizer, mlm=False)
    batch = collator([{"input_ids": row} for row in rows])
    for row, labels in zip(rows, batch["labels"].tolist()):
        assert [label for label in labels if label != -100] == row

    # The embedding of EOS tokens learns; that of the pad token does not.
    theirs.train()
    theirs(**batch).loss.backward()
    changes = theirs.get_input_embeddings().weight.grad.abs().sum(dim=1)
    assert (changes[[*tokenizer.bos_prefix, *ends]] > 0).all()
    if not theirs.config.tie_word_embeddings:
        assert changes[expected] == 0
    theirs.eval()
    check_batches(tokenizer, theirs, their_tokenizer)


@pytest.mark.parametrize("kind", ["bpe", "two ends", "unigram"])
def test_without_a_free_id_there_is_no_pad_token(tmp_path, kind):
    tokenizer = MAKERS[kind](tmp_path)
    model, theirs, their_tokenizer = export(tokenizer, tmp_path / "out", n_free=0)
    assert their_tokenizer.pad_token is None
    assert len(their_tokenizer) == model.config.vocab_size
    assert theirs.config.pad_token_id is None
    ids = torch.tensor([[*tokenizer.eos_ids, *tokenizer.encode("The cat")]])
    theirs(ids, labels=ids).loss.backward()
    changes = theirs.get_input_embeddings().weight.grad.abs().sum(dim=1)
    assert (changes[tokenizer.eos_ids] > 0).all()
    collator = transformers.DataCollatorForLanguageModeling(their_tokenizer, mlm=False)
    with pytest.raises(ValueError, match="does not have a padding token"):
        collator([{"input_ids": [1, 2, 3]}, {"input_ids": [1]}])
    # As the guide says.
    their_tokenizer.pad_token = their_tokenizer.eos_token
    check_batches(tokenizer, theirs, their_tokenizer)
    their_tokenizer.add_special_tokens({"pad_token": NAME})
    theirs.resize_token_embeddings(len(their_tokenizer))
    row = [*tokenizer.encode("The cat"), *tokenizer.eos_ids]
    labels = collator([{"input_ids": row}, {"input_ids": [*row, *row]}])["labels"][0]
    assert [label for label in labels.tolist() if label != -100] == row
    assert theirs.get_input_embeddings().weight.shape[0] == tokenizer.vocab_size + 1


@pytest.mark.parametrize("saved_there", [False, True])
@pytest.mark.parametrize("kind", MAKERS)
def test_an_export_that_is_imported_again_is_the_same(tmp_path, kind, saved_there):
    """Also if transformers has saved it."""
    tokenizer = MAKERS[kind](tmp_path)
    out = tmp_path / "out"
    model, theirs, their_tokenizer = export(tokenizer, out)
    assert "identical text" in verify_hf_export(model, tokenizer, out, n_texts=100)
    if saved_there:
        out = tmp_path / "saved"
        theirs.save_pretrained(out)
        their_tokenizer.save_pretrained(out)
    again, back = load(out)
    assert again.config.vocab_size == model.config.vocab_size
    ours, its = model.state_dict(), again.state_dict()
    assert ours.keys() == its.keys()
    assert all(torch.equal(ours[name], its[name]) for name in ours)
    assert back.vocab_size == tokenizer.vocab_size
    assert back.special_tokens == tokenizer.special_tokens
    assert (back.bos_id, back.eos_ids) == (tokenizer.bos_id, tokenizer.eos_ids)
    assert "pad_token" not in back.special_tokens_map
    text = f"The cat {NAME} sat"
    assert back.encode(text, allow_special=True) == tokenizer.encode(text, allow_special=True)
    scores = [Generator(*pair).score(text).logprobs for pair in ((model, tokenizer), (again, back))]
    assert scores[0] == scores[1]
    # And out again.
    export(back, tmp_path / "again")
    name = "tokenizer.json"
    if not saved_there:
        first, second = (json.loads((tmp_path / d / name).read_text()) for d in ("out", "again"))
        assert second == first


@pytest.mark.parametrize(
    ("pad", "eos_ids", "expected"),
    [
        ("<pad>", [257], ("<pad>", 258)),
        ("</s>", [257], (NAME, 259)),
        ("</s>", [256, 257], (NAME, 259)),
        ("<s>", [257], (NAME, 259)),
    ],
)
def test_the_tokenizers_own_pad_token(tmp_path, pad, eos_ids, expected):
    """It stays unless it begins or ends texts."""
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": pad}
    tokenizer = bytes_and(["<s>", "</s>", "<pad>"], eos_ids=eos_ids, special_tokens_map=names)
    _, theirs, their_tokenizer = export(tokenizer, tmp_path)
    assert (their_tokenizer.pad_token, their_tokenizer.pad_token_id) == expected
    assert theirs.config.pad_token_id == expected[1]
    assert load(tmp_path)[1].special_tokens == tokenizer.special_tokens


def test_pad_tokens_of_imported_tokenizers(tmp_path):
    unigram(tmp_path)
    path = tmp_path / "tokenizer" / "tokenizer_config.json"
    config = json.loads(path.read_text())
    for pad, expected in (("<unk>", ("<unk>", 0)), ("</s>", (NAME, 355))):
        path.write_text(json.dumps(config | {"pad_token": pad}))
        tokenizer = load_tokenizer(path.parent)
        assert tokenizer.vocab_size == 355
        _, theirs, their_tokenizer = export(tokenizer, tmp_path / "out")
        assert (their_tokenizer.pad_token, their_tokenizer.pad_token_id) == expected
        assert theirs.config.pad_token_id == expected[1]


def test_a_special_token_of_that_name_is_the_pad_token():
    assert find_pad_token(bytes_and(["<s>", NAME]), 300)[:2] == (NAME, 257)
    ends = bytes_and([NAME])
    assert find_pad_token(ends, 300) is None
