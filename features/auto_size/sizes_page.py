"""docs/reference/sizes.md: tables of what model.size=auto chooses."""

from thinker.features.auto_size.auto_size import choose, format_size

DEVICES = [  # title, rate of a large matrix product, whether it is a GPU
    ("Two CPU cores, together 100 GFLOP/s in fp32", 100e9, False),
    ("Two CPU cores, together 400 GFLOP/s in bf16", 400e9, False),
    ("One H100, 989 TFLOP/s in bf16 (a guess: no GPU has run this rule yet)", 989e12, True),
]
MINUTES = (1, 10, 60)
TEXT_BYTES = (100_000, 1_000_000, 10_000_000, 100_000_000)


def sizes_markdown(note: str) -> str:
    """The page. note: a line that says how it is made."""
    parts = [
        "# Sizes that model.size=auto chooses\n",
        "Each cell: parameters in the blocks, tokenizer, dropout, expected epochs. Text means "
        "training text, without "
        f"the validation split.\n\n{note}",
    ]
    for title, rate, is_gpu in DEVICES:
        names = ["1 minute" if minutes == 1 else f"{minutes} minutes" for minutes in MINUTES]
        parts.append(f"## {title}\n")
        parts.append(f"| text | {' | '.join(names)} |")
        parts.append("|---|" + "---|" * len(MINUTES))
        for n_bytes in TEXT_BYTES:
            cells = [_cell(n_bytes, minutes, rate, is_gpu) for minutes in MINUTES]
            parts.append(f"| {format_size(n_bytes)} | {' | '.join(cells)} |")
        parts.append("")
    return "\n".join(parts)


def _cell(n_bytes: int, minutes: float, rate: float, is_gpu: bool) -> str:
    choice = choose(n_bytes, minutes, rate, is_gpu)
    size = f"{choice.n_parameters / 1e6:.1f}M"
    epochs = f"{choice.epochs:.2g} epochs"
    return f"{size}, {choice.tokenizer}, {choice.dropout:g}, {epochs}"
