"""What needs a GPU: skipped, visibly, where there is none."""

import json

import pytest
import torch
from conftest import ROOT, run_script

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

# The 124M config on text that needs no network.
PYDOCS = [
    ROOT / "train.py",
    ROOT / "configs" / "gpu-124m.yaml",
    "data.source=pysource",
    "data.path=null",
    "data.config=null",
    "data.max_documents=null",
    "data.tokenizer=bpe:8192",
    "data.val_fraction=0.02",
    "model.vocab_size=null",
    "train.batch_size=32",
    "train.micro_batch_size=16",
    "train.eval_sequences=32",
    "train.sample_every=null",
    "train.log_every=1",
]


def losses(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["train_loss"] for line in lines if "train_loss" in line]


def test_bf16_compiled_follows_fp32_resumes_and_samples(tmp_path):
    runs = {}
    for name, options in {
        "bf16": ["train.precision=bf16", "train.compile=true"],
        "fp32": ["train.precision=fp32", "train.compile=false"],
    }.items():
        runs[name] = tmp_path / name
        common = [
            *PYDOCS,
            *options,
            f"run.dir={runs[name]}",
            f"data.cache_dir={tmp_path / 'cache'}",
        ]
        assert run_script(*common, "train.max_steps=150", timeout=900).returncode == 0
        done = run_script(*common, "train.max_steps=200", timeout=900)
        assert done.returncode == 0, done.stderr
        assert "resuming from step 150" in done.stderr
    bf16, fp32 = losses(runs["bf16"]), losses(runs["fp32"])
    assert len(bf16) == len(fp32) == 200
    assert sum(bf16[-20:]) / 20 == pytest.approx(sum(fp32[-20:]) / 20, rel=0.02)
    done = run_script(
        ROOT / "generate.py",
        runs["bf16"],
        "--device",
        "cuda",
        "--prompt",
        "def ",
        "--max-new-tokens",
        "20",
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > len("def \n")


def test_cached_logits_equal_uncached_ones(random_model):
    model = random_model().cuda()
    tokens = torch.randint(0, 61, (3, 40), device="cuda")
    with torch.no_grad():
        full = model(tokens)
    cache = model.new_cache(3, 40)
    pieces = [model(chunk, cache=cache) for chunk in tokens.split([7, 1, 20, 12], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), full, rtol=0, atol=1e-4)


@pytest.mark.parametrize("bits", [None, 8, 4])
def test_compiled_decoding_gives_the_same_texts_with_two_programs_and_never_waits(
    random_model, bits
):
    from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
    from thinker.generation import Generator, SamplingParams
    from thinker.generation.chat.conversation import Conversation

    model, tokenizer = (
        random_model(vocab_size=264, max_seq_len=300, norm_mean=0.3).cuda(),
        make_tokenizer("byte", []),
    )
    plain, compiled = (
        Generator(model, tokenizer, bits=bits, compile=compile) for compile in (False, True)
    )
    chats, counters = (
        [Conversation(plain), Conversation(compiled)],
        torch._dynamo.utils.counters["stats"],
    )
    before = counters["unique_graphs"]
    for lengths in ((9, 9, 9), (30, 3, 17, 8, 25), (140, 12), (5,), (7,)):
        prompts = ["The cat", "a", "The cat", "", "Once upon a time"][: len(lengths)]
        params = [SamplingParams(max_new_tokens=n, seed=n) for n in lengths]
        known, ours = (generator.generate(prompts, params) for generator in (plain, compiled))
        assert [one.token_ids for one in ours] == [one.token_ids for one in known]
        replies = ["".join(chat.reply("Hello.", params[0])) for chat in chats]
        assert replies[0] == replies[1]
    assert counters["unique_graphs"] - before == 2
    cache = compiled.model.new_cache(3, 20)
    compiled.model(torch.ones(3, 5, dtype=int, device="cuda"), cache=cache)
    cache.truncate([5, 2, 3])
    tokens = torch.ones(3, 1, dtype=int, device="cuda")
    compiled.decoder.step(tokens, cache)  # captures
    torch.cuda.set_sync_debug_mode("error")
    compiled.decoder.step(tokens, cache)
    torch.cuda.set_sync_debug_mode("default")


def test_a_proof_leaves_the_random_numbers_of_the_gpu_alone():
    from thinker.model import proof

    torch.manual_seed(1)
    known = torch.rand(3, device="cuda")
    torch.manual_seed(1)
    with proof.own_random_numbers():
        torch.rand(5, device="cuda")
    assert torch.equal(torch.rand(3, device="cuda"), known)


def test_a_bad_step_changes_no_bit_although_the_host_does_not_know():
    from thinker.data.batches.prefetch import Batch
    from thinker.model import ThinkerConfig
    from thinker.training.config.load import validate_config
    from thinker.training.settings.resolve import resolve_settings
    from thinker.training.step import TrainingStep, build_model

    config = ThinkerConfig(vocab_size=50, d_model=32, n_layers=2, n_heads=2, max_seq_len=16)
    train = {
        "precision": "fp32",
        "compile": False,
        "micro_batch_size": 4,
        "batch_size": 4,
        "max_steps": 9,
    }
    device = torch.device("cuda")
    settings = resolve_settings(
        validate_config({"train": {**train, "max_nonfinite_steps": 1}}), config, device
    )
    step = TrainingStep(build_model(config, 1, device), settings)
    tokens = torch.randint(50, (4, 17))
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), 64)
    step(batch, 1.0)
    everything = {**step.model.state_dict(), **step.optimizers.tensors()}
    before = {name: tensor.clone() for name, tensor in everything.items()}
    hook = step.model.norm.weight.register_hook(lambda gradient: gradient * float("nan"))
    torch.cuda.set_sync_debug_mode("error")
    step(batch, 1.0)
    torch.cuda.set_sync_debug_mode("default")
    hook.remove()
    assert all(torch.equal(tensor, before[name]) for name, tensor in everything.items())
    step(batch, 1.0)
    assert not torch.equal(step.model.lm_head.weight, before["lm_head.weight"])


