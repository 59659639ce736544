"""Sample from a Thinker: python generate.py PATH --prompt TEXT."""

import argparse
import secrets
import sys
from dataclasses import asdict, fields
from pathlib import Path

try:
    from thinker.runtime.cli import ArgumentParser
    from thinker.runtime.errors import UserError, run_command
    from thinker.runtime.terminal_text import unescape
except ModuleNotFoundError:
    print("error: run `make demo` once and then .venv/bin/python, or pip install -r requirements.txt", file=sys.stderr)
    sys.exit(2)

SAMPLING_FLAGS = (
    "max_new_tokens", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "temperature",
    "greedy", "top_k", "top_p", "min_p", "seed", "stop",
)  # fmt: skip
DECODING_FLAGS = ("speculate", "compile", "no_cache", "no_slide")
UNUSED_FLAGS = {  # by mode, the flags that it does not read
    "--interactive": ("num_samples", "json", "logprobs", "no_cache"),
    "--score": ("num_samples", "prompt", "prompt_file", "chat", *DECODING_FLAGS, *SAMPLING_FLAGS),
}


def parse_arguments() -> argparse.Namespace:
    """Read the command line. Raises UserError for flags that contradict each other or that the mode does not read."""
    parser = ArgumentParser(description="Sample from a trained Thinker; text goes to standard output.")
    parser.add_argument("path", help="a run directory, a checkpoint in it, or a Hugging Face folder")
    parser.add_argument("--checkpoint", default="latest", help="for a run directory: latest, best, a step or a name")
    group = parser.add_argument_group("task")
    prompt = group.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", default="", help="the beginning of the text, as it is (default: empty)")
    prompt.add_argument("--prompt-file", metavar="FILE", help="read the prompt from a UTF-8 file; - is standard input")
    group.add_argument("--num-samples", type=int, default=1, help="number of texts, separated by --- (default 1)")
    group.add_argument("--chat", action="store_true", help="what you write is a message, by the chat template")
    group.add_argument("--system", metavar="TEXT", help="with --chat: the system message")
    mode = group.add_mutually_exclusive_group()
    mode.add_argument("--interactive", action="store_true", help="write a text in turns with the model")
    mode.add_argument("--score", metavar="FILE", help="print how likely a UTF-8 file is; - is standard input")
    logprobs_help = "print log-probabilities of each token and the N likeliest"
    group.add_argument("--logprobs", type=int, metavar="N", help=logprobs_help)
    group.add_argument("--json", action="store_true", help="print one JSON object per sample or score")
    group = parser.add_argument_group("sampling, in the order it is applied")
    group.add_argument("--max-new-tokens", type=int, default=256, help="maximum length of the sample (default 256)")
    group.add_argument("--repetition-penalty", type=float, default=1.0, help="above 1: fewer repetitions")
    group.add_argument("--presence-penalty", type=float, default=0.0, help="subtracted from logits of generated tokens")
    group.add_argument("--frequency-penalty", type=float, default=0.0, help="the same, once per occurrence")
    bias = {"type": parse_logit_bias, "action": "append", "default": []}
    group.add_argument("--logit-bias", **bias, metavar="ID=B", help="added to a token's logit; -inf bans it")
    temperature = group.add_mutually_exclusive_group()
    temperature.add_argument("--temperature", type=float, default=0.8, help="0 is greedy (default 0.8)")
    temperature.add_argument("--greedy", action="store_true", help="always sample the likeliest token")
    group.add_argument("--top-k", type=int, help="keep the K likeliest tokens")
    group.add_argument("--top-p", type=float, help="keep the likeliest tokens, up to probability P in total")
    group.add_argument("--min-p", type=float, help="keep tokens with this share of the likeliest's probability")
    group.add_argument("--seed", type=int, help="the same seed gives the same text (default: a random one)")
    stop_help = r"end before TEXT, where \n is a line break and \\ a backslash; may be repeated"
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", type=unescape, help=stop_help)
    group = parser.add_argument_group("computation")
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    precisions = ["auto", "fp32", "bf16", "fp16"]
    group.add_argument("--precision", default="auto", choices=precisions, help="of weights and cache")
    group.add_argument("--int8", action="store_true", help="weights in int8; --score reports the loss in quality")
    group.add_argument("--compile", action="store_true", help="compile the decode step: slow to start, then faster")
    group.add_argument("--speculate", type=int, default=0, metavar="N", help="draft N tokens per step from the text")
    group.add_argument("--draft", metavar="PATH", help="with --speculate: draft with this smaller model instead")
    border = group.add_mutually_exclusive_group()
    border.add_argument("--window", type=int, metavar="W", help="remember the newest W tokens, for texts of any length")
    group.add_argument("--sinks", type=int, default=0, metavar="S", help="with --window: remember the first S, too")
    border.add_argument("--no-slide", action="store_true", help="stop at the end of the context (default: go on)")
    group.add_argument("--no-cache", action="store_true", help="recompute all positions at every step, to compare")
    arguments = parser.parse_args()
    if arguments.interactive or arguments.score is not None:
        mode = "--interactive" if arguments.interactive else "--score"
        parser.check_unused(arguments, mode, UNUSED_FLAGS[mode])
    parser.check_utf8(arguments, "prompt", "system")
    if arguments.interactive and arguments.prompt_file == "-":
        raise UserError("--prompt-file - does not go with --interactive: both read standard input")
    if arguments.num_samples < 1:
        raise UserError(f"--num-samples is {arguments.num_samples}; it must be at least 1")
    if arguments.greedy:
        arguments.temperature = 0.0
    if arguments.temperature == 0 and arguments.num_samples > 1:
        raise UserError("greedy samples (temperature 0) are all the same: leave out --num-samples")
    if arguments.system is not None and not arguments.chat:
        raise UserError("--system goes with --chat; leave it out")
    return arguments


