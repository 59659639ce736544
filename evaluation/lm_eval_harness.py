"""Adapter for EleutherAI's lm-evaluation-harness and its standard tasks."""

from pathlib import Path
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.evaluation.long_context import hidden_states
from thinker.generation import Generator, SamplingParams
from thinker.model import Thinker
from thinker.runtime.errors import UserError, did_you_mean

MAX_NEW_TOKENS = 256  # unless the task sets it


class ThinkerLM(TemplateLM):
    """A Thinker as an LM of the harness; tokenizes, truncates and scores like its adapter for transformers."""

    def __init__(self, model: Thinker, tokenizer: Tokenizer, batch_size: int = 16) -> None:
        super().__init__()
        self.model, self.tokenizer, self.batch_size = model.eval(), tokenizer, batch_size
        self.max_length, self.generator = model.config.max_seq_len, Generator(model, tokenizer)

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text, from the tokenizer's special tokens map if it has one."""
        tokenizer = self.tokenizer
        return tokenizer.special_tokens.get(
            tokenizer.special_tokens_map.get("eos_token"), tokenizer.eos_id
        )

    @property
    def prefix_token_id(self) -> int:
        """Context of a text without context: the BOS token, or else the EOS token."""
        return self.tokenizer.special_tokens.get(
            self.tokenizer.special_tokens_map.get("bos_token"), self.eot_token_id
        )

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Tokenize a text that may contain special tokens; adds the BOS token if the model was trained with one."""
        ids = self.tokenizer.encode(string, allow_special=True)
        has_bos = ids[:1] == [self.tokenizer.bos_id]
        return ids if add_special_tokens is False or has_bos else [*self.tokenizer.bos_prefix, *ids]

    @torch.no_grad()
    def _loglikelihood_tokens(
        self,
        requests: list[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """Per (text, context, continuation), ln P of the continuation and whether greedy decoding produces it."""
        results: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        order = sorted(
            range(len(requests)), key=lambda i: -len(requests[i][1]) - len(requests[i][2])
        )  # by length
        with tqdm(total=len(order), desc="scoring", disable=disable_tqdm) as bar:
            for start in range(0, len(order), self.batch_size):
                batch = order[start : start + self.batch_size]
                rows = [(requests[i][1] + requests[i][2])[-(self.max_length + 1) :] for i in batch]
                inputs = pad_sequence([torch.tensor(row[:-1]) for row in rows], batch_first=True)
                hidden = hidden_states(self.model, inputs.to(self.model.device))  # (B, T, C)
                for index, (i, row) in enumerate(zip(batch, rows)):
                    targets = torch.tensor(
                        requests[i][2][-(len(row) - 1) :]
                    )  # without truncated tokens
                    n = len(targets)
                    logits = (
                        self.model.lm_head(hidden[index, len(row) - 1 - n : len(row) - 1])
                        .float()
                        .cpu()
                    )  # (n, V)
                    nats = (
                        logits.log_softmax(dim=-1).gather(1, targets[:, None]).double().sum().item()
                    )
                    results[i] = nats, bool((logits.argmax(dim=-1) == targets).all())
                bar.update(len(batch))
        for (text, _, _), result in zip(requests, results):
            if text is not None:
                self.cache_hook.add_partial("loglikelihood", text, result)
        return results

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """ln P of whole texts, in windows of the model's context; each token is counted once."""
        windows, request_indices = [], []
        for index, request in enumerate(requests):
            ids = self.tok_encode(*request.args)
            for window in get_rolling_token_windows(
                ids, self.prefix_token_id, self.max_length, context_len=1
            ):
                windows.append((None, *make_disjoint_window(window)))
                request_indices.append(index)
        totals = [0.0] * len(requests)
        for index, (nats, _) in zip(
            request_indices, self._loglikelihood_tokens(windows, disable_tqdm)
        ):
            totals[index] += nats
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate until one of the request's stop strings."""
        texts = []
        for request in tqdm(requests, desc="generating", disable=disable_tqdm):
            context, options = request.args
            params = sampling_params(options)
            n_new = params.max_new_tokens
            if n_new >= self.max_length:
                raise UserError(
                    f"the task generates {n_new} tokens, but the context is only {self.max_length}"
                )
            tokens = self.tok_encode(context)[n_new - self.max_length :] or [self.prefix_token_id]
            texts.append(self.generator.generate([context], params, [tokens])[0].text)
        return texts


def sampling_params(options: dict[str, Any]) -> SamplingParams:
    """Convert the generation_kwargs of a task. Raises UserError for unsupported options."""
    options = dict(normalize_gen_kwargs(options, MAX_NEW_TOKENS))
    temperature, do_sample = options.pop("temperature", 1.0), options.pop("do_sample")
    params = {
        "temperature": temperature if do_sample else 0.0,
        "max_new_tokens": options.pop("max_gen_toks"),
    }
    params["stop"] = [text for text in options.pop("until") if text]
    params |= {
        name: options.pop(name)
        for name in ("top_k", "top_p", "min_p", "repetition_penalty")
        if name in options
    }
    if options:
        raise UserError(f"the task uses the unsupported generation option {next(iter(options))}")
    return SamplingParams(**params)


def run_tasks(
    model: Thinker, tokenizer: Tokenizer, names: list[str], include: Path | None = None, n_shots: int | None = None,
    limit: int | None = None,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Run tasks and return {task: {metric: value, metric_stderr: standard error, questions: number of questions}}.

    `names`: tasks of the harness, such as hellaswag, whose data it downloads, or tasks of YAML files in the folder
    `include`. `n_shots`: examples before each question (default: set by the task). `limit`: maximum number of questions
    per task. Raises UserError for a task that is unknown or cannot run, for example without its data.
    """
    from lm_eval import evaluator
    from lm_eval.tasks import TaskManager

    evaluator.get_git_commit_hash = str  # unused; it runs git, which complains outside a repository
    folder = None if include is None else str(include)
    manager = TaskManager(include_path=folder, include_defaults=False)
    if not set(names) <= set(manager.all_tasks):  # loading the harness's own tasks takes seconds
        manager = TaskManager(include_path=folder)
    for name in names:
        if name not in manager.all_tasks:
            raise UserError(
                f"the harness has no task {name}{did_you_mean(name, manager.all_tasks)}"
            )
    options = {
        "num_fewshot": n_shots,
        "limit": limit,
        "bootstrap_iters": 1000,
        "log_samples": False,
    }
    try:
        output = evaluator.simple_evaluate(
            ThinkerLM(model, tokenizer), tasks=names, task_manager=manager, **options
        )
    except UserError:
        raise
    except Exception as error:  # tasks can raise any error, such as for missing data
        raise UserError(
            f"the harness cannot run {', '.join(names)}: {type(error).__name__}: {error}"
        ) from error
    results = {}
    for name, metrics in output["results"].items():
        values = {
            key.replace(",none", ""): value
            for key, value in metrics.items()
            if isinstance(value, int | float)
        }
        results[name] = {
            key: value for key, value in values.items() if not key.startswith("sample_")
        }
        if name in output.get("n-samples", {}):
            results[name]["questions"] = output["n-samples"][name]["effective"]
    return results
