"""Diagnose a step with a non-finite loss or gradient: its samples, and the first module that overflows."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from thinker.data.batches.batch_loader import BatchLoader
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.features.streams.stream_writer import BlockRemoved
from thinker.model import Thinker
from thinker.model.lora import RANK_OF, add_lora
from thinker.runtime.process_group import full_tensor

MAX_TEXT_CHARS = 200  # per sample of a report


def diagnose(
    model: Thinker, loader: BatchLoader, tokenizer: Tokenizer, step: int
) -> dict[str, Any]:
    """Run each sample of a step (from 0) separately, forward and backward without dropout, on the current weights.

    Returns "samples": id, loss (nats per token), gradient norm and first characters of each sample;
    "first_not_finite": the first module with a non-finite output; "gradients_not_finite": the parameters with a
    non-finite gradient; "largest_weight": [name, absolute value]. Non-finite numbers become None. Samples of a stream
    that was read long before are left out.
    """
    copy = unwrapped_copy(model)
    samples: list[dict[str, Any]] = []
    modules: list[str] = []  # with a non-finite output, in the order of the forward pass
    parameters: set[str] = set()  # with a non-finite gradient

    def record_nonfinite(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        if not all(bool(part.isfinite().all()) for part in outputs if isinstance(part, Tensor)):
            modules.append(name)

    for name, module in copy.named_modules():
        module.register_forward_hook(partial(record_nonfinite, name or "loss"))
    for row, sample_id in enumerate(loader.sample_ids(step)):
        try:
            inputs, targets = loader.batch(step, slice(row, row + 1))  # (1, T)
        except BlockRemoved:
            break  # the step was long ago, and its text is no longer on the disk
        document_ids = loader.dataset.document_ids(inputs)
        document_ids = None if document_ids is None else document_ids.to(model.device)
        loss_sum, n_targets = copy(
            inputs.to(model.device), targets=targets.to(model.device), document_ids=document_ids
        )
        loss = loss_sum / max(int(n_targets), 1)
        loss.backward()
        loss = loss.detach()
        gradients = {name: p.grad for name, p in copy.named_parameters() if p.grad is not None}
        norm = torch.nn.utils.get_total_norm(gradients.values())
        if not math.isfinite(norm):
            parameters |= {
                name for name, gradient in gradients.items() if not math.isfinite(gradient.norm())
            }
        copy.zero_grad(set_to_none=True)
        text = tokenizer.decode(inputs[0].tolist())[:MAX_TEXT_CHARS]
        samples.append(
            {
                "id": sample_id,
                "loss": finite_or_none(loss),
                "grad_norm": finite_or_none(norm),
                "text": text,
            }
        )
    largest_of = {
        name: parameter.detach().abs().max().item() for name, parameter in copy.named_parameters()
    }
    sizes = {name: math.inf if math.isnan(size) else size for name, size in largest_of.items()}
    largest = max(sizes, key=sizes.__getitem__)
    return {
        "samples": samples,
        "first_not_finite": next(iter(modules), None),
        "gradients_not_finite": sorted(parameters),
        "largest_weight": [largest, finite_or_none(sizes[largest])],
    }


def finite_or_none(value: Tensor | float) -> float | None:
    """The number, or None for nan and inf, which JSON does not have."""
    return float(value) if math.isfinite(value) else None


def unwrapped_copy(model: Thinker) -> Thinker:
    """Copy a model for evaluation, without compilation and sharding. All ranks must call this."""
    weights = {name: full_tensor(tensor) for name, tensor in model.state_dict().items()}
    with torch.device("meta"):
        copy = Thinker(model.config)
    if RANK_OF in weights:
        add_lora(copy, len(weights[RANK_OF]))
    copy.load_state_dict(weights, assign=True)
    if model.config.tie_embeddings:
        copy.lm_head.weight = copy.embedding.weight
    copy.activation_dtype = model.activation_dtype
    return copy.requires_grad_().eval()
