"""Every family fine-tunes as in transformers: gradients, exact resume, and exports that it opens."""

import functools
import json
import logging
import signal
import warnings

import pytest
import torch
from conftest import ROOT
from safetensors.torch import save_file
from training_runs import assert_same_tensors, checkpoint_steps, train_losses

from thinker.interop import export_huggingface as huggingface_export
from thinker.interop import load
from thinker.interop.export_huggingface import export_huggingface
from thinker.interop.families import FAMILIES
from thinker.interop.families.tensors import their_name, to_their_order, to_their_tensors
from thinker.interop.verify_export import verify_hf_export
from thinker.model.lora import LoraLinear, add_lora
from thinker.runtime.errors import UserError

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytest.importorskip("sentencepiece")

from tokenizer_kinds import build  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GROUPED = SIZES | {"num_key_value_heads": 2}
WINDOW = GROUPED | {"sliding_window": 9}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
FORMS = {
    "gpt2": GPT2,
    "gpt_neo": {
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "max_position_embeddings": 64,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 7,
    },
    "gpt_neox": SIZES,
    "opt": {
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "word_embed_proj_dim": 32,
    },
    "gemma": GROUPED | {"head_dim": 16},
    "gemma2": WINDOW | {"head_dim": 16, "query_pre_attn_scalar": 24},
    "gemma3_text": WINDOW | {"head_dim": 16, "query_pre_attn_scalar": 16, "num_hidden_layers": 6},
    "olmo": GROUPED,
    "olmo2": GROUPED,
    "olmo3": WINDOW | {"num_hidden_layers": 4},
    "phi": SIZES | {"qk_layernorm": True},
    "phi3": GROUPED,
    "granite": GROUPED
    | {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.22,
        "logits_scaling": 6.0,
        "attention_multiplier": 0.1,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "stablelm": GROUPED | {"use_qkv_bias": True, "qk_layernorm": True},
    "starcoder2": WINDOW,
    "cohere": SIZES | {"use_qk_norm": True, "attention_bias": True},
    "llama": GROUPED | {"attention_bias": True, "mlp_bias": True},
    "mistral": WINDOW,
    "qwen3": GROUPED | {"head_dim": 12},
    "qwen2": GROUPED,
    "smollm3": GROUPED | {"num_hidden_layers": 4},
}
FUSED = ("gpt2", "gpt_neox", "phi3")  # several of our matrices in one, or transposed
SHORT = ("gpt2", "gemma3_text", "phi3", "cohere")  # in make test-more; the others with --stress
RANK = 4
SCALE = 2.0


def test_every_family_has_a_form():
    assert FORMS.keys() == FAMILIES.keys()


def make_model(name, std, **config):
    """A model of transformers in which each parameter is random."""
    config = transformers.AutoConfig.for_model(name, **FORMS[name], **config)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * std)
    return model


@pytest.fixture
def small(tmp_path):
    """Makes a model of transformers with 89 tokens, and its folder."""

    def make(name):
        # Ids of special tokens must be in the vocabulary.
        ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
        model = make_model(name, 0.2, vocab_size=89, **ids)
        model.save_pretrained(tmp_path / name)
        return model, tmp_path / name

    return make


def name_in_files(model_type, name):
    """Of a parameter of transformers: version 5 has given the head of GPT-NeoX another name."""
    if model_type == "gpt_neox":
        return name.replace("lm_head", "embed_out")
    return name


def random_tokens():
    """Without 0: the row of the padding token gets no gradient in transformers."""
    return torch.randint(1, 89, (3, 41), generator=torch.Generator().manual_seed(1))


def our_loss(model, tokens):
    loss_sum, count = model(tokens[:, :-1], targets=tokens[:, 1:])
    return loss_sum / count


def assert_near(ours, theirs, largest, name):
    """Equal to 1e-5 of the largest gradient of this tensor.

    A gradient that is zero but for rounding, as that of a bias of the keys, is compared with the
    `largest` of the model.
    """
    tolerance = max(1e-5 * theirs.abs().max().item(), 1e-6 * largest)
    difference = (ours - theirs).abs().max().item()
    assert difference <= tolerance, (name, difference / theirs.abs().max().item(), largest)


def largest_gradient(gradients):
    return max(gradient.abs().max().item() for gradient in gradients.values())


@pytest.mark.parametrize("name", FORMS)
def test_loss_and_gradients_of_all_weights(small, name):
    other, folder = small(name)
    model, _ = load(folder)
    tokens = random_tokens()
    loss = our_loss(model, tokens)
    loss.backward()
    other_loss = other(tokens, labels=tokens).loss
    other_loss.backward()
    torch.testing.assert_close(loss, other_loss, rtol=1e-6, atol=0)
    ours = {}
    for key, parameter in model.named_parameters():
        ours[key] = parameter.grad
    ours = to_their_tensors(FAMILIES[name], model.config, ours)
    theirs = {}
    for key, parameter in other.named_parameters():
        theirs[name_in_files(name, key)] = parameter.grad
    assert ours.keys() == theirs.keys()
    for key, gradient in ours.items():
        assert_near(gradient, theirs[key], largest_gradient(theirs), key)


