"""Serve models over HTTP: python -m thinker.serving runs/quickstart."""

from __future__ import annotations

import argparse
import gc
import ipaddress
import logging
import re
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinker.generation.command_flags import CommandFlags, ModelSource, add_feature_flags
from thinker.runtime.cli import ArgumentParser, parse_bits
from thinker.runtime.errors import UserError, install_command, run_command
from thinker.runtime.registry import offers

if TYPE_CHECKING:
    import torch

    from thinker.generation.engine import Generator

LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
# The lowest values of flags.
LEAST = {"max_batch": 1, "max_queue": 0, "max_prompt": 1, "max_tokens": 1, "max_body": 1, "port": 0}


def parse_arguments() -> tuple[argparse.Namespace, list[CommandFlags]]:
    """Parse the command line. Returns its arguments, and the features that have flags."""
    if sys.argv[0].endswith("__main__.py"):  # python -m thinker.serving
        sys.argv[0] = "thinker-serve"
    examples = (
        "runs/quickstart",
        "runs/quickstart runs/finetune --port 8001",
        "tiny=runs/quickstart --bits 8",
    )
    description = "Serve models over HTTP: OpenAI's API at /v1, and a playground at /."
    parser = ArgumentParser(description=description, examples=examples)
    model_help = (
        "run directory, checkpoint or Hugging Face folder; NAME=PATH serves it under another name"
    )
    parser.add_argument("paths", metavar="PATH", nargs="+", help=model_help)
    checkpoint_help = "checkpoint to load from run directories: latest, best, a step or a name"
    parser.add_argument("--checkpoint", default="latest", metavar="NAME", help=checkpoint_help)
    group = parser.add_argument_group("network")
    host_help = (
        "address to listen on; 0.0.0.0 is every network of this machine (then use --api-key)"
    )
    group.add_argument("--host", default="127.0.0.1", help=host_help)
    group.add_argument(
        "--port", type=int, default=8000, help="port to listen on; 0 chooses a free one"
    )
    group.add_argument(
        "--api-key", metavar="KEY", help="requests must send this key (default: no key)"
    )
    cors_help = (
        "let pages of this web site call the API, such as https://example.org, or * for all; "
        "repeatable"
    )
    group.add_argument("--cors", action="append", default=[], metavar="ORIGIN", help=cors_help)
    allowed_help = (
        "also answer requests that name this host, such as the name of a proxy before a server "
        "that listens on 127.0.0.1; repeatable"
    )
    group.add_argument(
        "--allowed-host", action="append", default=[], metavar="NAME", help=allowed_help
    )
    group = parser.add_argument_group("limits")
    group.add_argument(
        "--max-batch", type=int, default=16, help="texts that each model decodes at once"
    )
    group.add_argument(
        "--max-queue",
        type=int,
        default=64,
        help="further texts that may wait; others get status 429",
    )
    group.add_argument(
        "--max-prompt", type=int, help="tokens of a prompt (default: the model's context)"
    )
    group.add_argument(
        "--max-tokens", type=int, help="tokens to generate per text (default: what it asks for)"
    )
    group.add_argument(
        "--max-body", type=int, default=1 << 20, metavar="BYTES", help="size of a request"
    )
    group = parser.add_argument_group("chats")
    group.add_argument(
        "--allow-special-tokens",
        action="store_true",
        help="read names of special tokens in messages as these tokens (default: as plain text)",
    )
    group = parser.add_argument_group("performance and context")
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    precisions = ["auto", "fp32", "bf16", "fp16"]
    group.add_argument(
        "--precision", default="auto", choices=precisions, help="precision of weights and KV cache"
    )
    bits_help = "bits per weight: 8, 4 or mixed:FILE (default: those of --precision)"
    group.add_argument("--bits", type=parse_bits, metavar="N", help=bits_help)
    group.add_argument(
        "--cache-bits",
        type=int,
        choices=(8, 4),
        help="bits of keys and values (default: --precision)",
    )
    compile_help = (
        "use kernels compiled by a C compiler on a CPU (default, if there is one), "
        "on a GPU by Triton (default, if they know the model)"
    )
    group.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=None, help=compile_help
    )
    group.add_argument(
        "--no-slide",
        action="store_true",
        help="stop at the context limit (default: drop old tokens)",
    )
    features = add_feature_flags(parser, "serve")
    arguments = parser.parse_args()
    check_arguments(arguments)
    return arguments, features


