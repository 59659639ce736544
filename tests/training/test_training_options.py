"""Options of training with each other: each pair once, every case right or refused in one line.

Right is: every loss is finite; 2 steps and 2 resumed ones are 4 to the last bit; recomputation
changes no bit; in fp32, without dropout, micro-batches and ranks change the losses by no more than
rounding.
"""

import math

import fork_server
import pytest
from conftest import ROOT
from pairwise import pairwise
from training_runs import assert_same_tensors, train_losses
from training_workers import train_each

from thinker.runtime.errors import UserError
from thinker.training.config.load import load_config

BASE = ROOT / "tests" / "fixtures" / "base.yaml"
DOCUMENTS = {
    "cut": [],
    "shifted": ["data.shift_windows=true"],
    "packed": ["data.packing=documents"],
    "masked": ["data.packing=documents", "data.document_masking=true"],
    "fitted": ["data.packing=best_fit", "data.document_masking=true"],
}
MIXTURE = "{source: tales, max_documents: 40, weight: 0.8}, {source: pysource, max_documents: 3, val_fraction: 0.5324}"
SOURCES = {
    "one": ["data.max_documents=60"],
    "streamed": ["data.max_documents=60", "data.buffer_tokens=1600"],
    "several": ["data.source=null", "data.max_documents=null", f"data.sources=[{MIXTURE}]"],
}
EAGER = {
    "train.precision": ["fp32", "bf16"],
    "train.micro_batch_size": ["null", "1"],
    "model.dropout": ["0.0", "0.2"],
    "model.token_shift": ["false", "true"],
    "documents": list(DOCUMENTS),
    "sources": list(SOURCES),
    "train.lora_rank": ["null", "4"],
    "train.checkpoint_every_n_blocks": ["null", "1", "2"],
    "optimizer.name": ["muon", "adamw"],
    "train.ema_decay": ["null", "0.9"],
    "teacher": ["none", "logits", "activations", "cached"],
    "decay": ["none", "plain", "cautious"],
    "prune": ["none", "weights", "neurons", "gates"],
}
TEACHERS = {
    "none": [],
    "logits": ["train.distill.temperature=2"],
    "activations": ["train.distill.attention=0.5", "train.distill.hidden=1"],
    "cached": ["train.distill.cached_logits=8"],
}
DECAYS = {
    "none": [],
    "plain": ["optimizer.weight_decay=0.1"],
    "cautious": ["optimizer.weight_decay=0.1", "optimizer.cautious_weight_decay=true"],
}
# Random scores do not depend on rounding. Pruning ends with the first step, whatever
# train.max_steps is.
AT_ONCE = ["train.prune.start=0", "train.prune.end=0.25"]
PRUNED = {
    "none": [],
    "weights": [
        "train.prune.weights=0.5",
        "train.prune.every=1",
        "train.prune.by=random",
        *AT_ONCE,
    ],
    "neurons": [
        "train.prune.neurons=0.5",
        "train.prune.every=1",
        "train.prune.by=random",
        *AT_ONCE,
    ],
    "gates": ["train.prune.heads=0.5", "train.prune.by=gates", *AT_ONCE],
}
ALL = {"train.compile": ["false", "true"], "train.parallel": ["alone", "ddp", "fsdp"], **EAGER}
# What cannot be combined with the pruning of heads, see tests/model/test_extra_embeddings.py.
TABLES = ["model.value_embeddings=true", "model.bigram_rows=97"]
NAMED = ("documents", "decay", "sources", "teacher", "prune")
PLAIN = {"train.compile": "false", "train.parallel": "alone"}
CASES = [pytest.param(PLAIN | case, id="-".join(case.values())) for case in pairwise(EAGER)]
STRESS = [
    pytest.param(case, id="-".join(case.values()), marks=pytest.mark.stress)
    for case in pairwise(ALL)
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def overrides(case, run, cache, tiny_run, n_steps=4, device="cpu"):
    """What is to be overridden in BASE for this case."""
    keys = {name: value for name, value in case.items() if name not in NAMED}
    if keys["train.parallel"] == "alone":
        del keys["train.parallel"]
    is_lora = keys["train.lora_rank"] != "null"
    if is_lora:
        del keys["model.token_shift"]  # the initial model has none
    start = (
        [f"run.init_from={tiny_run}", "data.tokenizer=null"]
        if is_lora
        else ["data.tokenizer=bpe:300"]
    )
    if case["teacher"] != "none":
        start += [f"train.distill.teacher={tiny_run}", *TEACHERS[case["teacher"]]]
        start += [] if is_lora else [f"data.tokenizer={tiny_run}"]
    shape = [
        "model.d_model=32",
        "model.n_layers=2",
        "model.n_heads=2",
        "model.n_kv_heads=1",
        "data.seq_len=32",
    ]
    shape += ["model.n_kv_heads=2"] if case["prune"] == "gates" and not is_lora else []
    lengths = [
        f"train.max_steps={n_steps}",
        "train.decay_fraction=0",
        "train.eval_every=null",
        "train.eval_sequences=2",
    ]
    fixed = ["train.batch_size=4", f"train.device={device}", f"data.cache_dir={cache}"]
    written = [f"{name}={value}" for name, value in keys.items()]
    choices = [
        *DOCUMENTS[case["documents"]],
        *DECAYS[case["decay"]],
        *SOURCES[case["sources"]],
        *PRUNED[case["prune"]],
    ]
    # In the same cases as token shift, as more options would need more cases.
    if keys.get("model.token_shift") == "true" and case["prune"] != "gates":
        choices += TABLES
    return [*start, *shape, *lengths, *fixed, *written, *choices, f"run.dir={run}"]


def train(case, runs):
    """Train in the order given, in one process, or by two ranks each."""
    if case["train.parallel"] == "alone":
        (statuses,) = fork_server.run_ranks(1, train_each, str(BASE), runs)
        assert statuses == [0] * len(runs)
    else:
        for run in runs:
            assert fork_server.run_ranks(2, train_each, str(BASE), [run]) == [[0], [0]]


def check_refusals(case, tiny_run, cache, run):
    """What is refused is refused in one line; returns the case without it, for the other pairs."""
    if (case["sources"], case["documents"]) == ("streamed", "shifted"):
        with pytest.raises(UserError, match="data.shift_windows has no effect with buffer_tokens"):
            load_config(BASE, overrides(case, run, cache, tiny_run))
        case |= {"documents": "cut"}
    if case["train.lora_rank"] != "null" and case["optimizer.name"] == "muon":
        with pytest.raises(
            UserError, match="train.lora_rank needs run.init_from and optimizer.name=adamw"
        ):
            load_config(BASE, overrides(case, run, cache, tiny_run))
        case |= {"optimizer.name": "adamw"}  # the other pairs of this case
    refused = {
        "cached": case["documents"] == "shifted" or case["sources"] == "streamed",
        "activations": case["train.compile"] == "true"
        or case["train.checkpoint_every_n_blocks"] != "null",
    }
    if refused.get(case["teacher"]):
        with pytest.raises(UserError, match="train.distill cannot be combined with"):
            load_config(BASE, overrides(case, run, cache, tiny_run))
        case |= {"teacher": "logits"}
    unfit = {
        "train.lora_rank": case["train.lora_rank"] != "null",
        "train.parallel=fsdp": case["train.parallel"] == "fsdp",
    }
    unfit["train.ema_decay"] = case["prune"] == "gates" and case["train.ema_decay"] != "null"
    if case["prune"] != "none" and any(unfit.values()):
        with pytest.raises(UserError, match="train.prune.* cannot be combined with"):
            load_config(BASE, overrides(case, run, cache, tiny_run))
        case |= {"prune": "none"}
    if case["decay"] == "cautious" and case["optimizer.name"] == "adamw":
        with pytest.raises(
            UserError, match="cautious_weight_decay has no effect without optimizer.name=muon"
        ):
            load_config(BASE, overrides(case, run, cache, tiny_run))
        case |= {"decay": "plain"}
    return case


@pytest.mark.parametrize("case", CASES + STRESS)
def test_a_pair_of_options(case, tiny_run, cache, tmp_path):
    whole, parts, plain, reference = (
        tmp_path / name for name in ("whole", "parts", "plain", "reference")
    )
    case = check_refusals(case, tiny_run, cache, whole)
    runs = [
        overrides(case, whole, cache, tiny_run),
        *(overrides(case, parts, cache, tiny_run, n) for n in (2, 4)),
    ]
    is_exact = case["train.compile"] == "false"
    if is_exact and case["train.checkpoint_every_n_blocks"] != "null":
        runs.append(
            overrides(case | {"train.checkpoint_every_n_blocks": "null"}, plain, cache, tiny_run)
        )
    train(case, runs)
    losses = train_losses(whole)
    assert list(losses) == [1, 2, 3, 4]
    assert all(math.isfinite(loss) for loss in losses.values())
    assert train_losses(parts) == losses
    assert_same_tensors(whole, parts, 4)
    if plain.exists():
        assert train_losses(plain) == losses
        assert_same_tensors(whole, plain, 4)
    if case["train.precision"] == "fp32" and case["model.dropout"] == "0.0":
        simple = case | PLAIN | {"train.micro_batch_size": "null"}
        train(simple, [overrides(simple, reference, cache, tiny_run)])
        assert train_losses(reference) == pytest.approx(losses, rel=1e-5)


def test_the_cases_hold_every_pair():
    for options in (EAGER, ALL):
        cases = pairwise(options)
        for a in options:
            for b in options:
                found = {(case[a], case[b]) for case in cases}
                assert a == b or len(found) == len(options[a]) * len(options[b])
        assert len(cases) <= 30
    assert pairwise({"a": [[1], [2]], "b": [None]}) == [
        {"a": [1], "b": None},
        {"a": [2], "b": None},
    ]
