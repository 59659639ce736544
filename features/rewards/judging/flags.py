"""The flag --verifier of `thinker eval`: rewards of answers, pass@k, and a page of samples."""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinker.evaluation.eval_flags import EvalFlags, Report
from thinker.features.rewards.verifiers.load_verifier import check_verifier
from thinker.runtime.cli import ArgumentParser
from thinker.runtime.errors import UserError
from thinker.runtime.files import output_file

if TYPE_CHECKING:
    from thinker.data.text.sources import Source
    from thinker.data.tokenizers.tokenizer import Tokenizer
    from thinker.features.rewards.judging.judge_model import Judged
    from thinker.features.rewards.keys import GRPOConfig
    from thinker.features.rewards.prompts import Prompt
    from thinker.model import Thinker

N_PROMPTS = 100
TALES_SEED = 1 << 40  # of stories that no run trains on
SAMPLING = ("prompt_tokens", "max_new_tokens", "temperature")  # keys of train.grpo
VERIFIER_FLAGS = (*SAMPLING, "samples", "right", "before", "page")
OTHER_FLAGS = (  # of other measurements
    "fineweb",
    "read_data",
    "part",
    "max_tokens",
    "rope_scaling",
    "png",
    "context",
    "stride",
    "long",
    "factor",
    "windows",
    "tasks",
    "include",
    "shots",
)


class VerifierFlags(EvalFlags):
    """Answers judged by verifiers; see features/rewards/guide.md."""

    def __init__(self, parser: ArgumentParser) -> None:
        title = "answers judged by verifiers (see --source, --path, --confidence, --limit)"
        add = parser.add_argument_group(title).add_argument
        add(
            "--verifier",
            action="append",
            metavar="NAME",
            help="a verifier, such as exact or FILE.py:FUNCTION; may be repeated",
        )
        run_default = "(default: that of the run, or {})"
        add(
            "--prompt-tokens",
            type=int,
            metavar="N",
            help="for texts: the prompt is the beginning, N tokens",
        )
        longest_help = f"longest answer in tokens {run_default.format(64)}"
        add("--max-new-tokens", type=int, metavar="N", help=longest_help)
        temperature_help = f"temperature of sampling {run_default.format(1)}"
        add("--temperature", type=float, metavar="T", help=temperature_help)
        add("--samples", type=int, default=8, metavar="N", help="answers to each prompt")
        right_help = "an answer with this reward or more is right, for pass@k"
        add("--right", type=float, default=1.0, metavar="REWARD", help=right_help)
        before_help = "another model, such as that before training, for the same prompts"
        add("--before", metavar="RUN", help=before_help)
        add("--page", type=Path, metavar="FILE", help="write the answers as HTML")

    def check(self, arguments: argparse.Namespace, parser: ArgumentParser) -> bool:
        """As EvalFlags.check()."""
        if not arguments.verifier:
            parser.check_unused(arguments, "without --verifier", VERIFIER_FLAGS)
            return False
        parser.check_unused(arguments, "with --verifier", OTHER_FLAGS)
        if arguments.source is None:
            raise UserError(
                "--verifier needs prompts; add --source jsonl --path FILE, or --source tales"
            )
        if arguments.source == "pysource":
            raise UserError("--verifier needs prompts; use --source jsonl, parquet, text or tales")
        if arguments.source == "tales":
            parser.check_unused(arguments, "with --source tales", ("path", "column"))
        elif arguments.path is None:
            raise UserError(f"--source {arguments.source} needs --path FILE")
        for name in arguments.verifier:
            check_verifier(name)
        if arguments.page is not None:
            output_file(arguments.page)
        if not math.isfinite(arguments.right):
            raise UserError(f"--right is {arguments.right}; use a number")
        if arguments.samples < 1:
            raise UserError(f"--samples is {arguments.samples}; use at least 1")
        return True

    def evaluate(
        self, arguments: argparse.Namespace, model: Thinker, tokenizer: Tokenizer
    ) -> Report:
        """As EvalFlags.evaluate()."""
        from thinker.features.rewards.judging.samples_page import write_page

        options = _options(arguments)
        name = arguments.run
        if arguments.checkpoint != "latest":
            name += f" ({arguments.checkpoint})"
        models = [(name, model, tokenizer)]
        if arguments.before is not None:
            models.insert(0, (f"before: {arguments.before}", *_load_before(arguments)))
        judged = _judge(arguments, options, models)
        header = _header(arguments, options)
        if arguments.page is not None:
            write_page(arguments.page, header, judged)
        values: dict[str, Any] = dict(header)
        confidence = arguments.confidence
        values["models"] = [{"name": name} | each.to_dict(confidence) for name, each in judged]
        return Report(values, _report(header, judged, confidence), None)


def _options(arguments: argparse.Namespace) -> GRPOConfig:
    """How to sample: what the flags say, else the run's train.grpo."""
    from pydantic import ValidationError

    from thinker.features.rewards.keys import GRPOConfig
    from thinker.interop.find import find_model
    from thinker.training.data.open_run import load_run_config

    config = load_run_config(find_model(arguments.run, arguments.checkpoint))
    values: dict[str, Any] = {}
    if config is not None and config.train.grpo is not None:
        for name in (*SAMPLING, "timeout"):
            values[name] = getattr(config.train.grpo, name)
    for name in SAMPLING:
        if getattr(arguments, name) is not None:
            values[name] = getattr(arguments, name)
    values["rewards"] = dict.fromkeys(arguments.verifier, 1.0)
    try:
        return GRPOConfig(**values)
    except ValidationError as error:
        first = error.errors()[0]
        flag = str(first["loc"][0]).replace("_", "-")
        raise UserError(f"--{flag}: {first['msg']}") from error


