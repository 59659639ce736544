"""Bound on how much longer an untrusted tokenizer makes a text.

Rules that multiply could fill the memory.
"""

import base64
from typing import Any

MAX_GROWTH = 1000.0  # SentencePiece's own rules, which expand ﷺ to 33 bytes, reach 132
MAX_PREFIX_BYTES = 64

# Largest factor on the bytes of a text per kind of step.
GROWTH = {
    "NFKC": 11.0,  # of ﷺ
    "NFKD": 11.0,
    "NFC": 3.0,
    "NFD": 3.0,
    "Metaspace": 3.0,  # three bytes for a space
    "BertNormalizer": 3.0,
    "ByteLevel": 2.0,  # an added space
    "Lowercase": 2.0,
}


def check_growth(content: dict[str, Any]) -> None:
    """Raise ValueError if a tokenizer.json can expand a text too much."""
    for name in ("normalizer", "decoder"):
        growth = _growth(content.get(name) or {})
        if growth > MAX_GROWTH:
            raise ValueError(
                f"its {name} can make a text {growth:,.0f} times as long "
                f"(maximum: {MAX_GROWTH:,.0f})"
            )


def _growth(step: dict[str, Any]) -> float:
    """Largest factor of a step on the bytes of a text."""
    kind = step.get("type")
    if kind == "Sequence":
        growth = 1.0
        for each in step.get("normalizers") or step.get("decoders") or []:
            growth *= _growth(each)
        return growth
    if kind == "Prepend" and len(step["prepend"].encode()) > MAX_PREFIX_BYTES:
        raise ValueError(f"its normalizer adds {len(step['prepend']):,} characters to every text")
    if kind == "Replace":
        n_new = len(step["content"].encode())
        n_replaced = len(step["pattern"].get("String", "").encode())
        if n_replaced == 0:  # a regular expression may match ""
            return 1.0 + n_new
        return max(1.0, n_new / n_replaced)
    if kind == "Precompiled":
        # The size of a trie in 4 bytes, the trie, and its replacements, separated by zeros.
        charsmap = base64.b64decode(step.get("precompiled_charsmap") or "")
        trie_bytes = int.from_bytes(charsmap[:4], "little")
        replacements = charsmap[4 + trie_bytes :].split(b"\0")
        return max(1.0, float(max(map(len, replacements))))
    return GROWTH.get(kind, 1.0)
