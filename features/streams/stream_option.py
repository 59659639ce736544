"""The key `buffer_tokens` of a source."""

from thinker.data.batches.dataset import OrderedDataset
from thinker.training.config.source_section import TextSource
from thinker.training.data.training_batches import DatasetOptions


def make_stream(
    options: DatasetOptions, source: TextSource, name: str, number: int
) -> OrderedDataset | None:
    """The stream of a source, or None if the source is no stream."""
    if source.buffer_tokens is None:
        return None
    from thinker.features.streams import streamed_source

    return streamed_source.open_stream(options, source, name, number)
