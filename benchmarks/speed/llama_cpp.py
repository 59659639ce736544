"""Decode with llama.cpp (the llama-cpp-python package), on a file exported from the same model."""

import ctypes
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.interop.gguf.write_gguf import write_gguf
from thinker.model import Thinker
from thinker.runtime.errors import UserError

TYPES = ("f32", "f16", "q8_0", "q4_0")


class LlamaCpp:
    """A model in llama.cpp, with as many threads as torch. Steps call its C interface, without a
    sampler."""

    def __init__(self, model: Thinker, dtype: str, batch: int, max_len: int) -> None:
        """`dtype`: one of TYPES. Raises UserError if the package is missing."""
        try:
            import llama_cpp
        except ImportError as error:
            raise UserError(
                "llama.cpp variants need its package; run pip install llama-cpp-python"
            ) from error
        self.library, self.batch_size = llama_cpp, batch
        # Kept, because llama.cpp calls it as long as it runs.
        self.silence = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self.silence, ctypes.c_void_p())
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            write_gguf(model, make_tokenizer("byte", []), path, dtype)
            parameters = llama_cpp.llama_model_default_params()
            parameters.use_mmap = False  # the file is removed
            self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
            self.n_bytes = (
                path.stat().st_size
                - model.embedding.weight.numel()
                * path.stat().st_size
                // sum(parameter.numel() for parameter in model.parameters())
            )
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = max_len * batch
        options.n_seq_max = batch
        options.n_batch = 2048
        options.n_ubatch = 512
        options.n_threads = options.n_threads_batch = torch.get_num_threads()
        self.context = llama_cpp.llama_init_from_model(self.model, options)
        self.tokens = llama_cpp.llama_batch_init(max(2048, max_len * batch), 0, batch)
        self.vocab_size = model.config.vocab_size

    def step(self, rows: list[list[int]], start: int) -> list[int]:
        """Read tokens of each row at positions from `start`. Returns the likeliest next token of
        each row."""
        tokens, last = self.tokens, []
        for row, ids in enumerate(rows):
            for offset, token in enumerate(ids):
                n = tokens.n_tokens = row * len(ids) + offset
                tokens.token[n] = token
                tokens.pos[n] = start + offset
                tokens.n_seq_id[n] = 1
                tokens.seq_id[n][0] = row
                tokens.logits[n] = offset == len(ids) - 1
            last.append(n)
        tokens.n_tokens = len(rows) * len(rows[0])
        assert self.library.llama_decode(self.context, tokens) == 0
        logits = (self.library.llama_get_logits_ith(self.context, n) for n in last)
        return [int(np.ctypeslib.as_array(row, (self.vocab_size,)).argmax()) for row in logits]

    def generator(self, prompts: list[list[int]]) -> Callable[[int], None]:
        """Greedy decoding: a function that generates n tokens for each prompt."""

        def generate(count: int) -> None:
            self.library.llama_memory_clear(self.library.llama_get_memory(self.context), True)
            tokens, position = self.step(prompts, 0), len(prompts[0])
            for _ in range(count - 1):
                tokens, position = self.step([[token] for token in tokens], position), position + 1

        return generate
