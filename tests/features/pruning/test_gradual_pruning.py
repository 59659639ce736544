"""Pruning during training: its schedule, zeros that stay, gates, whole runs and their resumption,
what is refused."""

import functools
import shutil
from types import SimpleNamespace

import fork_server
import pytest
import torch
from conftest import ROOT, random_model, run_script
from installed import if_installed
from safetensors.torch import load_file
from training_runs import assert_same_run, assert_same_tensors, read_metrics, train_losses
from training_workers import train_each

from thinker.features.pruning import gates, zeros
from thinker.features.pruning.gradual_pruning import hold_zeros
from thinker.features.pruning.keys import PruneConfig
from thinker.features.pruning.weight_pruning import block_matrices, zero_share
from thinker.interop import load
from thinker.runtime.errors import UserError
from thinker.runtime.ranks import SINGLE_PROCESS
from thinker.training.callback import StepInfo, evaluated_weights
from thinker.training.config.load import load_config
from thinker.training.run import build_trainer

pytestmark = pytest.mark.usefixtures("one_thread")
BASE = ROOT / "tests" / "fixtures" / "base.yaml"
N_STEPS = 8
FORMS = {
    "weights": ["train.prune.weights=0.5", "train.prune.every=2"],
    "weights and an average": [
        "train.prune.weights=0.5", "train.prune.every=1", "train.ema_decay=0.9", "train.prune.by=activation"
    ],
    "neurons and heads": [
        "train.prune.neurons=0.5", "train.prune.heads=0.5", "train.prune.every=1", "train.prune.by=gradient"
    ],
    "everything": [
        "train.prune.neurons=0.25", "train.prune.heads=0.5", "train.prune.weights=0.7", "train.prune.every=1",
        "optimizer.weight_decay=0.1", "train.precision=bf16", "optimizer.name=adamw"
    ],
    "gates": ["train.prune.heads=0.5", "train.prune.by=gates"],
}  # fmt: skip


def test_the_share_rises_from_start_to_end():
    options = PruneConfig(weights=0.8, start=0.2, end=0.6)
    assert [options.share(0.8, progress) for progress in (0, 0.2, 0.6, 1)] == [0, 0, 0.8, 0.8]
    assert options.share(0.8, 0.4) == pytest.approx(0.8 * (1 - 0.5**3))
    shares = [options.share(0.8, step / 100) for step in range(101)]
    assert shares == sorted(shares)
    at_once = PruneConfig(weights=0.8, start=0.3, end=0.3)
    assert (at_once.share(0.8, 0.29), at_once.share(0.8, 0.3)) == (0, 0.8)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Muon])
def test_zeros_stay_unless_the_whole_matrix_is_zero(optimizer):
    torch.manual_seed(0)
    partly, fully, other = (torch.nn.Parameter(torch.randn(6, 5)) for _ in range(3))
    with torch.no_grad():
        partly[2:4] = fully[:] = other[0] = 0
    steps = optimizer([partly, fully, other], lr=0.1)
    hold_zeros(steps, [partly, fully])
    for _ in range(3):
        for parameter in (partly, fully, other):
            parameter.grad = torch.randn(6, 5)
        steps.step()
        assert (partly.grad[2:4] == 0).all()
        assert (fully.grad != 0).all()
        assert (partly == 0).sum() == 10
        assert (partly[2:4] == 0).all()
        assert (fully != 0).all()
        assert (other != 0).all()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


def overrides(folder, name, more, n_steps=N_STEPS):
    shape = [
        "model.d_model=32",
        "model.n_layers=2",
        "model.n_heads=4",
        "model.n_kv_heads=2",
        "data.seq_len=32",
    ]
    keys = ["data.max_documents=40", "data.tokenizer=bpe:300", "train.batch_size=4", "train.eval_every=3",
            "train.save_every=1", "train.keep_last=20", "train.eval_sequences=4", "train.device=cpu",
            "train.precision=fp32", f"data.cache_dir={folder / 'cache'}"]  # fmt: skip
    keys += ["train.prune.start=0.1", "train.prune.end=0.7"] if "train.prune" in str(more) else []
    return [*shape, *keys, *more, f"run.dir={folder / name}", f"train.max_steps={n_steps}"]


def train(folder, name, more):
    """Train to the end, from the newest checkpoint; returns the run directory."""
    assert build_trainer(load_config(BASE, overrides(folder, name, more))).train() == 0
    return folder / name


