"""What a report says of a run, in sentences and tables, before it becomes HTML or Markdown."""

import importlib.metadata
import json
import platform
import time
from dataclasses import dataclass
from typing import Any

from thinker.data.corpus.corpus import Corpus
from thinker.features.run_report.attention_picture import AttentionPicture
from thinker.features.run_report.history import History, spread
from thinker.features.run_report.loss_curves import LossCurves, loss_curves
from thinker.training.callback import TrainingRun
from thinker.training.config.config import config_sections
from thinker.training.metrics import format_trained
from thinker.training.reports.epochs import format_epochs
from thinker.training.reports.fit import MEANINGS
from thinker.training.reports.run_summary import RunSummary
from thinker.training.settings.settings import Settings
from thinker.training.state.run_state import RunState

MAX_SAMPLES = 8
MAX_EVALUATIONS = 40  # rows of the table
AMOUNTS = (
    "training tokens",
    "training documents",
    "validation tokens",
    "validation documents",
    "held out for validation",
    "bytes per token",
    "read so far",
)
WORDS = [
    ["token", "what the model reads and predicts: a word, or a piece of one"],
    ["loss", "how badly the model predicts the next token; lower is better"],
    ["validation loss", "the same on text that training never sees; this judges the model"],
    ["nat", "the unit of the loss; x nats is the uncertainty of e^x equally likely tokens"],
    ["bits per byte", "the loss in bits, per byte of text: comparable between tokenizers"],
    ["step", "one update of the weights, from one batch of sequences"],
    ["epoch", "one pass over the training text"],
]
WORDS_OF_BASELINES = [
    ["5-gram", "a table that predicts each byte from the four before it; a model should do better"],
    ["gzip, xz", "programs that compress files, as predictors of the same text"],
]
# The status of a run.
RUNNING = "running"
PAUSED = "paused"
STOPPED = "stopped"
FINISHED = "finished"

Rows = list[list[str]]


@dataclass(frozen=True)
class Table:
    """A table with a row of names of columns, or without."""

    title: str
    columns: list[str]  # empty: the first cell of each row names it
    rows: Rows
    note: str = ""


@dataclass(frozen=True)
class ReportFacts:
    """What a report shows."""

    title: str
    status: str  # RUNNING, PAUSED, STOPPED or FINISHED
    status_text: str
    progress: float  # from 0 to 1
    key_numbers: Rows  # name and value
    result: list[str]
    assessment: list[str]  # the verdict, the comparison with simple models, estimates
    advice: list[str]
    next_commands: list[str]
    curves: LossCurves | None  # None: nothing was logged yet
    evaluations: Table
    model: Table
    speed: Table
    data: Table
    config: Table
    machine: Table
    samples: list[dict[str, Any]]  # step, prompt, text
    n_samples: int  # of which MAX_SAMPLES at most are shown
    attention: AttentionPicture | str  # or why there is none
    words: Table  # what the words of the result mean


def gather_facts(
    run: TrainingRun,
    history: History,
    summary: RunSummary | None,
    attention: AttentionPicture | str,
    status: str,
    saved_step: int | None,
) -> ReportFacts:
    """Describe a run as it is now. saved_step: that of the newest checkpoint; None without one."""
    has_text = run.loader.reads_corpus  # otherwise the windows are those of a user's dataset
    last = {}
    if history.evaluations:
        last = history.evaluations[-1]
    result = _result_so_far(last)
    assessment: list[str] = []
    advice: list[str] = []
    next_commands: list[str] = []
    if summary is not None:
        result = summary.result
        assessment = summary.assessment
        advice = summary.advice
        next_commands = summary.next_commands
    return ReportFacts(
        title=run.directory.path.name,
        status=status,
        status_text=_status_text(run, status, saved_step),
        progress=run.state.progress(run.parts.settings.train),
        key_numbers=_key_numbers(run, last, summary),
        result=result,
        assessment=assessment,
        advice=advice,
        next_commands=next_commands,
        curves=loss_curves(history, summary),
        evaluations=_evaluations(history),
        model=_model(run, has_text),
        speed=_speed(run, history),
        data=_data(run, has_text),
        config=_config(run.parts.settings),
        machine=_machine(run),
        samples=spread(history.samples, MAX_SAMPLES),
        n_samples=len(history.samples),
        attention=attention,
        words=_words(summary, history),
    )


