"""What is compared: trainings, texts, and runs that the old code has begun."""

import json
import random
from typing import NamedTuple

STEPS, STOP = 50, 25

CONFIG = """\
data:
  source: tales
  max_documents: 300
  tokenizer: bpe:400
  seq_len: 64
  cache_dir: cache
model:
  d_model: 64
  n_layers: 2
  n_heads: 4
  n_kv_heads: 2
train:
  max_steps: 50
  max_minutes: null
  batch_size: 8
  device: cpu
  compile: false
  precision: fp32
  eval_every: 25
  eval_sequences: 16
  save_every: 25
"""
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["girl", "fox"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
STORY = "Once upon a time there was a fox. The fox was old and kind, and lived in the woods.\n"


def write_inputs(folder):
    """Write the files that the cases read."""
    folder.mkdir(parents=True)
    draw = random.Random(7)
    vocabulary = "the a fox girl saw met kind old red little house river and then went home"
    vocabulary = vocabulary.split()
    texts = [" ".join(draw.choices(vocabulary, k=draw.randrange(5, 60))) for _ in range(400)]
    texts += texts[:40] + [text + " again" for text in texts[40:60]]  # duplicates to clean
    draw.shuffle(texts)
    files = {
        "small.yaml": CONFIG,
        "rows.jsonl": "".join(json.dumps({"text": text}) + "\n" for text in texts),
        "schema.json": json.dumps(SCHEMA),
        "story.txt": STORY * 4,
    }
    for name, content in files.items():
        (folder / name).write_text(content, encoding="utf-8")


class Training(NamedTuple):
    """A training of 50 steps by both trees, each from nothing."""

    name: str
    overrides: tuple[str, ...] = ()
    n_ranks: int = 1
    is_quick: bool = False
    feature: str | None = None


class Text(NamedTuple):
    """A text that both trees sample from one run of the old tree."""

    name: str
    arguments: tuple[str, ...]
    is_quick: bool = False
    feature: str | None = None  # the case is skipped in a tree whose features/ lacks it
    is_json: bool = True
    input: str = ""


class Run(NamedTuple):
    """A run that the old tree stops after 25 steps; both trees open copies, and resume them."""

    name: str
    overrides: tuple[str, ...]
    feature: str | None = None
    starts_from: bool = False  # it needs runs/first, a run of the old tree
    text: tuple[str, ...] = ("--prompt", "Once")
    evaluation: tuple[str, ...] = ()
    can_export: bool = True


def words(text):
    """The arguments of a command without spaces in them."""
    return tuple(text.split())


# ------------------------------------------------------------------ trainings

SETUPS = {
    "fp32": words("data.packing=documents"),
    # Not in bf16: its loss, attention and weight gradients have new kernels.
    "patterns": words("data.document_masking=true model.attention=LG model.window=16"),
    "accumulation": words(
        "train.micro_batch_size=2 model.dropout=0.1 model.tie_embeddings=true "
        "optimizer.weight_decay=0.1 optimizer.cautious_weight_decay=true train.schedule=cosine"
    ),
}
PROCESSES = {
    "one process": ((), 1),
    "DDP 2": (("train.parallel=ddp",), 2),
    "FSDP2 2": (("train.parallel=fsdp",), 2),
}
FIRST = Training("fp32, one process", SETUPS["fp32"], is_quick=True)
TRAININGS = [FIRST]
for setup, overrides in SETUPS.items():
    for processes, (parallel, n_ranks) in PROCESSES.items():
        case = Training(f"{setup}, {processes}", overrides + parallel, n_ranks)
        if case.name != FIRST.name:
            TRAININGS.append(case)
ADAMW = ("optimizer.name=adamw",)
TRAININGS += [
    Training("fp32 with AdamW, one process", SETUPS["fp32"] + ADAMW),
    Training("patterns with AdamW, one process", SETUPS["patterns"] + ADAMW),
    Training("patterns, sharded checkpoints", (*SETUPS["patterns"], "train.save_sharded=true"), 2),
    Training(
        "other layers, one process",
        words(
            "model.attention_sinks=true model.token_shift=true model.attention_bias=true "
            "model.attn_logit_softcap=20 model.attention_temperature=0.9 model.head_init_std=0.1 "
            "train.checkpoint_every_n_blocks=1 train.log_every=3 data.shift_windows=true"
        ),
    ),
    Training(
        "other positions, one process",
        words(
            "model.positions=learned model.qk_norm=false model.init=normal data.packing=best_fit"
        ),
    ),
]

# ------------------------------------------------------------------ texts

PROMPT = ("--prompt", "Once upon a time")
LONG = words("--max-new-tokens 150")  # beyond the context of 64 tokens
GREEDY = (*PROMPT, "--greedy")
TEXTS = [
    Text("greedy", GREEDY, is_quick=True),
    Text("sampled", (*PROMPT, "--logprobs", "3"), is_quick=True),
    Text("beyond the context", LONG),
    Text("bf16, greedy", words("--precision bf16 --greedy")),
    Text("bf16, top-p", words("--precision bf16 --top-p 0.9 --temperature 1.1")),
    Text("8 bits, greedy", (*GREEDY, "--bits", "8")),
    Text("8 bits, sampled", words("--bits 8 --precision bf16")),
    Text("4 bits, sampled", (*PROMPT, "--bits", "4")),
    Text("without a cache", (*PROMPT, "--no-cache", "--logprobs", "2")),
    Text("window with sinks", (*LONG, *words("--window 16 --sinks 2"))),
    Text("speculation, greedy", (*GREEDY, "--speculate", "4"), feature="speculation"),
    Text("speculation, sampled", (*PROMPT, "--speculate", "4"), feature="speculation"),
    Text(
        "speculation with a model",
        words("--speculate 3 --draft runs/small/checkpoints/step-00000025"),
        feature="speculation",
    ),
    Text("cache of 8 bits", (*PROMPT, "--cache-bits", "8")),
    Text("cache of 4 bits", (*LONG, "--cache-bits", "4")),
    Text("early exit", (*PROMPT, "--early-exit", "0.1"), feature="early_exit"),
    Text(
        "retrieval",
        (*LONG, *words("--window 16 --retrieve 2 --retrieve-block 4")),
        feature="retrieval",
    ),
    Text("JSON schema", words("--json-schema schema.json"), feature="structured_output"),
    Text("regex", ("--regex", "[a-z]{3,9}( [a-z]+){2,4}[.!]"), feature="structured_output"),
    Text("stop strings", (*PROMPT, *words("--stop night --stop magic --no-slide"))),
    Text(
        "penalties",
        (
            *PROMPT,
            *words("--repetition-penalty 1.3 --presence-penalty 0.4 --frequency-penalty 0.2"),
            *words("--logit-bias 101=2.5 --logit-bias 97=-inf --min-p 0.01"),
        ),
    ),
    Text("four samples", (*PROMPT, *words("--num-samples 4 --top-k 20"))),
    Text("without kernels, sampled", (*PROMPT, "--no-compile")),
    Text("without kernels, greedy, bf16", words("--no-compile --greedy --precision bf16")),
    Text("without kernels, 8 bits", words("--no-compile --bits 8")),
    Text("scored", words("--score story.txt --logprobs 2")),
    Text("scored in 4 bits", words("--score story.txt --bits 4")),
    Text("as plain text", PROMPT, is_json=False),
    Text("a conversation", ("--interactive",), is_json=False, input="Once upon\nAnd then?\n"),
]

# ------------------------------------------------------------------ runs

MIXTURE = [
    {"source": "tales", "name": "tales", "max_documents": 200, "weight": {0: 0.8, 0.5: 0.2}},
    {"source": "jsonl", "name": "rows", "path": "rows.jsonl", "weight": {0: 0.2, 0.5: 0.8}},
]


def flow(value):
    """A value of a config on one line, as YAML reads it; JSON cannot have numbers as keys."""
    if isinstance(value, dict):
        inner = ", ".join(f"{key}: {flow(item)}" for key, item in value.items())
        return f"{{{inner}}}"
    if isinstance(value, list):
        inner = ", ".join(flow(item) for item in value)
        return f"[{inner}]"
    return str(value)


ROWS = words("data.source=jsonl data.path=rows.jsonl data.max_documents=null")
# Not on conversations: since 1071b80, their tokens have changed on purpose.
INITIAL = ("run.init_from=runs/first", *ROWS, "data.tokenizer=null")
READ = ("--read-data",)
RUNS = [
    Run("plain", SETUPS["fp32"]),
    Run("patterns", SETUPS["patterns"], can_export=False),
    Run("dropout and accumulation", SETUPS["accumulation"]),
    Run("ema_decay", words("train.ema_decay=0.9")),
    Run("fine-tuned", INITIAL, starts_from=True, evaluation=READ),
    Run(
        "lora",
        (*INITIAL, *words("train.lora_rank=4 train.lora_alpha=8")),
        starts_from=True,
        evaluation=READ,
    ),
    Run(
        "distill",
        ("train.distill={teacher: runs/first, weight: 0.5, attention: 1, hidden: 1}",),
        feature="distillation",
        starts_from=True,
    ),
    Run(
        "distill with stored logits",
        ("train.distill={teacher: runs/first, cached_logits: 8}",),
        feature="distillation",
        starts_from=True,
    ),
    Run(
        "prune",
        ("train.prune={weights: 0.3, neurons: 0.3, heads: 0.5, start: 0.2, every: 5}",),
        feature="pruning",
    ),
    Run(
        "prune by activation",
        ("train.prune={weights: 0.5, by: activation, start: 0.2, every: 5}",),
        feature="pruning",
    ),
    Run("gates", ("train.prune={heads: 0.5, by: gates}",), feature="pruning", can_export=False),
    Run(
        "mixture",
        ("data.source=null", "data.max_documents=null", f"data.sources={flow(MIXTURE)}"),
        feature="mixtures",
        evaluation=(*READ, "--part", "rows"),
    ),
    Run("stream", (*ROWS, "data.buffer_tokens=7000"), feature="streams", evaluation=READ),
    Run(
        "clean",
        (*ROWS, "data.clean={min_characters: 60, max_repeated_lines: 0.5, duplicates: near}"),
        feature="cleaning",
        evaluation=READ,
    ),
    Run(
        "monitored",
        words("train.log_attention_every=5 train.log_grad_norms=true"),
        feature="monitoring",
        text=("--monitor", "--prompt", "Once"),
    ),
]