def check_arguments(arguments: argparse.Namespace) -> None:
    """Raise UserError for numbers out of range, an empty key, a wrong web site or host."""
    for name, lowest in LEAST.items():
        value = getattr(arguments, name)
        if value is not None and value < lowest:
            raise UserError(f"--{name.replace('_', '-')} is {value}; use at least {lowest}")
    if arguments.port > 65535:
        raise UserError(f"--port is {arguments.port}; use at most 65535, or 0 for a free one")
    if arguments.api_key == "":
        raise UserError("--api-key is empty; give a key, or remove the flag")
    for origin in arguments.cors:
        if not re.fullmatch(r"\*|https?://[^/?#\s]+", origin):
            wanted = "use the scheme and host of a web site, such as https://example.org"
            raise UserError(f"--cors is {origin!r}; {wanted}")
    for host in arguments.allowed_host:
        if not re.fullmatch(r"[\w.-]+|\[[\da-fA-F:.]+\]", host):
            wanted = "use a name without scheme and port, such as models.example.org"
            raise UserError(f"--allowed-host is {host!r}; {wanted}")


def named_paths(paths: list[str]) -> dict[str, Path]:
    """Map names of models to their folders. Raises UserError if two have the same name."""
    named: dict[str, Path] = {}
    for text in paths:
        name, separator, path = text.partition("=")
        # A folder may have a "=" in its name.
        if not separator or Path(text).exists():
            path = text
            name = Path(text).resolve().name
        if not name or not path:
            raise UserError(f"{text!r} has no name or no path; use NAME=PATH")
        if name in named:
            raise UserError(f"two models have the name {name!r}; name one of them: NAME={path}")
        named[name] = Path(path)
    return named


def open_socket(host: str, port: int) -> socket.socket:
    """Listen on an address. Raises UserError if that is not possible."""
    try:
        # The first of the addresses: IPv4 or IPv6, as the system prefers.
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        # asyncio sets TCP_NODELAY only where a socket names its protocol. Without it, the body of
        # an answer waits 40 ms for the acknowledgement of the headers.
        listener = socket.socket(family, kind, protocol)
        if sys.platform != "win32":  # where it would let two servers share a port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        problem = f"cannot listen on {host}, port {port}: {error.strerror}"
        raise UserError(f"{problem}; choose another --port or --host") from None
    return listener


def allowed_hosts(arguments: argparse.Namespace, is_local: bool) -> frozenset[str] | None:
    """The names that requests may give the server; None: any."""
    if not is_local and not arguments.allowed_host:
        return None
    names = {host.strip("[]").lower() for host in arguments.allowed_host}
    return LOCAL | names | {arguments.host.lower()}


