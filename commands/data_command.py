"""The command `thinker data`: the training data of a config."""

import json
import sys
from pathlib import Path

from thinker.runtime.files import output_file
from thinker.runtime.plot_style import png_file
from thinker.training.config.command_line import ConfigArgumentParser


def main() -> int:
    """Prepare the data, print a table, and write the plot and the page. Returns the exit status."""
    examples = ("mixture --html data.html", "quickstart --png lengths.png --step 100")
    description = (
        "Show the training data of a config: sources, lengths of documents, and the "
        "sequences of a step."
    )
    parser = ConfigArgumentParser(description=description, examples=examples)
    group = parser.add_argument_group("output")
    group.add_argument("--step", type=int, default=0, help="step whose sequences are shown, from 0")
    group.add_argument("--sequences", type=int, default=4, help="number of sequences to show")
    group.add_argument(
        "--html", type=output_file, metavar="FILE", help="page to write, with the sequences"
    )
    group.add_argument("--png", type=png_file, metavar="FILE", help="plot of the lengths to write")
    group.add_argument(
        "--json", action="store_true", help="print a JSON list with an object per source"
    )
    arguments = parser.parse_command_line()
    if arguments.step < 0 or arguments.sequences < 1:
        parser.error("--step must be at least 0, and --sequences at least 1")
    from thinker.training.config.load import load_config
    from thinker.training.reports.data_page import write_page
    from thinker.training.reports.data_report import format_sources, make_data_report, plot_lengths

    report = make_data_report(
        load_config(arguments.config, arguments.overrides), arguments.step, arguments.sequences
    )
    if arguments.json:
        print(json.dumps([source.to_dict() for source in report.sources]))
    else:
        print(format_sources(report))
    if arguments.png is not None:
        plot_lengths(report, Path(arguments.png))
        print(f"wrote {arguments.png}", file=sys.stderr)
    if arguments.html is not None:
        write_page(report, Path(arguments.html))
        print(f"wrote {arguments.html}", file=sys.stderr)
    return 0
