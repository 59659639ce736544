"""Counters and histograms in Prometheus' text format."""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

State = Callable[[], Mapping[str, float]]  # the values of a model's gauges

disable_created_metrics()  # which would double the number of lines
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 150)


class Metrics:
    """The metrics of one server.

    Tokens and latencies are counted per text (a choice of a request).
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        model = ["model"]
        add = {"registry": self.registry}
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

    def add(self, collector: Collector) -> None:
        """Report what a feature measures at every scrape."""
        self.registry.register(collector)

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
        # Once, so that the numbers of a model fit together.
        states = {}
        for model, state in self.states.items():
            states[model] = state()
        for key, (name, documentation) in names.items():
            family = GaugeMetricFamily(name, documentation, labels=["model"])
            for model, state in states.items():
                family.add_metric([model], state[key])
            yield family
