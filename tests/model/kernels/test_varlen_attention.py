"""What leads to the variable-length kernel: boundaries, shapes, windows. tests/test_cuda.py runs
the kernel."""

import inspect
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinker.model.attention_dispatch import attend
from thinker.model.kernels.varlen_attention import VarlenAttention, cu_seqlens
from thinker.model.masks import MaskBuilder
from thinker.model.patterns.pattern import TokenInfo
from thinker.model.patterns.pattern_parser import parse_pattern


@given(st.lists(st.lists(st.integers(0, 3), min_size=5, max_size=5), min_size=1, max_size=4))
def test_boundaries_stand_where_a_document_or_a_row_begins(steps):
    document = torch.tensor(steps).cumsum(1)
    starts = cu_seqlens(document)
    assert starts.dtype == torch.int32
    flat = [(row, number) for row, numbers in enumerate(document.tolist()) for number in numbers]
    assert starts.tolist() == [
        at for at in range(len(flat)) if at == 0 or flat[at] != flat[at - 1]
    ] + [len(flat)]


def stand_in(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa=False
):
    """torch's function in loops, as strict as CUDA's kernels are."""
    assert cu_seq_q.dtype == torch.int32
    assert cu_seq_q is cu_seq_k
    assert max_q == max_k >= cu_seq_q.diff().max()
    assert query.shape[2] % 8 == 0
    assert query.shape[0] == cu_seq_q[-1]
    if not enable_gqa:
        assert query.shape[1] == key.shape[1]
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    left, right = window_size
    y = []
    for start, end in itertools.pairwise(cu_seq_q):
        q, k, v = (x[start:end].transpose(0, 1) for x in (query, key, value))  # (H, length, D)
        ahead = torch.arange(end - start) - torch.arange(end - start)[:, None]
        seen = (ahead <= right) & ((-ahead <= left) | (left == -1))
        y.append(
            ((q @ k.mT * scale).masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(0, 1)
        )
    return torch.cat(y)


@pytest.mark.parametrize("text", ["full", "window(1)", "window(4)", "window(99)"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "grouped"), [(4, 4, True), (4, 2, True), (4, 2, False)]
)
@pytest.mark.parametrize("width", [8, 10])
def test_it_hands_over_what_the_reference_computes(text, heads, kv_heads, grouped, width):
    torch.manual_seed(0)
    B, T = 3, 21
    q = torch.randn(B, heads, T, width, dtype=torch.float64)
    k, v = (torch.randn(B, kv_heads, T, width, dtype=torch.float64) for _ in range(2))
    document = (torch.rand(B, T) < 0.2).cumsum(1)
    begins = torch.nn.functional.pad(document[:, 1:] != document[:, :-1], (1, 0), value=True)
    position = torch.arange(T) - torch.where(begins, torch.arange(T), 0).cummax(1).values
    tokens = TokenInfo(position, document)
    known = attend(
        q,
        k,
        v,
        MaskBuilder(heads, kernel="reference").build(parse_pattern(text), tokens, tokens, True),
        0.3,
    )
    mask = MaskBuilder(heads, kernel="varlen").build(parse_pattern(text), tokens, tokens, True)
    assert isinstance(mask.compute, VarlenAttention)
    mask.compute.varlen_attn, mask.compute.has_gqa = stand_in, grouped
    torch.testing.assert_close(attend(q, k, v, mask, 0.3), known)


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_torchs_function_takes_what_it_is_given(kv_heads):
    varlen = VarlenAttention(torch.zeros(2, 8, dtype=torch.int64), None)
    signature, taken = inspect.signature(varlen.varlen_attn), []

    def take(*values, **options):
        taken.append(signature.bind(*values, **options).arguments)
        return values[0]

    varlen.varlen_attn = take
    varlen(torch.randn(2, 4, 8, 16), *torch.randn(2, 2, kv_heads, 8, 16), 0.25)
    assert taken[0]["window_size"] == (-1, 0)  # what torch takes for causal
    assert taken[0]["scale"] == 0.25


def test_a_compiled_block_takes_any_number_of_documents_without_a_break():
    programs = []

    def backend(program, _):
        programs.append(program)
        return lambda *given: [
            next(x for x in given if isinstance(x, torch.Tensor) and x.dim() == 4)
        ]

    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v, varlen: varlen(q, k, v, 0.3), fullgraph=True, backend=backend
    )
    q, (k, v) = torch.randn(2, 4, 12, 16), torch.randn(2, 2, 2, 12, 16)
    for every in (2, 3, 4, 6):
        compiled(q, k, v, VarlenAttention((torch.arange(12) // every).expand(2, 12), 5))
    assert len(programs) == 1
    assert any("varlen_attn" in str(node.target) for node in programs[0].graph.nodes)
    torch._dynamo.reset()
