"""The playground: one self-contained page that talks to the HTTP API of the server that it comes from."""

import re
from functools import cache
from pathlib import Path

# Relative to the folder page; the first of each is shared with the interpretability page.
STYLES = ("../../interpretability/page/page_base.css", "playground.css")
SCRIPTS = (
    "../../interpretability/page/page_base.js",
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
    folder = Path(__file__).parent / "page"
    parts = {
        "style": "".join((folder / name).read_text("utf-8") for name in STYLES),
        "script": "".join((folder / name).read_text("utf-8") for name in SCRIPTS),
    }
    page = (folder / "playground.html").read_text("utf-8")
    return re.sub(r"<!--(style|script)-->", lambda match: parts[match[1]], page)
