"""Datasets of the user in training: by index and iterable, resumed, and refused if they do not
fit."""

import threading

import numpy as np
import pytest
from training_contract import check_resumes, small_config
from training_runs import read_metrics

from thinker.data.batches.batch_loader import BatchLoader
from thinker.data.batches.custom_dataset import IterableDataset, order_dataset
from thinker.data.batches.dataset import Sample, ShuffledDataset, WindowRemoved
from thinker.runtime.errors import UserError
from thinker.training.data.custom_batches import load_custom_dataset
from thinker.training.data.run_corpus import prepare_training_data
from thinker.training.run import build_trainer

SEQ_LEN = 16  # of small_config


def window(number, n=SEQ_LEN):
    """Bytes that count from a number on."""
    tokens = np.arange(number, number + n + 1, dtype=np.int64) % 256
    return tokens[:-1], tokens[1:]


class Windows:
    """A dataset by index."""

    def __len__(self):
        return 10

    def window(self, index):
        return window(7 * index)


class Endless:
    """An iterable dataset that never ends."""

    def __iter__(self):
        number = 0
        while True:
            yield window(3 * number)
            number += 1


DATASETS = {
    "by index": Windows,
    "endless": Endless,
    "a list": lambda: [window(5 * i) for i in range(7)],
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", DATASETS)
def test_a_run_on_a_users_dataset_resumes_bit_for_bit(name, tmp_path, monkeypatch, capsys):
    whole = check_resumes(tmp_path, monkeypatch, make_dataset=DATASETS[name])
    losses = [line["train_loss"] for line in read_metrics(whole) if "train_loss" in line]
    assert len(losses) == 6
    assert "data: a dataset of your own for training, " in capsys.readouterr().err


def test_batches_are_the_windows_of_the_dataset(tmp_path):
    trainer = build_trainer(small_config(tmp_path, "run"), dataset=Endless())
    for step in (0, 3):
        inputs, targets = trainer.loader.batch(step)
        expected = [window(3 * number) for number in range(4 * step, 4 * step + 4)]
        assert inputs.tolist() == [row.tolist() for row, _ in expected]
        assert targets.tolist() == [row.tolist() for _, row in expected]
    trainer.batches.close()
    shuffled = order_dataset(Windows(), seed=1, n_kept=9)
    assert isinstance(shuffled, ShuffledDataset)
    assert sorted(sample.index for sample in shuffled.samples(10, 10)) == list(range(10))
    assert order_dataset(shuffled, seed=1, n_kept=9) is shuffled


def test_an_iterable_dataset_begins_again_and_forgets_old_windows():
    dataset = IterableDataset([window(i) for i in range(5)], n_kept=4)
    assert dataset.epochs(3) == [0.0]
    for number in range(12):
        inputs, _ = dataset.window(Sample(number))
        assert inputs[0] == number % 5
    assert dataset.window(Sample(8))[0][0] == 3
    with pytest.raises(WindowRemoved):
        dataset.window(Sample(7))
    assert dataset.epochs(12) == [12 / 5]


def test_threads_read_an_iterable_dataset_together():
    loader = BatchLoader(IterableDataset(Endless(), n_kept=64), 4)
    seen = {}

    def read(step):
        seen[step] = loader.batch(step)[0][:, 0].tolist()

    threads = [threading.Thread(target=read, args=(step,)) for step in (7, 3, 5, 0, 4, 6, 2, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {step: [3 * (4 * step + row) % 256 for row in range(4)] for step in range(8)}


class Empty(Windows):
    def __len__(self):
        return 0


MISTAKES = {
    "no dataset": (5, "the dataset is a int, but a dataset needs len.. and window"),
    "empty": (Empty(), "the dataset has no windows; give it at least one"),
    "an empty list": ([], "the dataset has no more windows; an iterable dataset must yield"),
    "texts": (["a text"], "the dataset yields str, but a window is .inputs, targets."),
    "lists": ([([1], [2])], "inputs of the dataset are list, not numpy arrays of int64"),
    "int32": ([tuple(x.astype(np.int32) for x in window(0))], "inputs of the dataset are int32"),
    "short": ([window(0, 8)], r"have the shape \(8,\); a window is .* of shape \(16,\)"),
    "unknown ids": ([(window(0)[0], window(0)[1] + 1000)], "targets of the dataset have ids out"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_dataset_that_does_not_fit_is_refused(name, tmp_path):
    dataset, message = MISTAKES[name]
    config = small_config(tmp_path, "run")
    corpus = prepare_training_data(config)
    with pytest.raises(UserError, match=message):
        load_custom_dataset(dataset, config, corpus)


def test_a_generator_is_refused_when_it_ends():
    dataset = IterableDataset((window(i) for i in range(3)), n_kept=9)
    dataset.window(Sample(2))
    for _ in range(2):
        with pytest.raises(UserError, match="pass a list or an object with __iter__, no generator"):
            dataset.window(Sample(3))
