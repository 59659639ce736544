"""Adapter for EleutherAI's lm-evaluation-harness and its standard tasks."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from thinker.data.tokenizers.common_prefix import common_prefix
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.evaluation.long_context import hidden_states
from thinker.generation import Generator, SamplingParams
from thinker.model import Thinker
from thinker.runtime.checks import check_computed
from thinker.runtime.errors import RunError, UserError, did_you_mean
from thinker.runtime.process.progress import Progress

MAX_NEW_TOKENS = 256  # unless the task sets it
BATCH_SIZE = 16


class Row(NamedTuple):
    """Tokens, of which those from `start` on are scored."""

    tokens: list[int]
    start: int


class Window(NamedTuple):
    """The part of a row that predicts its last tokens in one pass."""

    row: int  # index of the row
    inputs: list[int]
    targets: list[int]  # the last one follows the last input


class ThinkerLM(TemplateLM):
    """A Thinker as an LM of the harness.

    ln P(continuation | context) = ln P(context + continuation) - ln P(context), by the tokens of
    each text. Usually those of the context come first in both and cancel. If a token spans context
    and continuation, the difference still orders continuations by the likelihood of the whole text.
    Whitespace at the end of a context belongs to the continuation, as in the harness's own adapter.

    In ln P(text) each token follows all earlier ones while they fit into the model's context of L
    tokens. Later tokens follow the last 7/8 L to L ones, as windows advance by L/8. What a token
    follows depends only on its place, so more tokens never make a continuation likelier.
    """

    def __init__(self, model: Thinker, tokenizer: Tokenizer, batch_size: int = BATCH_SIZE) -> None:
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

    def loglikelihood(
        self, requests: list[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Per (context, continuation), ln P of the continuation.

        Also returns whether greedy decoding produces the tokens of the whole text that follow those
        it shares with the context. Raises UserError for a continuation without tokens.
        """
        pairs = [request.args for request in requests]
        rows = []
        for context, continuation in pairs:
            before, whole = self._encode_whole(context, continuation)
            n_shared = common_prefix(before, whole)
            if continuation and n_shared == len(whole):
                text = repr(continuation[:40])
                raise UserError(f"the tokenizer gives no token to the continuation {text}")
            rows.append(Row(whole, n_shared))
            rows.append(Row(before, n_shared))
        scores = self._score(rows, disable_tqdm)
        results = []
        for i, pair in enumerate(pairs):
            whole_nats, is_greedy = scores[2 * i]
            nats_before, _ = scores[2 * i + 1]
            result = (whole_nats - nats_before, is_greedy)
            self.cache_hook.add_partial("loglikelihood", pair, result)
            results.append(result)
        return results

    def _encode_whole(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """The tokens of the context, and of the whole text. Both begin with the same token."""
        whole_text = context + continuation
        if continuation:
            context = context.rstrip()
        has_context = context != ""
        before = self.tok_encode(context, add_special_tokens=has_context)
        whole = self.tok_encode(whole_text, add_special_tokens=has_context)
        # The first token of a text needs one before it.
        begins_with_prefix = whole[:1] == [self.prefix_token_id] and len(whole) > 1
        if not has_context and begins_with_prefix:
            before = whole[:1]
        elif common_prefix(before, whole) == 0:
            before = [self.prefix_token_id, *before]
            whole = [self.prefix_token_id, *whole]
        return before, whole

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """Per (text, context, continuation), what loglikelihood() returns for these tokens."""
        rows = [Row(context + continuation, len(context)) for _, context, continuation in requests]
        return self._score(rows, disable_tqdm)

    @torch.no_grad()
    def _score(self, rows: list[Row], disable_tqdm: bool) -> list[tuple[float, bool]]:
        """Per row, ln P of its tokens from `start` on, and whether each is the likeliest."""
        windows: list[Window] = []
        for i, row in enumerate(rows):
            windows += self._windows(i, row)
        # Windows of similar length share a batch, with little padding.
        windows.sort(key=lambda window: -len(window.inputs))
        nats = [0.0] * len(rows)
        is_greedy = [True] * len(rows)
        with Progress(total=len(windows), desc="scoring", disable=disable_tqdm) as bar:
            for start in range(0, len(windows), self.batch_size):
                batch = windows[start : start + self.batch_size]
                inputs = [torch.tensor(window.inputs) for window in batch]
                padded = pad_sequence(inputs, batch_first=True).to(self.model.device)
                hidden = hidden_states(self.model, padded)  # (B, T, C)
                for window, states in zip(batch, hidden):
                    window_nats, window_is_greedy = self._score_window(window, states)
                    nats[window.row] += window_nats
                    is_greedy[window.row] &= window_is_greedy
                bar.update(len(batch))
        check_computed(nats)
        return list(zip(nats, is_greedy))

    def _windows(self, index: int, row: Row) -> Iterator[Window]:
        """The windows of a row. Raises UserError if a bidirectional prefix contains a target."""
        assert row.start > 0, "the first token has no context"
        stride = max(1, self.max_length // 8)
        first = 0  # input of the window
        begin = row.start  # first target
        while begin < len(row.tokens):
            end = min(first + self.max_length + 1, len(row.tokens))
            if begin < end:
                self._check_prefix(begin - first)
                yield Window(index, row.tokens[first : end - 1], row.tokens[begin:end])
                begin = end
            first += stride

    def _check_prefix(self, n_before: int) -> None:
        """Raise UserError if a token after n_before tokens is seen by the tokens before it."""
        prefix = self.model.config.prefix
        if n_before < prefix:
            raise UserError(
                f"a task scores tokens in the model's bidirectional prefix of {prefix} tokens, "
                "which see each other; use tasks with longer contexts"
            )

    def _score_window(self, window: Window, states: Tensor) -> tuple[float, bool]:
        """ln P of the targets, and whether each is the likeliest.

        states: final hidden states, (T, C); those after the last input are padding.
        """
        n_inputs = len(window.inputs)
        n_targets = len(window.targets)
        targets = torch.tensor(window.targets)
        logits = self.model.lm_head(states[n_inputs - n_targets : n_inputs])
        # Ids above the tokenizer's are padding.
        logits = logits[:, : self.tokenizer.vocab_size].float().cpu()  # (n, V)
        nats = logits.log_softmax(dim=-1).gather(1, targets[:, None]).double().sum().item()
        is_greedy = bool((logits.argmax(dim=-1) == targets).all())
        return nats, is_greedy

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """ln P of whole texts after the prefix token; each token is counted once.

        A text longer than the model's context is read in windows as in the harness's own adapter:
        each starts with the last token of the one before it, and the last window is filled up
        with earlier tokens.
        """
        rows = []
        owners = []  # of each row: the index of its request
        for index, request in enumerate(requests):
            (text,) = request.args
            ids = self.tok_encode(text, add_special_tokens=False)
            if ids[:1] == [self.prefix_token_id]:
                ids = ids[1:]
            windows = get_rolling_token_windows(
                ids, self.prefix_token_id, self.max_length, context_len=1
            )
            for inputs, targets in windows:
                rows.append(Row([*inputs, targets[-1]], len(inputs) + 1 - len(targets)))
                owners.append(index)
        totals = [0.0] * len(requests)
        for owner, (nats, _) in zip(owners, self._score(rows, disable_tqdm)):
            totals[owner] += nats
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate until one of the request's stop strings."""
        texts = []
        for request in Progress(requests, desc="generating", disable=disable_tqdm):
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


def find_tasks(names: list[str], *folders: Path) -> TaskManager:
    """What knows these tasks: of YAML files in the folders, or else of the harness.

    Raises UserError for an unknown task.
    """
    paths = [str(folder) for folder in folders]
    manager = TaskManager(include_path=paths, include_defaults=False)
    if not set(names) <= set(manager.all_tasks):  # loading the harness's own tasks takes seconds
        manager = TaskManager(include_path=paths)
    for name in names:
        if name not in manager.all_tasks:
            hint = did_you_mean(name, manager.all_tasks)
            raise UserError(f"the harness has no task {name}{hint}")
    return manager


def harness_output(
    model: Thinker,
    tokenizer: Tokenizer,
    names: list[str],
    manager: TaskManager,
    n_shots: int | None = None,
    limit: int | None = None,
) -> dict[str, Any]:
    """All that the harness returns for some tasks. Raises UserError for a task that cannot run."""
    from lm_eval import evaluator

    # Their results are unused. One runs git, which complains outside a repository, the other pip.
    evaluator.get_git_commit_hash = str
    evaluator.add_env_info = lambda results: None
    try:
        return evaluator.simple_evaluate(
            ThinkerLM(model, tokenizer, BATCH_SIZE),
            tasks=names,
            task_manager=manager,
            num_fewshot=n_shots,
            limit=limit,
            bootstrap_iters=1000,
            log_samples=False,
        )
    except (UserError, RunError):
        raise
    except Exception as error:  # tasks can raise any error, such as for missing data
        raise UserError(
            f"the harness cannot run {', '.join(names)}: {type(error).__name__}: {error}"
        ) from error


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
    folders = []
    if include is not None:
        folders.append(include)
    manager = find_tasks(names, *folders)
    output = harness_output(model, tokenizer, names, manager, n_shots, limit)
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
