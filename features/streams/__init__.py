"""Streams: sources that are tokenized while they are trained on."""

from thinker.runtime.registry import Feature

FEATURE = Feature(
    name="streams",
    keys={"source": "thinker.features.streams.keys:StreamKeys"},
    check_config="thinker.features.streams.keys:check_streams",
    source_dataset="thinker.features.streams.stream_option:make_stream",
)
