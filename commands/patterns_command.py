"""The command `thinker patterns`: plots of attention patterns."""

from thinker.runtime.cli import ArgumentParser
from thinker.runtime.errors import UserError
from thinker.runtime.plot_style import png_file


def main() -> int:
    """Write a PNG file or print text. Returns the exit status."""
    examples = "--png patterns.png", "'window(8) | global(2)' 'strided(4)' --length 64"
    description = "Plot attention patterns: which keys (columns) each query (row) attends to."
    parser = ArgumentParser(description=description, examples=examples)
    example = 'attention pattern, such as "window(8) | global(2)" (default: one of each kind)'
    parser.add_argument("patterns", nargs="*", metavar="PATTERN", help=example)
    parser.add_argument("--length", type=int, default=32, help="number of positions, up to 128")
    heads = "number of heads to plot if heads differ (default: as in the pattern, or 4)"
    parser.add_argument("--heads", type=int, help=heads)
    parser.add_argument(
        "--png", type=png_file, metavar="FILE", help="write a plot instead of printing text"
    )
    arguments = parser.parse_args()
    for name, number, largest in (
        ("length", arguments.length, 128),
        ("heads", arguments.heads, 16),
    ):
        if number is not None and not 1 <= number <= largest:  # the largest plot that is readable
            raise UserError(f"--{name} is {number}; use 1 to {largest}")
    from thinker.interpretability import pattern_plots

    texts = arguments.patterns or pattern_plots.GALLERY
    plots = [
        pattern_plots.make_pattern_plot(text, arguments.length, arguments.heads) for text in texts
    ]
    if arguments.png is None:
        print(
            "\n".join([*map(pattern_plots.to_text, plots), pattern_plots.text_legend(plots)]),
            end="",
        )
        return 0
    figure, _ = pattern_plots.plot_patterns(plots)
    figure.savefig(arguments.png, format="png", dpi=160)
    print(f"wrote {arguments.png}")
    return 0