def _status_text(run: TrainingRun, status: str, saved_step: int | None) -> str:
    state = run.state
    train = run.parts.settings.train
    at = f"step {state.step:,}"
    if train.max_steps is not None:
        at += f" of {train.max_steps:,}"
    at += f", {state.progress(train):.0%} of the run"
    if status == FINISHED:
        return f"Finished: {state.step:,} steps."
    if status == RUNNING:
        written = time.strftime("%Y-%m-%d %H:%M:%S")
        return (
            f"Running: this page was written at {at}, on {written}, and is written again at each "
            f"evaluation. If the process has ended without a word here, the same command resumes "
            f"the run from its newest checkpoint."
        )
    how = "Run the same command again to resume it"
    if saved_step is None:
        how = "There is no checkpoint, so the same command starts over"
    elif saved_step < state.step:
        how = f"The same command resumes it from step {saved_step:,}"
    if status == PAUSED:
        return f"Paused at {at}, and saved. {how}."
    return f"Stopped by an error at {at}. {how}."


def _key_numbers(run: TrainingRun, val: dict[str, Any], summary: RunSummary | None) -> Rows:
    """What a reader looks for first. `val`: the last evaluation, or empty."""
    rows = []
    if "val_loss" in val:
        rows.append(["validation loss", _loss(val["val_loss"])])
    if "val_bits_per_byte" in val:
        rows.append(["bits per byte", _loss(val["val_bits_per_byte"])])
    if summary is not None and summary.verdict:
        rows.append(["verdict", summary.verdict])
    rows.append(["steps", f"{run.state.step:,}"])
    rows.append(["tokens", f"{_tokens(run.state):,}"])
    rows.append(["training time", _duration(run.state.elapsed_s)])
    n_parameters = sum(parameter.numel() for parameter in run.parts.model.parameters())
    rows.append(["parameters", f"{n_parameters:,}"])
    return rows


def _tokens(state: RunState) -> int:
    """The number of tokens that the line "finished: ..." of the run has."""
    if format_trained(state.processed_tokens, state.tokens, "{}"):
        return state.processed_tokens  # many have no loss; their number stands beside
    return state.tokens


def _words(summary: RunSummary | None, history: History) -> Table:
    """What the words of the result mean."""
    rows = []
    if summary is not None and summary.verdict:
        rows.append([summary.verdict, MEANINGS[summary.verdict]])
    rows += WORDS
    if any("entropy_floor" in line for line in history.evaluations):
        rows.append(["floor", "the lowest loss that any model of this text can expect"])
    if summary is not None and summary.baselines:
        rows += WORDS_OF_BASELINES
    return Table("What the words mean", [], rows)


def _result_so_far(val: dict[str, Any]) -> list[str]:
    """The last evaluation as a sentence; `val` may be empty."""
    if "val_loss" not in val:
        return ["there is no evaluation yet"]
    text = f"validation loss {val['val_loss']:.4f} nats per token"
    if "val_bits_per_byte" in val:
        text += f", {val['val_bits_per_byte']:.4f} bits per byte"
    return [f"{text}, at step {val['step']:,}"]


def _evaluations(history: History) -> Table:
    has_floor = any("entropy_floor" in line for line in history.evaluations)
    sources = history.sources()
    columns = ["step", "tokens trained on", "training loss", "validation loss", "bits per byte"]
    if has_floor:
        columns.append("floor")
    columns += [f"validation, {name}" for name in sources]
    columns.append("minutes")
    rows = []
    for line, train_loss in spread(history.evaluation_rows(), MAX_EVALUATIONS):
        losses = [train_loss, line["val_loss"], line.get("val_bits_per_byte")]
        if has_floor:
            losses.append(line.get("entropy_floor"))
        losses += [line.get(f"val_loss/{name}") for name in sources]
        cells = [f"{line['step']:,}", _count(line.get("tokens"))]
        cells += [_loss(loss) for loss in losses]
        cells.append(f"{line.get('elapsed_s', 0) / 60:.1f}")
        rows.append(cells)
    note = "Losses in nats per token. The training loss is the mean since the row before."
    n_all = len(history.evaluations)
    if n_all > len(rows):
        note = f"{len(rows)} of {n_all:,} evaluations; all are in metrics.jsonl. The training loss "
        note += "is the mean since the evaluation before. Losses in nats per token."
    return Table("The numbers", columns, rows, note)


