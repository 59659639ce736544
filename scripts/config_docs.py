"""Generate docs/config.md and configs/schema.json: python scripts/config_docs.py."""

from __future__ import annotations

import argparse
from pathlib import Path

from thinker.runtime.errors import run_command

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Write both files. Returns the exit status."""
    argparse.ArgumentParser(description="Generate docs/config.md and configs/schema.json.").parse_args()
    from thinker.training.config_docs import config_markdown, config_schema

    (ROOT / "docs" / "config.md").write_text(config_markdown(), encoding="utf-8")
    (ROOT / "configs" / "schema.json").write_text(config_schema(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    run_command(main)
