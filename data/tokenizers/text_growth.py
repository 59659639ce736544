"""Bound on how much longer an untrusted tokenizer makes a text; multiplying rules could fill the memory."""

import base64
from typing import Any

MAX_GROWTH = 1000.0  # SentencePiece's own rules, which expand ﷺ to 33 bytes, reach 132
MAX_PREFIX_BYTES = 64
# Largest factor on the bytes of a text per kind of step: NFKC of ﷺ; three bytes for a space; an added space.
GROWTH = {
    "NFKC": 11.0,
    "NFKD": 11.0,
    "NFC": 3.0,
    "NFD": 3.0,
    "Metaspace": 3.0,
    "BertNormalizer": 3.0,
}
GROWTH |= {"ByteLevel": 2.0, "Lowercase": 2.0}


def check_growth(content: dict[str, Any]) -> None:
    """Raise ValueError if the normalizer or decoder of a tokenizer.json can expand a text too much."""
    for name in ("normalizer", "decoder"):
        growth = _growth(content.get(name) or {})
        if growth > MAX_GROWTH:
            raise ValueError(
                f"its {name} can make a text {growth:,.0f} times as long (maximum: {MAX_GROWTH:,.0f})"
            )


def _growth(step: dict[str, Any]) -> float:
    kind = step.get("type")
    if kind == "Sequence":
        growth = 1.0
        for each in step.get("normalizers") or step.get("decoders") or []:
            growth *= _growth(each)
        return growth
    if kind == "Prepend" and len(step["prepend"].encode()) > MAX_PREFIX_BYTES:
        raise ValueError(f"its normalizer adds {len(step['prepend']):,} characters to every text")
    if kind == "Replace":
        content, pattern = (
            len(step["content"].encode()),
            len(step["pattern"].get("String", "").encode()),
        )
        return (
            max(1.0, content / pattern) if pattern else 1.0 + content
        )  # a regular expression may match ""
    if (
        kind == "Precompiled"
    ):  # 4 bytes of trie size, the trie, and its replacements, separated by zeros
        charsmap = base64.b64decode(step.get("precompiled_charsmap") or "")
        written = charsmap[4 + int.from_bytes(charsmap[:4], "little") :].split(b"\0")
        return max(1.0, *(float(len(each)) for each in written))
    return GROWTH.get(kind, 1.0)
