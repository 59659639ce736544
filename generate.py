"""Generate text with a trained model: python generate.py PATH --prompt TEXT."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import secrets
import sys
import time
from typing import TYPE_CHECKING, Any

try:
    from thinker.data.text.files.whole_text import read_text_or_stdin
    from thinker.generation.command_flags import CommandFlags, ModelSource, add_feature_flags
    from thinker.runtime.cli import ArgumentParser, parse_bits, unescape
    from thinker.runtime.errors import UserError, run_command
    from thinker.runtime.files import output_file
    from thinker.runtime.process.invocation import other_command
except ModuleNotFoundError:  # thinker itself: for packages of others, see run_command()
    print(
        "error: run `make demo` and use .venv/bin/python, or pip install -r requirements.txt",
        file=sys.stderr,
    )
    sys.exit(2)

if TYPE_CHECKING:
    from thinker.data.tokenizers.tokenizer import Tokenizer
    from thinker.generation.chat.conversation import Conversation
    from thinker.generation.engine import Generator
    from thinker.generation.sampling_params import SamplingParams
    from thinker.model import Thinker

EXAMPLES = (
    'runs/quickstart --prompt "Once upon a time"',
    "runs/quickstart --num-samples 3 --top-p 0.9 --seed 1",
    "runs/finetune --chat --interactive",
    "runs/quickstart --score story.txt",
)
SAMPLING_FLAGS = (
    "max_new_tokens",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "temperature",
    "greedy",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "stop",
)
INPUT_FLAGS = ("num_samples", "prompt", "prompt_file", "chat")
DECODING_FLAGS = ("compile", "no_cache", "no_slide")
WITHOUT_EFFECT = {  # by mode, the flags that have no effect in it
    "with --interactive": ("num_samples", "json", "logprobs", "no_cache"),
    "with --score": (*INPUT_FLAGS, *DECODING_FLAGS, *SAMPLING_FLAGS),
}


def main() -> int:
    """Load a model, then score a text, talk, or write texts. Returns the exit status."""
    return run(*make_parser())


def make_parser() -> tuple[ArgumentParser, list[CommandFlags]]:
    """The parser of generate.py, and the features that have flags."""
    description = (
        "Generate text with a trained model. Text goes to stdout, everything else to stderr."
    )
    parser = ArgumentParser(description=description, examples=EXAMPLES)
    parser.add_model("path", "PATH")
    add_prompt_flags(parser)
    add_output_flags(parser)
    add_sampling_flags(parser)
    add_performance_flags(parser)
    return parser, add_feature_flags(parser, "generate")


def run(parser: ArgumentParser, features: list[CommandFlags]) -> int:
    """Do what the command line asks for. Returns the exit status."""
    arguments = parse_arguments(parser, features)
    prompt = arguments.prompt
    if arguments.prompt_file is not None:
        prompt = read_text_or_stdin(arguments.prompt_file)
    text_to_score = None
    if arguments.score is not None:
        text_to_score = read_text_or_stdin(arguments.score)
    for flags in features:
        flags.read_files(arguments)
    params = sampling_params(arguments)

    from thinker.generation.command.terminal import log

    loaded = load_model(arguments, features)
    generator = loaded.new_generator()
    setup = describe_setup(arguments, generator)
    if text_to_score is not None:
        log(setup)
        score(arguments, loaded, generator, text_to_score)
        return 0

    conversation = None
    if arguments.chat or arguments.interactive:
        conversation = open_conversation(arguments, generator, prompt)
    if arguments.chat:
        tokens = conversation.encode(prompt)
    else:
        tokens = generator.encode(prompt)
    check(arguments, generator, params, tokens)  # before anything is printed
    if params.temperature > 0:
        setup = f"seed {params.seed}, {setup}"
    log(setup)
    if arguments.interactive:
        from thinker.generation.chat.interactive import run_interactive

        run_interactive(conversation, prompt, params, arguments.conversation)
        return 0
    if arguments.json:
        from thinker.generation.command.json_samples import print_json_samples

        print_json_samples(generator, prompt, tokens, params, arguments.num_samples, features)
        return 0
    prompt = "" if arguments.chat else prompt
    show_logprobs = arguments.logprobs is not None
    print_samples(generator, prompt, tokens, params, arguments.num_samples, show_logprobs)
    for flags in features:
        log(*flags.lines())
    return 0


def parse_arguments(parser: ArgumentParser, features: list[CommandFlags]) -> argparse.Namespace:
    """Parse the command line. Raises UserError for flags that contradict each other or have no
    effect."""
    arguments = parser.parse_args()

    mode = ""
    if arguments.interactive:
        mode = "with --interactive"
    elif arguments.score is not None:
        mode = "with --score"
    if mode:
        parser.check_unused(arguments, mode, WITHOUT_EFFECT[mode])
        for flags in features:
            parser.check_unused(arguments, mode, flags.without_effect.get(mode, ()))
    parser.check_utf8(arguments, "prompt", "system")
    if arguments.interactive and arguments.prompt_file == "-":
        problem = "both read standard input; use a file"
        raise UserError(f"--prompt-file - cannot be combined with --interactive: {problem}")
    if arguments.conversation is not None and not arguments.interactive:
        raise UserError("--conversation needs --interactive; add it, or remove --conversation")
    if arguments.num_samples < 1:
        raise UserError(f"--num-samples is {arguments.num_samples}; use at least 1")
    if arguments.greedy:
        arguments.temperature = 0.0
    if arguments.temperature == 0 and arguments.num_samples > 1:
        problem = "has no effect at temperature 0; raise --temperature"
        raise UserError(f"--num-samples {arguments.num_samples} {problem}")
    if arguments.system is not None and not arguments.chat:
        raise UserError("--system needs --chat; add it, or remove --system")
    if arguments.allow_special_tokens and not arguments.chat:
        raise UserError("--allow-special-tokens needs --chat; add it, or remove the flag")
    return arguments


def add_prompt_flags(parser: ArgumentParser) -> None:
    """Flags for what the model reads."""
    group = parser.group("input and output")
    add = group.add_argument
    prompt = group.add_mutually_exclusive_group()
    prompt_help = "prompt to continue (default: empty)"
    prompt.add_argument("--prompt", default="", metavar="TEXT", help=prompt_help)
    file_help = "read the prompt from FILE (UTF-8, also compressed; - for stdin)"
    prompt.add_argument("--prompt-file", metavar="FILE", help=file_help)
    add("--system", metavar="TEXT", help="system message of a chat (default: none)")
    allow_help = "in a chat, read names of special tokens in messages as these tokens"
    add("--allow-special-tokens", action="store_true", help=allow_help)


def add_conversation_flag(parser: ArgumentParser) -> None:
    """The flag --conversation, for sessions."""
    file_help = "of a session: go on with the conversation in FILE if it is there, and save it"
    add = parser.group("input and output").add_argument
    add("--conversation", type=output_file, metavar="FILE", help=file_help)


def add_output_flags(parser: ArgumentParser) -> None:
    """Flags for what is done with the prompt, and how the text is printed."""
    group = parser.group("input and output")
    add = group.add_argument
    add("--num-samples", type=int, default=1, help="number of samples, separated by ---")
    add("--chat", action="store_true", help="wrap the prompt in the model's chat template")
    mode = group.add_mutually_exclusive_group()
    interactive_help = "read prompts from the terminal, turn by turn"
    mode.add_argument("--interactive", action="store_true", help=interactive_help)
    add_conversation_flag(parser)
    score_help = "print the likelihood of the text in FILE (UTF-8; - for stdin)"
    mode.add_argument("--score", metavar="FILE", help=score_help)
    logprobs_help = "print the log-probability of each token and of the N most likely"
    add("--logprobs", type=int, help=logprobs_help)
    add("--json", action="store_true", help="print one JSON object per sample or score")


def add_sampling_flags(parser: ArgumentParser) -> None:
    """Flags for SamplingParams."""
    group = parser.group(
        "sampling (order: penalties, logit bias, temperature, top-k, top-p, min-p)"
    )
    add = group.add_argument
    add("--max-new-tokens", type=int, default=256, help="maximum number of tokens to generate")
    repetition_help = "values above 1 reduce repetition"
    add("--repetition-penalty", type=float, default=1.0, help=repetition_help)
    presence_help = "lower the logit of a generated token by X"
    add("--presence-penalty", type=float, default=0.0, help=presence_help)
    frequency_help = "lower the logit by X per occurrence"
    add("--frequency-penalty", type=float, default=0.0, help=frequency_help)
    add(
        "--logit-bias",
        type=parse_logit_bias,
        action="append",
        default=[],
        metavar="ID=X",
        help="add X to token ID's logit (-inf: ban); repeatable",
    )
    temperature = group.add_mutually_exclusive_group()
    temperature_help = "sampling temperature; 0 is greedy"
    temperature.add_argument("--temperature", type=float, default=0.8, help=temperature_help)
    greedy_help = "always choose the most likely token"
    temperature.add_argument("--greedy", action="store_true", help=greedy_help)
    top_k_help = "keep the K most likely tokens (default: all)"
    add("--top-k", type=int, metavar="K", help=top_k_help)
    top_p_help = "keep top tokens with total probability P (default: 1)"
    add("--top-p", type=float, metavar="P", help=top_p_help)
    min_p_help = "drop tokens below P * top probability (default: 0)"
    add("--min-p", type=float, metavar="P", help=min_p_help)
    add("--seed", type=int, help="seed for reproducible samples (default: random)")
    add(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        type=unescape,
        help=r"stop before TEXT (\n is a line break, \\ a backslash); repeatable",
    )


def add_performance_flags(parser: ArgumentParser) -> None:
    """Flags for options of Generator()."""
    group = parser.group("performance and context")
    add = group.add_argument
    add("--device", default="auto", help="auto, cpu, cuda or mps")
    precisions = ["auto", "fp32", "bf16", "fp16"]
    precision_help = "precision of weights and KV cache"
    add("--precision", default="auto", choices=precisions, help=precision_help)
    bits = group.add_mutually_exclusive_group()
    bits_help = (
        "bits per weight: 8, 4 or mixed:FILE (default: as --precision); "
        "--score reports what they cost"
    )
    bits.add_argument("--bits", type=parse_bits, metavar="N", help=bits_help)
    int8_help = "the same as --bits 8"
    bits.add_argument("--int8", dest="bits", action="store_const", const=8, help=int8_help)
    compile_help = (
        "use kernels compiled by a C compiler on a CPU (default, if there is one), on a GPU "
        "by Triton (default, if they know the model) or by torch"
    )
    add("--compile", action=argparse.BooleanOptionalAction, default=None, help=compile_help)
    border = group.add_mutually_exclusive_group()
    window_help = "attend only to the newest N tokens (default: full context)"
    border.add_argument("--window", type=int, help=window_help)
    sinks_help = "with --window: also attend to the first N tokens"
    add("--sinks", type=int, default=0, help=sinks_help)
    slide_help = "stop at the context limit (default: drop old tokens)"
    border.add_argument("--no-slide", action="store_true", help=slide_help)
    cache_help = "bits of keys and values (default: --precision)"
    add("--cache-bits", type=int, choices=(8, 4), help=cache_help)
    add("--no-cache", action="store_true", help="recompute all positions at every step")


def parse_logit_bias(text: str) -> tuple[int, float]:
    """Parse "15=-inf" as (15, -inf). Raises UserError for anything else."""
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        expected = "ID=X, a token id and a number, such as 15=-2.5"
        raise UserError(f"--logit-bias {text} is not {expected}") from None


def sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    """The parameters that the flags ask for; without --seed, with a random one."""
    from thinker.generation.sampling_params import SamplingParams

    values = {}
    for field in dataclasses.fields(SamplingParams):
        if hasattr(arguments, field.name):  # flags of features that are not installed are missing
            values[field.name] = getattr(arguments, field.name)
    values["logprobs"] = arguments.logprobs or 0
    if arguments.seed is None:
        values["seed"] = secrets.randbelow(2**31)
    return SamplingParams(**values)


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model, and the options of Generator() that the flags ask for."""

    model: Thinker
    tokenizer: Tokenizer
    options: dict[str, Any]

    def new_generator(self, is_exact: bool = False) -> Generator:
        """A Generator with these options. `is_exact`: in fp32, whatever they say."""
        from thinker.generation.engine import Generator

        options = dict(self.options)
        if is_exact:
            for name in ("dtype", "bits", "cache_bits"):
                del options[name]
        return Generator(self.model, self.tokenizer, **options)


