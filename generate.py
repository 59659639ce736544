"""Generate text with a trained model: python generate.py PATH --prompt TEXT."""

import argparse
import secrets
import sys
from dataclasses import asdict, fields

try:
    from thinker.runtime.cli import ArgumentParser, parse_bits, unescape
    from thinker.runtime.errors import UserError, run_command
    from thinker.runtime.reading import read_text_or_stdin
except ModuleNotFoundError:
    print(
        "error: run `make demo` once and then .venv/bin/python, or pip install -r requirements.txt",
        file=sys.stderr,
    )
    sys.exit(2)

SAMPLING_FLAGS = (
    "max_new_tokens", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "temperature",
    "greedy", "top_k", "top_p", "min_p", "seed", "stop", "json_schema", "regex",
)  # fmt: skip
DECODING_FLAGS = ("early_exit", "speculate", "compile", "no_cache", "no_slide")
UNUSED_FLAGS = {  # by mode, the flags that have no effect in it
    "with --interactive": ("num_samples", "json", "logprobs", "no_cache", "monitor"),
    "with --score": (
        "num_samples",
        "monitor",
        "prompt",
        "prompt_file",
        "chat",
        *DECODING_FLAGS,
        *SAMPLING_FLAGS,
    ),
}


def parse_arguments() -> argparse.Namespace:
    """Parse the command line. Raises UserError for flags that contradict each other or have no effect."""
    examples = ('runs/quickstart --prompt "Once upon a time"', "runs/quickstart --num-samples 3 --top-p 0.9 --seed 1",
                "runs/finetune --chat --interactive", "runs/quickstart --score story.txt")  # fmt: skip
    description = (
        "Generate text with a trained model. Text goes to stdout, everything else to stderr."
    )
    parser = ArgumentParser(description=description, examples=examples)
    parser.add_model("path", "PATH")
    group = parser.add_argument_group("input and output")
    prompt = group.add_mutually_exclusive_group()
    prompt.add_argument(
        "--prompt", default="", metavar="TEXT", help="prompt to continue (default: empty)"
    )
    prompt.add_argument(
        "--prompt-file", metavar="FILE", help="read the prompt from FILE (UTF-8; - for stdin)"
    )
    group.add_argument(
        "--num-samples", type=int, default=1, help="number of samples, separated by ---"
    )
    group.add_argument(
        "--chat", action="store_true", help="wrap the prompt in the model's chat template"
    )
    group.add_argument(
        "--system", metavar="TEXT", help="system message, with --chat (default: none)"
    )
    mode = group.add_mutually_exclusive_group()
    mode.add_argument(
        "--interactive", action="store_true", help="read prompts from the terminal, turn by turn"
    )
    mode.add_argument(
        "--score",
        metavar="FILE",
        help="print the likelihood of the text in FILE (UTF-8; - for stdin)",
    )
    group.add_argument(
        "--logprobs",
        type=int,
        help="print the log-probability of each token and of the N most likely",
    )
    group.add_argument(
        "--json", action="store_true", help="print one JSON object per sample or score"
    )
    group.add_argument(
        "--monitor",
        action="store_true",
        help="measure attention; warn if it drifts from validation",
    )
    group = parser.add_argument_group(
        "sampling (order: penalties, logit bias, temperature, top-k, top-p, min-p)"
    )
    group.add_argument(
        "--max-new-tokens", type=int, default=256, help="maximum number of tokens to generate"
    )
    group.add_argument(
        "--repetition-penalty", type=float, default=1.0, help="values above 1 reduce repetition"
    )
    group.add_argument(
        "--presence-penalty",
        type=float,
        default=0.0,
        help="lower the logit of a generated token by X",
    )
    group.add_argument(
        "--frequency-penalty", type=float, default=0.0, help="lower the logit by X per occurrence"
    )
    bias = {"type": parse_logit_bias, "action": "append", "default": []}
    group.add_argument(
        "--logit-bias",
        **bias,
        metavar="ID=X",
        help="add X to token ID's logit (-inf: ban); repeatable",
    )
    temperature = group.add_mutually_exclusive_group()
    temperature.add_argument(
        "--temperature", type=float, default=0.8, help="sampling temperature; 0 is greedy"
    )
    temperature.add_argument(
        "--greedy", action="store_true", help="always choose the most likely token"
    )
    group.add_argument(
        "--top-k", type=int, metavar="K", help="keep the K most likely tokens (default: all)"
    )
    group.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help="keep top tokens with total probability P (default: 1)",
    )
    group.add_argument(
        "--min-p",
        type=float,
        metavar="P",
        help="drop tokens below P * top probability (default: 0)",
    )
    group.add_argument("--seed", type=int, help="seed for reproducible samples (default: random)")
    stop_help = r"stop before TEXT (\n is a line break, \\ a backslash); repeatable"
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", type=unescape, help=stop_help
    )
    constraint = group.add_mutually_exclusive_group()
    schema_help = "generate JSON that is valid under the JSON schema in FILE (UTF-8)"
    constraint.add_argument("--json-schema", metavar="FILE", help=schema_help)
    constraint.add_argument(
        "--regex", metavar="PATTERN", help="generate a text that matches PATTERN as a whole"
    )
    group = parser.add_argument_group("performance and context")
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    precisions = ["auto", "fp32", "bf16", "fp16"]
    group.add_argument(
        "--precision", default="auto", choices=precisions, help="precision of weights and KV cache"
    )
    bits = group.add_mutually_exclusive_group()
    bits_help = "bits per weight: 8, 4 or mixed:FILE (default: as --precision); --score reports what they cost"
    bits.add_argument("--bits", type=parse_bits, metavar="N", help=bits_help)
    bits.add_argument(
        "--int8", dest="bits", action="store_const", const=8, help="the same as --bits 8"
    )
    compile_help = "compile decoding: on a CPU with its C compiler (default, if there is one), on a GPU with torch"
    group.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=None, help=compile_help
    )
    group.add_argument(
        "--speculate", type=int, default=0, help="draft N tokens per step by prompt lookup"
    )
    group.add_argument(
        "--early-exit",
        type=float,
        metavar="P",
        help="skip later layers if a token has probability P",
    )
    group.add_argument(
        "--draft", metavar="PATH", help="with --speculate: draft with this smaller model"
    )
    border = group.add_mutually_exclusive_group()
    border.add_argument(
        "--window", type=int, help="attend only to the newest N tokens (default: full context)"
    )
    group.add_argument(
        "--sinks", type=int, default=0, help="with --window: also attend to the first N tokens"
    )
    group.add_argument(
        "--retrieve",
        type=int,
        default=0,
        help="with --window: also attend to N older blocks per query",
    )
    group.add_argument(
        "--retrieve-block", type=int, default=32, help="with --retrieve: tokens per block"
    )
    border.add_argument(
        "--no-slide",
        action="store_true",
        help="stop at the context limit (default: drop old tokens)",
    )
    group.add_argument(
        "--cache-bits",
        type=int,
        choices=(8, 4),
        help="bits of keys and values (default: --precision)",
    )
    group.add_argument(
        "--no-cache", action="store_true", help="recompute all positions at every step"
    )
    arguments = parser.parse_args()
    if arguments.interactive or arguments.score is not None:
        mode = "with --interactive" if arguments.interactive else "with --score"
        parser.check_unused(arguments, mode, UNUSED_FLAGS[mode])
    parser.check_utf8(arguments, "prompt", "system")
    if arguments.interactive and arguments.prompt_file == "-":
        raise UserError(
            "--prompt-file - cannot be combined with --interactive: both read standard input; use a file"
        )
    if arguments.num_samples < 1:
        raise UserError(f"--num-samples is {arguments.num_samples}; use at least 1")
    if arguments.greedy:
        arguments.temperature = 0.0
    if arguments.temperature == 0 and arguments.num_samples > 1:
        raise UserError(
            f"--num-samples {arguments.num_samples} has no effect at temperature 0; raise --temperature"
        )
    if arguments.system is not None and not arguments.chat:
        raise UserError("--system needs --chat; add it, or remove --system")
    return arguments


