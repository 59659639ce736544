"""The interpretability page of a text, for "look inside"."""

import tempfile
from pathlib import Path

import torch

from thinker.interop import load
from thinker.interpretability.html_report import make_explorer, write_html_report
from thinker.interpretability.reports import Prompt, token_label
from thinker.runtime.errors import UserError
from thinker.serving.errors import ApiError
from thinker.serving.models import ServedModel
from thinker.serving.protocol import InspectRequest


def inspection_page(served: ServedModel, body: InspectRequest) -> str:
    """Return the page as HTML. Loads the model anew, because decoding uses fused weights. Raises ApiError."""
    if (body.text is None) == (body.token_ids is None):
        raise ApiError(400, "pass either text or token_ids", "text")
    try:
        model, tokenizer = load(served.path, "cpu")
        if body.token_ids is None:
            prompt = Prompt.from_text(model, tokenizer, body.text)
        else:
            n_ids, limit = len(body.token_ids), model.config.max_seq_len
            if not 2 <= n_ids <= limit or not all(
                0 <= token < tokenizer.vocab_size for token in body.token_ids
            ):
                raise UserError(
                    f"token_ids has {n_ids} ids; use 2 to {limit} ids below {tokenizer.vocab_size}"
                )
            labels = [token_label(tokenizer, token) for token in body.token_ids]
            prompt = Prompt(torch.tensor(body.token_ids), labels)
        explorer = make_explorer(model, tokenizer, prompt)
    except UserError as error:
        raise ApiError(400, str(error)) from None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.html"
        write_html_report(path, f"{served.name}: look inside", None, explorer)
        return path.read_text("utf-8")
