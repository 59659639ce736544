"""A small imported tokenizer in the style of SentencePiece."""

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from thinker.data.tokenizers.saved_tokenizer import load_tokenizer


def metaspace_tokenizer(folder, more_pieces, byte_fallback, normalizer=None):
    """Unigram pieces: ASCII characters, spaces written as ▁, and `more_pieces` with their
    scores."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    pieces += [(f"<0x{byte:02X}>", -9.0) for byte in range(256)] if byte_fallback else []
    pieces += [(chr(code), -4.0) for code in range(33, 127)] + [("▁", -2.0), *more_pieces.items()]
    library = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=byte_fallback))
    if normalizer is not None:
        library.normalizer = normalizer
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    library.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")]
    )
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    folder.mkdir(exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}'
    )
    return load_tokenizer(folder)