def _model(run: TrainingRun, has_text: bool) -> Table:
    settings = run.parts.settings
    model = settings.model
    train = settings.train
    heads = f"{model.n_heads} heads of {model.head_dim}"
    if model.n_kv_heads != model.n_heads:
        heads += f" with {model.n_kv_heads} KV heads"
    attention = model.attention
    if isinstance(attention, list):
        attention = ", ".join(map(str, attention))
    n_all = sum(parameter.numel() for parameter in run.parts.model.parameters())
    trained = [each.numel() for each in run.parts.model.parameters() if each.requires_grad]
    parameters = f"{n_all:,}"
    if sum(trained) < n_all:
        parameters += f", of which {sum(trained):,} are trained"
    if train.lora_rank is not None:
        parameters += f" (LoRA adapters of rank {train.lora_rank})"
    start = "random weights"
    if settings.run.init_from is not None:
        start = f"the weights of {settings.run.init_from}"
    text = _sources(settings) if has_text else "a dataset of your own"
    tokenizer = run.corpus.tokenizer
    n_tokens = train.batch_size * settings.data.seq_len
    batch = f"{train.batch_size} sequences of {settings.data.seq_len:,} tokens ({n_tokens:,})"
    if train.micro_batch_size < train.batch_size:
        batch += f", in micro-batches of {train.micro_batch_size}"
    rows = [
        [
            "model",
            f"{model.n_layers} layers of width {model.d_model}, {heads}; MLP of {model.d_ff}",
        ],
        ["attention", f"{attention}, over up to {model.max_seq_len:,} tokens"],
        ["parameters", parameters],
        ["started from", start],
        ["text", text],
        ["tokenizer", f"{tokenizer.kind}, {tokenizer.vocab_size:,} tokens"],
        ["batch", batch],
        ["optimizer", _optimizer(run)],
        ["length", _length(settings)],
        ["precision", train.precision + (", compiled" if train.compile else "")],
        ["hardware", _hardware(run)],
    ]
    return Table("What was trained", [], rows)


def _sources(settings: Settings) -> str:
    """The sources of the text with their paths."""
    texts = []
    for source in settings.data.text_sources():
        name = source.source or "tales"
        if source.path:
            name = f"{name} {source.path}"
        texts.append(name)
    return ", ".join(texts)


def _optimizer(run: TrainingRun) -> str:
    settings = run.parts.settings
    train = settings.train
    text = f"{settings.optimizer.name}, learning rate {run.parts.optimizers.lr:g}"
    if settings.optimizer.weight_decay:
        text += f", weight decay {settings.optimizer.weight_decay:g}"
    text += f"; schedule {train.schedule}, {train.warmup_steps:,} steps of warmup"
    if settings.model.dropout:
        text += f"; dropout {settings.model.dropout:g}"
    if train.ema_decay is not None:
        text += f"; averaged weights (decay {train.ema_decay:g})"
    return text


def _length(settings: Settings) -> str:
    train = settings.train
    limits = []
    if train.max_steps is not None:
        limits.append(f"{train.max_steps:,} steps")
    if train.max_minutes is not None:
        limits.append(f"{train.max_minutes:g} minutes")
    text = "at most " + " or ".join(limits)
    if train.patience is not None:
        text += f", or {train.patience} evaluations without a new lowest loss"
    return text


def _hardware(run: TrainingRun) -> str:
    machine = run.state.machine
    text = machine.get("device", "unknown")
    if run.parts.dist.world_size > 1:
        return f"{text}, ranks: {machine.get('ranks', run.parts.dist.world_size)}"
    if text.startswith("cpu"):
        threads = machine.get("threads", "?")
        text += f", {threads} thread" if threads == "1" else f", {threads} threads"
    return text