def parse_logit_bias(text: str) -> tuple[int, float]:
    """Parse "15=-inf" as (15, -inf). Raises UserError for anything else."""
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise UserError(
            f"--logit-bias {text} is not ID=X, a token id and a number, such as 15=-2.5"
        ) from None


def main() -> int:
    """Load the model, then sample or score. Returns the exit status."""
    arguments = parse_arguments()
    prompt = (
        arguments.prompt
        if arguments.prompt_file is None
        else read_text_or_stdin(arguments.prompt_file)
    )
    text_to_score = None if arguments.score is None else read_text_or_stdin(arguments.score)
    if arguments.json_schema is not None:
        arguments.json_schema = read_text_or_stdin(arguments.json_schema)

    from thinker.data.tokenizers.text_bytes import loses_text, warn_of_lost_text
    from thinker.features.monitoring.monitor import load_monitor
    from thinker.features.structured_output.constraints import describe_unmet
    from thinker.generation import Completion, Generator, SamplingParams, terminal
    from thinker.generation.chat.chat_conversation import ChatConversation
    from thinker.generation.chat.conversation import Conversation
    from thinker.generation.chat.interactive import run_interactive
    from thinker.generation.mixed_bits import describe_bits
    from thinker.generation.prompts import check_cache_fits
    from thinker.interop import load
    from thinker.interop.find import find_model
    from thinker.runtime.checks import finite_json
    from thinker.runtime.device import DTYPES, choose_decoding_precision, choose_device

    show_logprobs, n_top = arguments.logprobs is not None, arguments.logprobs or 0
    seed = secrets.randbelow(2**31) if arguments.seed is None else arguments.seed
    options = vars(arguments) | {
        "logprobs": n_top,
        "seed": seed,
        "logit_bias": arguments.logit_bias,
    }
    params = SamplingParams(**{field.name: options[field.name] for field in fields(SamplingParams)})
    device = choose_device(arguments.device)
    precision = choose_decoding_precision(arguments.precision, device)
    model, tokenizer = load(arguments.path, device, arguments.checkpoint)
    if tokenizer is None:
        raise UserError(
            f"{arguments.path} has no tokenizer, so it cannot read text; use a model saved with one"
        )
    draft, draft_tokenizer = (
        (None, tokenizer) if arguments.draft is None else load(arguments.draft, device)
    )
    if draft_tokenizer is None or draft_tokenizer.content_hash != tokenizer.content_hash:
        raise UserError(
            f"--draft {arguments.draft} has a different tokenizer; use a draft with the model's tokenizer"
        )
    window = {name: options[name] for name in ("window", "sinks", "retrieve", "retrieve_block")}
    names = "bits", "compile", "speculate", "cache_bits", "early_exit"
    monitor = (
        load_monitor(find_model(arguments.path, arguments.checkpoint))
        if arguments.monitor
        else None
    )
    options = (
        window
        | {name: options[name] for name in names}
        | {"slide": not arguments.no_slide, "monitor": monitor}
    )
    generator = Generator(
        model, tokenizer, not arguments.no_cache, dtype=DTYPES[precision], draft=draft, **options
    )
    setup = f"{describe_bits(arguments.bits, arguments.cache_bits, precision)} on {device.type}"
    if generator.kernel_problem:
        setup += f"; slower without compiled kernels: {generator.kernel_problem}"
    if text_to_score is not None:
        terminal.log(setup)
        warn_of_lost_text(loses_text(tokenizer, text_to_score, tokenizer.encode(text_to_score)), 1)
        is_rounded = arguments.bits or arguments.cache_bits
        exact = Generator(model, tokenizer, **window).score(text_to_score) if is_rounded else None
        score = generator.score(text_to_score, n_top, progress=True)
        terminal.print_score(generator, score, exact, arguments.json, show_logprobs)
        return 0
    if arguments.chat:
        if tokenizer.chat_template is None:
            raise UserError(
                f"{arguments.path} has no chat template: it was not trained on chats; remove --chat"
            )
        if not prompt.strip() and (prompt or not arguments.interactive):
            raise UserError("--chat needs a message; add --prompt TEXT or --interactive")
        conversation = ChatConversation(generator, arguments.system)
        tokens = conversation.encode(prompt)
    else:
        conversation, tokens = Conversation(generator), generator.encode(prompt)
    first = generator.new_sequence(
        0, Completion(prompt), params, tokens
    )  # validates both before anything is printed
    n = arguments.num_samples
    check_cache_fits(generator, generator.model, n, len(tokens) + first.n_remaining)
    if arguments.bits and device.type == "cuda" and not (arguments.compile and n == 1):
        terminal.log(
            "--bits is slower on a GPU without --compile or with several samples; it only saves memory there"
        )
    terminal.log(f"seed {params.seed}, {setup}" if params.temperature > 0 else setup)
    if arguments.interactive:
        run_interactive(conversation, prompt, params)
    elif arguments.json:
        completions = generator.generate([prompt] * n, params, [tokens] * n)
        facts = {"monitor": generator.monitor.summary()} if arguments.monitor else {}
        facts["mean_layers"] = getattr(generator.decode_model, "mean_layers", None)
        for index, completion in enumerate(completions):
            print(finite_json(asdict(completion) | {"seed": params.seed + index} | facts))
        terminal.log(*describe_unmet(completions))
    else:
        terminal.print_samples(
            generator, "" if arguments.chat else prompt, tokens, params, n, show_logprobs
        )
        terminal.log(*generator.monitor.lines() if arguments.monitor else ())
    return 0


def command() -> None:
    """Run main() and exit with its status: the installed command."""
    run_command(main)


if __name__ == "__main__":
    command()
