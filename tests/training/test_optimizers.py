import pytest
import torch
from safetensors.torch import load_file
from training_contract import N_STEPS, check_resumes, small_config
from training_runs import train_losses

from thinker.model import Thinker, ThinkerConfig
from thinker.runtime.errors import UserError
from thinker.training.callback import Callback
from thinker.training.config.load import validate_config
from thinker.training.config.sections import OptimizerConfig
from thinker.training.optim.optimizers import Optimizers, resolve_learning_rates
from thinker.training.optim.registry import OPTIMIZERS
from thinker.training.run import train

SHAPE = {
    "vocab_size": 61,
    "d_model": 32,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "max_seq_len": 64,
}


def config(**changes):
    return ThinkerConfig(**{**SHAPE, **changes})


def rates(model, optimizer_config):
    """The name of each parameter: its optimizer's class, its rate and its weight decay."""
    found = {}
    for optimizer in Optimizers(
        model, resolve_learning_rates(optimizer_config, model.config, 16)
    ).optimizers:
        for group in optimizer.param_groups:
            for name in group["param_names"]:
                assert name not in found
                found[name] = (type(optimizer).__name__, group["lr"], group["weight_decay"])
    return found


def kind(name):
    first, last = name.split(".")[0], name.split(".")[-2]
    if first in ("embedding", "lm_head"):
        return {"embedding": "embedding", "lm_head": "head"}[first]
    return "gain" if last.endswith("norm") else "matrix"


@pytest.mark.parametrize("tied", [False, True])
def test_muon_moves_the_matrices_and_adamw_the_rest(random_model, tied):
    model = random_model(tie_embeddings=tied)
    optimizer_config = OptimizerConfig(
        lr=0.5, embedding_lr=0.4, head_lr=0.3, norm_lr=0.2, weight_decay=0.1
    )
    found = rates(model, optimizer_config)
    assert found.keys() == dict(model.named_parameters()).keys()
    expected = {"matrix": ("Muon", 0.5, 0.1), "embedding": ("AdamW", 0.4, 0.0), "head": ("Muon", 0.3, 0.1),
                "gain": ("AdamW", 0.2, 0.0)}  # fmt: skip
    for name, group in found.items():
        assert group == expected[kind(name)], name
    assert {kind(name) for name in found} == expected.keys() - ({"head"} if tied else set())


def test_adamw_alone_moves_everything_at_its_one_rate(random_model):
    found = rates(random_model(), OptimizerConfig(name="adamw", lr=0.5, weight_decay=0.1))
    for name, group in found.items():
        assert group == ("AdamW", 0.5, 0.1 if kind(name) in ("matrix", "head") else 0.0), name


@pytest.mark.parametrize("width", [32, 64, 768])
def test_rates_that_are_left_out_follow_the_width(width):
    muon = resolve_learning_rates(OptimizerConfig(), config(d_model=width), 16)
    assert None not in muon.model_dump().values()
    narrow = resolve_learning_rates(OptimizerConfig(), config(), 16)
    assert muon == narrow
    adamw = resolve_learning_rates(OptimizerConfig(name="adamw"), config(d_model=width), 16)
    assert adamw.lr == adamw.embedding_lr == adamw.head_lr == adamw.norm_lr == 1 / width
    assert adamw.momentum is None


def test_rates_that_are_given_stay():
    given = {"lr": 0.5, "embedding_lr": 0.4, "head_lr": 0.3, "norm_lr": 0.2, "momentum": 0.1}
    given["momentum_warmup_steps"] = 0  # as a momentum is given
    assert resolve_learning_rates(OptimizerConfig(**given), config(), 16) == OptimizerConfig(
        **given
    )
    adamw = resolve_learning_rates(OptimizerConfig(name="adamw", lr=0.5, head_lr=0.3), config(), 16)
    assert (adamw.embedding_lr, adamw.head_lr) == (0.5, 0.3)
    tied = resolve_learning_rates(
        OptimizerConfig(embedding_lr=0.3), config(tie_embeddings=True), 16
    )
    assert (tied.embedding_lr, tied.head_lr) == (0.3, None)
    with pytest.raises(UserError, match="head_lr has no effect without model.tie_embeddings=false"):
        validate_config(
            {
                "model": {"tie_embeddings": True},
                "optimizer": {"head_lr": 0.3},
                "train": {"max_steps": 1},
            }
        )


def test_an_embedding_that_is_also_the_head_moves_as_a_head_of_adamw():
    for width in (32, 64):
        assert (
            resolve_learning_rates(
                OptimizerConfig(), config(d_model=width, tie_embeddings=True), 16
            ).embedding_lr
            == 2 / width
        )


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_rates_fall_with_the_root_of_a_small_batch(name):
    whole = resolve_learning_rates(OptimizerConfig(name=name), config(), 16)
    assert resolve_learning_rates(OptimizerConfig(name=name), config(), 512) == whole
    quarter = resolve_learning_rates(OptimizerConfig(name=name), config(), 4)
    for rate in ("lr", "embedding_lr", "head_lr", "norm_lr"):
        assert getattr(quarter, rate) == pytest.approx(getattr(whole, rate) / 2)
    assert (
        resolve_learning_rates(OptimizerConfig(name=name, lr=0.5), config(), 4).lr == 0.5
    )  # what is given stays


