"""The training windows of a mixture: each sample comes from the source whose turn it is."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from thinker.data.batches.dataset import OrderedDataset, Sample, Window
from thinker.features.mixtures.mixture import Mixture, MixtureSource
from thinker.training.data.training_batches import DatasetOptions, open_source_dataset


class MixedDataset:
    """An OrderedDataset of several, each with epochs of its own.

    Args:
        sources: the datasets.
        mixture: the order of the sources.
        sizes: the number of windows that each source has in the corpus, to number the windows of
            all.
    """

    def __init__(
        self, sources: Sequence[OrderedDataset], mixture: Mixture, sizes: Sequence[int]
    ) -> None:
        self.sources = sources
        self.mixture = mixture
        self.n_sources = len(sources)
        self.is_endless = any(source.is_endless for source in sources)
        self._n_windows = sum(sizes)
        firsts = np.cumsum([0, *sizes]).tolist()
        # The index of the first window of each source. Those of a stream have numbers of their own.
        self._firsts = [0 if source.is_endless else first for source, first in zip(sources, firsts)]

    def __len__(self) -> int:
        return self._n_windows

    def samples(self, first: int, n: int) -> list[Sample]:
        """See OrderedDataset. The index of a window counts over all sources."""
        turns, numbers = self.mixture.samples(first, n)
        samples: list[Sample] = [Sample(0)] * n
        for number, source in enumerate(self.sources):
            places = np.flatnonzero(turns == number)
            if not len(places):
                continue
            # Samples of a source that follow each other in the run also do so in the source.
            of_source = source.samples(int(numbers[places[0]]), len(places))
            for place, sample in zip(places.tolist(), of_source):
                index = self._firsts[number] + sample.index
                samples[place] = Sample(index, sample.epoch, number)
        return samples

    def window(self, sample: Sample) -> Window:
        """See OrderedDataset."""
        index = sample.index - self._firsts[sample.source]
        return self.sources[sample.source].window(sample._replace(index=index))

    def epochs(self, n: int) -> list[float]:
        """How often each source has been read after n samples."""
        taken = self.mixture.taken(n).tolist()
        return [source.epochs(count)[0] for source, count in zip(self.sources, taken)]

    def start(self, n: int) -> None:
        """Prepare each source to read on where it is after n samples."""
        taken = self.mixture.taken(n).tolist()
        for source, count in zip(self.sources, taken):
            source.start(count)

    def close(self, is_finished: bool) -> None:
        """Stop all sources."""
        for source in self.sources:
            source.close(is_finished)


def open_mixed_dataset(options: DatasetOptions) -> MixedDataset:
    """The training windows of the sources in `data.sources`.

    Raises UserError if the sources are used up before the end of the run.
    """
    settings = options.settings
    sources = []
    turns = []
    sizes = []
    parts = options.corpus.parts.items()
    for number, (source, (name, part)) in enumerate(zip(settings.data.sources, parts)):
        own = replace(options, corpus=part)
        sources.append(open_source_dataset(own, source, name, number))
        n_windows = len(options.pack(part.train))
        sizes.append(n_windows)
        tokens_per_window = part.train.n_tokens / n_windows
        limits = []
        if source.max_epochs is not None:
            limits.append(source.max_epochs * n_windows)
        if source.max_tokens is not None:
            limits.append(source.max_tokens / tokens_per_window)
        limit = max(1, round(min(limits))) if limits else None
        turns.append(MixtureSource(source.weights, tokens_per_window, limit))
    train = settings.train
    n_samples = None if train.max_steps is None else train.max_steps * train.batch_size
    return MixedDataset(sources, Mixture(turns, n_samples), sizes)