def _load_before(arguments: argparse.Namespace) -> tuple[Thinker, Tokenizer]:
    """The other model. Raises UserError if it has no tokenizer."""
    from thinker.interop import load
    from thinker.interop.find import find_model

    model, tokenizer = load(find_model(arguments.before), arguments.device)
    if tokenizer is None:
        raise UserError(f"--before {arguments.before} has no tokenizer")
    return model, tokenizer


def _judge(
    arguments: argparse.Namespace, options: GRPOConfig, models: list[tuple[str, Thinker, Tokenizer]]
) -> list[tuple[str, Judged]]:
    """Sample and judge the answers of each model, with its name. Raises UserError if models read
    different prompts, or if no answer could be judged."""
    from thinker.features.rewards.judging.judge_model import judge_model, mean_reward
    from thinker.features.rewards.rollouts import Sampler
    from thinker.features.rewards.verifiers.verifier_process import VerifierProcess

    judged: list[tuple[str, Judged]] = []
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "verifiers.log"
        verifiers = VerifierProcess(list(options.rewards), options.timeout, log)
        try:
            for name, model, tokenizer in models:
                prompts = prompts_from_flags(arguments, options, model, tokenizer)
                if judged:
                    _check_same(judged[0][1].prompts, prompts)
                sampler = Sampler(options, tokenizer, verifiers, seed=0)
                answers = judge_model(
                    model, prompts, sampler, arguments.samples, arguments.right, name
                )
                if mean_reward(answers.totals) is None:
                    raise UserError("verifiers could not judge any answer, as said above")
                judged.append((name, answers))
        finally:
            verifiers.close()
    return judged


def _check_same(prompts: list[Prompt], others: list[Prompt]) -> None:
    if [prompt.text for prompt in prompts] != [prompt.text for prompt in others]:
        raise UserError(
            "the two models read different prompts, because their tokenizers or context lengths "
            "differ; evaluate them separately"
        )


def prompts_from_flags(
    arguments: argparse.Namespace, options: GRPOConfig, model: Thinker, tokenizer: Tokenizer
) -> list[Prompt]:
    """The prompts that the flags choose. Raises UserError if there is none."""
    from itertools import islice

    from thinker.features.rewards.prompts import read_prompts

    limit = N_PROMPTS if arguments.limit is None else arguments.limit
    documents = islice(_source(arguments, tokenizer, limit).documents(), limit)
    longest = model.config.max_seq_len - options.max_new_tokens + 1
    prompts, n_too_long = read_prompts(documents, tokenizer, options.prompt_tokens, longest)
    if not prompts:
        raise UserError(
            f"--source {arguments.source} has no prompt that leaves {options.max_new_tokens} "
            f"tokens for an answer ({n_too_long} are too long, others too short)"
        )
    return prompts


def _source(arguments: argparse.Namespace, tokenizer: Tokenizer, limit: int) -> Source:
    """Where prompts come from."""
    from thinker.data.text.sources import open_source

    if arguments.source == "tales":
        return open_source("tales", max_documents=limit, seed=TALES_SEED)
    if arguments.column is not None:
        return open_source(arguments.source, path=arguments.path, column=arguments.column)
    if arguments.source in ("jsonl", "parquet") and _are_prompts(arguments.path, tokenizer):
        return open_source("prompts", path=arguments.path)
    return open_source(arguments.source, path=arguments.path)


def _are_prompts(path: str, tokenizer: Tokenizer) -> bool:
    """Whether the first row has a prompt of its own, and is no conversation."""
    from thinker.data.text.document import Document
    from thinker.data.text.sources import SourceOptions
    from thinker.data.text.tables.any_rows import open_rows

    def read_row(row: dict[str, Any], column: str, number: int, where: str) -> Document:
        return Document("", row=row)

    source = open_rows(SourceOptions(path=path, column="prompt"), read_row)
    first = next(iter(source.documents()), None)
    if first is None or "prompt" not in first.row:
        return False
    is_conversation = "completion" in first.row and tokenizer.chat_template is not None
    return not is_conversation


def _header(arguments: argparse.Namespace, options: GRPOConfig) -> dict[str, Any]:
    """What was measured, and how."""
    return {
        "model": arguments.run,
        "before": arguments.before,
        "source": arguments.source,
        "path": arguments.path,
        "verifiers": ", ".join(options.rewards),
        "answers": f"{arguments.samples} to each prompt",
        "max_new_tokens": options.max_new_tokens,
        "temperature": options.temperature,
        "right": f"a reward of {arguments.right:g} or more",
        "confidence": arguments.confidence,
    }


def _report(header: dict[str, Any], judged: list[tuple[str, Judged]], confidence: float) -> str:
    """The header, and a table for each model."""
    import numpy as np

    from thinker.features.rewards.judging.judge_model import mean_reward

    lines = []
    for name, value in header.items():
        if value is not None:
            lines.append(f"{name:>14}  {value}")
    for name, each in judged:
        n_prompts, n_answers = each.totals.shape
        lines += ["", f"{name}: {n_prompts:,} prompts, {n_prompts * n_answers:,} answers"]
        n_failed = int(np.isnan(each.totals).sum())
        if n_failed:
            lines.append(f"{'no reward':>14}  {n_failed:,} answers")
        reward = mean_reward(each.totals)
        if reward is not None:
            lines.append(f"{'reward':>14}  {reward:.3f}")
        for part, value in each.parts.items():
            lines.append(f"{part:>14}  {value:.3f}")
        for share in each.shares(confidence):
            interval = f"[{share.low:.3f}, {share.high:.3f}]"
            lines.append(f"{f'pass@{share.k}':>14}  {share.share:.3f}  {interval}")
    return "\n".join(lines)
