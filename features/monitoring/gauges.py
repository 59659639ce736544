"""What monitors have measured, for the metrics of a server."""

from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from thinker.features.monitoring.monitor import Monitor

# By figure: the name of the metric, and what it is.
FIGURES = {
    "attention_entropy": (
        "thinker_attention_entropy",
        "Mean entropy of the attention of a position, in nats",
    ),
    "max_logit": (
        "thinker_attention_max_logit",
        "Mean of the largest attention logit of a position",
    ),
    "first_token_share": (
        "thinker_attention_first_token",
        "Mean share of attention on the first token",
    ),
    "cache_used": ("thinker_layer_cache_used", "Used part of the cache of a text, 0 to 1"),
    "token_entropy": (
        "thinker_token_entropy",
        "Entropy of the next token under the model, in nats",
    ),
}


class AttentionGauges:
    """Reports the figures of all models at every scrape.

    Each is a mean over the positions that were measured last.
    """

    def __init__(self, monitors: Mapping[str, Monitor]) -> None:
        """`monitors`: by name of the model."""
        self.monitors = monitors

    def collect(self) -> Iterable[Metric]:
        """Called by prometheus_client."""
        n_measured = CounterMetricFamily(
            "thinker_measured_positions", "Positions that were measured", labels=["model"]
        )
        drifting = GaugeMetricFamily(
            "thinker_drifting_figures",
            "Figures outside the range of the validation set",
            labels=["model"],
        )
        for model, monitor in self.monitors.items():
            n_measured.add_metric([model], monitor.n_measured)
            if monitor.reference is not None:
                drifting.add_metric([model], len(monitor.drift))
        yield from (n_measured, drifting)
        # Once, so that the figures fit together: a monitor replaces them as a whole.
        figures = {model: monitor.figures for model, monitor in self.monitors.items()}
        for figure, (name, documentation) in FIGURES.items():
            labels = ["model"] if figure == "token_entropy" else ["model", "layer"]
            family = GaugeMetricFamily(name, documentation, labels=labels)
            for model, values in figures.items():
                for path, value in values.items():
                    *layer, kind = path.split(".")  # "blocks", the number of the layer, its figure
                    if kind == figure:
                        family.add_metric([model, *layer[1:]], value)
            yield family
