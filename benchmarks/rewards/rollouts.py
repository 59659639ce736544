"""What rollouts cost beside the engine: tokens per second of both, in turns.

Rollouts are answers with their rewards, as tensors, and each sees the weights of its step. So they
prepare the weights for inference, judge the answers and build rows, where the engine only samples.
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from thinker.benchmarks.environment import time_alternately
from thinker.data.text.sources import open_source
from thinker.features.rewards.keys import GRPOConfig
from thinker.features.rewards.prompts import read_prompts
from thinker.features.rewards.rollouts import Sampler, answer_seed, chosen_prompts, make_rollouts
from thinker.features.rewards.verifiers.verifier_process import VerifierProcess
from thinker.generation import Generator, SamplingParams
from thinker.interop import load
from thinker.runtime.device import choose_device
from thinker.runtime.errors import UserError

SEED = 1
N_PROMPTS = 500


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("run", help="the model: a run directory or a Hugging Face folder")
    parser.add_argument("--source", default="tales", help="where prompts come from")
    parser.add_argument("--path", help="of the source")
    parser.add_argument("--verifier", default="tales_story", help="judges the answers")
    parser.add_argument("--prompt-tokens", type=int, default=4, help="length of a prompt")
    parser.add_argument("--new", type=int, default=172, help="longest answer in tokens")
    parser.add_argument("--answers", type=int, default=64, help="answers of a step")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--repeats", type=int, default=9, help="rounds; medians are reported")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time rollouts and the engine with the same prompts and seeds."""
    device = choose_device(arguments.device)
    model, tokenizer = load(arguments.run, device)
    options = GRPOConfig(
        rewards=arguments.verifier,
        prompt_tokens=arguments.prompt_tokens,
        max_new_tokens=arguments.new,
    )
    source = {"path": arguments.path}
    if arguments.source == "tales":
        source = {"max_documents": N_PROMPTS}
    documents = open_source(arguments.source, **source).documents()
    longest = model.config.max_seq_len - arguments.new + 1
    prompts, _ = read_prompts(documents, tokenizer, arguments.prompt_tokens, longest)
    if not prompts:
        raise UserError(f"no prompt leaves {arguments.new} tokens for an answer; lower --new")
    generator = Generator(model, tokenizer)
    n_answers, group_size = arguments.answers, options.group_size
    numbers = chosen_prompts(len(prompts), 0, n_answers // group_size, SEED)
    asked = [prompts[number] for number in numbers for _ in range(group_size)]
    params = []
    for row in range(n_answers):
        seed = answer_seed(SEED, row)
        params.append(SamplingParams(max_new_tokens=arguments.new, seed=seed))
    texts = [prompt.text for prompt in asked]
    tokens = [prompt.tokens for prompt in asked]

    def sample() -> list[Any]:
        return generator.generate(texts, params, tokens)

    with tempfile.TemporaryDirectory() as folder:
        verifiers = VerifierProcess(list(options.rewards), options.timeout, Path(folder) / "log")
        sampler = Sampler(options, tokenizer, verifiers, SEED)

        def roll_out() -> Any:
            return make_rollouts(sampler, model, prompts, 0, n_answers, model.config.max_seq_len)

        times = time_alternately([sample, roll_out], arguments.repeats, device)
        n_tokens = sum(len(completion.token_ids) for completion in sample())
        verifiers.close()
    engine, rollouts = map(statistics.median, times)
    result = {
        "run": arguments.run,
        "verifier": arguments.verifier,
        "device": device.type,
        "answers": n_answers,
        "answer_tokens": n_tokens / n_answers,
        "engine_tokens_per_second": n_tokens / engine,
        "rollout_tokens_per_second": n_tokens / rollouts,
        "ratio": engine / rollouts,
    }
    print(f"{n_answers} answers, {result['answer_tokens']:.1f} tokens long on average")
    print(f"engine    {result['engine_tokens_per_second']:10,.0f} tokens/s")
    print(f"rollouts  {result['rollout_tokens_per_second']:10,.0f} tokens/s, {result['ratio']:.3f}")
    return result