def cut(run, step):
    """Remove what a run saved after a step, as if it had been interrupted there."""
    for path in (run / "checkpoints").iterdir():
        if int(path.name.split("-")[1]) > step:
            shutil.rmtree(path)


@pytest.fixture(scope="module")
def whole_run(folder):
    """A function of a form: its complete run, trained once."""
    return functools.cache(lambda form: train(folder, form.replace(" ", "-"), FORMS[form]))


@pytest.mark.parametrize("form", FORMS)
def test_a_run_resumes_bit_for_bit_wherever_it_was_interrupted(folder, whole_run, form):
    whole = whole_run(form)
    for step in (
        (1, 4, 6) if form in ("weights", "gates") else (4,)
    ):  # before, during and after pruning
        parts = folder / f"{whole.name}-{step}"
        shutil.copytree(whole, parts)
        cut(parts, step)
        train(folder, parts.name, FORMS[form])
        assert_same_run(whole, parts, N_STEPS)
        best = [
            sorted(path.name for path in run.glob("checkpoints/best-*")) for run in (whole, parts)
        ]
        assert best[0] == best[1]


@pytest.mark.parametrize("form", [form for form in FORMS if form != "gates"])
def test_what_is_zero_grows_to_the_share_and_stays(whole_run, form):
    whole, options = whole_run(form), load_config(BASE, FORMS[form]).train.prune
    zero, reached = {}, []
    for step in range(
        2, N_STEPS + 1
    ):  # output projections begin as zeros, and have no gradient in the first step
        model, _ = load(whole, checkpoint=str(step))
        now = {name: matrix.weight == 0 for name, matrix in block_matrices(model).items()}
        assert all((now[name] >= zero[name]).all() for name in zero)
        zero = now
        reached.append(zero_share(model))
    assert reached == sorted(reached)
    assert reached[0] < reached[2] < reached[-1]
    assert reached[4:] == [reached[-1]] * 3  # after 0.7 of 8 steps
    lines = {line["step"]: line for line in read_metrics(whole) if "train_loss" in line}
    assert lines[N_STEPS]["zero_weights"] == reached[-1]
    for block in model.blocks:
        assert int(zeros.zero_neurons(block).sum()) >= round(options.neurons * model.config.d_ff)
        assert int(zeros.zero_groups(block).sum()) == round(options.heads * 2)
    if options.weights:
        assert reached[-1] == pytest.approx(options.weights, abs=0.02)