def with_random_adapters(folder):
    """The model in a folder with adapters, whose B is no longer zero."""
    model, _ = load(folder)
    torch.manual_seed(2)
    add_lora(model, RANK, SCALE)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, LoraLinear):
                module.lora_B.normal_(0, 0.1)
    return model


def adapter_tensors(model):
    found = {}
    for key, parameter in model.named_parameters():
        if "lora" in key:
            found[key] = parameter
    return found


@pytest.mark.parametrize("name", [name for name in FORMS if name not in FUSED])
def test_loss_and_gradients_of_adapters(small, name):
    other, folder = small(name)
    model = with_random_adapters(folder)
    family = FAMILIES[name]
    names = {}  # of a parameter in peft
    for key in adapter_tensors(model):
        names[key] = f"base_model.model.{their_name(family, key)}.default.weight"
    targets = {their.split(".")[-4] for their in names.values()}
    config = peft.LoraConfig(r=RANK, lora_alpha=RANK * SCALE, target_modules=targets)
    adapted = peft.get_peft_model(other, config).eval()
    parameters = dict(adapted.named_parameters())

    def in_their_order(key, tensor):
        if key.endswith("lora_B"):
            return to_their_order(family, model.config, key, tensor)
        return tensor

    with torch.no_grad():
        for key, parameter in adapter_tensors(model).items():
            parameters[names[key]].copy_(in_their_order(key, parameter))
    tokens = random_tokens()
    loss = our_loss(model, tokens)
    loss.backward()
    other_loss = adapted(input_ids=tokens, labels=tokens).loss
    other_loss.backward()
    torch.testing.assert_close(loss, other_loss, rtol=1e-6, atol=0)
    theirs = {}
    for key, parameter in parameters.items():
        assert (parameter.grad is not None) == ("lora" in key)
        if parameter.grad is not None:
            theirs[key] = parameter.grad
    assert theirs.keys() == set(names.values())
    for key, parameter in adapter_tensors(model).items():
        gradient = in_their_order(key, parameter.grad)
        assert_near(gradient, theirs[names[key]], largest_gradient(theirs), key)


@pytest.mark.parametrize("name", FUSED)
def test_gradients_of_adapters_of_fused_matrices(small, tmp_path, name):
    """By the chain rule, from the gradients of the whole matrices in transformers."""
    other, folder = small(name)
    model = with_random_adapters(folder)
    matrices = {}
    for key, module in model.named_modules():
        if isinstance(module, LoraLinear):
            matrices[f"{key}.weight"] = module
    merged = dict(load(folder)[0].named_parameters())
    for key, module in matrices.items():
        merged[key] = module.effective_weight()
    merged = to_their_tensors(FAMILIES[name], model.config, merged)
    with torch.no_grad():
        for key, parameter in other.named_parameters():
            parameter.copy_(merged[name_in_files(name, key)])
    tokens = random_tokens()
    loss = our_loss(model, tokens)
    loss.backward()
    other_loss = other(tokens, labels=tokens).loss
    other_loss.backward()
    torch.testing.assert_close(loss, other_loss, rtol=1e-6, atol=0)
    # Read as if they were weights, they are in our layout.
    gradients = {}
    for key, parameter in other.named_parameters():
        gradients[name_in_files(name, key)] = parameter.grad.contiguous()
    save_file(gradients, folder / "model.safetensors")
    whole = dict(load(folder)[0].named_parameters())
    expected = {}
    for key, module in matrices.items():
        expected[key, "lora_A"] = SCALE * module.lora_B.T @ whole[key]
        expected[key, "lora_B"] = SCALE * whole[key] @ module.lora_A.T
    for (key, leaf), gradient in expected.items():
        ours = getattr(matrices[key], leaf).grad
        assert_near(ours, gradient, largest_gradient(expected), f"{key} {leaf}")


# Training

KILL = """
import os
import signal

from thinker import CALLBACKS, Callback


class Kill(Callback):
    def __init__(self, settings):
        self.step = int(os.environ.get("KILL_AT_STEP", "0"))

    def after_step(self, info):
        if info.step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


CALLBACKS.register("kill", Kill)
"""


@pytest.fixture
def base(tmp_path):
    """Makes a folder with a model and the tokenizer of its family."""

    def make(name):
        folder = tmp_path / "base"
        folder.mkdir()
        build(name, folder)
        config = json.loads((folder / "config.json").read_text())
        ids = {"bos_token_id": None, "pad_token_id": None} | config
        del ids["model_type"]
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        n_tokens = len(tokenizer["model"]["vocab"])
        n_tokens = max([n_tokens, *(token["id"] + 1 for token in tokenizer["added_tokens"])])
        make_model(name, 0.05, vocab_size=n_tokens, **ids).save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="module")