def load_model(arguments: argparse.Namespace, features: list[CommandFlags]) -> Loaded:
    """Load the model. Raises UserError if it cannot read text."""
    from thinker.interop.load import load
    from thinker.runtime.device import DTYPES, choose_decoding_precision, choose_device

    device = choose_device(arguments.device)
    arguments.precision = choose_decoding_precision(arguments.precision, device)
    model, tokenizer = load(arguments.path, device, arguments.checkpoint)
    if tokenizer is None:
        problem = "has no tokenizer, so it cannot read text"
        raise UserError(f"{arguments.path} {problem}; use a model saved with one")
    options = {
        "use_cache": not arguments.no_cache,
        "dtype": DTYPES[arguments.precision],
        "bits": arguments.bits,
        "compile": arguments.compile,
        "window": arguments.window,
        "sinks": arguments.sinks,
        "cache_bits": arguments.cache_bits,
        "slide": not arguments.no_slide,
    }
    source = ModelSource(arguments.path, arguments.checkpoint, tokenizer, device)
    for flags in features:
        options |= flags.generator_options(arguments, source)
    return Loaded(model, tokenizer, options)


def describe_setup(arguments: argparse.Namespace, generator: Generator) -> str:
    """Such as "8-bit weights, fp32 on cpu"."""
    from thinker.generation.mixed_bits import describe_bits

    bits = describe_bits(arguments.bits, arguments.cache_bits, arguments.precision)
    setup = f"{bits} on {generator.model.device.type}"
    if generator.kernel_problem:
        setup += f"; slower without compiled kernels: {generator.kernel_problem}"
    return setup


