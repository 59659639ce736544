"""Sample from a Thinker: python generate.py PATH --prompt TEXT."""

from __future__ import annotations

import argparse
import secrets
import sys
from pathlib import Path
from typing import NoReturn

from thinker.runtime.errors import UserError, run_command

DRAWING = {  # what decides the next token, with its default
    "max_new_tokens": 256,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": [],
    "temperature": None,
    "greedy": False,
    "top_k": None,
    "top_p": None,
    "min_p": None,
    "seed": None,
    "stop": [],
}


class Parser(argparse.ArgumentParser):
    """A flag that does not fit is a user's mistake like any other: one line."""

    def error(self, message: str) -> NoReturn:
        """Raises UserError."""
        raise UserError(f"{message}; --help lists what there is")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = Parser(description="Sample from a trained Thinker; text goes to standard output.")
    parser.add_argument(
        "path", help="a run directory, such as runs/quickstart, a checkpoint in it, or a Hugging Face folder"
    )
    parser.add_argument("--checkpoint", default="latest", help="of a run directory: latest, best or a name")

    group = parser.add_argument_group("what to do")
    group.add_argument("--prompt", help="how the text begins (default: at the beginning of a text)")
    group.add_argument("--prompt-file", metavar="FILE", help="the prompt from a UTF-8 file; - is standard input")
    group.add_argument("--num-samples", type=int, default=1, help="how many texts, ended by a line --- (default 1)")
    group.add_argument("--chat", action="store_true", help="the prompt is a message; the model's chat template asks it")
    group.add_argument("--system", metavar="TEXT", help="with --chat: how the assistant shall be")
    group.add_argument("--interactive", action="store_true", help="write a text in turns with the model")
    group.add_argument("--score", metavar="FILE", help="instead: how likely a UTF-8 file is; - is standard input")
    group.add_argument(
        "--logprobs", type=int, metavar="N", help="each token's log-probability, and the N likeliest in its place"
    )
    group.add_argument("--json", action="store_true", help="one JSON object a sample, with tokens, or a score")

    group = parser.add_argument_group("sampling, in the order it is applied")
    group.add_argument("--max-new-tokens", type=int, default=256, help="at most so many (default 256)")
    group.add_argument("--repetition-penalty", type=float, default=1.0, help="above 1: fewer repetitions")
    group.add_argument("--presence-penalty", type=float, default=0.0, help="off the logit of what was generated")
    group.add_argument("--frequency-penalty", type=float, default=0.0, help="the same for each time it was")
    group.add_argument(
        "--logit-bias", action="append", default=[], metavar="ID=B", help="added to a token's logit; -inf bans it"
    )
    group.add_argument("--temperature", type=float, help="0 is greedy (default 0.8)")
    group.add_argument("--greedy", action="store_true", help="always the likeliest token")
    group.add_argument("--top-k", type=int, help="keep the K likeliest tokens")
    group.add_argument("--top-p", type=float, help="keep the likeliest tokens that together have probability P")
    group.add_argument("--min-p", type=float, help="keep tokens with this share of the likeliest's probability")
    group.add_argument("--seed", type=int, help="the same seed gives the same text (default: a new one each time)")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before TEXT; may be repeated")

    group = parser.add_argument_group("how it is computed")
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    group.add_argument(
        "--precision", default="auto", choices=["auto", "fp32", "bf16", "fp16"], help="of weights and cache"
    )
    group.add_argument("--int8", action="store_true", help="weights in int8; --score says what it costs")
    group.add_argument("--compile", action="store_true", help="compile the step: half a minute, then faster")
    group.add_argument(
        "--speculate", type=int, default=0, metavar="N", help="draft N tokens a step from the text so far"
    )
    group.add_argument("--draft", metavar="PATH", help="with --speculate: draft with this smaller model instead")
    group.add_argument("--window", type=int, help="remember the newest W tokens only, for texts of any length")
    group.add_argument("--sinks", type=int, default=0, help="with --window: and the first S")
    group.add_argument("--no-cache", action="store_true", help="recompute every position at every step, to compare")
    return parser.parse_args()


def read_text(name: str) -> str:
    """A file as text, - being standard input. Raises UserError where there is none, or it is not UTF-8."""
    try:
        return (sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()).decode()
    except OSError as error:
        raise UserError(f"cannot read {name}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not UTF-8 (byte {error.start}); convert it, for example with iconv") from None


def find_prompt(arguments: argparse.Namespace) -> str:
    """The prompt as text. Raises UserError where it is given twice or is not UTF-8."""
    if arguments.prompt is not None and arguments.prompt_file is not None:
        raise UserError("--prompt and --prompt-file contradict each other; leave one out")
    if arguments.prompt_file is not None:
        return read_text(arguments.prompt_file)
    prompt = arguments.prompt or ""
    if any("\ud800" <= char <= "\udfff" for char in prompt):
        raise UserError("--prompt is not UTF-8; convert it, or give a file with --prompt-file")
    return prompt


