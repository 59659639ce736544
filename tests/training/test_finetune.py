"""Fine-tuning a Hugging Face folder on answers: all weights, or LoRA adapters that peft opens."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from conftest import random_model
from safetensors.torch import load_file
from tqdm import tqdm

from thinker.data.batches.prefetch import Batch
from thinker.data.tokenizers import tokenizer_conversion
from thinker.data.tokenizers.saved_tokenizer import load_tokenizer
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.interop import load
from thinker.interop.huggingface import save_pretrained
from thinker.interop.peft_adapter import load_adapter, save_adapter
from thinker.model.lora import LoraLinear, add_lora, merge_lora
from thinker.runtime.errors import UserError
from thinker.training.config.load import load_config, validate_config
from thinker.training.initial_model import load_initial_model
from thinker.training.reports.plan import make_plan
from thinker.training.reports.plan_table import format_plan
from thinker.training.run import build_trainer
from thinker.training.step import TrainingStep

transformers = pytest.importorskip("transformers")
ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("one_thread")

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A random model made by transformers, with a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("base")
    tokenizer = make_tokenizer("bpe:300", ["user: what is 12 times 7? assistant: it is 84. " * 30])
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        bos_token_id=tokenizer.bos_id, eos_token_id=tokenizer.eos_id,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.dim() == 2 else 1)  # large enough for adapters to matter
    model.save_pretrained(folder)
    tokenizer_conversion.write(tokenizer.with_chat_template(TEMPLATE), folder, 64)
    return folder


@pytest.fixture(scope="module")
def conversations(tmp_path_factory):
    path = tmp_path_factory.mktemp("conversations") / "conversations.jsonl"
    pairs = [[f"what is {i} times {j}?", f"it is {i * j}."] for i in range(12) for j in range(8)]
    rows = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in pairs]
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return path


@pytest.fixture
def make_trainer(base, conversations, tmp_path):
    """Builds a Trainer that fine-tunes `base` on the answers in the conversations."""
    config = tmp_path / "config.yaml"
    config.write_text("train: {max_steps: 40}")

    def make(*overrides, folder="run"):
        defaults = [
            f"run.init_from={base}", f"run.dir={tmp_path / folder}", "data.source=jsonl",
            f"data.path={conversations}", "data.assistant_only_loss=true", "data.packing=documents",
            "data.seq_len=48", f"data.cache_dir={tmp_path}", "train.batch_size=8", "train.precision=fp32",
            "train.compile=false", "train.device=cpu", "train.eval_every=20", "optimizer.lr=0.01",
        ]  # fmt: skip
        return build_trainer(load_config(config, [*defaults, *overrides]))

    return make


def losses(trainer, key):
    return [line[key] for line in trainer.run.read_metrics() if key in line]


@pytest.mark.parametrize(
    "lora", [[], ["train.lora_rank=4", "train.lora_alpha=4"]], ids=["full", "lora"]
)
def test_finetuning_lowers_the_loss_and_the_run_exports(make_trainer, base, tmp_path, lora):
    trainer = make_trainer(*lora)
    before = trainer.evaluator(trainer.model).loss
    assert (trainer.settings.optimizer.embedding_lr is None) == bool(lora)
    assert trainer.train() == 0
    load_initial_model(
        load_config(tmp_path / "run" / "config.yaml", [])
    )  # valid, with all that it resolves to
    after = losses(trainer, "val_loss")[-1]
    assert after < 0.7 * before
    assert losses(trainer, "train_loss")[-1] < losses(trainer, "train_loss")[0]
    model, tokenizer = load(tmp_path / "run")
    assert tokenizer.chat_template == "{{ bos_token }}" + TEMPLATE
    assert tokenizer.content_hash == load_tokenizer(base).content_hash
    assert not any(isinstance(module, LoraLinear) for module in model.modules())
    tokens = torch.randint(
        tokenizer.vocab_size, (2, 40), generator=torch.Generator().manual_seed(1)
    )
    with torch.no_grad():
        logits = model(tokens)
        tolerance = 1e-5 * max(
            1.0, float(logits.abs().max())
        )  # as verify_export(); here logits reach 30
        torch.testing.assert_close(logits, trainer.model.eval()(tokens), rtol=0, atol=1e-5)
        (tmp_path / "out").mkdir()
        save_pretrained(model, tokenizer, tmp_path / "out")
        hf_model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        torch.testing.assert_close(hf_model(tokens).logits, logits, rtol=0, atol=tolerance)


def test_assistant_only_loss_gives_masked_positions_no_gradient(make_trainer):
    """The head's input has a gradient exactly where a target counts, and the loss is the sum over
    these positions."""
    trainer = make_trainer()
    batch = trainer.loader.batch(0)
    head_inputs = []

    def record(module, args, out):
        out.retain_grad()
        head_inputs.append(out)

    hook = trainer.model.norm.register_forward_hook(record)
    loss_sum, count = trainer.model(batch[0], targets=batch[1])
    loss_sum.backward()
    hook.remove()
    counted = batch[1] >= 0
    assert 0 < counted.sum() == count < counted.numel() / 3
    sizes = head_inputs[0].grad.abs().sum(dim=-1)
    assert (sizes[~counted] == 0).all()
    assert (sizes[counted] > 0).all()
    with torch.no_grad():
        nats = torch.nn.functional.cross_entropy(
            trainer.model(batch[0])[counted], batch[1][counted], reduction="sum"
        )
    torch.testing.assert_close(loss_sum, nats)
    ids = [
        tokens[row].tolist()
        for tokens, row in ((batch[1][i], counted[i]) for i in range(len(counted)))
    ]
    answers = [trainer.corpus.tokenizer.decode(row) for row in ids]
    assert all(answer.startswith("it is ") and "what" not in answer for answer in answers)


def test_zero_lora_keeps_logits_and_merging_keeps_them_too():
    model, tokens = random_model(attention_bias=True, qk_norm=False), torch.randint(61, (2, 30))
    with torch.no_grad():
        before = model(tokens)
        add_lora(model, 4, 2.0)
        assert torch.equal(model(tokens), before)
        for module in model.modules():
            if isinstance(module, LoraLinear):
                module.lora_B.normal_(0, 0.3)
        unmerged = model(tokens)
        assert (unmerged - before).abs().max() > 0.1
        merge_lora(model)
        torch.testing.assert_close(model(tokens), unmerged, rtol=0, atol=2e-5)
    assert not any("lora" in name for name in model.state_dict())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_lora_trains_adapters_only(make_trainer, base):
    trainer = make_trainer("train.lora_rank=2", "train.max_steps=5")
    frozen = {name: p.clone() for name, p in trainer.model.named_parameters() if "lora" not in name}
    assert {name for name in trainer.step.optimizers.tensors() if "lora" not in name} == set()
    trainer.train()
    for name, parameter in trainer.model.named_parameters():
        if "lora" in name:
            assert parameter.requires_grad
            assert parameter.abs().sum() > 0
        else:
            assert torch.equal(parameter, frozen[name])
            assert parameter.grad is None
    names = {name for name in trainer.step.optimizers.tensors() if name.startswith("optimizer.")}
    assert all("lora" in name for name in names)
    assert (
        len(names) == 3 * 2 * 7 * 2
    )  # three tensors of AdamW, A and B, seven matrices, two layers


@pytest.mark.parametrize("lora", [[], ["train.lora_rank=2"]], ids=["full", "lora"])
def test_resuming_is_bitwise_without_the_init_from_folder(make_trainer, base, tmp_path, lora):
    whole = make_trainer(*lora, "train.max_steps=8", "train.schedule=cosine", folder="whole")
    whole.train()
    moved = shutil.copytree(base, tmp_path / "base")
    given = [*lora, f"run.init_from={moved}", "train.schedule=cosine", "train.max_steps=8"]
    first = make_trainer(*given, folder="parts")
    first.bar = tqdm(disable=True)
    for _ in range(3):
        first.train_step()
    first.save()
    first.batches.close()
    first.checkpoints.close()
    first.run.unlock()
    shutil.rmtree(moved)
    second = make_trainer(*given, f"run.init_from={moved}/", folder="parts")  # the same folder
    assert second.state.step == 3
    second.train()
    ours = [load_file(sorted((tmp_path / run / "checkpoints").glob("step-*"))[-1] / "model.safetensors")
            for run in ("whole", "parts")]  # fmt: skip
    assert ours[0].keys() == ours[1].keys()
    assert all(torch.equal(ours[0][name], ours[1][name]) for name in ours[0])


def test_peft_loads_exported_adapters(make_trainer, base, tmp_path):
    peft = pytest.importorskip("peft")
    make_trainer("train.lora_rank=3", "train.lora_alpha=12", "train.max_steps=10").train()
    checkpoint = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))[-1]
    (tmp_path / "adapter").mkdir()
    model, _ = load(tmp_path / "run")
    save_adapter(checkpoint, model.config, base, tmp_path / "adapter")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base)
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    tokens = torch.randint(model.config.vocab_size, (2, 40))
    with torch.no_grad():
        ours = model(tokens)
        assert (ours - load(base)[0](tokens)).abs().max() > 1e-3
        torch.testing.assert_close(theirs(tokens).logits, ours, rtol=0, atol=1e-5)
        torch.testing.assert_close(
            theirs.merge_and_unload()(tokens).logits, ours, rtol=0, atol=1e-5
        )
    again, tokenizer = load(tmp_path / "adapter")
    assert tokenizer.chat_template == "{{ bos_token }}" + TEMPLATE  # the base's
    torch.testing.assert_close(again(tokens), ours, rtol=0, atol=1e-5)
    make_trainer("train.max_steps=1", folder="plain").train()
    plain = next((tmp_path / "plain" / "checkpoints").glob("step-*"))
    with pytest.raises(UserError, match="has no adapters"):
        save_adapter(plain, model.config, base, tmp_path / "adapter")
    with pytest.raises(
        UserError, match=r"model.max_seq_len is 999 but .* which an adapter cannot change"
    ):
        save_adapter(
            checkpoint,
            dataclasses.replace(model.config, max_seq_len=999),
            base,
            tmp_path / "adapter",
        )
    with pytest.raises(
        UserError, match=r"model.attention_temperature is 2.0 but 1.0 in .* which an adapter cannot"
    ):
        save_adapter(
            checkpoint, dataclasses.replace(model.config, attention_temperature=2.0), base, tmp_path
        )


@pytest.mark.parametrize("rslora", [False, True])
def test_load_adapters_made_by_peft(base, tmp_path, rslora):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], use_rslora=rslora,
                             init_lora_weights=False)  # fmt: skip
    theirs = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(base), config
    ).eval()
    theirs.save_pretrained(tmp_path)
    ours, folder = load_adapter(tmp_path)
    assert folder == base
    tokens = torch.randint(ours.config.vocab_size, (2, 40))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-4)
    values = json.loads((tmp_path / "adapter_config.json").read_text())
    for change, message in [({"use_dora": True}, "use_dora is True"), ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
                            ({"base_model_name_or_path": "meta/none"}, "does not exist"),
                            ({"base_model_name_or_path": "x" * 999}, "does not exist"),
                            ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
                            ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
                            ({"layers_to_transform": 0}, "layers_to_transform is 0"),
                            ({"init_lora_weights": "pissa"}, "changes the base model"),
                            ({"target_modules": ["q_proj"]}, "contradicts r or target_modules"),
                            ({"target_modules": "q(_proj"}, "target_modules"),
                            ({"r": 8}, "contradicts r or target_modules"),
                            ({"target_modules": 7}, "target_modules is 7; use a list"),
                            ({"lora_alpha": float("nan")}, "lora_alpha")]:  # fmt: skip
        (tmp_path / "adapter_config.json").write_text(json.dumps(values | change))
        with pytest.raises(UserError, match=message):
            load(tmp_path)


@pytest.mark.parametrize("change", ["edited", "added", "left out", "moved", "gone"])
def test_what_a_chat_templates_file_holds_decides(make_trainer, tmp_path, capsys, change):
    file, moved = tmp_path / "chat.jinja", tmp_path / "moved.jinja"
    file.write_text("A talk.\n" + TEMPLATE)
    given = [f"data.chat_template={file}"]
    make_trainer(*([] if change == "added" else given), "train.max_steps=1").train()
    refusal = (
        r"^data.chat_template is .* started with .*; undo the change, choose another run.dir, or"
    )
    if change == "edited":
        file.write_text(file.read_text().replace("A talk", "Talk"))
        refusal = rf"^data.chat_template={file} has changed since the run in {tmp_path / 'run'} started; undo the change"
    elif change == "left out":
        given = []
    elif change == "moved":
        given = [f"data.chat_template={file.rename(moved)}"]
    elif change == "gone":
        file.unlink()
    capsys.readouterr()
    if change in ("moved", "gone"):
        assert make_trainer(*given, "train.max_steps=2").train() == 0
        said = f"data.chat_template={file} does not exist; using the run's copy of it"
        assert capsys.readouterr().err.splitlines().count(said) == (change == "gone")
        return
    with pytest.raises(UserError, match=refusal):
        make_trainer(*given, "train.max_steps=2")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.n_layers=3"], "model.n_layers is 3, but the model in run.init_from="),
        (["data.tokenizer=byte"], "data.tokenizer=byte is not the tokenizer of run.init_from"),
        (["data.seq_len=100"], "longer than the context of the model in run.init_from"),
        (["train.lora_rank=4", "optimizer.name=muon"], "train.lora_rank needs"),
        (
            ["train.lora_rank=4", "optimizer.norm_lr=0.1"],
            "optimizer.norm_lr has no effect with train.lora_rank",
        ),
        (["train.lora_alpha=4"], "train.lora_alpha has no effect without"),
        (["run.init_from=null", "train.lora_rank=2"], "train.lora_rank needs"),
        (["run.init_from=nowhere"], "nowhere does not exist"),
        (["data.chat_template=nowhere.jinja"], "nowhere.jinja is not a file"),
        (["run.init_from=null", "data.chat_template=x.jinja"], "needs an existing tokenizer"),
        (["run.init_from=null", "data.tokenizer=byte"], "need a chat template"),
        (["train.lora_rank=33"], "train.lora_rank is 33; use at most d_model=32"),
        (["model.attn_logit_softcap=5"], "model.attn_logit_softcap is 5.0, but .* has null"),
    ],
)
def test_configs_that_contradict_the_initial_model_are_refused(
    make_trainer, tmp_path, overrides, message
):
    with pytest.raises(UserError, match=message):
        make_trainer(*overrides)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_the_context_is_the_initial_models_where_it_is_not_set(
    make_trainer, tmp_path, conversations, base
):
    """configs/finetune.yaml, as its header says, on a model whose context is shorter than the
    default; and again."""
    for steps in (1, 2):
        config = load_config(ROOT / "configs" / "finetune.yaml", [
            f"run.init_from={base}", f"data.path={conversations}", f"run.dir={tmp_path / 'run'}",
            f"data.cache_dir={tmp_path}", f"train.max_steps={steps}", "train.precision=fp32", "train.device=cpu",
        ])  # fmt: skip
        trainer = build_trainer(config)
        assert trainer.settings.data.seq_len == trainer.settings.model.max_seq_len == 64
        assert trainer.train() == 0
    assert trainer.state.step == 2
    longer = load_initial_model(validate_config({"run": {"init_from": str(base)}, "model": {"max_seq_len": 512},
                                                 "train": {"max_steps": 1}}))[0]  # fmt: skip
    assert longer.data.seq_len == 256


def test_a_plan_does_not_advise_another_size_for_the_initial_model(base, conversations, tmp_path):
    config = load_config(ROOT / "configs" / "finetune.yaml", [
        f"run.init_from={base}", f"data.path={conversations}", f"data.cache_dir={tmp_path}", "train.device=cpu",
        "train.max_steps=1", "train.batch_size=1",
    ])  # fmt: skip
    plan = make_plan(config, measure=False)
    assert plan["recommendation"] == ["the run fits; no changes needed"]
    assert 0 < plan["tokens"] < 64  # a sequence has 64, of which answers alone are learned
    assert f"{plan['tokens']} of 64 trained on, in 1 steps, 0." in format_plan(plan)
    assert "optimal" not in format_plan(plan)


def test_context_length_and_dropout_may_change(make_trainer):
    trainer = make_trainer("model.max_seq_len=128", "model.dropout=0.1", "data.seq_len=80",
                       "model.attention_temperature=2",
                       "model.rope_scaling={type: yarn, factor: 2, original_max_seq_len: 64}")  # fmt: skip
    assert trainer.model.config.max_seq_len == 128
    assert trainer.model.rope.scaling.type == "yarn"
    assert trainer.model.dropout.p == 0.1
    assert trainer.model.blocks[0].attention.scale == trainer.model.config.head_dim**-0.5 / 2
    trainer.batches.close()
    trainer.checkpoints.close()


def test_default_learning_rates_of_finetuning(make_trainer):
    rates = {}
    for name, given in {"whole": [], "lora": ["train.lora_rank=2"]}.items():
        trainer = make_trainer("optimizer.lr=null", "train.batch_size=16", *given, folder=name)
        rates[name] = trainer.settings.optimizer.lr
        assert trainer.settings.optimizer.name == "adamw"
        trainer.batches.close()
        trainer.checkpoints.close()
        trainer.run.unlock()
    assert rates == pytest.approx({"whole": 0.1 / 32, "lora": 1 / 32})


def test_lora_step_in_bf16_with_activation_checkpointing(make_trainer):
    trainer = make_trainer(
        "train.lora_rank=2",
        "train.precision=bf16",
        "train.checkpoint_every_n_blocks=1",
        "train.max_steps=2",
    )
    loss, norm = trainer.step(Batch(*trainer.loader.batch(0), 50), 1.0)
    assert isinstance(trainer.step, TrainingStep)
    assert torch.isfinite(loss)
    assert norm > 0
    trainer.batches.close()
    trainer.checkpoints.close()


@pytest.fixture
def rare_answers(tmp_path):
    """Conversations whose questions mostly fill their windows, so that these hold no answer."""
    path = tmp_path / "rare.jsonl"
    talks = []
    for i in range(60):
        n_times = 1 if i % 4 == 0 else 40
        talks.append([("user", f"what is {i}? " * n_times), ("assistant", f"it is {i}.")])
    rows = [
        {"messages": [{"role": role, "content": text} for role, text in talk]} for talk in talks
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        f"data.path={path}",
        "data.packing=contiguous",
        "train.batch_size=1",
        "train.micro_batch_size=1",
    ]


def test_steps_without_targets_are_not_steps_of_loss_zero(
    make_trainer, tmp_path, rare_answers, monkeypatch
):
    losses, n_targets, call = [], [], TrainingStep.__call__

    def recorded(self, batch, multiplier):
        loss, norm = call(self, batch, multiplier)
        losses.append(loss.item())
        n_targets.append(batch.n_targets)
        return loss, norm

    monkeypatch.setattr(TrainingStep, "__call__", recorded)
    trainer = make_trainer(*rare_answers, "train.max_steps=40", "train.log_every=4")
    assert trainer.train() == 0
    assert 0 in n_targets
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    logged = {line["step"]: line["train_loss"] for line in lines if "train_loss" in line}
    for end in range(4, 41, 4):
        real = [loss for loss, n in zip(losses[end - 4 : end], n_targets[end - 4 : end]) if n]
        assert (end in logged) == bool(real)
        if real:
            assert logged[end] == pytest.approx(sum(real) / len(real))


def test_validation_without_targets_is_refused_before_training(
    make_trainer, tmp_path, rare_answers
):
    with pytest.raises(
        UserError, match=r"^the 1 validation sequences have no targets: .*eval_sequences or"
    ):
        make_trainer(*rare_answers, "train.eval_sequences=1")
    assert not (tmp_path / "run").exists()


def adapter_flops(rank, T):
    """FLOPs per position of `base` with adapters: 4 for a frozen weight, 6 for a trained one."""
    in_out = [(32, 32), (32, 16), (32, 16), (32, 32), (32, 64), (32, 64), (64, 32)]
    matrices = 2 * sum(n_in * n_out for n_in, n_out in in_out)
    adapters = 2 * sum(rank * (n_in + n_out) for n_in, n_out in in_out)
    return 4 * (matrices + 5 * 32) + 6 * adapters + 12 * 2 * 32 * T  # with the gains of norms


@pytest.mark.parametrize("rank", [None, 4])
def test_speeds_count_positions_and_the_flops_that_are_computed(make_trainer, tmp_path, rank):
    """Also after a resume. 8 sequences of 48 positions a step, most of which have no target."""
    lora = [] if rank is None else [f"train.lora_rank={rank}"]
    for max_steps in (4, 10):
        options = ["train.log_every=2", "train.decay_fraction=0", f"train.max_steps={max_steps}"]
        trainer = make_trainer(*lora, *options)
        assert trainer.train() == 0
    lines = [line for line in trainer.run.read_metrics() if "train_loss" in line]
    assert [line["step"] for line in lines] == [2, 4, 6, 8, 10]
    head = trainer.corpus.tokenizer.vocab_size * 32
    flops = adapter_flops(4, 48) + 4 * head
    if rank is None:
        flops = sum(p.numel() for p in trainer.model.parameters()) * 6 - 6 * head + 12 * 2 * 32 * 48
    for before, line in zip([{"tokens": 0, "elapsed_s": 0.0}, *lines], lines):
        seconds = line["elapsed_s"] - before["elapsed_s"]
        if line["step"] == 6:  # the time before the resume is not in it
            seconds = 2 * 8 * 48 / line["tokens_per_second"]
        assert line["tokens_per_second"] * seconds == pytest.approx(2 * 8 * 48)
        trained = line["tokens"] - before["tokens"]
        assert 0 < trained < 2 * 8 * 48 / 2
        assert line["trained_tokens_per_second"] * seconds == pytest.approx(trained)
        assert line["flops_per_second"] * seconds == pytest.approx(2 * 8 * 48 * flops)
        assert line["processed_tokens"] == line["step"] * 8 * 48


def test_the_end_and_the_bar_say_what_was_trained_of_what_was_processed(make_trainer, capsys):
    trainer = make_trainer("train.max_steps=20", "train.log_every=1")
    assert trainer.train() == 0
    printed = capsys.readouterr()
    tokens = trainer.state.tokens
    said = f"finished: 20 steps, {20 * 8 * 48:,} tokens, {tokens:,} of which were trained on, "
    assert said in printed.out
    assert re.search(r"[\d,]+ tokens/s \([\d,]+ trained on\)", printed.err)


@pytest.mark.parametrize("rank", [None, 4])
def test_a_plan_counts_as_the_run_does(make_trainer, tmp_path, rank):
    lora = [] if rank is None else [f"train.lora_rank={rank}"]
    trainer = make_trainer(*lora, "train.max_steps=12", "train.log_every=12")
    assert trainer.train() == 0
    (line,) = [line for line in trainer.run.read_metrics() if "train_loss" in line]
    plan = make_plan(load_config(tmp_path / "run" / "config.yaml", ["model.vocab_size=null"]))
    assert plan["tokens_per_second"] * plan["step_s"] == pytest.approx(8 * 48)
    expected = plan["trained_tokens_per_second"] * plan["step_s"]
    assert expected == pytest.approx(plan["tokens"] / 12, rel=0.01)
    assert plan["processed_tokens"] == line["processed_tokens"] == 12 * 8 * 48
    assert plan["tokens"] == pytest.approx(line["tokens"], rel=0.05)
    per_token = line["flops_per_second"] / line["tokens_per_second"]
    assert plan["flops_per_token"] == pytest.approx(per_token)
    text = format_plan(plan)
    assert re.search(r"speed .* tokens/s, [\d,]+ of them trained on", text)
    assert f"{plan['tokens']:,} of 4,608 trained on, in 12 steps" in text
