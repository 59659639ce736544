"""How much longer a stranger's tokenizer can make a text: a few rules that multiply would fill the memory."""

import base64
from typing import Any

MAX_GROWTH = 1000.0  # SentencePiece's own rules, which write ﷺ as 33 bytes, reach 132
MAX_PREFIX_BYTES = 64
# The most that a kind of step can multiply the bytes of a text by: NFKC of ﷺ; three bytes for a space; an added space.
GROWTH = {"NFKC": 11.0, "NFKD": 11.0, "NFC": 3.0, "NFD": 3.0, "Metaspace": 3.0, "BertNormalizer": 3.0}
GROWTH |= {"ByteLevel": 2.0, "Lowercase": 2.0}


def check_growth(content: dict[str, Any]) -> None:
    """Raise ValueError where the normalizer or the decoder of a tokenizer.json can multiply a text."""
    for name in ("normalizer", "decoder"):
        growth = _growth(content.get(name) or {})
        if growth > MAX_GROWTH:
            raise ValueError(
                f"its {name} can make a text {growth:,.0f} times as long; at most {MAX_GROWTH:,.0f} is read"
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
        content, pattern = len(step["content"].encode()), len(step["pattern"].get("String", "").encode())
        return max(1.0, content / pattern) if pattern else 1.0 + content  # a regular expression may match nothing
    if kind == "Precompiled":  # the size of a trie in 4 bytes, the trie, and what it writes, separated by zeros
        charsmap = base64.b64decode(step.get("precompiled_charsmap") or "")
        written = charsmap[4 + int.from_bytes(charsmap[:4], "little") :].split(b"\0")
        return max(1.0, *(float(len(each)) for each in written))
    return GROWTH.get(kind, 1.0)