def read_text(name: str) -> str:
    """Read a UTF-8 file, or standard input for "-". Raises UserError if it cannot be read or is not UTF-8."""
    try:
        return (sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()).decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"cannot read {name}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not UTF-8 (byte {error.start}); convert it, for example with iconv") from None


def parse_logit_bias(text: str) -> tuple[int, float]:
    """Parse "15=-inf" as (15, -inf). Raises UserError for anything else."""
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise UserError(f"--logit-bias {text} is not a token id, = and a number, such as 15=-2.5") from None


def main() -> int:
    """Load the model, sample or score, print. Returns the exit status."""
    arguments = parse_arguments()
    prompt = arguments.prompt if arguments.prompt_file is None else read_text(arguments.prompt_file)
    text_to_score = None if arguments.score is None else read_text(arguments.score)

    from thinker.data.text_bytes import loses_text, warn_of_lost_text
    from thinker.generation import Completion, Generator, SamplingParams, terminal
    from thinker.generation.chat_conversation import ChatConversation
    from thinker.generation.conversation import Conversation
    from thinker.generation.interactive import run_interactive
    from thinker.generation.prompts import check_cache_fits
    from thinker.interop import load
    from thinker.runtime.device import DTYPES, choose_decoding_precision, choose_device
    from thinker.runtime.finite import finite_json

    show_logprobs, n_top = arguments.logprobs is not None, arguments.logprobs or 0
    seed = secrets.randbelow(2**31) if arguments.seed is None else arguments.seed
    options = vars(arguments) | {"logprobs": n_top, "seed": seed, "logit_bias": arguments.logit_bias}
    params = SamplingParams(**{field.name: options[field.name] for field in fields(SamplingParams)})
    device = choose_device(arguments.device)
    precision = choose_decoding_precision(arguments.precision, device)
    model, tokenizer = load(arguments.path, device, arguments.checkpoint)
    if tokenizer is None:
        raise UserError(f"{arguments.path} has no tokenizer, so it cannot read a prompt")
    draft, draft_tokenizer = (None, tokenizer) if arguments.draft is None else load(arguments.draft, device)
    if draft_tokenizer is None or draft_tokenizer.content_hash != tokenizer.content_hash:
        raise UserError(f"the draft model in {arguments.draft} must have the same tokenizer as the model")
    options = {name: options[name] for name in ("int8", "compile", "window", "sinks", "speculate")}
    options["slide"] = not arguments.no_slide
    generator = Generator(model, tokenizer, not arguments.no_cache, dtype=DTYPES[precision], draft=draft, **options)
    setup = f"{'int8 weights, ' if arguments.int8 else ''}{precision} on {device.type}"
    if text_to_score is not None:
        terminal.log(setup)
        warn_of_lost_text(loses_text(tokenizer, text_to_score, tokenizer.encode(text_to_score)), 1)
        exact = None
        if arguments.int8:
            exact = Generator(model, tokenizer, window=arguments.window, sinks=arguments.sinks).score(text_to_score)
        terminal.print_score(
            generator, generator.score(text_to_score, n_top, progress=True), exact, arguments.json, show_logprobs
        )
        return 0
    if arguments.chat:
        if tokenizer.chat_template is None:
            raise UserError(f"{arguments.path} has no chat template: it was not trained on chats; leave out --chat")
        if not prompt.strip() and (prompt or not arguments.interactive):
            raise UserError("--chat needs a message: --prompt TEXT, or --interactive to write in turns")
        conversation = ChatConversation(generator, arguments.system)
        tokens = conversation.encode(prompt)
    else:
        conversation, tokens = Conversation(generator), generator.encode(prompt)
    first = generator.new_sequence(0, Completion(prompt), params, tokens)  # checks both before anything is printed
    check_cache_fits(generator, generator.model, arguments.num_samples, len(tokens) + first.n_remaining)
    if arguments.int8 and device.type == "cuda" and not (arguments.compile and arguments.num_samples == 1):
        terminal.log("int8 saves memory on a GPU, but costs time there without --compile or with several samples")
    terminal.log(f"seed {params.seed}, {setup}" if params.temperature > 0 else setup)
    if arguments.interactive:
        run_interactive(conversation, prompt, params)
    elif arguments.json:
        n = arguments.num_samples
        for index, completion in enumerate(generator.generate([prompt] * n, params, [tokens] * n)):
            print(finite_json(asdict(completion) | {"seed": params.seed + index}))
    else:
        shown_prompt = "" if arguments.chat else prompt
        terminal.print_samples(generator, shown_prompt, tokens, params, arguments.num_samples, show_logprobs)
    return 0


def command() -> None:
    """Run main() and exit with its status: the installed command."""
    run_command(main)


if __name__ == "__main__":
    command()
