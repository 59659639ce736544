"""The playground: one self-contained page that talks to the HTTP API of its server."""

import re
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent / "page"
# Relative to this folder; the first of each is shared by all pages.
STYLES = ("../../runtime/page/page_base.css", "playground.css")
SCRIPTS = (
    "../../runtime/page/page_base.js",
    "playground_api.js",
    "playground_tokens.js",
    "playground_popover.js",
    "playground_settings.js",
    "playground_pane.js",
    "playground_write.js",
    "playground_chat.js",
    "playground.js",
)


@cache
def playground_page() -> str:
    """Return the page as HTML, with its style and scripts inlined."""
    parts = {"style": _concatenate(STYLES), "script": _concatenate(SCRIPTS)}
    page = (FOLDER / "playground.html").read_text("utf-8")
    return re.sub(r"<!--(style|script)-->", lambda match: parts[match[1]], page)


def _concatenate(names: tuple[str, ...]) -> str:
    """The text of these files, one after the other."""
    text = ""
    for name in names:
        text += (FOLDER / name).read_text("utf-8")
    return text
