"""Distillation: the loss and its gradient, stored logits, what is refused, and whole runs with
every form of it."""

import hashlib
import shutil
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, random_model, run_script
from torch import nn
from training_contract import SMALL, check_objective, check_ranks
from training_runs import assert_same_run, read_metrics

from thinker.data.batches.prefetch import Batch
from thinker.features.distillation.distillation import (
    DistillationLoss,
    LogitLoss,
    attention_kl,
    similarity_error,
)
from thinker.features.distillation.keys import DistillConfig
from thinker.features.distillation.teacher import Teacher, hash_weights
from thinker.features.distillation.teacher_logits import TeacherLogits, TopLogits
from thinker.model import Thinker
from thinker.runtime.constants import IGNORE_INDEX
from thinker.runtime.errors import UserError
from thinker.runtime.ranks import SINGLE_PROCESS
from thinker.training.config.load import load_config
from thinker.training.kernels import Kernels
from thinker.training.run import build_trainer

pytestmark = pytest.mark.usefixtures("one_thread")
V, N, C = 50, 24, 16
BASE = ROOT / "tests" / "fixtures" / "base.yaml"
FORMS = {
    "logits": ["train.distill.weight=0.7", "train.distill.temperature=2"],
    "activations": ["train.distill.attention=0.5", "train.distill.hidden=2"],
    "cached": ["train.distill.cached_logits=8"],
}


def random_case(seed=0):
    """Logits of a student, inputs of a teacher's head with the head, targets of which some are
    ignored."""
    generator = torch.Generator().manual_seed(seed)
    logits, x = (torch.randn(N, n, generator=generator) for n in (V, C))
    lm_head = nn.Linear(C, V, bias=False)
    with torch.no_grad():
        lm_head.weight.copy_(torch.randn(V, C, generator=generator))
    targets = torch.randint(V, (N,), generator=generator)
    targets[::5] = IGNORE_INDEX
    return logits, x, lm_head, targets