@pytest.mark.parametrize("form", ["neurons and heads", "everything", "gates"])
def test_zeros_are_removed_from_the_saved_model(whole_run, tmp_path, form):
    full, _ = load(whole_run(form))
    small, _ = zeros.remove_zeros(full)
    if form == "gates":
        script = ROOT / "scripts" / "prune.py"
        done = run_script(
            script, whole_run(form), "--zeros", "--texts", 8, "--out", tmp_path / "small"
        )
        assert done.returncode == 0, done.stderr
        small, _ = load(tmp_path / "small")
    tokens = torch.randint(300, (2, 20), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(small(tokens), full(tokens), rtol=1e-4, atol=1e-4)
    assert sum(block.attention.n_kv_heads for block in small.blocks) == 2
    most = {"neurons and heads": 64, "everything": 96, "gates": 128}[form]
    assert small.config.d_ff <= most  # single weights may have left another neuron without any
    assert form == "everything" or small.config.d_ff == most


def test_the_best_weights_are_those_of_the_final_form(folder):
    trainer = build_trainer(load_config(BASE, overrides(folder, "best", FORMS["gates"])))
    saved, save = [], trainer.checkpoints.save
    trainer.checkpoints.save = lambda kind, step, files: (
        saved.append((kind, step)),
        save(kind, step, files),
    )
    assert trainer.train() == 0
    evaluated = [line["step"] for line in read_metrics(folder / "best") if "val_loss" in line]
    assert evaluated == [3, 6, 8]
    assert ("best", 3) not in saved
    assert ("best", 6) in saved


def test_a_pruned_model_keeps_its_zeros_in_training(folder, whole_run, tmp_path):
    whole = whole_run("weights")
    start, _ = load(whole)
    more = [
        f"run.init_from={whole}",
        "train.prune.weights=0.5",
        "train.prune.every=1",
        "data.tokenizer=null",
    ]
    trained, _ = load(train(folder, "healed", more))
    for before, after in zip(block_matrices(start).values(), block_matrices(trained).values()):
        assert torch.equal(before.weight == 0, after.weight == 0)
        assert not torch.equal(before.weight, after.weight)


@pytest.mark.parametrize("form", ["neurons and heads", "gates"])
def test_two_ranks_prune_as_one_does(folder, whole_run, form):
    name = f"{form.replace(' ', '-')}-ranks"
    runs = [overrides(folder, name, [*FORMS[form], "train.parallel=ddp"])]
    assert fork_server.run_ranks(2, train_each, str(BASE), runs) == [[0], [0]]
    assert train_losses(folder / name) == pytest.approx(train_losses(whole_run(form)), rel=1e-3)
    (ranks, _), (alone, _) = load(folder / name), load(whole_run(form))
    for one, other in zip(block_matrices(ranks).values(), block_matrices(alone).values()):
        assert torch.equal(one.weight == 0, other.weight == 0)
    if form == "gates":
        step = "checkpoints/step-00000005/training.safetensors"
        one, other = (load_file(run / step) for run in (folder / name, whole_run(form)))
        for key in ("gates.log_alpha", "gates.exp_avg", "gates.exp_avg_sq"):
            torch.testing.assert_close(one[key], other[key], rtol=2e-5, atol=1e-9)


def gates_of(model, options):
    made = gates.Gates(options, 1)
    made.setup(SimpleNamespace(model=model, dist=SINGLE_PROCESS))
    return made


def test_a_gate_of_one_changes_nothing_and_its_distribution_is_that_of_the_paper():
    model, tokens = random_model(), torch.arange(20)[None]
    expected = model(tokens)
    made = gates_of(model, PruneConfig(heads=0.5, by="gates"))
    assert torch.equal(model(tokens), expected)
    log_alpha, noise = torch.tensor([-2.0, 0.0, 1.0]), torch.rand(100_000, 1).clamp(1e-6, 1 - 1e-6)
    values = gates.hard_concrete(log_alpha, noise)
    assert ((values >= 0) & (values <= 1)).all()
    is_open = torch.stack([gates.open_share(each) for each in log_alpha.split(1)])
    torch.testing.assert_close((values > 0).float().mean(0), is_open, atol=0.01, rtol=0)
    with torch.no_grad():
        made.log_alpha.copy_(torch.tensor([-9.0, 0.3, 2.0, -0.5]))
        made._use(torch.full((4,), 0.5))
        kept = {name: parameter.clone() for name, parameter in model.named_parameters()}
        with evaluated_weights([made]):
            values = gates.without_noise(made.log_alpha)
            plain = random_model()
            plain.load_state_dict(model.state_dict())
            assert torch.equal(plain(tokens), model(tokens))  # what is saved is what is evaluated
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, kept[name])
    heads = {f"blocks.{layer}.attention.heads.{head}": float(values[2 * layer + head // 2])
             for layer in (0, 1) for head in range(4)}  # fmt: skip
    whole = random_model()
    with (
        torch.no_grad(),
        whole.patch({name: lambda x, by=by: x * by for name, by in heads.items()}),
    ):
        torch.testing.assert_close(plain(tokens), whole(tokens), rtol=1e-4, atol=1e-4)
    assert {*made.tensors()} >= {
        "gates.0.weight",
        "gates.log_alpha",
        "gates.noise",
        "gates.exp_avg",
    }


def test_gates_learn_which_heads_matter():
    """A group whose output is noise closes; the one that the loss needs stays open."""
    torch.manual_seed(0)
    model = random_model(n_layers=1, n_kv_heads=4)
    made = gates_of(model, PruneConfig(heads=0.5, by="gates", start=0.0, end=0.9))
    for step in range(1, 101):
        helpful = torch.tensor([-0.5, 0.05, -0.5, 0.05])  # ∂loss/∂gate
        made.gates[0].grad = helpful.clone()
        made.after_step(StepInfo(step, step / 100, None))
        if step == 80:
            assert float(gates.open_share(made.log_alpha)) == pytest.approx(0.5, abs=0.15)
    assert made.has_final_form()
    assert made.gates[0].tolist() == [1, 0, 1, 0]
    assert made.metrics() == {"open_gates": 0.5}
    with evaluated_weights([made]):
        assert zeros.zero_groups(model.blocks[0]).tolist() == [False, True, False, True]


def test_a_run_with_gates_reports_them_and_ends_without(whole_run):
    whole = whole_run("gates")
    lines = [line for line in read_metrics(whole) if "train_loss" in line]
    assert [0 < line["open_gates"] < 1 for line in lines] == [True] * N_STEPS
    assert lines[-1]["open_gates"] == 0.5
    model, _ = load(whole)
    assert sum(int(zeros.zero_groups(block).sum()) for block in model.blocks) == 2
    done = run_script(
        ROOT / "generate.py", whole, "--prompt", "Once", "--max-new-tokens", 4, "--greedy"
    )
    assert done.returncode == 0, done.stderr


def test_a_run_interrupted_before_its_first_step_resumes(folder, monkeypatch):
    for name, more in (("first-gates", FORMS["gates"]), ("first-average", ["train.ema_decay=0.9"])):
        trainer = build_trainer(load_config(BASE, overrides(folder, name, more)))
        trainer.signal_handler.number = 15
        assert trainer.train() == 143
        train(folder, name, more)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["train.prune.every=3"], "train.prune.weights, neurons and heads are 0, so nothing is pruned; raise one"),
        (["train.prune.weights=1"], "train.prune.weights is 1; it must be less than 1"),
        (["train.prune.weights=0.5", "train.prune.start=0.95"], "train.prune.start is 0.95, after end (0.9); lower it"),
        (["train.prune.weights=0.5", "train.prune.by=wanda"], "train.prune.by is 'wanda'; it must be magnitude"),
        (["train.prune.weights=0.5", "train.prune.by=gates"], "train.prune.by=gates chooses heads only"),
        (["train.prune.heads=0.5", "train.prune.by=gates", "train.prune.every=3"], "train.prune.every has no effect"),
        (["train.prune.neuron=0.5"], "unknown config key train.prune.neuron; did you mean train.prune.neurons?"),
        (["train.prune.weights=0.5", "train.patience=2"], "train.prune cannot be combined with train.patience"),
        (["train.prune.weights=0.5", "train.parallel=fsdp"], "train.prune cannot be combined with train.parallel=fsdp"),
        *if_installed("auto_size", (["train.prune.weights=0.5", "model.size=auto", "train.max_minutes=1"],
                                    "train.prune cannot be combined with model.size=auto")),
        (["train.prune.weights=0.5", "run.init_from=x", "train.lora_rank=2"],
         "train.prune cannot be combined with train.lora_rank"),
        (["train.prune.heads=0.5", "train.prune.by=gates", "train.ema_decay=0.9"],
         "train.prune.by=gates cannot be combined with train.ema_decay"),
        (["train.prune.heads=0.5", "train.prune.by=gates", "train.precision=fp16"],
         "train.prune.by=gates cannot be combined with train.precision=fp16"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_refused(options, message):
    with pytest.raises(UserError) as error:
        load_config(BASE, options)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["train.prune.heads=0.2"], "train.prune.heads=0.2 removes none of the 2 KV heads of layer 0; change it"),
        (["train.prune.heads=0.8"], "train.prune.heads=0.8 removes all of the 2 KV heads of layer 0; change it"),
        (["train.prune.neurons=0.999"], "train.prune.neurons=0.999 removes all of the 128 neurons of layer 0"),
        (["train.prune.neurons=0.001"], "train.prune.neurons=0.001 removes none of the 128 neurons of layer 0"),
        (["train.prune.weights=0.99", "train.prune.by=activation"],
         "train.prune.weights=0.99 removes all of the 32 weights in a row of layer 0"),
        (["train.prune.heads=0.1", "train.prune.by=gates"],
         "closes 0 of 4 KV heads, and every layer keeps at least one; choose a share that closes 1 to 2"),
        (["train.prune.heads=0.5", "model.positions=alibi"], "train.prune.heads does not work with alibi"),
        (["train.prune.heads=0.5", "train.prune.by=gates", "model.positions=alibi"],
         "train.prune.heads does not work with alibi"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_pruned_is_refused(tmp_path, folder, options, message):
    with pytest.raises(UserError) as error:
        build_trainer(load_config(BASE, overrides(folder, "refused", options)))
    assert message in str(error.value)
    assert not (folder / "refused").exists()


def test_a_run_keeps_its_schedule(folder, whole_run):
    with pytest.raises(UserError, match="train.prune is .* started with"):
        train(folder, whole_run("weights").name, ["train.prune.weights=0.6", "train.prune.every=2"])
    assert_same_tensors(whole_run("weights"), whole_run("weights"), N_STEPS)
