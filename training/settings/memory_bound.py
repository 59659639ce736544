"""Lower bound on the memory of a run, to reject impossible sizes before anything is allocated."""

import torch

from thinker.model import ThinkerConfig
from thinker.runtime.memory import check_memory
from thinker.runtime.process_group import SINGLE_PROCESS, DistContext
from thinker.training.config.config import Config


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
    train, T = config.train, config.data.seq_len
    shape = config.thinker_config(config.model.vocab_size or 1)  # 1 until the tokenizer is known
    n_weights = least_parameters(shape) // (dist.world_size if train.parallel != "ddp" else 1)
    is_trained = train.lora_rank is None
    rows = train.batch_size // dist.world_size
    at_once = {"auto": 1, None: rows}.get(train.micro_batch_size, train.micro_batch_size)
    kept = 0 if train.offload_activations else shape.n_layers * at_once * T * shape.d_model
    on_device = {
        "weights": 4 * n_weights,
        "gradients": 4 * n_weights * is_trained,
        "optimizer": (8 if config.optimizer.name == "adamw" else 4) * n_weights * is_trained,
        "activations": kept * (4 if train.precision == "fp32" else 2),
    }
    return on_device, {"batch": 8 * rows * T}


def least_parameters(shape: ThinkerConfig) -> int:
    """Number of weights in the matrices of a model, without norms and biases."""
    C, D = shape.d_model, shape.head_dim
    heads = sum(sum(shape.head_counts(layer)) for layer in range(shape.n_layers))
    tables = shape.vocab_size * (1 if shape.tie_embeddings else 2)
    tables += shape.max_seq_len if shape.positions == "learned" else 0
    return C * (tables + 2 * D * heads + 3 * shape.d_ff * shape.n_layers)