def score(arguments: argparse.Namespace, loaded: Loaded, generator: Generator, text: str) -> None:
    """Print the likelihood of a text, and what fewer bits cost."""
    from thinker.generation.command.score_report import report_score

    new_exact = None
    if arguments.bits or arguments.cache_bits:
        new_exact = functools.partial(loaded.new_generator, is_exact=True)
    report_score(generator, new_exact, text, arguments.logprobs, arguments.json)


def open_conversation(
    arguments: argparse.Namespace, generator: Generator, prompt: str
) -> Conversation:
    """A chat with --chat; otherwise a text that user and model write in turns.

    Raises UserError if the model or the prompt does not suit a chat.
    """
    if not arguments.chat:
        from thinker.generation.chat.conversation import Conversation

        return Conversation(generator)
    if generator.tokenizer.chat_template is None:
        problem = "has no chat template: it was not trained on chats"
        remedy = f"use {other_command('generate')} {arguments.path} --interactive"
        raise UserError(f"{arguments.path} {problem}; {remedy}")
    if not prompt.strip() and (prompt or not arguments.interactive):
        raise UserError("--chat needs a message; add --prompt TEXT or --interactive")
    from thinker.generation.chat.chat_conversation import ChatConversation

    return ChatConversation(generator, arguments.system, arguments.allow_special_tokens)


