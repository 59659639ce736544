"""The interpretability page of a text, for "look inside"."""

import tempfile
from pathlib import Path

import torch

from thinker.data.tokenizers.token_label import token_label
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.interop import load
from thinker.interpretability.html_report import make_explorer, write_html_report
from thinker.interpretability.prompt_reports import choose_head
from thinker.interpretability.reports import Prompt
from thinker.model import Thinker
from thinker.runtime.errors import UserError
from thinker.serving.api_errors import ApiError
from thinker.serving.models import ServedModel
from thinker.serving.protocol import InspectRequest

MAX_CHOICE_FLOPS = 5e11  # of finding the head that the page opens, which takes some seconds at most


def inspection_page(served: ServedModel, body: InspectRequest) -> str:
    """Return the page as HTML. Raises ApiError."""
    if (body.text is None) == (body.token_ids is None):
        raise ApiError(400, "pass either text or token_ids", "text")
    try:
        # Anew, because the weights of the model that decodes are fused.
        model, tokenizer = load(served.path, "cpu")
        if body.token_ids is None:
            prompt = Prompt.from_text(model, tokenizer, body.text)
        else:
            prompt = _prompt_from_ids(model, tokenizer, body.token_ids)
        layer, head = _first_head(model, prompt)
        explorer = make_explorer(model, tokenizer, prompt, layer=layer, head=head)
    except UserError as error:
        raise ApiError(400, str(error)) from None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.html"
        write_html_report(path, f"{served.name}: look inside", None, explorer)
        return path.read_text("utf-8")


def _first_head(model: Thinker, prompt: Prompt) -> tuple[int, int]:
    """The head that the likeliest next token needs most; the first one if finding that takes too
    long, as it takes a pass per head."""
    n_passes = 1 + sum(block.attention.n_heads for block in model.blocks)
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    if 2 * n_parameters * len(prompt.tokens) * n_passes > MAX_CHOICE_FLOPS:
        return 0, 0
    chosen = choose_head(model, prompt)
    return chosen.layer, chosen.head


def _prompt_from_ids(model: Thinker, tokenizer: Tokenizer, ids: list[int]) -> Prompt:
    """The prompt of these token ids. Raises UserError for a wrong number or unknown ids."""
    limit = model.config.max_seq_len
    size = tokenizer.vocab_size
    are_known = all(0 <= token < size for token in ids)
    if not 2 <= len(ids) <= limit or not are_known:
        raise UserError(f"token_ids has {len(ids)} ids; use 2 to {limit} ids below {size}")
    labels = [token_label(tokenizer, token) for token in ids]
    return Prompt(torch.tensor(ids), labels)
