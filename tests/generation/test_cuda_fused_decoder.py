"""The decoder with fused kernels on a GPU: logits, texts and waits, compared with plain decoding.

`make test-more` runs the same checks on a CPU, in Triton's interpreter.
"""

import importlib.util
import itertools
import os
import random
import threading
import time
import warnings

import pytest
import torch
from conftest import random_model

from thinker.benchmarks.contenders import stream
from thinker.benchmarks.gpu.first_text import interpreted_generator
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.generation import Generator, SamplingParams
from thinker.generation.sequence import Completion

TOKENIZER = make_tokenizer("byte", [])
CPU = torch.device("cpu")
CUDA = torch.device("cuda")
PROMPTS = ("The cat", "a", "Once upon a time, there was", "x" * 40, "")
TOLERANCES = {"fp32": 1e-4, "bf16": 0.03, "fp16": 0.03}  # of logits, relative to the largest
on_a_gpu = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
HAS_TRITON = importlib.util.find_spec("triton") is not None


def drawn_model(seed, device):
    """A model of a drawn shape."""
    numbers = random.Random(seed)
    n_kv_heads = numbers.choice([1, 2, 4])
    return random_model(
        seed,
        0.3,
        0.3,
        vocab_size=numbers.choice([264, 301]),
        d_model=numbers.choice([64, 96, 320]),
        d_ff=numbers.choice([50, 256]),
        n_kv_heads=n_kv_heads,
        n_heads=n_kv_heads * numbers.choice([1, 2, 4]),
        head_dim=numbers.choice([16, 32, 64]),
        qk_norm=numbers.choice([False, True]),
        attention_bias=numbers.choice([False, True]),
        tie_embeddings=numbers.choice([False, True]),
        max_seq_len=400,
    ).to(device)


def fused_generator(model, dtype="fp32"):
    """A Generator whose decoder has the fused kernels, by default on a GPU."""
    if model.device.type == "cpu":
        return interpreted_generator(model)
    return Generator(model, TOKENIZER, dtype=dtype)


def assert_fused(generator):
    decoder = generator.decoder
    assert type(decoder).__name__ == "FusedDecoder"
    assert decoder.report() == ""


def check_logits(model, dtype, n_texts, length):
    """The logits of tokens that are read one by one are those of a pass of the model."""
    random_numbers = torch.Generator().manual_seed(n_texts)
    tokens = torch.randint(0, 256, (n_texts, length), generator=random_numbers).to(model.device)
    plain = Generator(model, TOKENIZER, dtype=dtype, compile=False)
    with torch.no_grad():
        known = plain.model(tokens).float()
    generator = fused_generator(model, dtype)
    cache = generator.new_cache(n_texts, length)
    n_read = length - 4
    found = [generator.decoder.prefill(tokens[:, :n_read], cache)]
    for position in range(n_read, length):
        found.append(generator.decoder.step(tokens[:, position : position + 1], cache))
    assert_fused(generator)
    error = (torch.cat(found, 1).float() - known[:, n_read - 1 :]).abs().max() / known.abs().max()
    assert error < TOLERANCES[dtype]


def check_texts(model, n_texts, n_new):
    """Texts and their scores are those of plain decoding: greedy, and with random numbers."""
    plain = Generator(model, TOKENIZER, compile=False)
    fused = fused_generator(model)
    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(n_texts)]
    for temperature in (0.0, 0.8):
        params = SamplingParams(n_new, temperature=temperature, seed=n_texts)
        known = plain.generate(prompts, params)
        found = fused.generate(prompts, params)
        assert [each.token_ids for each in found] == [each.token_ids for each in known]
        for one, other in zip(found, known):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)
    assert_fused(fused)


def check_edit(model):
    """Texts of an edited model are its own, not those of the kernels."""
    plain, fused = Generator(model, TOKENIZER, compile=False), fused_generator(model)
    for generator in (plain, fused):
        norm = generator.model.blocks[0].mlp_norm
        norm.forward = lambda x: x.clone()
    params = SamplingParams(8, temperature=0)
    (known,) = plain.generate(["The cat"], params)
    (found,) = fused.generate(["The cat"], params)
    assert found.token_ids == known.token_ids
    assert "computes something else" in fused.decoder.report()


def yield_checks():
    os.environ["TRITON_INTERPRET"] = "1"
    with torch.compiler.set_stance("force_eager"):  # what is compiled is tested elsewhere
        check_logits(drawn_model(2, CPU), "fp32", 1, 7)
        check_texts(drawn_model(4, CPU), 2, 3)
        check_edit(drawn_model(5, CPU))
    yield {"done": True}


