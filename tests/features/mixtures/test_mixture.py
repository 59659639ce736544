"""The order of the sources of a mixture: exact shares, budgets and schedules, and random access."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from token_shards import write_tokens

from thinker.data.batches.batch_loader import BatchLoader
from thinker.data.batches.dataset import ShuffledDataset
from thinker.data.batches.windows import PackedDataset
from thinker.features.mixtures.mixed_dataset import MixedDataset
from thinker.features.mixtures.mixture import UNIT, Mixture, MixtureSource
from thinker.runtime.errors import UserError

WEIGHTS = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6)


@pytest.fixture(scope="session")
def make_tokens(tmp_path_factory):
    return lambda lengths, **options: write_tokens(
        tmp_path_factory.mktemp("tokens"), lengths, **options
    )


def counts(sources, n_sources):
    """How many of the first samples come from each source, after each sample, (n, S)."""
    return (sources[:, None] == np.arange(n_sources)).cumsum(0)


@given(weights=WEIGHTS, sizes=st.lists(st.floats(1, 100), min_size=6, max_size=6))
def test_every_part_of_a_run_has_the_shares(weights, sizes):
    """The samples of a source differ from its share by less than the number of sources, and count
    up from 0."""
    mixture = Mixture([MixtureSource({0: weight}, size) for weight, size in zip(weights, sizes)])
    n, n_sources = 3000, len(weights)
    sources, numbers = mixture.samples(0, n)
    for source in range(n_sources):
        of_source = numbers[sources == source]
        assert (of_source == np.arange(len(of_source))).all()
    samples = np.array([weight / size for weight, size in zip(weights, sizes)])
    shares = samples / samples.sum()
    excess = counts(sources, n_sources) - np.arange(1, n + 1)[:, None] * shares
    rounding = n * n_sources / UNIT
    assert (np.ptp(excess, axis=0) < n_sources + rounding).all()  # between any two samples


@given(
    weights=WEIGHTS, first=st.integers(0, 2000), n=st.integers(1, 300), budget=st.integers(1, 500),
    start=st.floats(0.01, 0.99),
)  # fmt: skip
def test_a_sample_does_not_depend_on_where_reading_starts(weights, first, n, budget, start):
    sources = [MixtureSource({0: weight, start: 1.0}) for weight in weights]
    sources[0] = MixtureSource({0: weights[0]}, 1.0, budget if len(weights) > 1 else None)
    mixture = Mixture(sources, 2300)
    whole = np.stack(mixture.samples(0, 2300))
    assert (np.stack(mixture.samples(first, n)) == whole[:, first : first + n])[
        :, : 2300 - first
    ].all()
    for end in (0, first, 2300):
        assert (mixture.taken(end) == np.bincount(whole[0, :end], minlength=len(weights))).all()
    if len(weights) > 1:
        assert (whole[0] == 0).sum() <= budget


@given(weights=st.lists(st.integers(1, 50), min_size=1, max_size=5))
def test_samples_come_in_the_order_of_their_exact_times(weights):
    """The same by fractions: sample j of a source with share w is due at (j + 1/2) / w."""
    mixture = Mixture([MixtureSource({0: weight * UNIT / sum(weights)}) for weight in weights])
    exact = [
        Fraction(int(weight), int(mixture.phases[0].weights.sum()))
        for weight in mixture.phases[0].weights
    ]
    n = 200
    due = [
        (-(-(Fraction(2 * j + 1, 2) / share) // 1), source, j)
        for source, share in enumerate(exact)
        for j in range(n)
    ]
    sources, numbers = mixture.samples(0, n)
    expected = [(source, j) for _, source, j in sorted(due)[:n]]
    assert list(zip(sources.tolist(), numbers.tolist())) == expected


def test_four_sources_and_a_schedule_keep_their_shares_of_every_million_tokens():
    """Within 0.1%, in windows of 256 tokens, and across the change of the weights."""
    changed = (0.1, 0.2, 0.3, 0.4)
    weights = [{0: first, 0.7: later} for first, later in zip((0.5, 0.3, 0.15, 0.05), changed)]
    n, million = 40_000, 1_000_000 // 256
    mixture = Mixture([MixtureSource(weight) for weight in weights], n)
    sources, _ = mixture.samples(0, n)
    expected = np.array(
        [[weight[0 if i < 28_000 else 0.7] for weight in weights] for i in range(n)]
    ).cumsum(0)
    excess = counts(sources, 4) - expected
    assert (np.abs(excess[million:] - excess[:-million]) / million).max() < 0.001


def test_weights_are_shares_of_tokens():
    """A source whose windows are half full is read twice as often."""
    mixture = Mixture([MixtureSource({0: 1}, 256), MixtureSource({0: 1}, 128)])
    assert mixture.taken(300).tolist() == [100, 200]


def test_a_budget_ends_a_source_and_the_others_share_its_weight():
    mixture = Mixture(
        [MixtureSource({0: 2}, max_samples=10), MixtureSource({0: 1}), MixtureSource({0: 1})], 100
    )
    assert mixture.taken(100).tolist() == [10, 45, 45]
    sources, _ = mixture.samples(0, 100)
    assert sources[:20].tolist().count(0) == 10
    assert not (sources[21:] == 0).any()


def test_used_up_sources_are_refused_unless_the_run_ends_before():
    def both(budget, n):
        return Mixture(
            [MixtureSource({0: 1}, max_samples=budget), MixtureSource({0: 3}, max_samples=30)], n
        )

    assert both(10, 40).taken(40).tolist() == [10, 30]
    for n in (41, None):
        with pytest.raises(
            UserError, match="no source with a weight above 0 is left after 40 sequences"
        ):
            both(10, n)
    weights = {0: 1, 0.5: 0}
    with pytest.raises(UserError, match="after 50 sequences"):
        Mixture([MixtureSource(weights), MixtureSource(weights)], 100)


def test_a_source_may_start_later():
    mixture = Mixture([MixtureSource({0: 1}), MixtureSource({0: 0, 0.8: 1})], 100)
    assert mixture.taken(80).tolist() == [80, 0]
    assert mixture.taken(100).tolist() == [90, 10]


def test_far_samples_are_exact():
    mixture = Mixture([MixtureSource({0: 0.7}), MixtureSource({0: 0.3})])
    sources, numbers = mixture.samples(10**12, 1000)
    assert sources.sum() in (299, 300, 301)
    assert (
        np.abs(numbers[sources == 0][0] - 7 * 10**11) < 10**6
    )  # weights are rounded to a millionth
    assert (mixture.taken(10**12 + 1000) - mixture.taken(10**12) == np.bincount(sources)).all()


@given(seed=st.integers(0, 2**31), batch_size=st.integers(1, 9), shift=st.booleans())
def test_every_source_has_its_own_epochs(make_tokens, seed, batch_size, shift):
    lengths = ([9, 1, 14, 7, 3] * 3, [20] * 9, [4])
    parts = [PackedDataset(make_tokens(each), 10, "contiguous") for each in lengths]
    sizes = [len(part) for part in parts]
    bounds = np.cumsum([0, *sizes]).tolist()
    mixture = Mixture([MixtureSource({0: weight}) for weight in (5, 3, 1)])
    sources = [ShuffledDataset(part, seed, shift, number) for number, part in enumerate(parts)]
    dataset = MixedDataset(sources, mixture, sizes)
    loader = BatchLoader(dataset, batch_size)
    steps = 400 // batch_size
    samples = [sample for step in range(steps) for sample in loader.samples(step)]
    ids = [sample.index for sample in samples]
    sources = [sample.source for sample in samples]
    for source, (first, end) in enumerate(itertools.pairwise(bounds)):
        own = [i for i, of in zip(ids, sources) if of == source]
        n_epochs, rest = divmod(len(own), end - first)
        assert loader.epochs(steps)[source] == pytest.approx(n_epochs + rest / (end - first))
        for epoch in range(n_epochs):
            assert sorted(own[epoch * (end - first) : (epoch + 1) * (end - first)]) == list(
                range(first, end)
            )
    if not shift:
        inputs, _ = loader.batch(3)
        rows = [
            parts[source].window(index - bounds[source])[0].tolist()
            for index, _, source in loader.samples(3)
        ]
        assert inputs.tolist() == rows


def test_one_source_is_read_as_without_a_mixture(make_tokens):
    dataset = PackedDataset(make_tokens([30] * 20), 16, "contiguous")
    shuffled = ShuffledDataset(dataset, 3)
    mixture = Mixture([MixtureSource({0: 0.3})])
    alone = BatchLoader(shuffled, 4)
    mixed = BatchLoader(MixedDataset([shuffled], mixture, [len(dataset)]), 4)
    for step in range(30):
        assert mixed.sample_ids(step) == alone.sample_ids(step)
