"""EleutherAI's lm-evaluation-harness on a Thinker: the tasks that papers report, by the library that defines them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from thinker.data.tokenizer import Tokenizer
from thinker.evaluation.long_context import hidden_states
from thinker.generation import Generator, SamplingParams
from thinker.generation.sequence import Completion
from thinker.model import Thinker
from thinker.runtime.errors import UserError, did_you_mean

MAX_NEW_TOKENS = 256  # where a task does not say


class ThinkerLM(TemplateLM):
    """A Thinker as the harness's LM: texts are tokenized, cut and scored as by its adapter for transformers."""

    def __init__(self, model: Thinker, tokenizer: Tokenizer, batch_size: int = 16) -> None:
        super().__init__()
        self.model, self.tokenizer, self.batch_size = model.eval(), tokenizer, batch_size
        self.max_length = model.config.max_seq_len
        self.generator = Generator(model, tokenizer)

    @property
    def eot_token_id(self) -> int:
        """What ends a text, by the tokenizer's own file."""
        return self.tokenizer.special_tokens.get(
            self.tokenizer.special_tokens_map.get("eos_token"), self.tokenizer.eos_id
        )

    @property
    def prefix_token_id(self) -> int:
        """What a continuation without a context is seen after: what begins a text, or else what ends one."""
        return self.tokenizer.special_tokens.get(self.tokenizer.special_tokens_map.get("bos_token"), self.eot_token_id)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """The ids of a text, special tokens by their names; in front what prompts of the model begin with."""
        ids = self.tokenizer.encode(string, allow_special=True)
        begun = ids[:1] == [self.tokenizer.bos_id]
        return ids if add_special_tokens is False or begun else [*self.tokenizer.bos_prefix, *ids]

    @torch.no_grad()
    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """(ln P of a continuation, whether it is the likeliest at every step), each after its context."""
        found: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i][1]) - len(requests[i][2]))  # alike lengths
        with tqdm(total=len(order), desc="scoring", disable=disable_tqdm) as bar:
            for start in range(0, len(order), self.batch_size):
                part = order[start : start + self.batch_size]
                rows = [(requests[i][1] + requests[i][2])[-(self.max_length + 1) :] for i in part]
                longest = max(map(len, rows)) - 1
                inputs = torch.tensor([row[:-1] + [0] * (longest + 1 - len(row)) for row in rows])  # nobody sees the 0s
                hidden = hidden_states(self.model, inputs.to(self.model.device))  # (B, T, C)
                for place, (i, row) in enumerate(zip(part, rows)):
                    targets = torch.tensor(requests[i][2][-(len(row) - 1) :])  # those that are left of it
                    n = len(targets)
                    logits = self.model.lm_head(hidden[place, len(row) - 1 - n : len(row) - 1]).float().cpu()  # (n, V)
                    nats = logits.log_softmax(dim=-1).gather(1, targets[:, None]).double().sum().item()
                    found[i] = nats, bool((logits.argmax(dim=-1) == targets).all())
                bar.update(len(part))
        for (text, _, _), answer in zip(requests, found):
            if text is not None:
                self.cache_hook.add_partial("loglikelihood", text, answer)
        return found

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """ln P of whole texts: cut into windows of the model's length, each token counted once."""
        windows: list[tuple[None, list[int], list[int]]] = []
        owner: list[int] = []
        for number, request in enumerate(requests):
            ids = self.tok_encode(*request.args)
            cut = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1)
            for window in map(make_disjoint_window, cut):
                windows.append((None, *window))
                owner.append(number)
        totals = [0.0] * len(requests)
        for number, (nats, _) in zip(owner, self._loglikelihood_tokens(windows, disable_tqdm)):
            totals[number] += nats
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """What the model goes on with, up to the first of the request's stop strings."""
        texts = []
        for request in tqdm(requests, desc="generating", disable=disable_tqdm):
            context, options = request.args
            params = sampling_params(options)
            room = self.max_length - params.max_new_tokens
            if room < 1:
                raise UserError(
                    f"the task draws {params.max_new_tokens} tokens; the model's context is {self.max_length}"
                )
            completion = Completion(context)
            tokens = self.tok_encode(context)[-room:] or [self.prefix_token_id]
            for _ in self.generator.stream_batch([completion], params, [tokens]):
                pass
            texts.append(completion.text)
        return texts


def sampling_params(options: dict[str, Any]) -> SamplingParams:
    """A task's generation_kwargs in our words. Raises UserError for one that is not known."""
    options = dict(normalize_gen_kwargs(options, MAX_NEW_TOKENS))
    new = {"stop": tuple(text for text in options.pop("until") if text), "max_new_tokens": options.pop("max_gen_toks")}
    temperature, sampled = options.pop("temperature", 1.0), options.pop("do_sample")
    new["temperature"] = temperature if sampled else 0.0
    new |= {name: options.pop(name) for name in ("top_k", "top_p", "min_p", "repetition_penalty") if name in options}
    if options:
        raise UserError(f"the task generates with {next(iter(options))}, which is not known here")
    return SamplingParams(**new)


def run_tasks(
    model: Thinker,
    tokenizer: Tokenizer,
    names: list[str],
    *,
    include: Path | None = None,
    n_shots: int | None = None,
    limit: int | None = None,
) -> dict[str, dict[str, Any]]:
    """The results of each task: {task: {metric: value, metric_stderr: its error, questions: how many}}.

    Args:
        names: of the harness's tasks, such as hellaswag, whose data it downloads, or of those defined in YAML files in
            the folder `include`.
        n_shots: examples before each question; None: as the task says. limit: of the first so many questions only.

    Raises UserError for a name that is none, and where a task's data cannot be had.
    """
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=None if include is None else str(include), include_defaults=False)
    if not set(names) <= set(manager.all_tasks):  # reading the harness's own takes seconds
        manager = TaskManager(include_path=None if include is None else str(include))
    for name in names:
        if name not in manager.all_tasks:
            raise UserError(f"the harness has no task {name}{did_you_mean(name, manager.all_tasks)}")
    adapter = ThinkerLM(model, tokenizer)
    try:
        found = simple_evaluate(
            adapter, tasks=names, num_fewshot=n_shots, limit=limit, task_manager=manager,
            bootstrap_iters=1000, log_samples=False,
        )  # fmt: skip
    except UserError:
        raise
    except Exception as error:  # data that cannot be had, more examples than there are; tasks are programs, too
        raise UserError(f"the harness cannot run {', '.join(names)}: {type(error).__name__}: {error}") from error
    tidy: dict[str, dict[str, Any]] = {}
    for name, metrics in found["results"].items():
        values = {key.replace(",none", ""): value for key, value in metrics.items() if isinstance(value, int | float)}
        tidy[name] = {key: value for key, value in values.items() if not key.startswith("sample_")}
        if name in found.get("n-samples", {}):
            tidy[name]["questions"] = found["n-samples"][name]["effective"]
    return tidy
