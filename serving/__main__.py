"""Serve models over HTTP: python -m thinker.serving runs/quickstart."""

import argparse
import ipaddress
import logging
import re
import socket
import sys
from pathlib import Path
from typing import Any

from thinker.runtime.cli import ArgumentParser, parse_bits
from thinker.runtime.errors import UserError, run_command

LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
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
    cors_help = "let pages of this web site call the API, such as https://example.org, or * for all; repeatable"
    group.add_argument("--cors", action="append", default=[], metavar="ORIGIN", help=cors_help)
    monitor_help = "report attention per layer in /metrics, and warn if it drifts from the values of the validation set"
    parser.add_argument("--monitor", action="store_true", help=monitor_help)
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
        "--max-body", type=int, default=1 << 20, metavar="BYTES", help="size of a request"
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
    compile_help = "use kernels compiled by a C compiler on a CPU (default, if there is one)"
    group.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=None, help=compile_help
    )
    group.add_argument(
        "--no-slide",
        action="store_true",
        help="stop at the context limit (default: drop old tokens)",
    )
    arguments = parser.parse_args()
    least = {"max_batch": 1, "max_queue": 0, "max_prompt": 1, "max_body": 1, "port": 0}
    for name, lowest in least.items():
        value = getattr(arguments, name)
        if value is not None and value < lowest:
            raise UserError(f"--{name.replace('_', '-')} is {value}; use at least {lowest}")
    if arguments.port > 65535:
        raise UserError(f"--port is {arguments.port}; use at most 65535, or 0 for a free one")
    if arguments.api_key == "":
        raise UserError("--api-key is empty; give a key, or remove the flag")
    for origin in arguments.cors:
        if not re.fullmatch(r"\*|https?://[^/?#\s]+", origin):
            raise UserError(
                f"--cors is {origin!r}; use the scheme and host of a web site, such as https://example.org"
            )
    return arguments


def named_paths(paths: list[str]) -> dict[str, Path]:
    """Map names of models to their folders. Raises UserError if two have the same name."""
    named: dict[str, Path] = {}
    for text in paths:
        name, separator, path = text.partition("=")
        if not separator or Path(text).exists():
            path, name = text, Path(text).resolve().name
        if not name or not path:
            raise UserError(f"{text!r} has no name or no path; use NAME=PATH")
        if name in named:
            raise UserError(f"two models have the name {name!r}; name one of them: NAME={path}")
        named[name] = Path(path)
    return named


def open_socket(host: str, port: int) -> socket.socket:
    """Listen on an address. Raises UserError if that is not possible."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family)
        if sys.platform != "win32":  # where it would let two servers share a port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        raise UserError(
            f"cannot listen on {host}, port {port}: {error.strerror}; choose another --port or --host"
        ) from None
    return listener


def is_local(address: str) -> bool:
    """Whether only this machine can reach an address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def main() -> int:
    """Load the models and serve until a signal comes. Returns the exit status."""
    arguments = parse_arguments()
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format="%(levelname)s: %(message)s"
    )
    paths = named_paths(arguments.paths)
    listener = open_socket(
        arguments.host, arguments.port
    )  # before the models load, which takes longer
    try:
        import llguidance  # noqa: F401  (so that requests with schemas cannot fail later)
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as error:
        raise UserError(f"serving needs {error.name}; install it: pip install '.[serve]'") from None

    from thinker.features.monitoring.monitor import load_monitor
    from thinker.interop.find import find_model
    from thinker.runtime.device import choose_decoding_precision, choose_device
    from thinker.serving.allocator import share_one_arena
    from thinker.serving.app import Service, create_app
    from thinker.serving.engine_thread import EngineThread
    from thinker.serving.metrics import Metrics
    from thinker.serving.models import ServedModel, load_model
    from thinker.serving.playground import playground_page
    from thinker.serving.server import DrainingServer

    def log(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    share_one_arena()  # before there are threads
    device = choose_device(arguments.device)
    precision = choose_decoding_precision(arguments.precision, device)
    options: dict[str, Any] = {
        name: getattr(arguments, name) for name in ("bits", "cache_bits", "compile")
    }
    options["slide"] = not arguments.no_slide
    metrics, models, monitors = Metrics(), {}, {}
    for name, path in paths.items():
        checkpoint = find_model(
            path, arguments.checkpoint
        )  # which stays the same if a run trains on
        if arguments.monitor:
            monitors[name] = load_monitor(
                checkpoint, lambda line, name=name: log(f"warning: {name}: {line}")
            )
        generator, words, n_parameters = load_model(
            checkpoint, device, precision, options | {"monitor": monitors.get(name)}
        )
        engine = EngineThread(name, generator, arguments.max_batch, arguments.max_queue, metrics)
        model = ServedModel(name, checkpoint, engine, words, n_parameters, arguments.max_prompt)
        models[name] = model
        slow = (
            f"; slower without compiled kernels: {generator.kernel_problem}"
            if generator.kernel_problem
            else ""
        )
        log(f"{name}: {words} on {device.type}, context of {model.context_len} tokens{slow}")
    metrics.watch({name: model.engine.state for name, model in models.items()})
    metrics.watch_attention(monitors)
    address, port = listener.getsockname()[:2]
    hosts = LOCAL | {arguments.host.lower()} if is_local(address) else None
    service = Service(
        models, metrics, playground_page(), arguments.api_key, arguments.max_body, hosts
    )
    shown = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
    log(f"playground: http://{shown}:{port}   API: http://{shown}:{port}/v1   (Ctrl-C to stop)")
    if hosts is None and arguments.api_key is None:
        log("anyone who can reach this machine can use the models; set --api-key to prevent that")
    DrainingServer(create_app(service, arguments.cors), service, log).run(sockets=[listener])
    for model in models.values():
        model.engine.stop()
    return 0


def command() -> None:
    """Run main() and exit with its status: the installed command."""
    run_command(main)


if __name__ == "__main__":
    command()
