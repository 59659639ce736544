"""A model for inference: the same forward pass, with faster forms of modules.

Only modules of exactly the known types are replaced. Those of a user, or with a method that was
changed on the instance, are copied as they are; the matrices in them are still replaced one by one.
"""

import copy
from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from thinker.generation.decoders.inference_linear import (
    FewRowsLinear,
    NativeLinear,
    TransformedHead,
    has_known_weight,
)
from thinker.generation.mixed_bits import Bits
from thinker.model import Thinker
from thinker.model.attention import Attention, LinearAttention
from thinker.model.inspection.open_hooks import has_open_hooks
from thinker.model.layers import Linear, OnePlusRMSNorm, RMSNorm, TransformedLinear
from thinker.model.positions import Rotation, apply_rotary_emb
from thinker.model.transformer import MLP, Block
from thinker.runtime.errors import UserError

# Modules that have a faster form.
KINDS = frozenset({Attention, LinearAttention, MLP, RMSNorm, OnePlusRMSNorm, Linear})
RMS_NORMS = (RMSNorm, OnePlusRMSNorm)


class FusedProjection:
    """The projections of Attention: q, k and v in one product, and one norm for q and k."""

    def project(self, x: Tensor, rope: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """As Attention.project(): x (B, T, C) -> q (B, H, T, D), k (B, K, T, D), v (B, K, T, D)."""
        H = self.n_heads
        K = self.n_kv_heads
        heads = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q_and_k, v = heads.split((H + K, K), dim=1)  # (B, H + K, T, D), (B, K, T, D)
        q, k = apply_rotary_emb(self.qk_norm(q_and_k), rope).split((H, K), dim=1)
        return q, k, v


class FusedAttention(FusedProjection, Attention):
    """Attention for inference."""


class FusedLinearAttention(FusedProjection, LinearAttention):
    """LinearAttention for inference."""


FUSED_ATTENTION = {Attention: FusedAttention, LinearAttention: FusedLinearAttention}


class FusedMLP(nn.Module):
    """MLP for inference: gate and up in one product."""

    def __init__(self, gate_up_proj: nn.Module, down_proj: nn.Module, plain: MLP) -> None:
        super().__init__()
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj
        self.activation = plain.activation

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)  # (B, T, d_ff) each
        return self.down_proj(self.activation(gate) * up)


class InferenceNorm(RMSNorm):
    """RMSNorm that writes its result once.

    It uses torch's kernel on a GPU, and needs no copy in fp32 on a CPU.
    """

    def __init__(self, plain: RMSNorm) -> None:
        nn.Module.__init__(self)
        self.weight = plain.weight
        self.eps = plain.eps
        if isinstance(plain, OnePlusRMSNorm):
            self.weight = nn.Parameter(plain.weight + 1)

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) -> (..., width), in x's dtype."""
        if x.device.type != "cpu" or torch.compiler.is_compiling():
            normalized = F.rms_norm(x.float(), x.shape[-1:], eps=self.eps)
            return normalized.to(x.dtype) * self.weight.to(x.dtype)
        if x.dtype not in (torch.bfloat16, torch.float16) or x.requires_grad:
            return super().forward(x)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.rsqrt(norm * norm / x.shape[-1] + self.eps)  # (..., 1)
        # Multiplies in fp32, and casts while writing.
        return torch.mul(x, scale, out=torch.empty_like(x)) * self.weight.to(x.dtype)


@torch.no_grad()
def fuse_for_inference(
    model: Thinker,
    dtype: torch.dtype = torch.float32,
    bits: Bits = None,
    native: bool = False,
    kinds: Collection[type] = KINDS,
) -> Thinker:
    """Copy a Thinker for sampling, and replace modules of the given kinds by faster forms.

    `bits` quantizes all matrices and the LM head, tied or not, also if `kinds` leaves out Linear;
    embedding, activations and cache have `dtype`. `native` uses the kernels of `thinker.native`,
    for fp32 and bf16 on a CPU.
    """
    if has_open_hooks(model):
        raise UserError(
            "the model has open hooks, which are not copied; record or patch generator.model "
            "instead"
        )
    return _Fusing(model, dtype, bits, native, kinds).run()


