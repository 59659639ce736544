"""The training batches of a dataset of the user."""

from thinker.data.batches.batch_loader import BatchLoader
from thinker.data.batches.custom_dataset import check_window, order_dataset
from thinker.data.batches.dataset import AnyDataset
from thinker.data.corpus.corpus import Corpus
from thinker.training.config.config import Config
from thinker.training.settings.settings import Settings


def load_custom_dataset(
    dataset: AnyDataset, settings: Config | Settings, corpus: Corpus
) -> BatchLoader:
    """The training batches of a dataset of the user. Raises UserError if it is none, or if its
    windows do not fit."""
    data = settings.data
    batch_size = settings.train.batch_size
    n_kept = (data.num_workers + 2) * batch_size  # for threads that are behind, and for reports
    ordered = order_dataset(dataset, settings.run.seed, n_kept)
    bos_id = corpus.tokenizer.bos_id if data.document_masking else None
    loader = BatchLoader(ordered, batch_size, bos_id)
    loader.reads_corpus = False
    first = ordered.window(loader.samples(0)[0])
    check_window(first, data.seq_len, corpus.tokenizer.vocab_size)
    return loader