def random_inputs(text, features, dtype, B=2, H=4, K=2, T=1100, D=64):
    """A pattern, TokenInfo, ALiBi slopes, soft-cap; leaves q, k, v (and sinks) in fp32 that `dtype`
    holds exactly."""
    from thinker.model.patterns.pattern import TokenInfo
    from thinker.model.patterns.pattern_parser import parse_pattern
    from thinker.model.positions import alibi_slopes

    generator = torch.Generator().manual_seed(0)
    position, document, token = torch.arange(T), None, None
    if "documents" in features:
        begins = torch.rand(B, T, generator=generator) < 5 / T
        begins[:, 0] = True
        document = begins.cumsum(1)
        position = position - torch.where(begins, position, 0).cummax(1).values
    if "token" in text:
        token = torch.randint(200, (B, T), generator=generator)
    tokens = TokenInfo(*(x if x is None else x.cuda() for x in (position, document, token)))
    shapes = [(B, H, T, D), (B, K, T, D), (B, K, T, D)] + [(H,)] * ("sinks" in features)
    leaves = [
        torch.randn(s, generator=generator).to("cuda", dtype).float().requires_grad_()
        for s in shapes
    ]
    alibi, attn_logit_softcap = (
        alibi_slopes(H, "cuda") if "alibi" in features else None,
        1.5 if "attn_logit_softcap" in features else None,
    )
    return parse_pattern(text), tokens, alibi, attn_logit_softcap, leaves