def check_together(arguments: argparse.Namespace) -> float:
    """Refuse flags that contradict each other; returns the temperature."""
    if arguments.num_samples < 1:
        raise UserError(f"--num-samples is {arguments.num_samples}; it must be at least 1")
    if arguments.greedy and arguments.temperature:
        raise UserError(f"--greedy and --temperature {arguments.temperature} contradict each other; leave one out")
    temperature = 0.0 if arguments.greedy else 0.8 if arguments.temperature is None else arguments.temperature
    if temperature == 0 and arguments.num_samples > 1:
        raise UserError("a greedy answer (temperature 0) is always the same: leave out --num-samples")
    modes = {"--interactive": arguments.interactive, "--score": arguments.score is not None}
    if all(modes.values()):
        raise UserError("--interactive and --score contradict each other; leave one out")
    mode = next((name for name, given in modes.items() if given), None)
    unused = {
        "--num-samples": arguments.num_samples > 1,
        "--prompt": mode == "--score" and arguments.prompt is not None,
        "--prompt-file": mode == "--score" and arguments.prompt_file is not None,
        "--prompt-file -": mode == "--interactive" and arguments.prompt_file == "-",
        "--json": mode == "--interactive" and arguments.json,
        "--logprobs": mode == "--interactive" and arguments.logprobs is not None,
        "--speculate": mode == "--score" and arguments.speculate,
        "--compile": mode == "--score" and arguments.compile,
        "--no-cache": mode is not None and arguments.no_cache,
        "--chat": mode is not None and arguments.chat,
    }
    if mode == "--score":  # nothing is drawn
        for name, default in DRAWING.items():
            unused["--" + name.replace("_", "-")] = getattr(arguments, name) != default
    for name, given in unused.items():
        if mode and given:
            raise UserError(f"{name} does not go with {mode}; leave one out")
    if arguments.system is not None and not arguments.chat:
        raise UserError("--system goes with --chat; leave it out")
    if arguments.draft is not None and not arguments.speculate:
        raise UserError("--draft needs --speculate N, the number of tokens it drafts a step")
    return temperature


def parse_bias(given: list[str]) -> dict[int, float]:
    """ "15=-inf" as {15: -inf}. Raises UserError where it is nothing of the kind."""
    biases = {}
    for text in given:
        token, _, bias = text.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise UserError(f"--logit-bias {text} is not a token id, = and a number, such as 15=-2.5") from None
    return biases


def main() -> int:
    """Load, sample, print. Returns the exit status."""
    arguments = parse_arguments()
    temperature = check_together(arguments)
    prompt = find_prompt(arguments)
    scored = None if arguments.score is None else read_text(arguments.score)
    biases = parse_bias(arguments.logit_bias)
    sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows a question mark

    from thinker.generation import Generator, SamplingParams, terminal
    from thinker.interop import load
    from thinker.runtime.device import DTYPES, choose_decoding_precision, choose_device

    seed = secrets.randbelow(2**31) if arguments.seed is None else arguments.seed
    params = SamplingParams(
        max_new_tokens=arguments.max_new_tokens,
        temperature=temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        repetition_penalty=arguments.repetition_penalty,
        presence_penalty=arguments.presence_penalty,
        frequency_penalty=arguments.frequency_penalty,
        logit_bias=biases,
        logprobs=arguments.logprobs or 0,
        seed=seed,
        stop=tuple(arguments.stop),
    )
    device = choose_device(arguments.device)
    precision = choose_decoding_precision(arguments.precision, device)
    model, tokenizer = load(arguments.path, device, arguments.checkpoint)
    if tokenizer is None:
        raise UserError(f"{arguments.path} has no tokenizer, so it cannot read a prompt")
    draft = None
    if arguments.draft is not None:
        draft, its_tokenizer = load(arguments.draft, device)
        if its_tokenizer is None or its_tokenizer.content_hash != tokenizer.content_hash:
            raise UserError(f"the draft model in {arguments.draft} has another tokenizer: its tokens mean other text")
    generator = Generator(
        model,
        tokenizer,
        use_cache=not arguments.no_cache,
        dtype=DTYPES[precision],
        int8=arguments.int8,
        compile=arguments.compile,
        window=arguments.window,
        sinks=arguments.sinks,
        speculate=arguments.speculate,
        draft=draft,
    )
    how = f"{'int8 weights, ' if arguments.int8 else ''}{precision} on {device.type}"
    if scored is not None:
        terminal.note(how)
        exact = Generator(model, tokenizer, window=arguments.window, sinks=arguments.sinks) if arguments.int8 else None
        terminal.print_score(generator, scored, arguments.logprobs, arguments.json, exact and exact.score(scored))
        return 0
    asked = None
    if arguments.chat:
        from thinker.data import chat

        if tokenizer.chat_template is None:
            raise UserError(
                f"{arguments.path} was not made for conversations: it has no chat template; leave out --chat"
            )
        if not prompt.strip():
            raise UserError("--chat needs a message: --prompt TEXT")
        system = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
        asked = chat.encode_prompt(tokenizer, [*system, {"role": "user", "content": prompt}])
        generator.check_length(asked)
    else:
        generator.encode(prompt)  # refuses one that is too long before anything is printed
    generator.check_params(params)
    terminal.note(f"seed {seed}, {how}" if temperature > 0 else how)
    if arguments.interactive:
        terminal.converse(generator, prompt, params)
    else:
        show_logprobs = arguments.logprobs is not None
        terminal.print_samples(generator, prompt, params, arguments.num_samples, arguments.json, show_logprobs, asked)
    return 0


def command() -> None:
    """Run main() and exit with its status: the installed command."""
    run_command(main)


if __name__ == "__main__":
    command()