def plain_loss(logits, teacher, targets, weight, temperature):
    """The definition, per position."""
    counted = targets != IGNORE_INDEX
    cross_entropy = nn.functional.cross_entropy(
        logits, targets, ignore_index=IGNORE_INDEX, reduction="none"
    )
    student, teacher = ((x / temperature).log_softmax(-1) for x in (logits, teacher))
    kl = (teacher.exp() * (teacher - student)).sum(-1) * counted
    return (1 - weight) * cross_entropy + weight * temperature**2 * kl, kl.sum()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_the_loss_and_its_gradient_in_any_chunks(weight, temperature):
    logits, x, lm_head, targets = random_case()
    options = DistillConfig.model_construct(teacher="x", weight=weight, temperature=temperature)
    logits.requires_grad_()
    with torch.no_grad():
        teacher = lm_head(x)
    expected, kl = plain_loss(logits, teacher, targets, weight, temperature)
    (expected_grad,) = torch.autograd.grad(expected.sum(), logits)
    for size in (1, 7, N):
        filled = torch.empty(4, N // 4)
        loss = LogitLoss(options, (x, lm_head), filled)
        with torch.no_grad():
            parts = [
                loss(part.clone(), wanted, True)
                for part, wanted in zip(logits.split(size), targets.split(size))
            ]
        torch.testing.assert_close(torch.cat([value for value, _ in parts]), expected.detach())
        torch.testing.assert_close(torch.cat([grad for _, grad in parts]), expected_grad)
        torch.testing.assert_close(loss.kl, kl.detach())
        torch.testing.assert_close(filled.sum(), loss.cross_entropy)


@pytest.mark.parametrize("weight", [0.4, 1.0])
@pytest.mark.parametrize("k", [1, 5, V - 1])
def test_the_loss_of_the_largest_logits(k, weight):
    """Other tokens count if they come next; over all that may come next, the gradient is that of
    all logits."""
    logits, x, lm_head, targets = random_case()
    logits = logits.requires_grad_()
    with torch.no_grad():
        teacher = lm_head(x)
    probs = teacher.softmax(-1)
    top, ids = probs.topk(k)
    rest = (1 - top.sum(-1, keepdim=True)).clamp_min(1e-9)
    options, stored = DistillConfig(teacher="x", weight=weight), torch.cat((top, rest), dim=1).log()

    def compute(wanted):
        return LogitLoss(options, TopLogits(ids, stored), None)(logits.detach(), wanted, True)

    log_probs = logits.log_softmax(-1)
    is_other = (ids != targets[:, None]).all(1)
    kl = (top * (top.log() - log_probs.gather(1, ids))).sum(-1)
    kl = kl + is_other * (
        rest.log()[:, 0] - log_probs.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    )
    cross_entropy = nn.functional.cross_entropy(
        logits, targets, ignore_index=IGNORE_INDEX, reduction="none"
    )
    expected = ((1 - weight) * cross_entropy + weight * kl) * (targets != IGNORE_INDEX)
    losses, grad = compute(targets)
    torch.testing.assert_close(losses, expected.detach(), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(
        grad, torch.autograd.grad(expected.sum(), logits)[0], atol=1e-5, rtol=1e-4
    )
    mean = sum(probs[:, [token]] * compute(torch.full((N,), token))[1] for token in range(V))
    torch.testing.assert_close(mean, logits.softmax(-1).detach() - probs, atol=1e-5, rtol=1e-4)


def test_stored_logits_are_read_as_they_were_written(tmp_path):
    _, x, lm_head, _ = random_case()
    stored = TeacherLogits(tmp_path / "teacher", 10, N // 2, V, 6)
    stored.create("key")
    windows = torch.tensor([7, 2])
    assert stored.read(windows) is None
    with torch.no_grad():
        stored.write(windows, x, lm_head)
        probs = lm_head(x).softmax(-1)
    assert stored.read(torch.tensor([7, 3])) is None
    again = TeacherLogits(tmp_path / "teacher", 10, N // 2, V, 6)
    again.create("key")
    top = again.read(windows)
    assert torch.equal(top.ids, probs.topk(6).indices)
    torch.testing.assert_close(
        top.log_probs[:, :-1].exp(), probs.topk(6).values, atol=2e-3, rtol=2e-2
    )
    torch.testing.assert_close(top.log_probs.exp().sum(-1), torch.ones(N))
    swapped = again.read(windows.flip(0))
    assert torch.equal(swapped.ids, top.ids.unflatten(0, (2, -1)).flip(0).flatten(0, 1))
    with torch.no_grad():
        again.write(torch.tensor([2, 5]), x.flip(0), lm_head)  # one of them is stored, and stays
    assert torch.equal(again.read(windows).ids, top.ids)
    assert torch.equal(again.read(torch.tensor([5])).ids, top.ids.flip(0)[N // 2 :])
    other = TeacherLogits(tmp_path / "teacher", 10, N // 2, V, 6)
    other.create("another teacher")
    assert other.read(windows) is None


def test_maps_of_attention_and_similarities():
    """Zero for equal models, whatever the width; masked keys do not count; and gradients flow."""
    torch.manual_seed(0)
    student, teacher = (
        torch.randn(2, n, 5, 5).tril().masked_fill(torch.ones(5, 5).triu(1) > 0, -torch.inf)
        for n in (2, 4)
    )
    student.requires_grad_()
    is_counted = torch.ones(2, 5, dtype=torch.bool)
    maps = student.softmax(-1), teacher.softmax(-1)
    merged = maps[1].unflatten(1, (2, 2)).mean(2)
    expected = (merged * (merged / maps[0]).log().nan_to_num(0, 0, 0)).sum(-1).mean(1).sum()
    loss = attention_kl([maps], is_counted)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert student.grad.isfinite().all()
    assert student.grad.abs().sum() > 0
    assert attention_kl([(merged, maps[1])], is_counted).abs() < 1e-5
    wide = torch.randn(2, 5, 8)
    rotation = torch.linalg.qr(torch.randn(12, 8)).Q  # another width, the same angles
    assert similarity_error(wide, wide @ rotation.T, is_counted) < 1e-6
    assert similarity_error(wide, torch.randn(2, 5, 12), is_counted) > 0.1


@pytest.mark.parametrize(
    "options", [{}, {"attention": 1.0, "hidden": 1.0}], ids=["logits", "activations"]
)
def test_a_copy_of_the_teacher_has_nothing_to_learn_from_it(options):
    model = random_model(vocab_size=V, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2)
    copy = Thinker(model.config)
    copy.load_state_dict(model.state_dict())
    tokens = torch.randint(V, (2, 12))
    compute = DistillationLoss(
        Teacher(model, DistillConfig(teacher="x", weight=1.0, **options), "")
    )
    compute.setup(SimpleNamespace(model=copy, dist=SINGLE_PROCESS, kernels=Kernels({})))
    loss = compute(copy, Batch(tokens, tokens, tokens.numel()))
    assert abs(float(loss.sum)) < 1e-3
    torch.testing.assert_close(loss.cross_entropy, copy(tokens, targets=tokens)[0].detach())
    names = ["distill_kl", "distill_attention", "distill_hidden"] if options else ["distill_kl"]
    assert {name: int(count) for name, (_, count) in loss.parts.items()} == dict.fromkeys(names, 24)
    loss.sum.backward()
    assert max(float(parameter.grad.abs().max()) for parameter in copy.parameters()) < 1e-3


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_contract_of_objectives(temperature):
    """Its sum and gradient are the definition's, however a batch is split."""
    student, teacher = random_model(), random_model(seed=1, n_layers=1)
    options = DistillConfig(teacher="x", weight=0.3, temperature=temperature)
    objective = DistillationLoss(Teacher(teacher, options, ""))
    objective.setup(SimpleNamespace(model=student, dist=SINGLE_PROCESS, kernels=Kernels({})))

    def plain(logits, batch):
        with torch.no_grad():
            wanted = teacher(batch.inputs).flatten(0, 1)
        targets = batch.targets.flatten()
        return plain_loss(logits.flatten(0, 1), wanted, targets, 0.3, temperature)[0].sum()

    check_objective(objective, student, plain)


def test_two_ranks_learn_what_one_does(tmp_path):
    teacher = train(tmp_path, "teacher", [*SMALL, f"data.cache_dir={tmp_path / 'cache'}"], 2)
    check_ranks(tmp_path, [f"train.distill.teacher={teacher}", f"data.tokenizer={teacher}"])


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_run):
    """A folder for runs, and the overrides of a student of the tiny run."""
    folder = tmp_path_factory.mktemp("runs")
    shape = [
        "model.d_model=16",
        "model.n_layers=1",
        "model.n_heads=2",
        "model.n_kv_heads=1",
        "data.seq_len=32",
    ]
    keys = ["data.max_documents=30", "train.batch_size=4", "train.eval_every=3", "train.decay_fraction=0",
            "train.eval_sequences=2", "train.device=cpu", f"data.cache_dir={folder / 'cache'}",
            f"data.tokenizer={tiny_run}", f"train.distill.teacher={tiny_run}"]  # fmt: skip
    return folder, shape + keys


def train(folder, name, overrides, n_steps):
    """Train to a number of steps; returns the run directory."""
    config = load_config(
        BASE, [*overrides, f"run.dir={folder / name}", f"train.max_steps={n_steps}"]
    )
    assert build_trainer(config).train() == 0
    return folder / name


@pytest.mark.parametrize("form", FORMS)
def test_a_run_resumes_bit_for_bit(runs, form):
    folder, overrides = runs
    whole = train(folder, f"{form}-whole", [*overrides, *FORMS[form]], 6)
    train(folder, f"{form}-parts", [*overrides, *FORMS[form]], 3)
    assert_same_run(whole, train(folder, f"{form}-parts", [*overrides, *FORMS[form]], 6), 6)
    lines = [line for line in read_metrics(whole) if "train_loss" in line]
    names = {"distill_kl"} | (
        {"distill_attention", "distill_hidden"} if form == "activations" else set()
    )
    for line in lines:
        assert {name for name in line if name.startswith("distill")} == names
        assert all(line[name] > 0 for name in names)


def test_stored_logits_change_no_step(runs, monkeypatch):
    """With all but one token, the loss is nearly that of all logits; and the teacher reads each
    window once."""
    folder, overrides = runs
    read = []
    forward = Thinker.forward_blocks
    monkeypatch.setattr(
        Thinker,
        "forward_blocks",
        lambda self, *args, **kw: (read.append(self), forward(self, *args, **kw))[1],
    )
    losses = []
    for name, more in (("all", []), ("top", ["train.distill.cached_logits=299"])):
        read.clear()
        few = [
            "data.max_documents=4",
            "data.val_fraction=0.5135",
            "train.max_steps=40",
            "train.eval_every=null",
        ]
        few += [
            "train.precision=fp32",
            "optimizer.name=adamw",
            "optimizer.lr=0.001",
        ]  # which amplify no rounding
        trainer = build_trainer(
            load_config(BASE, [*overrides, *more, *few, f"run.dir={folder / name}"])
        )
        n_batches = -(-len(trainer.loader.dataset) // 4)
        assert n_batches < 20
        assert trainer.train() == 0
        teacher = trainer.step.objective.teacher
        n_read = sum(model is teacher for model in read)
        assert n_read == 40 if name == "all" else n_batches <= n_read <= 2 * n_batches
        losses.append(
            [line["train_loss"] for line in read_metrics(folder / name) if "train_loss" in line]
        )
    torch.testing.assert_close(*losses, rtol=0, atol=0.05)


def test_micro_batches_change_only_rounding(runs):
    folder, overrides = runs
    lines = []
    for size in (1, 4):
        options = [
            *overrides,
            *FORMS["activations"],
            "train.precision=fp32",
            f"train.micro_batch_size={size}",
        ]
        run = train(folder, f"micro-{size}", options, 3)
        lines.append([line for line in read_metrics(run) if "train_loss" in line])
    for one, other in zip(*lines):
        for name in (
            "train_loss",
            "grad_norm",
            "distill_kl",
            "distill_attention",
            "distill_hidden",
        ):
            assert one[name] == pytest.approx(other[name], rel=1e-4)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.distill.weight=0"], "train.distill.weight, attention and hidden are 0"),
        (["train.distill.weight=2"], "train.distill.weight is 2; it must be at most 1"),
        (["train.distill.wait=1"], "unknown config key train.distill.wait; did you mean train.distill.weight?"),
        (["train.distill.weight=0", "train.distill.attention=1", "train.distill.temperature=2"],
         "train.distill.temperature has no effect without weight"),
        (["train.distill.cached_logits=4", "train.distill.temperature=2"],
         "train.distill.cached_logits cannot be combined with a temperature"),
        (["train.distill.cached_logits=4", "train.distill.hidden=2"],
         "train.distill.cached_logits cannot be combined with attention or hidden"),
        (["train.distill.cached_logits=4", "data.shift_windows=true"],
         "train.distill cannot be combined with data.shift_windows=true"),
        (["train.distill.hidden=1", "train.compile=true"], "train.distill cannot be combined with train.compile=true"),
        (["train.distill.attention=1", "train.checkpoint_every_n_blocks=1"],
         "train.distill cannot be combined with train.checkpoint_every_n_blocks"),
        (["train.micro_batch_size=auto"], "train.distill cannot be combined with train.micro_batch_size=auto"),
        (["train.distill=5"], "train.distill is 5; it must be a mapping"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_refused(overrides, message):
    with pytest.raises(UserError) as error:
        load_config(BASE, ["train.distill.teacher=x", *overrides])
    assert str(error.value).startswith(message)


def test_a_teacher_is_required():
    with pytest.raises(UserError, match="train.distill.teacher is missing"):
        load_config(BASE, ["train.distill.weight=0.5"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.tokenizer=byte"], "has another tokenizer; teacher and student need the same one"),
        (["model.vocab_size=400"], "has 300 token ids, the student 400; set model.vocab_size=300"),
        (
            ["data.seq_len=64", "data.max_documents=60"],
            "has a context of 32 tokens, and data.seq_len is 64",
        ),
        (
            ["model.n_heads=4", "model.n_kv_heads=1", "train.distill.attention=1"],
            "needs a multiple",
        ),
        (
            ["model.attention=linear(8)", "train.distill.attention=1"],
            "linear attention, which the student has",
        ),
        (["train.distill.teacher=no/such/run"], "no/such/run does not exist"),
        (["train.distill.cached_logits=300"], "the vocabulary has 300 tokens; use at most 299"),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused(runs, tmp_path, overrides, message):
    _, common = runs
    with pytest.raises(UserError) as error:
        train(tmp_path, "run", [*common, *overrides], 1)
    assert message in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_run_keeps_its_teacher(runs, tiny_run, tmp_path):
    """It may move, but not change."""
    folder, overrides = runs
    train(folder, "kept", overrides, 2)
    moved, other = tmp_path / "moved", tmp_path / "other"
    shutil.copytree(tiny_run, moved)
    train(folder, "kept", [*overrides, f"train.distill.teacher={moved}"], 3)
    with pytest.raises(UserError, match="train.distill is .* started with"):
        train(folder, "kept", [*overrides, "train.distill.weight=0.25"], 4)
    init = [
        f"run.init_from={tiny_run}",
        f"data.tokenizer={tiny_run}",
        "data.max_documents=30",
        "optimizer.lr=0.1",
    ]
    train(tmp_path, "other", [*init, "train.device=cpu", "train.batch_size=2"], 1)
    with pytest.raises(
        UserError, match="has other weights than the teacher that this run started with"
    ):
        train(folder, "kept", [*overrides, f"train.distill.teacher={other}"], 4)


# The architecture that the hash of the first runs with a teacher counted.
FIRST_KEYS = """
attention attention_bias attention_sinks attn_logit_softcap d_ff d_model dropout head_dim
head_init_std init max_seq_len n_heads n_kv_heads n_kv_heads_per_layer n_layers no_rope_layers
norm_eps positions qk_norm rope_scaling rope_theta tie_embeddings token_shift vocab_size window
"""


def test_the_hash_of_a_teacher_is_that_of_the_first_runs_and_sees_every_change():
    model = random_model()
    config = model.config.to_dict()
    pairs = [(key, config[key]) for key in FIRST_KEYS.split()]
    digest = hashlib.sha256(repr(pairs).encode())
    for name in sorted(model.state_dict()):
        digest.update(model.state_dict()[name].numpy().tobytes())
    assert hash_weights(model) == digest.hexdigest()
    known = {digest.hexdigest()}
    for changed in ({"activation": "gelu"}, {"norm": "layernorm"}, {"attention_temperature": 2.0}):
        known.add(hash_weights(random_model(**changed)))
    with torch.no_grad():
        model.norm.weight[0] += 1
    known.add(hash_weights(model))
    assert len(known) == 5


def test_the_command_says_what_the_student_learns_from(runs, tmp_path, tiny_run):
    _, overrides = runs
    done = run_script(
        ROOT / "train.py", BASE, *overrides, "train.max_steps=2", f"run.dir={tmp_path / 'run'}"
    )
    assert done.returncode == 0, done.stderr
    assert f"teacher: {tiny_run}" in done.stderr