@pytest.mark.parametrize(
    "optimizer_config", [OptimizerConfig(), OptimizerConfig(name="adamw")], ids=["muon", "adamw"]
)
def test_a_logit_of_a_wide_model_moves_as_far_as_one_of_a_narrow_model(optimizer_config):
    """What the rule of the head says, measured: one step on one token, whose logits move the same
    way at any width."""
    moved = []
    for width in (64, 256, 1024):
        model = Thinker(config(vocab_size=2048, d_model=width))
        optimizers = Optimizers(model, resolve_learning_rates(optimizer_config, model.config, 16))
        x = torch.randn(width, generator=torch.Generator().manual_seed(0))
        (model.lm_head.weight @ x)[7].backward()
        before = model.lm_head.weight.detach() @ x.sign()
        for optimizer in optimizers.optimizers:
            optimizer.step()
        moved.append((model.lm_head.weight.detach() @ x.sign() - before).norm().item())
    assert moved[0] > 0
    assert max(moved) < 1.2 * min(moved)


def test_the_schedule_scales_every_rate(random_model):
    optimizer_config = OptimizerConfig(
        lr=0.5, embedding_lr=0.4, head_lr=0.3, norm_lr=0.2, momentum=0.9
    )
    optimizers = Optimizers(random_model(), optimizer_config)
    optimizers.set_lr(0.25)
    optimizers.set_lr(0.5)
    found = sorted(
        group["lr"] for optimizer in optimizers.optimizers for group in optimizer.param_groups
    )
    assert found == [0.1, 0.15, 0.2, 0.25]


def test_a_run_sets_the_momentum_of_each_step(tmp_path):
    found = []

    class Reader(Callback):
        def after_step(self, info):
            for group in self.parts.optimizers.optimizers[0].param_groups:
                found.append((info.step, group["momentum"]))

        def setup(self, parts):
            self.parts = parts

    config = small_config(tmp_path, "run", ["optimizer.momentum_warmup_steps=4"])
    assert train(config, callbacks=[Reader()]) == 0
    n_groups = 2  # of Muon: the matrices, and the LM head
    rising = [0.9, 0.9125, 0.925, 0.9375, 0.95, 0.95]
    expected = [(step + 1, rising[step]) for step in range(N_STEPS) for _ in range(n_groups)]
    assert [step for step, _ in found] == [step for step, _ in expected]
    assert [momentum for _, momentum in found] == pytest.approx([m for _, m in expected])


class SignMomentum(torch.optim.Optimizer):
    """A user's optimizer, which moves by the sign of its momentum; a state of two tensors, one of
    them a number."""

    def __init__(self, groups):
        super().__init__(groups, {"beta": 0.9})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                    state["n_steps"] = torch.tensor(0.0)
                state["n_steps"] += 1
                state["momentum"].lerp_(parameter.grad, 1 - group["beta"])
                shrink = 1 / (1 + 0.01 * float(state["n_steps"]))
                parameter.add_(state["momentum"].sign(), alpha=-0.1 * group["lr"] * shrink)


@pytest.fixture
def sign_momentum(monkeypatch):
    monkeypatch.setattr(OPTIMIZERS, "_values", dict(OPTIMIZERS._values))
    OPTIMIZERS.register("sign", lambda parts: [SignMomentum(list(parts.groups.values()))])


@pytest.mark.usefixtures("sign_momentum", "one_thread")
@pytest.mark.parametrize("more", [[], ["train.ema_decay=0.9"]], ids=["alone", "with an average"])
def test_an_optimizer_of_a_user_trains_and_resumes_bit_for_bit(more, tmp_path, monkeypatch):
    whole = check_resumes(tmp_path, monkeypatch, ["optimizer.name=sign", *more])
    losses = train_losses(whole)
    assert losses[6] < losses[1]
    state = load_file(whole / "checkpoints" / "step-00000006" / "training.safetensors")
    assert float(state["optimizer.embedding.weight.n_steps"]) == 6


def test_a_state_that_checkpoints_do_not_store_is_refused(sign_momentum):
    model = Thinker(ThinkerConfig(vocab_size=11, d_model=16, n_layers=1, n_heads=2))
    optimizers = Optimizers(model, OptimizerConfig(name="sign", lr=0.1))
    optimizers.optimizers[0].state[model.norm.weight]["count"] = 3
    with pytest.raises(
        UserError, match="SignMomentum keeps count as torch.int64, which checkpoints"
    ):
        optimizers.tensors()


def test_an_unknown_optimizer_names_those_that_there_are(sign_momentum):
    with pytest.raises(UserError, match="optimizer.name is 'lion'; it must be muon, adamw or sign"):
        validate_config({"train": {"max_steps": 1}, "optimizer": {"name": "lion"}})
