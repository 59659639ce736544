"""Adapter for EleutherAI's lm-evaluation-harness and its standard tasks."""

from pathlib import Path
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.evaluation.long_context import hidden_states
from thinker.generation import Generator, SamplingParams
from thinker.model import Thinker
from thinker.runtime.errors import UserError, did_you_mean

MAX_NEW_TOKENS = 256  # unless the task sets it


class ThinkerLM(TemplateLM):
    """A Thinker as an LM of the harness.

    Tokenizes, truncates and scores like the harness's adapter for transformers.
    """

    def __init__(self, model: Thinker, tokenizer: Tokenizer, batch_size: int = 16) -> None:
        super().__init__()
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.max_length = model.config.max_seq_len
        self.generator = Generator(model, tokenizer)

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text, from the tokenizer's special tokens map if it has one."""
        name = self.tokenizer.special_tokens_map.get("eos_token")
        return self.tokenizer.special_tokens.get(name, self.tokenizer.eos_id)

    @property
    def prefix_token_id(self) -> int:
        """Context of a text without context: the BOS token, or else the EOS token."""
        name = self.tokenizer.special_tokens_map.get("bos_token")
        return self.tokenizer.special_tokens.get(name, self.eot_token_id)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Tokenize a text that may contain special tokens.

        Adds the BOS token if the model was trained with one.
        """
        ids = self.tokenizer.encode(string, allow_special=True)
        has_bos = ids[:1] == [self.tokenizer.bos_id]
        if add_special_tokens is False or has_bos:
            return ids
        return [*self.tokenizer.bos_prefix, *ids]

    @torch.no_grad()
    def _loglikelihood_tokens(
        self,
        requests: list[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """Per (text, context, continuation), ln P of the continuation.

        Also returns whether greedy decoding produces it.
        """
        results: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        rows = [context + continuation for _, context, continuation in requests]
        # Rows of similar length share a batch, with little padding.
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
        with tqdm(total=len(order), desc="scoring", disable=disable_tqdm) as bar:
            for start in range(0, len(order), self.batch_size):
                batch = order[start : start + self.batch_size]
                truncated = []
                inputs = []
                for i in batch:
                    # The last token is a target alone, so it does not count against the context.
                    row = rows[i][-(self.max_length + 1) :]
                    truncated.append(row)
                    inputs.append(torch.tensor(row[:-1]))
                padded = pad_sequence(inputs, batch_first=True).to(self.model.device)
                hidden = hidden_states(self.model, padded)  # (B, T, C)
                for i, row, states in zip(batch, truncated, hidden):
                    n_inputs = len(row) - 1
                    targets = requests[i][2][-n_inputs:]  # without truncated tokens
                    results[i] = self._score(states[:n_inputs], targets)
                bar.update(len(batch))
        for (text, _, _), result in zip(requests, results):
            if text is not None:
                self.cache_hook.add_partial("loglikelihood", text, result)
        return results

    def _score(self, states: Tensor, continuation: list[int]) -> tuple[float, bool]:
        """ln P of the tokens at the end of a row, and whether each is the likeliest.

        states: final hidden states of the row, (T, C).
        """
        targets = torch.tensor(continuation)
        logits = self.model.lm_head(states[len(states) - len(targets) :]).float().cpu()  # (n, V)
        nats = logits.log_softmax(dim=-1).gather(1, targets[:, None]).double().sum().item()
        is_greedy = bool((logits.argmax(dim=-1) == targets).all())
        return nats, is_greedy

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """ln P of whole texts, in windows of the model's context; each token is counted once."""
        windows = []
        owners = []  # of each window: the index of its request
        for index, request in enumerate(requests):
            ids = self.tok_encode(*request.args)
            # Each window starts with the last token before it.
            overlapping = get_rolling_token_windows(
                ids, self.prefix_token_id, self.max_length, context_len=1
            )
            for window in overlapping:
                context, continuation = make_disjoint_window(window)
                windows.append((None, context, continuation))
                owners.append(index)
        scores = self._loglikelihood_tokens(windows, disable_tqdm)
        totals = [0.0] * len(requests)
        for owner, (nats, _) in zip(owners, scores):
            totals[owner] += nats
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
            # The end of the context is kept, as the new tokens must fit behind it.
            tokens = self.tok_encode(context)[-(self.max_length - n_new) :]
            if not tokens:
                tokens = [self.prefix_token_id]
            completions = self.generator.generate([context], params, [tokens])
            texts.append(completions[0].text)
        return texts


def sampling_params(options: dict[str, Any]) -> SamplingParams:
    """Convert the generation_kwargs of a task. Raises UserError for unsupported options."""
    options = dict(normalize_gen_kwargs(options, MAX_NEW_TOKENS))
    temperature = options.pop("temperature", 1.0)
    if not options.pop("do_sample"):
        temperature = 0.0
    params = {
        "temperature": temperature,
        "max_new_tokens": options.pop("max_gen_toks"),
        "stop": [text for text in options.pop("until") if text],
    }
    for name in ("top_k", "top_p", "min_p", "repetition_penalty"):
        if name in options:
            params[name] = options.pop(name)
    for name in options:
        raise UserError(f"the task uses the unsupported generation option {name}")
    return SamplingParams(**params)


def run_tasks(
    model: Thinker,
    tokenizer: Tokenizer,
    names: list[str],
    include: Path | None = None,
    n_shots: int | None = None,
    limit: int | None = None,
) -> dict[str, dict[str, Any]]:
    """Run tasks and return {task: {metric: value, metric_stderr: standard error, questions: n}}.

    `names`: tasks of the harness, such as hellaswag, whose data it downloads, or tasks of YAML
    files in the folder `include`. `n_shots`: examples before each question (default: set by the
    task). `limit`: maximum number of questions per task. Raises UserError for a task that is
    unknown or cannot run, for example without its data.
    """
    from lm_eval import evaluator
    from lm_eval.tasks import TaskManager

    # Its result is unused, and it runs git, which complains outside a repository.
    evaluator.get_git_commit_hash = str
    folder = None
    if include is not None:
        folder = str(include)
    manager = TaskManager(include_path=folder, include_defaults=False)
    if not set(names) <= set(manager.all_tasks):  # loading the harness's own tasks takes seconds
        manager = TaskManager(include_path=folder)
    for name in names:
        if name not in manager.all_tasks:
            hint = did_you_mean(name, manager.all_tasks)
            raise UserError(f"the harness has no task {name}{hint}")
    try:
        output = evaluator.simple_evaluate(
            ThinkerLM(model, tokenizer),
            tasks=names,
            task_manager=manager,
            num_fewshot=n_shots,
            limit=limit,
            bootstrap_iters=1000,
            log_samples=False,
        )
    except UserError:
        raise
    except Exception as error:  # tasks can raise any error, such as for missing data
        raise UserError(
            f"the harness cannot run {', '.join(names)}: {type(error).__name__}: {error}"
        ) from error
    results = {}
    # Of the harness's numbers, keep those that mean something by themselves.
    n_samples = output.get("n-samples", {})
    for name, metrics in output["results"].items():
        values = {}
        for key, value in metrics.items():
            if isinstance(value, int | float) and not key.startswith("sample_"):
                values[key.replace(",none", "")] = value  # ",none": no filter
        if name in n_samples:
            values["questions"] = n_samples[name]["effective"]
        results[name] = values
    return results