def check(
    arguments: argparse.Namespace, generator: Generator, params: SamplingParams, tokens: list[int]
) -> None:
    """Raise UserError if the prompt does not fit the model, or the samples the memory."""
    from thinker.generation.command.terminal import log
    from thinker.generation.sequence import Completion

    n = arguments.num_samples
    sequence = generator.new_sequence(0, Completion(""), params, tokens)
    if generator.use_cache:
        max_len = len(tokens) + sequence.n_remaining
        generator.caches.check_memory(generator.model, n, max_len)
    is_slow = arguments.bits and generator.model.device.type == "cuda"
    if is_slow and not (arguments.compile and n == 1):
        log(
            "--bits is slower on a GPU without --compile or with several samples; "
            "it only saves memory there"
        )


def print_samples(
    generator: Generator,
    prompt: str,
    tokens: list[int],
    params: SamplingParams,
    n_samples: int,
    show_logprobs: bool,
) -> None:
    """Print samples: the first one as it is made, then the others."""
    from thinker.generation.command.terminal import (
        describe_context_end,
        describe_speed,
        describe_unmet,
        log,
        logprob_lines,
        print_text,
    )
    from thinker.generation.sequence import Completion

    completions = [Completion(prompt) for _ in range(n_samples)]
    print_text(prompt)
    start = time.perf_counter()
    first_text = None
    for index, piece in generator.stream_batch(completions, params, [tokens] * n_samples):
        if first_text is None:
            first_text = time.perf_counter() - start
        if index == 0:
            print_text(piece)
    seconds = time.perf_counter() - start
    for completion in completions[1:]:
        print_text(f"\n\n---\n\n{prompt}{completion.text}")
    print_text("\n")

    if show_logprobs:
        for completion in completions:
            log(*logprob_lines(generator.tokenizer, completion))
    log(describe_speed(generator, completions, seconds, first_text))
    log(*describe_context_end(generator, completions, params.max_new_tokens).values())
    log(*describe_unmet(completions))


def command() -> None:
    """Run main() and exit with its status: the installed command."""
    run_command(main)


if __name__ == "__main__":
    command()