def values_and_gradients(kernel, dtype, pattern, tokens, alibi, attn_logit_softcap, leaves):
    from thinker.model.attention_dispatch import attend
    from thinker.model.masks import MaskBuilder

    q, k, v, *sinks = leaves
    plain = attn_logit_softcap is None and not sinks
    mask = MaskBuilder(q.shape[1], dtype, alibi, kernel, plain).build(pattern, tokens, tokens, True)
    y = attend(*(x.to(dtype) for x in (q, k, v)), mask, None, attn_logit_softcap, *sinks)
    weight = torch.randn(y.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda")
    return mask.kernel, [y.detach(), *torch.autograd.grad((y * weight).sum(), leaves)]


def assert_near(ours, known, tolerance):
    for mine, right in zip(
        ours, known, strict=True
    ):  # kernels give gradients of 1e-4 where they are 0
        assert (mine - right).norm() <= tolerance * (right.norm() + 0.05)


@pytest.fixture
def _exact_fp32():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


FLEX = [
    ("window(100)", "", 64),
    ("window(100)", "alibi documents", 64),
    ("longformer(50, 4, 3)", "attn_logit_softcap sinks", 64),
    ("bigbird(50, 3, 64, 2, 1)", "", 16),
    ("heads(window(60), strided(33))", "documents", 64),
    ("block(64, 2)", "sinks", 8),
    ("prefix(300)", "attn_logit_softcap", 36),
    ("token(3)", "sinks alibi", 64),  # some queries see nothing
    ("full", "documents alibi attn_logit_softcap sinks", 128),
]


@pytest.mark.parametrize(("text", "features", "width"), FLEX)
@pytest.mark.usefixtures("_exact_fp32")
def test_flex_equals_the_reference(text, features, width):
    # Twelve heads: the kernel counts them in 32 bits, which the random blocks' hash overflows from
    # the eleventh on.
    given = random_inputs(text, features, torch.float32, H=12, K=4, D=width)
    _, known = values_and_gradients("reference", torch.float32, *given)
    assert_near(values_and_gradients("flex", torch.float32, *given)[1], known, 1e-4)
    given = random_inputs(text, features, torch.bfloat16, H=12, K=4, D=width)
    _, known = values_and_gradients("reference", torch.float32, *given)
    chosen, ours = values_and_gradients("auto", torch.bfloat16, *given)
    assert chosen == "flex"
    assert_near(ours, known, 0.02)


@pytest.mark.usefixtures("_exact_fp32")
def test_flex_takes_further_lengths_and_patterns_without_end():
    for text, T in [
        ("window(9)", 128),
        ("window(9)", 200),
        *((f"window({w})", 1024) for w in range(9, 18)),
    ]:
        given = random_inputs(text, "", torch.float32, T=T)
        _, known = values_and_gradients("reference", torch.float32, *given)
        assert_near(values_and_gradients("flex", torch.float32, *given)[1], known, 1e-4)


def test_flex_of_a_long_sequence_holds_neither_scores_nor_mask():
    from thinker.model.attention_dispatch import attend
    from thinker.model.masks import MaskBuilder
    from thinker.model.patterns.pattern import TokenInfo
    from thinker.model.patterns.pattern_parser import parse_pattern

    tokens = TokenInfo(torch.arange(2**15, device="cuda"))
    q = torch.randn(1, 2, 2**15, 64, device="cuda", dtype=torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    mask = MaskBuilder(2, q.dtype).build(
        parse_pattern("longformer(256, 4, 4)"), tokens, tokens, True
    )
    assert mask.kernel == "flex"
    assert torch.isfinite(attend(q, q, q, mask)).all()
    assert (
        torch.cuda.max_memory_allocated() - before < 3 * 2**30
    )  # positions' differences alone would be 8 GiB


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 4, 64), (6, 2, 36), (4, 1, 128)])
@pytest.mark.parametrize("text", ["full", "window(1)", "window(100)", "window(5000)"])
def test_varlen_equals_the_reference(text, heads, kv_heads, width, dtype):
    given = random_inputs(text, "documents", dtype, H=heads, K=kv_heads, D=width)
    _, known = values_and_gradients("reference", torch.float32, *given)
    chosen, ours = values_and_gradients("auto", dtype, *given)
    assert chosen == "varlen"
    assert_near(ours, known, 0.02)