class _Fusing:
    """The arguments of fuse_for_inference(), which all of its steps need."""

    def __init__(
        self, model: Thinker, dtype: torch.dtype, bits: Bits, native: bool, kinds: Collection[type]
    ) -> None:
        self.model = model
        self.dtype = dtype
        self.bits = bits
        self.native = native
        self.kinds = kinds
        self.on_cpu = model.device.type == "cpu"

    def run(self) -> Thinker:
        """The copy."""
        model = self.model
        new = copy_structure(model, self.dtype)
        for layer, (new_block, block) in enumerate(zip(new.blocks, model.blocks)):
            if type(block.attention) in self.kinds and is_known_attention(block.attention):
                new_block.attention = self.fuse_attention(block.attention, layer)
            if MLP in self.kinds and is_known_mlp(block.mlp):
                new_block.mlp = self.fuse_mlp(block.mlp, layer)
        new.embedding.weight = frozen(model.embedding.weight, self.dtype)
        for path, old in list(model.named_modules()):
            parent = _parent(new, path)
            if parent is None or isinstance(parent, FusedProjection | FusedMLP):
                continue  # it was fused
            name = path.rpartition(".")[2]
            if has_known_weight(old):
                setattr(parent, name, self.linear(old, path, new))
            elif type(old) is TransformedLinear and not is_patched(old):
                head = TransformedHead(self.linear(old, path, new), old.transform)
                setattr(parent, name, head)
            elif type(old) in RMS_NORMS and type(old) in self.kinds and not is_patched(old):
                norm = InferenceNorm(old)
                norm.weight = frozen(norm.weight, self.dtype)
                setattr(parent, name, norm)
        return self.fill(new)

    def fuse_attention(self, plain: Attention, layer: int) -> Attention:
        """q, k and v as one matrix, with the same attend()."""
        kind = FUSED_ATTENTION[type(plain)]
        fused = kind.__new__(kind)
        fused.__dict__.update(plain.__dict__)  # numbers such as the scale
        fused._parameters = dict(plain._parameters)
        fused._modules = {}
        path = f"blocks.{layer}.attention"
        fused.qkv_proj = self.matrix((plain.q_proj, plain.k_proj, plain.v_proj), f"{path}.qkv")
        fused.o_proj = self.known_or_copied(plain.o_proj, f"{path}.o")
        fused.qk_norm = nn.Identity()
        if isinstance(plain.q_norm, RMSNorm):  # a weight vector per head, (H + K, 1, D)
            q_weights = InferenceNorm(plain.q_norm).weight.expand(plain.n_heads, -1)
            k_weights = InferenceNorm(plain.k_norm).weight.expand(plain.n_kv_heads, -1)
            fused.qk_norm = InferenceNorm(plain.q_norm)
            fused.qk_norm.weight = frozen(torch.cat((q_weights, k_weights))[:, None], self.dtype)
        return fused

    def fuse_mlp(self, plain: MLP, layer: int) -> FusedMLP:
        """gate and up as one matrix."""
        path = f"blocks.{layer}.mlp"
        gate_up = self.matrix((plain.gate_proj, plain.up_proj), f"{path}.gate_up")
        down = self.known_or_copied(plain.down_proj, f"{path}.down")
        return FusedMLP(gate_up, down, plain)

    def known_or_copied(self, linear: nn.Module, name: str) -> nn.Module:
        """One matrix, or a copy of a module that may compute something else."""
        if has_known_weight(linear):
            return self.matrix((linear,), name)
        return copy_module(linear, self.dtype)

    def linear(self, plain: Linear, path: str, new: Thinker) -> nn.Module:
        """A matrix by itself: the LM head, or one in a module that is not fused."""
        if plain.weight is self.model.embedding.weight and self.bits is None:
            tied = self.new_linear(plain.out_features, plain.in_features)
            tied.weight = new.embedding.weight
            if plain.bias is not None:
                tied.bias = frozen(plain.bias, self.dtype)
            return tied
        return self.matrix((plain,), _matrix_name(path))

    def matrix(self, linears: tuple[Linear, ...], name: str) -> nn.Module:
        """Matrices with the same input as one."""
        weight = torch.cat([linear.effective_weight() for linear in linears])
        bias = None
        biases = [linear.bias for linear in linears if linear.bias is not None]
        if biases:
            bias = torch.cat(biases).to(self.dtype)
        n_bits = self.bits
        if isinstance(self.bits, dict):
            n_bits = self.bits[name]
        if n_bits is not None:
            from thinker.generation.decoders.quantized_linear import QuantizedLinear
            from thinker.native.quantization import quantize

            if self.native or not self.on_cpu:
                return QuantizedLinear(weight, bias, n_bits, self.native)
            # Without kernels, a CPU would take longer to expand the codes than to multiply.
            weight = quantize(weight, n_bits).dequantize()
        fused = self.new_linear(*weight.shape)
        fused.weight = frozen(weight, self.dtype)
        if bias is not None:
            fused.bias = frozen(bias, self.dtype)
        return fused

    def new_linear(self, n_out: int, n_in: int) -> Linear:
        """An empty matrix of the fastest kind."""
        kind = Linear
        if Linear in self.kinds and self.on_cpu:
            kind = NativeLinear if self.native else FewRowsLinear
        with torch.device("meta"):
            return kind(n_in, n_out)

    def fill(self, new: Thinker) -> Thinker:
        """Copy the parameters that no step has copied, and freeze all."""
        # A tied head that no step replaces is there under both names.
        originals = dict(self.model.named_parameters(remove_duplicate=False))
        shared = set(map(id, originals.values()))
        for name, parameter in list(new.named_parameters()):
            if not parameter.is_meta and id(parameter) not in shared:
                parameter.requires_grad_(False)
                continue
            source = originals[name] if parameter.is_meta else parameter
            module, _, leaf = name.rpartition(".")
            setattr(new.get_submodule(module), leaf, frozen(source, self.dtype))
        return new.eval()


