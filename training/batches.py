"""The training batches of a rank, and the evaluator of the validation split."""

from functools import partial

import torch

from thinker.checkpoint.run_directory import RunDirectory
from thinker.data.batches.batches import PackedDataset
from thinker.data.batches.prefetch import Prefetcher
from thinker.data.corpus.corpus import Corpus
from thinker.data.tokenizers.text_bytes import scaled_byte_lengths
from thinker.evaluation.loss import Evaluator
from thinker.features.mixtures.mixture_loss import MixtureEvaluator, split_limit
from thinker.features.mixtures.reports import make_loader
from thinker.features.streams.make_streams import make_streams
from thinker.runtime.process_group import DistContext
from thinker.training.settings.settings import Settings


def build_batches(
    settings: Settings, corpus: Corpus, device: torch.device, dist: DistContext
) -> tuple[Prefetcher, Evaluator | MixtureEvaluator]:
    """The training batches of this rank, and the evaluator of the validation split."""
    data, train = settings.data, settings.train
    masking = {"document_masking": data.document_masking, "prefix_len": settings.model.prefix}
    pack = partial(PackedDataset, seq_len=data.seq_len, packing=data.packing, **masking)
    streams = make_streams(
        settings, corpus, pack, RunDirectory(settings.run.dir).streams, progress=dist.is_main
    )
    loader = make_loader(settings, corpus, pack(corpus.train), streams)
    n_rows = train.batch_size // dist.world_size
    rows = slice(dist.rank * n_rows, (dist.rank + 1) * n_rows)
    batches = Prefetcher(loader, device.type == "cuda", rows, data.num_workers)
    parts = {name: part for name, part in (corpus.parts or {"": corpus}).items() if part.val.shards}
    val_sets = [
        PackedDataset(part.val, data.seq_len, data.val_packing, **masking)
        for part in parts.values()
    ]
    evaluators = {}
    for name, val_set, limit in zip(
        parts, val_sets, split_limit(train.eval_sequences, [*map(len, val_sets)])
    ):
        byte_lengths = scaled_byte_lengths(parts[name].val, corpus.tokenizer)
        evaluators[name] = Evaluator(
            val_set, train.micro_batch_size, byte_lengths, limit, dist, progress=True
        )
    if corpus.parts:
        return batches, MixtureEvaluator(
            evaluators, dict(zip(corpus.parts, loader.mixture.mean_token_shares()))
        )
    return batches, evaluators[""]
