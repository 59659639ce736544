"""Lower bound on the memory of a run, to reject impossible sizes before anything is allocated."""

import torch

from thinker.model import ThinkerConfig
from thinker.runtime.memory import check_memory
from thinker.runtime.ranks import SINGLE_PROCESS, DistContext
from thinker.training.config.config import Config

MLP_MATRICES = {"swiglu": 3, "ungated": 2}


def check_run_fits(
    config: Config, device: torch.device, dist: DistContext = SINGLE_PROCESS
) -> None:
    """Raise UserError if a run needs more memory than there is, even with every memory-saving
    option."""
    on_device, on_host = least_memory(config, dist)
    size = "" if config.run.init_from else "model.d_model, model.n_layers, "
    remedy = f"lower {size}data.seq_len or train.batch_size, or set train.micro_batch_size"
    if device.type == "cuda":
        check_memory(on_device, device, remedy)
        check_memory(on_host, torch.device("cpu"), remedy, dist.local_world_size)
    else:
        check_memory(on_device | on_host, device, remedy, dist.local_world_size)


def least_memory(
    config: Config, dist: DistContext = SINGLE_PROCESS
) -> tuple[dict[str, int], dict[str, int]]:
    """Minimum bytes for one rank, by purpose: on the device, and on the host.

    The only activations that count are the inputs of the blocks, which even recomputation keeps.
    """
    train = config.train
    shape = config.thinker_config(config.model.vocab_size or 1)  # 1 until the tokenizer is known
    n_weights = least_parameters(shape)
    if train.parallel != "ddp":
        n_weights //= dist.world_size
    n_trained = n_weights if train.lora_rank is None else 0
    rows = train.batch_size // dist.world_size
    row_bytes = 8 * config.data.seq_len
    on_device = {
        "weights": 4 * n_weights,
        "gradients": 4 * n_trained,
        "optimizer": (8 if config.optimizer.name == "adamw" else 4) * n_trained,
        "activations": _least_activations(config, shape, rows),
    }
    return on_device, {"batch": rows * row_bytes}


def _least_activations(config: Config, shape: ThinkerConfig, rows: int) -> int:
    """Bytes of the inputs of the blocks, for a rank with so many rows of a batch."""
    train = config.train
    if train.offload_activations:
        return 0
    at_once = train.micro_batch_size
    if at_once is None:
        at_once = rows
    elif at_once == "auto":
        at_once = 1
    n_values = shape.n_layers * at_once * config.data.seq_len * shape.d_model
    return n_values * (4 if train.precision == "fp32" else 2)


def least_parameters(shape: ThinkerConfig) -> int:
    """Number of weights in the matrices of a model, without norms and biases."""
    heads = sum(sum(shape.head_counts(layer)) for layer in range(shape.n_layers))
    of_attention = 2 * shape.head_dim * heads
    n_matrices = MLP_MATRICES.get(shape.mlp, 0)  # of a user's MLP nothing is known
    of_mlps = n_matrices * shape.d_ff * shape.n_layers
    tables = shape.vocab_size * (1 if shape.tie_embeddings else 2) + shape.bigram_rows
    if shape.positions == "learned":
        tables += shape.max_seq_len
    of_values = 0
    if shape.value_embeddings:
        of_values = shape.n_layers * shape.vocab_size * shape.n_kv_heads * shape.head_dim
    return shape.d_model * (tables + of_attention + of_mlps) + of_values
