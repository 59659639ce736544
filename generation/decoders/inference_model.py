"""A model for inference: the same forward pass with fused and optionally quantized matrices."""

import torch
from torch import Tensor, nn

from thinker.generation.decoders.inference_linear import NativeLinear, QuantizedLinear
from thinker.generation.mixed_bits import Bits, matrix_names
from thinker.model import Thinker
from thinker.model.activation_hooks import has_open_hooks
from thinker.model.layers import Linear, RMSNorm
from thinker.native.quantization import quantize
from thinker.runtime.errors import UserError


def fused_matrices(model: Thinker) -> dict[str, tuple[Linear, ...]]:
    """The matrices that inference reads as one, by name (mixed_bits.matrix_names)."""
    matrices: list[tuple[Linear, ...]] = []
    for block in model.blocks:
        attention, mlp = block.attention, block.mlp
        matrices += [(attention.q_proj, attention.k_proj, attention.v_proj), (attention.o_proj,)]
        matrices += [(mlp.gate_proj, mlp.up_proj), (mlp.down_proj,)]
    return dict(zip(matrix_names(len(model.blocks)), [*matrices, (model.lm_head,)]))


@torch.no_grad()
def prepare_for_inference(
    model: Thinker, dtype: torch.dtype = torch.float32, bits: Bits = None, native: bool = False
) -> Thinker:
    """Copy a Thinker for sampling, fusing matrices with the same input (q, k and v; gate and up).

    `bits` quantizes all matrices and the LM head, tied or not; embedding, activations and cache have `dtype`.
    `native` uses the kernels of `thinker.native`, for fp32 and bf16 on a CPU.
    """
    on_cpu = model.device.type == "cpu"
    matrices = fused_matrices(model)

    def fuse(name: str) -> nn.Module:
        linears, n_bits = matrices[name], bits[name] if isinstance(bits, dict) else bits
        weight = torch.cat([linear.effective_weight() for linear in linears])
        biases = [linear.bias for linear in linears if linear.bias is not None]
        bias = torch.cat(biases).to(dtype) if biases else None
        if n_bits is not None and (native or not on_cpu):
            return QuantizedLinear(weight, bias, n_bits, native)
        if (
            n_bits is not None
        ):  # without kernels, a CPU would take longer to expand the codes than to multiply
            weight = quantize(weight, n_bits).dequantize()
        with torch.device("meta"):
            fused = (NativeLinear if native else Linear)(weight.shape[1], weight.shape[0])
        fused.weight, fused.bias = (
            _frozen(weight.to(dtype)),
            None if bias is None else _frozen(bias),
        )
        return fused

    if has_open_hooks(model):
        raise UserError(
            "the model has open hooks, which are not copied; record or patch generator.model instead"
        )
    with torch.device("meta"):
        copy = Thinker(model.config)  # without allocating weights
    for layer, (new_block, old_block) in enumerate(zip(copy.blocks, model.blocks)):
        new, old, name = new_block.attention, old_block.attention, f"blocks.{layer}"
        new.qkv_proj, new.o_proj = fuse(f"{name}.attention.qkv"), fuse(f"{name}.attention.o")
        new.qk_norm = new.q_norm
        if isinstance(new.qk_norm, RMSNorm):  # a weight vector per head, (H + K, 1, D)
            weights = (
                old.q_norm.weight.expand(old.n_heads, -1),
                old.k_norm.weight.expand(old.n_kv_heads, -1),
            )
            new.qk_norm.weight = _frozen(torch.cat(weights)[:, None].to(dtype))
        del new.q_proj, new.k_proj, new.v_proj, new.q_norm, new.k_norm
        new = new_block.mlp
        new.gate_up_proj, new.down_proj = fuse(f"{name}.mlp.gate_up"), fuse(f"{name}.mlp.down")
        del new.gate_proj, new.up_proj
    copy.embedding.weight = _frozen(model.embedding.weight.to(dtype))
    if model.config.tie_embeddings and bits is None:
        if native:
            with torch.device("meta"):
                copy.lm_head = NativeLinear(model.config.d_model, model.config.vocab_size)
        copy.lm_head.weight = copy.embedding.weight
    else:
        copy.lm_head = fuse("lm_head")
    parameters = dict(model.named_parameters())
    for name, parameter in copy.named_parameters():
        if parameter.is_meta:
            module, _, leaf = name.rpartition(".")
            setattr(copy.get_submodule(module), leaf, _frozen(parameters[name].to(dtype)))
    return copy.to(model.device).eval()


def _frozen(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.detach().clone(), requires_grad=False)
