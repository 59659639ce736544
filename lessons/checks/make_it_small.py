"""Checks of the lesson "Make it small"."""

from typing import Any

import torch
from torch import Tensor

from thinker.features.quantization_study.sensitivity import round_vectors
from thinker.lessons.exercise import call, exercise, is_near

MATRIX_WEIGHTS, EMBEDDING = 1_000_000, 200_000  # of the model in the second exercise


@exercise
def check_round(answer: Any) -> str | None:
    """A function round(row, bits) that returns a row (n,) rounded to codes times one scale."""
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(12, generator=generator, dtype=torch.float64)
    row[3] = -4.0  # the largest magnitude belongs to a negative weight
    for bits in (8, 4):
        if hint := _find_rounding_mistake(call(answer, row.clone(), bits), row, bits):
            return hint
    return None


def _find_rounding_mistake(found: Any, row: Tensor, bits: int) -> str | None:
    highest = 2 ** (bits - 1) - 1
    scale = row.abs().max() / highest
    if is_near(found, round_vectors(row, bits), 1e-6):
        return None
    if is_near(found, row, 1e-9):
        return (
            "Not yet: the row is unchanged. Round each weight divided by the scale to an integer."
        )
    if is_near(found, (row / scale).round(), 1e-6):
        return "Not yet: these are the codes. Multiply them by the scale to get weights back."
    if is_near(found, (row / scale).trunc() * scale, 1e-6):
        return "Not yet: the codes are cut off instead of rounded, so errors reach a whole step."
    for wrong in (2**bits - 1, 2**bits, highest + 1):
        step = row.abs().max() / wrong
        if is_near(found, (row / step).round() * step, 1e-6):
            return f"Not yet: with {bits} bits, codes go from -{highest} to {highest}, but yours reach {wrong}."
    for wrong in (127, 7):
        step = row.abs().max() / wrong
        if is_near(found, (row / step).round() * step, 1e-6):
            return f"Not yet: with {bits} bits, the largest code is {highest}, not {wrong}. It depends on `bits`."
    step = row.max() / highest
    if is_near(found, (row / step).round() * step, 1e-6):
        return "Not yet: the largest magnitude counts, and here it is that of a negative weight."
    return f"Not yet: the scale is the largest magnitude divided by {highest}. Print scale, codes, and codes · scale."


@exercise
def check_bytes(answer: Any) -> str | None:
    """The bytes of a million weights in 4 bits with scales, and an embedding of 200,000 numbers in
    fp32."""
    matrices, embedding = MATRIX_WEIGHTS * 4.5 / 8, 4 * EMBEDDING
    if is_near(answer, matrices + embedding, 1):
        return None
    if is_near(answer, matrices, 1):
        return "Not yet: that is right for the matrices. The embedding is missing."
    if is_near(answer, (MATRIX_WEIGHTS + EMBEDDING) * 4.5 / 8, 1):
        return "Not yet: the embedding is not in 4 bits. Each of its numbers takes 32 bits."
    if is_near(answer, MATRIX_WEIGHTS * 4 / 8 + embedding, 1):
        return "Not yet: the scales are missing. 16 bits for 32 weights are half a bit per weight."
    if is_near(answer, 8 * (matrices + embedding), 8):
        return "Not yet: these are bits. A byte has 8 of them."
    if is_near(answer, matrices + EMBEDDING, 1):
        return "Not yet: a number of the embedding takes 4 bytes, not one."
    if is_near(answer, matrices + 32 * EMBEDDING, 1):
        return (
            "Not yet: 32 bits of the embedding's numbers are 4 bytes, so do not add bits to bytes."
        )
    if is_near(answer, MATRIX_WEIGHTS * 20 / 8 + embedding, 1):
        return "Not yet: 32 weights share the 16 bits of a scale, so a weight does not pay for all of them."
    return "Not yet: find the bits per weight, scales included, then the bytes of the matrices and of the embedding."


@exercise
def check_choice(answer: Any) -> str | None:
    """Which of three models fits into 0.9 MB and +0.020 nats on new stories: "A", "B" or "C"."""
    if not isinstance(answer, str) or answer.strip().upper() not in ("A", "B", "C"):
        return 'Not yet: answer with "A", "B" or "C", in quotes.'
    choice = answer.strip().upper()
    if choice == "A":
        return "Not yet: its loss is the lowest, but compare its size with 0.9 MB."
    if choice == "B":
        return "Not yet: it is the smallest, but look at the text that its loss was measured on."
    return None
