"""Counters and histograms in Prometheus' text format."""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from thinker.features.monitoring.monitor import Monitor

State = Callable[[], Mapping[str, float]]  # the values of a model's gauges

disable_created_metrics()  # which would double the number of lines
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 150)


class Metrics:
    """The metrics of one server. Tokens and latencies are counted per text (a choice of a request)."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        model, add = ["model"], {"registry": self.registry}
        self.requests = Counter("thinker_requests", "HTTP requests", ["path", "status"], **add)
        self.prompt_tokens = Counter("thinker_prompt_tokens", "Tokens of prompts", model, **add)
        self.cached_tokens = Counter(
            "thinker_cached_prompt_tokens", "Those that were not read again", model, **add
        )
        self.new_tokens = Counter("thinker_generated_tokens", "Sampled tokens", model, **add)
        self.texts = Counter("thinker_texts", "Ended texts", ["model", "reason"], **add)
        latency = {"buckets": SECONDS, **add}
        self.first_token = Histogram(
            "thinker_first_token_seconds", "Arrival to first token", model, **latency
        )
        self.per_token = Histogram(
            "thinker_seconds_per_token", "Mean time between tokens of a text", model, **latency
        )
        self.whole = Histogram("thinker_text_seconds", "Arrival to end of text", model, **latency)

    def watch(self, states: Mapping[str, State]) -> None:
        """Report the gauges of these models at every scrape."""
        self.registry.register(_Gauges(states))

    def watch_attention(self, monitors: Mapping[str, Monitor]) -> None:
        """Report what the monitors of these models have measured at every scrape."""
        if monitors:
            self.registry.register(_AttentionGauges(monitors))

    def text(self) -> bytes:
        """All metrics."""
        return generate_latest(self.registry)


class _Gauges:
    def __init__(self, states: Mapping[str, State]) -> None:
        self.states = states

    def collect(self) -> Iterable[Metric]:
        """Called by prometheus_client."""
        names = {
            "running": ("thinker_running_texts", "Texts that are being read or decoded"),
            "waiting": ("thinker_waiting_texts", "Texts that wait for a row of the batch"),
            "cache_used": ("thinker_cache_used", "Used part of the KV cache, 0 to 1"),
        }
        states = {
            model: state() for model, state in self.states.items()
        }  # once, so that the numbers fit together
        for key, (name, documentation) in names.items():
            family = GaugeMetricFamily(name, documentation, labels=["model"])
            for model, state in states.items():
                family.add_metric([model], state[key])
            yield family


class _AttentionGauges:
    def __init__(self, monitors: Mapping[str, Monitor]) -> None:
        self.monitors = monitors

    def collect(self) -> Iterable[Metric]:
        """Called by prometheus_client. Each figure is a mean over the positions that were measured last."""
        monitors, by_model, by_layer = self.monitors, ["model"], ["model", "layer"]
        n_measured = CounterMetricFamily(
            "thinker_measured_positions", "Positions that were measured", labels=by_model
        )
        drifting = GaugeMetricFamily(
            "thinker_drifting_figures",
            "Figures outside the range of the validation set",
            labels=by_model,
        )
        for model, monitor in monitors.items():
            n_measured.add_metric([model], monitor.n_measured)
            if monitor.reference is not None:
                drifting.add_metric([model], len(monitor.drift))
        yield from (n_measured, drifting)
        names = {
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
        figures = {
            model: monitor.figures for model, monitor in monitors.items()
        }  # once, as they are replaced
        for key, (name, documentation) in names.items():
            family = GaugeMetricFamily(
                name, documentation, labels=by_model if key == "token_entropy" else by_layer
            )
            for model, values in figures.items():
                for path, value in values.items():
                    *layer, figure = path.split(".")
                    if figure == key:
                        family.add_metric([model, *layer[1:]], value)
            yield family
