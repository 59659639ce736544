"""Bits per weight: 8 or 4 for all matrices, or those of each matrix."""

from thinker.runtime.errors import UserError

# Bits of all matrices, or of each by its name in matrix_names(); None: not quantized.
Bits = int | dict | None
CHOICES = (8, 4)


def matrix_names(n_layers: int) -> list[str]:
    """Names of the matrices that inference reads as one, as they have the same input, and of the LM
    head."""
    names = []
    for layer in range(n_layers):
        for part in ("attention.qkv", "attention.o", "mlp.gate_up", "mlp.down"):
            names.append(f"blocks.{layer}.{part}")
    return [*names, "lm_head"]


def check_bits(bits: Bits, n_layers: int) -> None:
    """Raise UserError unless `bits` can be used for a model of so many layers."""
    if not isinstance(bits, dict):
        if bits not in (None, *CHOICES):
            raise UserError(f"bits is {bits}; use 8 or 4, or None for weights in `dtype`")
        return
    names = matrix_names(n_layers)
    missing = [name for name in names if name not in bits]
    unknown = [name for name in bits if name not in names]
    if missing or unknown:
        problem = f"has no bits for {missing[0]}" if missing else f"names {unknown[0]}"
        raise UserError(f"the assignment {problem}; use one that was made for this model")
    for name, value in bits.items():
        if value not in CHOICES or isinstance(value, bool):
            raise UserError(f"the assignment gives {name} {value!r} bits; use 8 or 4")


def describe_bits(bits: Bits, cache_bits: int | None, *more: str) -> str:
    """Such as "8-bit weights, 4-bit cache, fp32"; `more` comes last."""
    words = []
    if isinstance(bits, dict):
        n_in_8_bits = sum(value == 8 for value in bits.values())
        words.append("4-bit weights")
        words.append(f"{n_in_8_bits} of {len(bits)} matrices 8-bit")
    elif bits is not None:
        words.append(f"{bits}-bit weights")
    if cache_bits is not None:
        words.append(f"{cache_bits}-bit cache")
    return ", ".join([*words, *more])