@pytest.mark.parametrize(
    ("attention", "isolated", "kernel"),
    [
        ("window(256)", False, "flex"),
        ("window(256)", True, "varlen"),
        ("bigbird(64, 2, 64, 2)", True, "flex"),
    ],
)
def test_training_is_the_same_by_its_kernel_by_the_mask_and_compiled(attention, isolated, kernel):
    from thinker.data.batches.prefetch import Batch
    from thinker.model import ThinkerConfig
    from thinker.training.config.load import validate_config
    from thinker.training.settings.resolve import resolve_settings
    from thinker.training.step import TrainingStep, build_model

    shape = {
        "vocab_size": 50,
        "d_model": 128,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 2,
        "head_init_std": 0.2,
    }
    config = ThinkerConfig(**shape, max_seq_len=2048, attention=attention)
    found = {}
    for name in ("reference", "plain", "compiled"):
        train = {
            "precision": "bf16",
            "compile": name == "compiled",
            "micro_batch_size": 2,
            "batch_size": 2,
        }
        device = torch.device("cuda")
        settings = resolve_settings(
            validate_config({"train": {**train, "max_steps": 9}}), config, device
        )
        step = TrainingStep(build_model(config, 1, device), settings)
        step.model.kernel = "reference" if name == "reference" else "auto"
        generator, used = torch.Generator().manual_seed(0), set()
        make_context = step.model.make_context

        def recorded(*given, make_context=make_context, used=used):
            context = make_context(*given)
            used.update(mask.kernel for mask in context.masks)
            return context

        step.model.make_context = recorded
        for number in range(3):
            tokens = torch.randint(50, (2, 2049), generator=generator)
            documents = (
                (torch.rand(2, 2048, generator=generator) < (number + 1) / 400).cumsum(1)
                if isolated
                else None
            )
            batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), 4096, documents)
            found.setdefault(name, []).append([float(x) for x in step(batch, 1.0)])
        assert used == {"reference" if name == "reference" else kernel}
    for name in ("plain", "compiled"):
        for mine, right in zip(found[name], found["reference"], strict=True):
            assert mine == pytest.approx(right, rel=0.02)  # loss, and the gradient's norm


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_two_gpus_learn_as_one_and_save_for_one(tmp_path, parallel):
    """NCCL: each rank on a GPU of its own, from the commands that docs/guides/scaling-out.md
    gives."""
    common = [
        "data.max_documents=200",
        "data.seq_len=64",
        "train.batch_size=8",
        "train.precision=fp32",
    ]
    common += [
        "train.compile=false",
        "optimizer.name=adamw",
        "optimizer.lr=0.003",
        "train.max_steps=20",
    ]
    common += [
        "train.max_minutes=null",
        "train.device=cuda",
        f"data.cache_dir={tmp_path / 'cache'}",
    ]
    config = ROOT / "configs" / "quickstart.yaml"
    assert (
        run_script(
            ROOT / "train.py", config, *common, f"run.dir={tmp_path / '1'}", timeout=300
        ).returncode
        == 0
    )
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        ROOT / "train.py",
        config,
    ]
    options = [f"train.parallel={parallel}", "train.save_sharded=true", f"run.dir={tmp_path / '2'}"]
    done = run_script(*torchrun, *common, *options, timeout=300)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "1"), rel=1e-5)
    assert run_script(ROOT / "generate.py", tmp_path / "2", "--max-new-tokens", "8").returncode == 0


@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.usefixtures("_exact_fp32")
def test_head_and_loss_in_bf16_are_near_fp32(monkeypatch, is_compiled):
    """In several chunks, the last one shorter, with ignored targets."""
    from thinker.model.kernels import linear_cross_entropy as module

    monkeypatch.setattr(module, "COMPILED_CHUNK_ELEMENTS", 2**20)
    monkeypatch.setitem(module.CHUNK_ELEMENTS, "cuda", 2**20)
    generator = torch.Generator("cuda").manual_seed(0)
    options = {"generator": generator, "device": "cuda"}
    x = torch.randn(1, 1001, 256, **options).bfloat16().requires_grad_()
    weight = (torch.randn(5000, 256, **options) / 4).bfloat16().float().requires_grad_()
    targets = torch.randint(-1, 5000, (1, 1001), **options)
    ours, count = module.linear_cross_entropy(x, weight, targets, None, is_compiled)
    known = torch.nn.functional.cross_entropy(
        (x.float() @ weight.T)[0], targets[0], ignore_index=-1, reduction="sum"
    )
    assert int(count) == int((targets >= 0).sum())
    assert ours.item() == pytest.approx(known.item(), rel=1e-3)
    grads, right = (torch.autograd.grad(loss, (x, weight)) for loss in (ours, known))
    assert grads[0].dtype == torch.bfloat16
    assert grads[1].dtype == torch.float32
    assert_near([grad.float() for grad in grads], [grad.float() for grad in right], 1e-2)