def frozen(weight: Tensor, dtype: torch.dtype) -> nn.Parameter:
    """A copy of a weight in a dtype, without a gradient."""
    return nn.Parameter(weight.detach().to(dtype, copy=True), requires_grad=False)


def is_patched(module: nn.Module) -> bool:
    """Whether a method was replaced on this instance.

    What training replaces, for compilation and checkpointing, does not count.
    """
    for name, value in vars(module).items():
        is_of_training = name == "forward" and _is_of_training(value)
        if callable(getattr(type(module), name, None)) and not is_of_training:
            return True
    return False


def _is_of_training(forward: Any) -> bool:
    """Whether a module's forward() was replaced for compilation or checkpointing."""
    is_checkpointed = isinstance(forward, partial) and forward.func is checkpoint
    return is_checkpointed or hasattr(forward, "_torchdynamo_orig_callable")


def is_known_attention(attention: nn.Module) -> bool:
    """Whether FusedProjection computes what project() of this module does, by the types of its
    parts."""
    if type(attention) not in FUSED_ATTENTION or is_patched(attention) or _has_hooks(attention):
        return False
    q_norm, k_norm = attention.q_norm, attention.k_norm
    if type(q_norm) is not type(k_norm) or type(q_norm) not in (*RMS_NORMS, nn.Identity):
        return False
    if getattr(q_norm, "eps", 0) != getattr(k_norm, "eps", 0):
        return False
    matrices = (attention.q_proj, attention.k_proj, attention.v_proj)
    return all(map(has_known_weight, matrices)) and _have_alike_biases(matrices)


def is_known_mlp(mlp: nn.Module) -> bool:
    """Whether FusedMLP computes what this module does, by the types of its parts."""
    if type(mlp) is not MLP or is_patched(mlp) or _has_hooks(mlp):
        return False
    matrices = (mlp.gate_proj, mlp.up_proj)
    return all(map(has_known_weight, matrices)) and _have_alike_biases(matrices)


