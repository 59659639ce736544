"""A model built by hand: a previous-token head below an induction head, which is an induction
circuit."""

import torch

from thinker.model import Thinker, ThinkerConfig

V, T = 12, 24  # tokens, positions
WIDTH = 2 * V + T  # which token, which position, which token before


def induction_circuit(sharpness=200.0):
    """Two layers of one head: the first copies the previous token, the second looks for copies of
    its own token."""
    config = ThinkerConfig(
        vocab_size=V, d_model=WIDTH, n_layers=2, n_heads=1, head_dim=T, d_ff=8, max_seq_len=T, positions="learned",
        qk_norm=False,
    )  # fmt: skip
    model = Thinker(config).eval()
    token, place, before = torch.arange(V), V + torch.arange(T), V + T + torch.arange(V)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.zero_()
        model.embedding.weight[token, token] = 1
        model.positions.weight[torch.arange(T), place] = 1
        first, second = (block.attention for block in model.blocks)
        first.q_proj.weight[torch.arange(T), place] = sharpness
        first.k_proj.weight[torch.arange(1, T), place[:-1]] = (
            1  # a key answers the position after its own
        )
        first.v_proj.weight[token, token] = 1
        first.o_proj.weight[before, token] = 1
        second.q_proj.weight[token, token] = sharpness
        second.k_proj.weight[token, before] = 1
        second.k_proj.weight[token, V] = -1  # the first position had no token before it but itself
        second.v_proj.weight[token, token] = 1
        second.o_proj.weight[token, token] = 1
        model.lm_head.weight[token, token] = 1
    return model