def _speed(run: TrainingRun, history: History) -> Table:
    state = run.state
    last = history.last_train
    rows = [["training time", _duration(state.elapsed_s)]]
    if state.elapsed_s > 0:
        speed = state.processed_tokens / state.elapsed_s
        trained = format_trained(state.processed_tokens, state.tokens, " ({} trained on)")
        rows.append(["tokens", f"{_tokens(state):,}{trained}"])
        rows.append(["mean speed", f"{speed:,.0f} tokens per second"])
    if last:
        rows.append(["speed in the newest line", f"{last['tokens_per_second']:,.0f} tokens/s"])
        rows.append(["computation", _flops(last)])
        if "data_wait" in last:
            rows.append(["waiting for data", f"{last['data_wait']:.1%} of the time"])
        if last.get("peak_memory_bytes"):
            memory = f"{last['peak_memory_bytes'] / 2**20:,.0f} MiB"
            rows.append(["peak memory", f"{memory} ({_memory_kind(run)})"])
    if state.skipped:
        rows.append(["skipped steps", f"{state.skipped:,} with a non-finite loss or gradient"])
    return Table("Speed and memory", [], rows)


def _flops(line: dict[str, Any]) -> str:
    text = f"{line.get('flops_per_second', 0) / 1e12:.3g} TFLOP/s"
    if "mfu" in line:
        text += f", {line['mfu']:.0%} of the peak"
    return text


def _memory_kind(run: TrainingRun) -> str:
    if run.parts.model.device.type == "cuda":
        return "allocated on the GPU"
    return "growth of the process"


def _data(run: TrainingRun, has_text: bool) -> Table:
    corpus = run.corpus
    epochs = run.loader.epochs(run.state.step)
    parts = dict(corpus.parts) or {run.parts.settings.data.source: corpus}
    columns = [["source", *AMOUNTS]]
    for number, (name, part) in enumerate(parts.items()):
        seen = ""
        if has_text and len(epochs) == len(parts):
            seen = format_epochs(epochs[number])
        columns.append([name, *_amounts(part), seen])
    names, *rows = [list(cells) for cells in zip(*columns)]
    note = ""
    if not has_text:
        note = "The model is trained on a dataset of your own; this is the text of the config."
    elif run.loader.dataset.is_endless:
        note = "The training text is a stream; its tokens here are only those at hand."
    return Table("Data", names, rows, note)


def _amounts(part: Corpus) -> list[str]:
    """AMOUNTS of a source, except the last."""
    train, val = part.train, part.val
    n_bytes = train.n_bytes + val.n_bytes
    n_tokens = train.n_tokens + val.n_tokens
    return [
        f"{train.n_tokens:,}",
        f"{train.n_conversations:,}",
        f"{val.n_tokens:,}",
        f"{val.n_conversations:,}",
        f"{val.n_bytes / max(1, n_bytes):.1%}",
        f"{n_bytes / max(1, n_tokens):.2f}",
    ]


def _config(settings: Settings) -> Table:
    """The keys of a config whose values are not the defaults."""
    values = settings.model_dump(mode="json")
    rows = []
    for section, kind in config_sections().items():
        for key, field in kind.model_fields.items():
            if key not in values[section]:
                continue
            value = values[section][key]
            default = field.get_default(call_default_factory=True)
            if isinstance(default, tuple):
                default = list(default)
            if value != default:
                rows.append([f"{section}.{key}", _plain(value), _plain(default)])
    note = "Where the default is null or auto, the run may have chosen the value. All keys are in "
    return Table("Settings", ["key", "value", "default"], rows, f"{note}config.yaml.")


def _plain(value: Any) -> str:
    """A value as a command line has it."""
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:.6g}"
    return json.dumps(_without_nulls(value), ensure_ascii=False)


def _without_nulls(value: Any) -> Any:
    """A value of a config without the keys inside it that are null."""
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return value


def _machine(run: TrainingRun) -> Table:
    machine = run.state.machine
    rows = [[name, machine[name]] for name in ("device", "threads", "kernels") if name in machine]
    if "ranks" in machine:
        rows.append(["ranks", machine["ranks"]])
    rows.append(["system", f"{platform.system()} {platform.release()}, {platform.machine()}"])
    rows.append(["Python", platform.python_version()])
    for package in ("thinker", "torch", "numpy", "safetensors"):
        version = _version(package)
        if version:
            rows.append([package, version])
    return Table("Versions and machine", [], rows)


def _version(package: str) -> str:
    """The version of an installed package, or ""."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.1f} minutes"
    return f"{seconds / 3600:.1f} hours"


def _count(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _loss(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
