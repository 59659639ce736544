"""GPT-2 as most people train it: transformers' GPT2LMHeadModel by a config of ours, on the same windows."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from thinker.benchmarks.training_runs import Training
from thinker.data.batches import BatchLoader, PackedDataset
from thinker.data.tokenizer import token_byte_lengths
from thinker.evaluation.loss import Evaluator
from thinker.runtime.constants import IGNORE_INDEX
from thinker.runtime.device import configure_backend
from thinker.runtime.errors import UserError
from thinker.training.config import load_config
from thinker.training.corpus import prepare_training_data
from thinker.training.metrics import MemoryMeter
from thinker.training.schedule import lr_multiplier


@dataclass
class Gpt2(Training):
    """Learned positions, LayerNorm, GELU, biases, a tied head, normal(0.02) initialisation; fp32, on the CPU.

    The config gives width, layers, heads, data and training; biases and gains do not decay, as in nanoGPT.
    """

    def __post_init__(self) -> None:
        """Raises UserError where the config leaves to our rules what GPT-2 needs."""
        config = load_config(self.config, self.overrides)
        if config.optimizer.name != "adamw" or config.optimizer.lr is None or config.train.max_steps is None:
            raise UserError(
                f"{self.config}: with --gpt2 it needs optimizer.name=adamw, optimizer.lr and train.max_steps"
            )

    def train(self, threads: int | None = None) -> None:
        """Train, and evaluate at the end."""
        import transformers

        config = load_config(self.config, self.overrides)
        corpus, train, T = prepare_training_data(config), config.train, config.data.seq_len
        configure_backend(torch.device("cpu"))
        meter = MemoryMeter(torch.device("cpu"))
        torch.manual_seed(config.run.seed)
        model_config = transformers.GPT2Config(
            vocab_size=corpus.tokenizer.vocab_size, n_positions=T, n_embd=config.model.d_model,
            n_layer=config.model.n_layers, n_head=config.model.n_heads, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
            bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        model = _Summed(transformers.GPT2LMHeadModel(model_config))
        matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
        others = [parameter for parameter in model.parameters() if parameter.dim() != 2]
        optimizer = torch.optim.AdamW(
            [{"params": matrices}, {"params": others, "weight_decay": 0.0}],
            lr=config.optimizer.lr, betas=config.optimizer.betas, eps=config.optimizer.eps,
            weight_decay=config.optimizer.weight_decay, fused=True,
        )  # fmt: skip
        loader = BatchLoader(PackedDataset(corpus.train, T, config.data.packing), train.batch_size, config.run.seed)
        tokens, start = 0, time.perf_counter()
        for step in tqdm(range(train.max_steps), desc=self.name):
            factor = lr_multiplier(
                step, step / train.max_steps, schedule=train.schedule, warmup_steps=train.warmup_steps,
                decay_fraction=train.decay_fraction,
                final=train.min_lr_ratio,
            )  # fmt: skip
            for group in optimizer.param_groups:
                group["lr"] = config.optimizer.lr * factor
            inputs, targets = loader.batch(step)
            loss, count = model(inputs, targets)
            (loss / count).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), train.grad_clip or float("inf"))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            tokens += int(count)
        elapsed = time.perf_counter() - start
        windows = PackedDataset(corpus.val, T, "documents" if config.data.source == "tales" else config.data.packing)
        evaluate = Evaluator(windows, train.batch_size, token_byte_lengths(corpus.tokenizer), train.eval_sequences)
        self.resolved, self.peak_memory = config.model_dump(mode="json"), meter.peak()
        found = {"step": train.max_steps, "tokens": tokens, "val_loss": evaluate(model).loss, "elapsed_s": elapsed}
        self.curve = [found]


class _Summed(nn.Module):
    """The peer with the interface of a Thinker that training and evaluation use."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.device = model.train(), torch.device("cpu")

    def forward(self, tokens: Tensor, targets: Tensor, documents: None = None) -> tuple[Tensor, Tensor]:
        logits = self.model(input_ids=tokens, use_cache=False).logits  # (B, T, V)
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
        )
        return loss, (targets != IGNORE_INDEX).sum()
