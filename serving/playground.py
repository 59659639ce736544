"""The playground: one self-contained page that talks to the HTTP API of the server that it comes from."""

import re
from functools import cache
from pathlib import Path

SCRIPTS = (
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
    folder = Path(__file__).parent
    parts = {
        "style": (folder / "playground.css").read_text("utf-8"),
        "script": "".join((folder / name).read_text("utf-8") for name in SCRIPTS),
    }
    page = (folder / "playground.html").read_text("utf-8")
    return re.sub(r"<!--(style|script)-->", lambda match: parts[match[1]], page)