def is_local(address: str) -> bool:
    """Whether only this machine can reach an address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def load_generator(
    name: str,
    path: Path,
    device: torch.device,
    dtype: torch.dtype,
    arguments: argparse.Namespace,
    features: list[CommandFlags],
) -> tuple[Generator, int]:
    """A Generator for the model in a folder, and the number of its parameters. Raises UserError.

    The model itself, of which the Generator has a copy, is not kept.
    """
    from thinker.generation.engine import Generator
    from thinker.interop.load import load

    model, tokenizer = load(path, device)
    if tokenizer is None:
        problem = "has no tokenizer, so it cannot read text"
        raise UserError(f"{path} {problem}; use a model saved with one")
    source = ModelSource(path, "latest", tokenizer, device, name)
    options: dict[str, Any] = {}
    for flags in features:
        options |= flags.generator_options(arguments, source)
    generator = Generator(
        model,
        tokenizer,
        dtype=dtype,
        bits=arguments.bits,
        cache_bits=arguments.cache_bits,
        compile=arguments.compile,
        slide=not arguments.no_slide,
        **options,
    )
    return generator, sum(weight.numel() for weight in model.parameters())


def describe_decoder(generator: Generator) -> str:
    """How texts are decoded, as the end of a line, after the first ones were; "" if there is
    nothing to say."""
    decoder = generator.decoder
    parts = []
    if generator.model.device.type == "cuda":
        parts.append(decoder.report() or f"decoded by {decoder.name}")
    if generator.kernel_problem:
        parts.append(f"slower without compiled kernels: {generator.kernel_problem}")
    if decoder.rows_problem:
        parts.append(f"prompts are read one by one: {decoder.rows_problem}")
    return "".join(f"; {part}" for part in parts)


def import_libraries() -> None:
    """Raise UserError for a missing library now, rather than at the first request that needs it."""
    try:
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401

        for source in offers("constraint"):  # for requests with schemas
            source.import_library()
    except ModuleNotFoundError as error:
        remedy = f"install it: {install_command('serve')}"
        raise UserError(f"serving needs {error.name}; {remedy}") from None


def main() -> int:
    """Load the models and serve until a signal comes. Returns the exit status."""
    arguments, features = parse_arguments()
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format="%(levelname)s: %(message)s"
    )
    paths = named_paths(arguments.paths)
    # Before the models load, which takes longer.
    listener = open_socket(arguments.host, arguments.port)
    import_libraries()

    # Only now: these modules need the libraries, and importing them takes seconds.
    from thinker.generation.mixed_bits import describe_bits
    from thinker.interop.find import find_model
    from thinker.runtime.device import DTYPES, choose_decoding_precision, choose_device
    from thinker.serving.allocator import share_one_arena
    from thinker.serving.app import Service, create_app
    from thinker.serving.engine_thread import EngineThread
    from thinker.serving.models import ServedModel
    from thinker.serving.openmp_threads import release_openmp_threads
    from thinker.serving.playground import example_prompt, playground_page
    from thinker.serving.server import DrainingServer
    from thinker.serving.server_metrics import Metrics

    def log(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    share_one_arena()  # before there are threads
    device = choose_device(arguments.device)
    precision = choose_decoding_precision(arguments.precision, device)
    metrics = Metrics()
    models = {}
    for name, path in paths.items():
        # The checkpoint stays the same if a run trains on.
        checkpoint = find_model(path, arguments.checkpoint)
        generator, n_parameters = load_generator(
            name, checkpoint, device, DTYPES[precision], arguments, features
        )
        words = describe_bits(arguments.bits, arguments.cache_bits, precision)
        engine = EngineThread(name, generator, arguments.max_batch, arguments.max_queue, metrics)
        model = ServedModel(
            name,
            checkpoint,
            engine,
            words,
            n_parameters,
            prompt_limit=arguments.max_prompt,
            max_tokens=arguments.max_tokens,
            allow_special=arguments.allow_special_tokens,
            example=example_prompt(checkpoint),
        )
        models[name] = model
        how = describe_decoder(generator)
        log(f"{name}: {words} on {device.type}, context of {model.context_len} tokens{how}")
    metrics.watch({name: model.engine.state for name, model in models.items()})
    for flags in features:
        for collector in flags.collectors():
            metrics.add(collector)
    address, port = listener.getsockname()[:2]
    is_open = not is_local(address)
    hosts = allowed_hosts(arguments, not is_open)
    service = Service(
        models, metrics, playground_page(), arguments.api_key, arguments.max_body, hosts
    )
    shown = arguments.host
    if ":" in shown:  # IPv6
        shown = f"[{shown}]"
    log(f"playground: http://{shown}:{port}   API: http://{shown}:{port}/v1   (Ctrl-C to stop)")
    if is_open and arguments.api_key is None:
        log("anyone who can reach this machine can use the models; set --api-key to prevent that")
    gc.collect()
    release_openmp_threads()  # only the threads of the engines compute from now on
    gc.freeze()  # a full collection, which stops all threads, need not visit what stays anyway
    server = DrainingServer(create_app(service, arguments.cors), service, log)
    server.run(sockets=[listener])  # until a signal comes
    for model in models.values():
        model.engine.stop()
    return 0


def command() -> None:
    """Run main() and exit with its status: the installed command."""
    run_command(main)


if __name__ == "__main__":
    command()