def train(run_script, text_file, tmp_path_factory):
    """Fine-tunes a folder for 30 steps."""
    project = tmp_path_factory.mktemp("project")
    (project / "kill_at_step.py").write_text(KILL)
    config = project / "config.yaml"
    config.write_text("extensions: [kill_at_step]\ntrain: {callbacks: [kill]}")

    def run(folder, run, *overrides, **variables):
        given = [
            f"run.init_from={folder}", f"run.dir={run}", "data.source=text", f"data.path={text_file}",
            f"data.cache_dir={project / 'cache'}", "data.seq_len=32", "train.batch_size=4",
            "train.max_steps=30", "train.save_every=10", "train.eval_every=15", "train.precision=fp32",
            "train.device=cpu", "train.compile=false", "train.sample_every=null", "train.report=false",
            "optimizer.name=adamw", "optimizer.lr=0.003",
        ]  # fmt: skip
        return run_script(ROOT / "train.py", config, *given, *overrides, **variables)

    return run


class Messages(logging.Handler):
    """What transformers logs."""

    def __init__(self):
        super().__init__(logging.INFO)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def open_there(folder):
    """The model in transformers, which must say nothing."""
    logger = logging.getLogger("transformers")
    transformers.utils.logging.set_verbosity_warning()
    messages = Messages()
    logger.addHandler(messages)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                folder, output_loading_info=True
            )
    finally:
        logger.removeHandler(messages)
        transformers.utils.logging.set_verbosity_error()
    assert [str(each.message) for each in caught] == []
    assert messages.texts == []
    assert not any(info.values()), info
    return model.eval()


def check_adapter(run, folder, name, tmp_path):
    out = tmp_path / "adapter"
    if name in FUSED:
        with pytest.raises(UserError, match=f"{name} stores .*; export without --adapter"):
            export_huggingface(run, out, adapter=True)
        assert not out.exists()
        return
    export = export_huggingface(run, out, adapter=True)
    assert export.model_type == name
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder)
    adapted = peft.PeftModel.from_pretrained(whole, out).eval()
    model, _ = load(run)
    tokens = torch.randint(model.config.vocab_size, (2, 40))
    with torch.no_grad():
        ours = model(tokens)
        theirs = adapted(tokens).logits
        assert (ours - load(folder)[0](tokens)).abs().max() > 1e-2
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5 * max(1.0, ours.abs().max().item()))


@pytest.fixture
def fewer_texts(monkeypatch, stress):
    """An export compares tokenizers on 5,000 texts only with --stress."""
    if not stress:
        fewer = functools.partial(verify_hf_export, n_texts=300)
        monkeypatch.setattr(huggingface_export, "verify_hf_export", fewer)


def case(name):
    mark = pytest.mark.more if name in SHORT else pytest.mark.stress
    return pytest.param(name, marks=mark)


@pytest.mark.parametrize("lora", [[], [f"train.lora_rank={RANK}"]], ids=["full", "lora"])
@pytest.mark.parametrize("name", [case(name) for name in FORMS])
@pytest.mark.usefixtures("fewer_texts")
def test_killed_and_resumed_then_exported(base, train, tmp_path, name, lora):
    folder = base(name)
    whole, parts, out = tmp_path / "whole", tmp_path / "parts", tmp_path / "out"
    done = train(folder, whole, *lora)
    assert done.returncode == 0, done.stderr
    says_no_adapter = "export without --adapter" in done.stderr
    assert says_no_adapter == (bool(lora) and name in FUSED)
    killed = train(folder, parts, *lora, KILL_AT_STEP="15")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert max(checkpoint_steps(parts)) == 10
    resumed = train(folder, parts, *lora)
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming from step 10" in resumed.stderr
    assert_same_tensors(whole, parts, 30)
    losses = train_losses(whole)
    assert losses[30] < losses[1]

    export = export_huggingface(whole, out)
    assert export.model_type == json.loads((out / "config.json").read_text())["model_type"] == name
    model, _ = load(whole)
    again, _ = load(out)
    other = open_there(out)
    before, _ = load(folder)
    changed = []
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[key]), key
        changed.append(not torch.equal(tensor, before.state_dict()[key]))
    assert any(changed)
    assert all(changed) or lora
    tokens = torch.randint(model.config.vocab_size, (2, 40))
    with torch.no_grad():
        ours = model(tokens)
        theirs = other(tokens).logits
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5 * max(1.0, ours.abs().max().item()))
    if lora:
        check_adapter(whole, folder, name, tmp_path)


@pytest.mark.more
def test_the_family_is_kept_through_two_runs(base, train, tmp_path):
    """As long as the folder is there: another model of the same kind is exported as llama."""
    folder = base("phi3")
    short = ["train.max_steps=2", "train.save_every=2"]
    for origin, run in ((folder, tmp_path / "first"), (tmp_path / "first", tmp_path / "second")):
        done = train(origin, run, *short)
        assert done.returncode == 0, done.stderr
    assert export_huggingface(tmp_path / "second", tmp_path / "a").model_type == "phi3"
    folder.rename(tmp_path / "moved")
    with pytest.raises(UserError, match="--adapter needs a run that starts from"):
        export_huggingface(tmp_path / "second", tmp_path / "b", adapter=True)
    assert export_huggingface(tmp_path / "second", tmp_path / "b").model_type == "llama"