def _have_alike_biases(matrices: tuple[Linear, ...]) -> bool:
    """Whether all matrices have a bias, or none has."""
    return len({linear.bias is None for linear in matrices}) == 1


def _has_hooks(module: nn.Module) -> bool:
    """Whether a user's hooks are on a module or its parts. Fused forms would not run them."""
    return any(each._forward_hooks or each._forward_pre_hooks for each in module.modules())


def copy_structure(model: Thinker, dtype: torch.dtype) -> Thinker:
    """Copy a model without the weights of known modules, which stay on the meta device.

    Other modules are copied whole.
    """
    if type(model) is not Thinker or is_patched(model):
        return copy_module(model, dtype)
    with torch.device("meta"):
        new = Thinker(model.config)
    _copy_unknown(new, model, dtype)
    return new


def _copy_unknown(new: nn.Module, old: nn.Module, dtype: torch.dtype) -> None:
    """Copy the parts of `old` that a new model of its config does not have."""
    for name, child in old.named_children():
        if has_known_weight(child):
            continue
        counterpart = getattr(new, name, None)
        is_plain = not (is_patched(child) or child._forward_hooks or child._forward_pre_hooks)
        if type(counterpart) is type(child) and is_plain:
            _copy_unknown(counterpart, child, dtype)
        else:
            setattr(new, name, copy_module(child, dtype))


def copy_module(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Copy a module with its weights in a dtype, without compilation and checkpointing."""
    new = copy.deepcopy(module).to(dtype)
    for each in new.modules():
        if not is_patched(each):
            vars(each).pop("forward", None)
        if isinstance(each, Thinker):
            each.activation_dtype = None
            each.is_compiled = False
    return new


def _parent(model: nn.Module, path: str) -> nn.Module | None:
    """The module that has the module at this path, or None if the model has no such module."""
    *parents, name = path.split(".")
    parent = model
    for part in parents:
        parent = getattr(parent, part, None)
    if not isinstance(getattr(parent, name, None), nn.Module):
        return None
    return parent


def _matrix_name(path: str) -> str:
    """The name in matrix_names() of the group that has the matrix at this path."""
    parts = path.split(".")
    if parts[0] != "blocks":
        return "lm_head"
    groups = {"o_proj": "attention.o", "down_proj": "mlp.down"}
    default = "attention.qkv" if parts[2] == "attention" else "mlp.gate_up"
    return f"blocks.{parts[1]}.{groups.get(parts[-1], default)}"


def unknown_parts(model: Thinker) -> Iterator[str]:
    """The parts of a fused model that NativeDecoder does not know, with their types."""
    known: list[tuple[str, nn.Module, type]] = [
        ("model", model, Thinker),
        ("embedding", model.embedding, nn.Embedding),
    ]
    matrices = []
    for block in model.blocks:
        known += [
            ("block", block, Block),
            ("norm", block.attention_norm, InferenceNorm),
            ("attention", block.attention, FusedAttention),
            ("output", block.after_attention, nn.Identity),
            ("norm", block.mlp_norm, InferenceNorm),
            ("MLP", block.mlp, FusedMLP),
            ("output", block.after_mlp, nn.Identity),
        ]
        if type(block.attention) is FusedAttention:
            matrices.append(("output", block.attention.o_proj))
        if type(block.mlp) is FusedMLP:
            matrices.append(("output", block.mlp.down_proj))
            if block.mlp.activation is not F.silu:
                yield f"activation {block.mlp.activation.__name__}"
    known.append(("norm", model.norm, InferenceNorm))
    matrices.append(("LM head", model.lm_head))
    for part, module, kind in known:
        if type(module) is nn.Identity and kind is not nn.Identity:
            yield f"no {part}"
        elif type(module) is not kind or is_patched(module):
            yield f"{part} {type(module).__name__}"
    for part, matrix in matrices:
        if not hasattr(matrix, "kernel_weight"):
            yield f"{part} {type(matrix).__name__}"