@pytest.mark.more
@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_the_checks_pass_in_the_interpreter():
    (result,) = stream(yield_checks, deadline=time.monotonic() + 900, is_fresh=True)
    assert result["done"]


class TestOnAGpu:
    pytestmark = on_a_gpu

    @pytest.mark.parametrize("n_texts", [1, 3, 32])
    @pytest.mark.parametrize("dtype", TOLERANCES)
    @pytest.mark.parametrize("seed", range(2))
    def test_logits(self, seed, dtype, n_texts):
        check_logits(drawn_model(seed, CUDA), dtype, n_texts, 300)

    @pytest.mark.parametrize("n_texts", [1, 2, 5, 64])
    @pytest.mark.parametrize("seed", range(2))
    def test_texts(self, seed, n_texts):
        check_texts(drawn_model(10 + seed, CUDA), n_texts, 100)

    def test_an_edited_model_is_noticed(self):
        check_edit(drawn_model(5, CUDA))

    def test_a_changed_number_of_texts_and_a_second_text(self):
        model = drawn_model(6, CUDA)
        plain = Generator(model, TOKENIZER, compile=False)
        fused = fused_generator(model)
        for n_texts, n_new in ((1, 5), (4, 40), (1, 300), (3, 20), (1, 5)):
            params = SamplingParams(n_new, seed=n_new)
            prompts = list(PROMPTS[:n_texts])
            known = plain.generate(prompts, params)
            found = fused.generate(prompts, params)
            assert [each.token_ids for each in found] == [each.token_ids for each in known]
        assert_fused(fused)

    @pytest.mark.parametrize("n_texts", [1, 4])
    def test_the_host_does_not_wait_for_each_token(self, n_texts):
        """Sampling 16 tokens waits as often as sampling 2."""
        generator = fused_generator(drawn_model(7, CUDA))
        params = SamplingParams(64, temperature=1.0)
        sequences = []
        for index in range(n_texts):
            sequences.append(generator.new_sequence(index, Completion(""), params, [1, 2, 3]))
        counts = []
        for n_steps in (16, 2, 16):  # the first one compiles
            cache = generator.new_cache(n_texts, 64)
            logits = generator.prefill([[1, 2, 3]] * n_texts, cache)
            torch.cuda.set_sync_debug_mode("warn")
            with warnings.catch_warnings(record=True) as waits:
                warnings.simplefilter("always")
                generator.decoder.sample(sequences, cache, logits, n_steps)
            torch.cuda.set_sync_debug_mode("default")
            counts.append(len(waits))
        assert_fused(generator)
        assert counts[1] == counts[2]

    def test_other_threads_use_the_gpu_while_graphs_are_captured(self):
        """Such as those that pin batches of training and take new memory."""
        is_done = threading.Event()
        errors = []

        def use_gpu():
            sizes = itertools.count(1)
            while not is_done.is_set():
                try:
                    torch.zeros(next(sizes), 4096).pin_memory().to(CUDA).sum().item()
                except RuntimeError as error:
                    errors.append(str(error))
                    return

        thread = threading.Thread(target=use_gpu)
        thread.start()
        try:
            generator = fused_generator(drawn_model(9, CUDA))
            for n_texts in (1, 2, 4):
                generator.generate(["a"] * n_texts, SamplingParams(3))
        finally:
            is_done.set()
            thread.join()
        assert errors == []
        assert_fused(generator)

    def test_products_in_tf32_are_near_enough(self):
        options = torch.backends.cuda.matmul
        before = options.allow_tf32
        options.allow_tf32 = True
        try:
            generator = fused_generator(drawn_model(10, CUDA))
            for n_texts in (1, 3):
                generator.generate(["a"] * n_texts, SamplingParams(3))
        finally:
            options.allow_tf32 = before
        assert_fused(generator)

    def test_the_logits_do_not_change_from_run_to_run(self):
        model = drawn_model(8, CUDA)
        results = []
        for _ in range(2):
            generator = fused_generator(model, "bf16")
            cache = generator.new_cache(1, 64)
            generator.prefill([[1, 2, 3]], cache)
            token = torch.tensor([[4]], device=CUDA)
            results.append(generator.decoder.step(token, cache))
        assert torch.equal(*results)

    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
    @pytest.mark.parametrize("n_texts", [1, 4])
    def test_a_gpu_that_is_not_the_current_one(self, n_texts):
        check_texts(drawn_model(9, torch.device("cuda:1")), n_texts, 20)
