"""GPT-2 baseline: GPT2LMHeadModel of transformers, trained with a Thinker config on the same
windows."""

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thinker.data.batches.batch_loader import BatchLoader
from thinker.data.batches.dataset import ShuffledDataset
from thinker.data.batches.windows import PackedDataset
from thinker.data.tokenizers.text_bytes import token_byte_lengths
from thinker.evaluation.loss import Evaluator
from thinker.runtime.backend import configure_backend
from thinker.runtime.constants import IGNORE_INDEX
from thinker.runtime.errors import UserError
from thinker.runtime.process.progress import Progress
from thinker.training.config.load import load_config
from thinker.training.data.run_corpus import prepare_training_data
from thinker.training.metrics import MemoryMeter
from thinker.training.optim.schedule import lr_multiplier
from thinker.training.processes.training_process import TrainingProcess


@dataclass
class Gpt2Run(TrainingProcess):
    """Learned positions, LayerNorm, GELU, biases, tied embeddings, normal(0.02) initialization;
    fp32 on the CPU.

    The config sets width, layers, heads, data and training. Biases and norm weights do not decay,
    as in nanoGPT.
    """

    def __post_init__(self) -> None:
        """Raises UserError if the config leaves the optimizer, its rate or the number of steps to
        defaults."""
        config = load_config(self.config, self.overrides)
        if (
            config.optimizer.name != "adamw"
            or config.optimizer.lr is None
            or config.train.max_steps is None
        ):
            raise UserError(
                f"{self.config}: --gpt2 needs optimizer.name=adamw, optimizer.lr and train.max_steps"
            )

    def train(self, threads: int | None = None) -> None:
        """Train, and evaluate at the end."""
        import transformers

        config = load_config(self.config, self.overrides)
        corpus, train, seq_len = prepare_training_data(config), config.train, config.data.seq_len
        configure_backend(torch.device("cpu"))
        meter = MemoryMeter(torch.device("cpu"))
        torch.manual_seed(config.run.seed)
        gpt2_config = transformers.GPT2Config(
            vocab_size=corpus.tokenizer.vocab_size, n_positions=seq_len, n_embd=config.model.d_model,
            n_layer=config.model.n_layers, n_head=config.model.n_heads, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
            bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        model = LossModel(transformers.GPT2LMHeadModel(gpt2_config))
        matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
        vectors = [parameter for parameter in model.parameters() if parameter.dim() != 2]
        optimizer = torch.optim.AdamW(
            [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
            lr=config.optimizer.lr, betas=config.optimizer.betas, eps=config.optimizer.eps,
            weight_decay=config.optimizer.weight_decay, fused=True,
        )  # fmt: skip
        train_set = PackedDataset(corpus.train, seq_len, config.data.packing)
        loader = BatchLoader(ShuffledDataset(train_set, config.run.seed), train.batch_size)
        tokens, start = 0, time.perf_counter()
        for step in Progress(range(train.max_steps), desc=self.name):
            multiplier = lr_multiplier(train, step, step / train.max_steps)
            for group in optimizer.param_groups:
                group["lr"] = config.optimizer.lr * multiplier
            inputs, targets = loader.batch(step)
            loss_sum, count = model(inputs, targets)
            (loss_sum / count).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), train.grad_clip or float("inf"))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            tokens += int(count)
        elapsed = time.perf_counter() - start
        val_set = PackedDataset(corpus.val, seq_len, config.data.val_packing)
        evaluate = Evaluator(
            val_set, train.batch_size, token_byte_lengths(corpus.tokenizer), train.eval_sequences
        )
        val_loss = evaluate(model).loss
        self.resolved, self.peak_memory = config.model_dump(mode="json"), meter.peak()
        self.curve = [
            {"step": train.max_steps, "tokens": tokens, "val_loss": val_loss, "elapsed_s": elapsed}
        ]


class LossModel(nn.Module):
    """A transformers model with the forward pass of a Thinker: (sum of losses in nats, number of
    targets)."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.device = model.train(), torch.device("cpu")

    def forward(
        self, tokens: Tensor, targets: Tensor, document_ids: None = None
    ) -> tuple[Tensor, Tensor]:
        """`document_ids` is ignored: GPT-2 attends across documents."""
        logits = self.model(input_ids=tokens, use_cache=False).logits  # (B, T, V)
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
        )
        return loss, (targets != IGNORE_INDEX).sum()
