"""The flag --monitor, of generate.py and of the server."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from thinker.generation.command_flags import CommandFlags, ModelSource
from thinker.runtime.cli import ArgumentParser

if TYPE_CHECKING:
    from thinker.features.monitoring.monitor import Monitor
    from thinker.generation.engine import Generator


class MonitoringFlags(CommandFlags):
    """The flag for measuring attention; see features/monitoring/monitor.py."""

    def __init__(self) -> None:
        self.monitors: dict[str, Monitor] = {}  # by name of the model

    def generator_options(
        self, arguments: argparse.Namespace, source: ModelSource
    ) -> dict[str, Any]:
        """Make a monitor that compares with the figures of the run. Raises UserError."""
        if not arguments.monitor:
            return {}
        from thinker.features.monitoring.monitor import load_monitor, print_warning
        from thinker.interop.find import find_model

        folder = find_model(source.path, source.checkpoint)
        prefix = f"{source.name}: " if source.name else ""
        monitor = load_monitor(folder, lambda line: print_warning(prefix + line))
        self.monitors[source.name] = monitor
        return {"monitor": monitor}


class GenerateFlags(MonitoringFlags):
    """--monitor of generate.py."""

    without_effect: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "with --interactive": ("monitor",),
        "with --score": ("monitor",),
    }

    def __init__(self, parser: ArgumentParser) -> None:
        super().__init__()
        self.warnings: list[str] = []  # of drift, which are printed after the text
        monitor_help = "measure attention; warn if it drifts from validation"
        group = parser.group("input and output")
        group.add_argument("--monitor", action="store_true", help=monitor_help)

    def generator_options(
        self, arguments: argparse.Namespace, source: ModelSource
    ) -> dict[str, Any]:
        """As MonitoringFlags.generator_options()."""
        options = super().generator_options(arguments, source)
        if not arguments.json:
            for monitor in self.monitors.values():
                monitor.warn = self.warnings.append
        return options

    def facts(self, generator: Generator) -> dict[str, Any]:
        """As CommandFlags.facts()."""
        if not self.monitors:
            return {}
        (monitor,) = self.monitors.values()
        return {"monitor": monitor.summary()}

    def lines(self) -> list[str]:
        """As CommandFlags.lines()."""
        lines = []
        for monitor in self.monitors.values():
            lines += monitor.lines()
        return lines + [f"warning: {line}" for line in self.warnings]


class ServerFlags(MonitoringFlags):
    """--monitor of the server."""

    def __init__(self, parser: ArgumentParser) -> None:
        super().__init__()
        monitor_help = (
            "report attention per layer in /metrics, and warn if it drifts from the values of the "
            "validation set"
        )
        parser.add_argument("--monitor", action="store_true", help=monitor_help)

    def collectors(self) -> list[Any]:
        """As CommandFlags.collectors()."""
        if not self.monitors:
            return []
        from thinker.features.monitoring.gauges import AttentionGauges

        return [AttentionGauges(self.monitors)]
