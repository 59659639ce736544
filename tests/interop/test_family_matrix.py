"""Every family with everything that Thinker does: right, or refused in one line, as the page of the
families says."""

import random

import pytest
import torch
from conftest import ROOT

transformers = pytest.importorskip("transformers")
pytest.importorskip("sentencepiece")

from batch_cases import check_equal, run_batch  # noqa: E402
from family_models import CONTEXT, NAMES, family_folder, family_model  # noqa: E402
from installed import NAMES as FEATURES  # noqa: E402

import thinker  # noqa: E402
from thinker.generation import Generator, SamplingParams  # noqa: E402
from thinker.generation.mixed_bits import matrix_names  # noqa: E402
from thinker.interop.families.abilities import ABILITIES, PLAIN, YES  # noqa: E402
from thinker.interop.families.table import FAMILIES  # noqa: E402
from thinker.interpretability import attribution  # noqa: E402
from thinker.model.lora import add_lora  # noqa: E402
from thinker.model.transformer import Thinker  # noqa: E402
from thinker.native.compiler import has_compiler  # noqa: E402
from thinker.runtime.errors import UserError  # noqa: E402
from thinker.training.config.sections import TrainConfig  # noqa: E402
from thinker.training.kernels import choose_kernels, fused_kernels  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = ["The cat", "A", "In the beginning"]
TEXT = "The cat sat on the mat, and it was a good cat. "
NO_END = -1e4


def copy_of(model):
    """A model that a test may change."""
    new = Thinker(model.config)
    new.load_state_dict(model.state_dict())
    return new.eval()


def greedy(tokenizer, n_new=64, **params):
    bias = dict.fromkeys(tokenizer.eos_ids, NO_END)
    return SamplingParams(n_new, temperature=0, logit_bias=bias, **params)


def texts(family, prompts=PROMPTS, n_new=64, **options):
    """The tokens that follow each prompt, and the generator."""
    model, tokenizer = family_model(family)
    generator = Generator(model, tokenizer, **options)
    completions = generator.generate(prompts, greedy(tokenizer, n_new))
    return [completion.token_ids for completion in completions], generator


def some_tokens(family, n=24):
    _, tokenizer = family_model(family)
    return torch.tensor([tokenizer.encode(TEXT * 3)[:n]])


@torch.no_grad()
def stepwise(generator, tokens):
    """Logits of tokens (1, T) that are read one by one, (1, T, V)."""
    cache = generator.new_cache(1, CONTEXT)
    steps = [generator.decoder.step(token, cache) for token in tokens.split(1, dim=1)]
    return torch.cat(steps, dim=1).float()


def is_near(found, known, tolerance):
    return (found - known).abs().max() <= tolerance * known.abs().max()


def generate(family):
    known, _ = texts(family, use_cache=False, compile=False)
    assert texts(family, compile=False)[0] == known
    found, generator = texts(family)
    assert found == known
    for row, prompt in enumerate(PROMPTS):
        assert texts(family, [prompt], compile=False)[0] == [known[row]]
    if "speculation" in FEATURES:
        model, _ = family_model(family)
        assert texts(family, speculate=4)[0] == known
        assert texts(family, speculate=4, draft=model)[0] == known
    if not has_compiler():
        pytest.skip("needs a C compiler")
    assert texts(family, compile=True)[0] == known
    if generator.kernel_problem:
        assert "they do not know" in generator.kernel_problem
        return PLAIN
    return YES


@torch.no_grad()
def bits(family):
    model, tokenizer = family_model(family)
    tokens = some_tokens(family)
    exact = model(tokens)
    names = matrix_names(model.config.n_layers)
    mixed = {name: (8, 4)[index % 2] for index, name in enumerate(names)}
    for chosen in (8, 4, mixed):
        rounded = Generator(model, tokenizer, bits=chosen, use_cache=False, compile=False)
        known = rounded.model(tokens)
        assert not is_near(known, exact, 1e-3)
        plain = Generator(model, tokenizer, bits=chosen, compile=False)
        assert is_near(stepwise(plain, tokens), known, 1e-4)
        # The kernels round activations, too.
        assert is_near(stepwise(Generator(model, tokenizer, bits=chosen), tokens), known, 0.2)
    for options in ({}, {"compile": False}):
        in_bf16 = Generator(model, tokenizer, dtype="bf16", **options)
        assert is_near(stepwise(in_bf16, tokens), exact, 0.15)
    return YES


def cache_in_8_bits(family):
    model, tokenizer = family_model(family)
    tokens = some_tokens(family)
    for compile in (None, False):
        generator = Generator(model, tokenizer, cache_bits=8, compile=compile)
        assert is_near(stepwise(generator, tokens), model(tokens), 0.15)
    return YES


def window(family):
    """A window longer than the text is full attention; a shorter one goes on without end."""
    known, _ = texts(family, use_cache=False, compile=False)
    assert texts(family, window=CONTEXT)[0] == known
    assert texts(family, window=CONTEXT - 2, sinks=2)[0] == known
    options = [{}, {"sinks": 4}]
    if "retrieval" in FEATURES:
        options.append({"sinks": 4, "retrieve": 2, "retrieve_block": 8})
    for more in options:
        found, _ = texts(family, PROMPTS[:1], n_new=CONTEXT + 20, window=16, **more)
        assert len(found[0]) == CONTEXT + 20
    return YES


def slide(family):
    known, _ = texts(family, PROMPTS[:1], CONTEXT + 20, slide=True, use_cache=False)
    assert texts(family, PROMPTS[:1], CONTEXT + 20, slide=True)[0] == known
    assert len(known[0]) == CONTEXT + 20
    return YES


def early_exit(family):
    known, _ = texts(family, compile=False)
    assert texts(family, early_exit=1 - 1e-9)[0] == known
    found, generator = texts(family, early_exit=1e-6)
    assert generator.decoder.mean_layers == 1
    assert len(found[0]) == 64
    return YES


def server(family):
    model, tokenizer = family_model(family)
    generator = Generator(model, tokenizer)
    numbers = random.Random(family)
    requests = []
    for seed in range(5):
        params = SamplingParams(20, temperature=0.8 * (seed % 2), seed=seed)
        requests.append((PROMPTS[seed % 3] * (1 + seed // 3), params))
    check_equal(generator, run_batch(generator, requests, numbers, max_rows=3))
    return YES


def inspect(family):
    model, tokenizer = family_model(family)
    prompt = "The cat sat on the mat and"
    for contrast in (None, 7):
        parts = attribution.direct_logit_attribution(model, some_tokens(family)[0], 3, contrast)
        total = parts.embedding + parts.heads.nansum() + parts.mlps.sum() + parts.biases
        assert total.item() == pytest.approx(parts.logit, abs=1e-4)
    report = thinker.inspect(model, tokenizer, "attribute", prompt).data
    total = report["embedding"] + report["biases"] + sum(report["mlps"])
    total += sum(map(sum, report["heads"]))
    assert total == pytest.approx(report["logit"], abs=1e-3)
    lens = attribution.logit_lens(model, some_tokens(family)[0])
    torch.testing.assert_close(lens[-1], model(some_tokens(family))[0])
    for name in ("explain", "map", "heads", "attribute", "lens"):
        report = thinker.inspect(model, tokenizer, name, prompt)
        assert report.table()
    # The same words have the same number of tokens.
    thinker.inspect(model, tokenizer, "patch", prompt, corrupt="The mat sat on the cat and")
    return YES


def prune_heads(family):
    from thinker.features.pruning import pruning

    model, _ = family_model(family)
    tokens = some_tokens(family)
    left = pruning.prune(model, [(0, 1)])
    shared = model.config.n_heads // model.config.n_kv_heads
    names = [f"blocks.0.attention.heads.{head}" for head in range(shared, 2 * shared)]
    with model.patch(dict.fromkeys(names, "zero")):
        known = model(tokens)
    assert is_near(left(tokens), known, 1e-5)
    return YES


def prune_neurons(family):
    from thinker.features.pruning import pruning, saliency, weight_pruning

    model, _ = family_model(family)
    tokens = some_tokens(family)
    targets = tokens.roll(-1, 1)
    d_ff = model.config.d_ff
    for method in saliency.METHODS:
        scores = saliency.score_parts(model, tokens, targets, method)
        kept = [score.argsort()[d_ff // 4 :] for score in scores.neurons]
        mask = torch.zeros(len(kept), d_ff)
        patches = {}
        for layer, indices in enumerate(kept):
            mask[layer, indices] = 1
            patches[f"blocks.{layer}.mlp.hidden"] = mask[layer].mul
        with model.patch(patches):
            known = model(tokens)
        assert is_near(pruning.prune_neurons(model, kept)(tokens), known, 1e-5)
        changed = copy_of(model)
        by_matrix = weight_pruning.score_weights(changed, tokens, targets, method)
        weight_pruning.zero_weights(changed, by_matrix, 0.5, by_row=method == "activation")
        assert weight_pruning.zero_share(changed) == pytest.approx(0.5, abs=0.01)
        assert changed(tokens).isfinite().all()
    return YES


def prune_layers(family):
    from thinker.features.pruning import pruning

    model, _ = family_model(family)
    tokens = some_tokens(family)
    left = pruning.prune_layers(model, [1])
    with model.record("blocks.0") as cache:
        model(tokens)
    with model.patch({"blocks.1": lambda x: cache["blocks.0"]}):
        known = model(tokens)
    assert is_near(left(tokens), known, 1e-5)
    return YES


def teach(family):
    """Its own teacher has nothing to teach, whatever its LM head does."""
    from thinker.features.distillation.distillation import LogitLoss
    from thinker.features.distillation.keys import DistillConfig

    model, _ = family_model(family)
    student = copy_of(model)
    tokens = some_tokens(family)
    targets = tokens.roll(-1, 1)
    with torch.no_grad():
        x = model.forward_blocks(tokens, model.make_context(tokens, tokens)).flatten(0, 1)
    options = DistillConfig(teacher="itself", weight=1.0, temperature=2.0)
    loss = LogitLoss(options, (x, model.lm_head), None)
    total, _ = student(tokens, targets=targets, chunk_loss=loss)
    total.backward()
    gradients = [p.grad.abs().max() for p in student.parameters() if p.grad is not None]
    assert abs(total.item()) < 1e-3
    assert max(gradients) < 1e-3
    with torch.no_grad():
        for parameter in student.blocks.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    student.zero_grad()
    loss = LogitLoss(options, (x, model.lm_head), None)
    student(tokens, targets=targets, chunk_loss=loss)[0].backward()
    found = [p.grad.clone() for p in student.parameters() if p.grad is not None]
    student.zero_grad()
    plain = torch.nn.functional.kl_div(
        (student(tokens) / 2).log_softmax(-1),
        (model(tokens).detach() / 2).log_softmax(-1),
        reduction="sum",
        log_target=True,
    )
    (4 * plain).backward()
    known = [p.grad for p in student.parameters() if p.grad is not None]
    largest = max(grad.abs().max() for grad in known)
    for ours, theirs in zip(found, known, strict=True):
        assert (ours - theirs).abs().max() < 1e-4 * largest
    return YES


def train(family):
    """A step of AdamW lowers the loss, in full and with adapters; kernels change no gradient."""
    base, _ = family_model(family)
    tokens = some_tokens(family)
    targets = tokens.roll(-1, 1)
    for rank in (None, 2):
        model = copy_of(base).train()
        if rank is not None:
            add_lora(model, rank)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        kernels, _ = choose_kernels(model, TrainConfig(), torch.device("cpu"))
        gradients = []
        for forms in (None, kernels):
            with fused_kernels(model, forms):
                loss, _ = model(tokens, targets=targets)
                gradients.append(torch.autograd.grad(loss, trained))
        largest = max(gradient.abs().max() for gradient in gradients[0])
        for plain, fast in zip(*gradients):
            assert (plain - fast).abs().max() <= 1e-4 * largest
        optimizer = torch.optim.AdamW(trained, lr=1e-3)
        losses = []
        for _ in range(6):
            loss, n_targets = model(tokens, targets=targets)
            optimizer.zero_grad()
            (loss / n_targets).backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0]
    return YES


@torch.no_grad()
def evaluate(family):
    """The likelihood of a text is that of transformers."""
    model, tokenizer = family_model(family)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(family_folder(family))

    def likelihood(tokens):
        """ln P of all tokens but the first."""
        log_probs = theirs(torch.tensor([tokens])).logits[0].log_softmax(-1)
        return log_probs[:-1].gather(1, torch.tensor(tokens[1:])[:, None]).sum().item()

    score = Generator(model, tokenizer).score(TEXT)
    before = tokenizer.bos_prefix or [tokenizer.bos_id]
    assert -score.nats == pytest.approx(likelihood([*before, *score.token_ids]), rel=1e-4)
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance

    from thinker.evaluation.lm_eval_harness import ThinkerLM

    harness = ThinkerLM(model, tokenizer)
    request = Instance("loglikelihood", {}, ("The cat sat", " on the mat"), 0)
    ((nats, _),) = harness.loglikelihood([request])
    context = harness.tok_encode("The cat sat", add_special_tokens=True)
    whole = harness.tok_encode("The cat sat on the mat", add_special_tokens=True)
    assert nats == pytest.approx(likelihood(whole) - likelihood(context), abs=1e-3)
    return YES


CHECKS = {
    "generate": generate,
    "bits": bits,
    "cache in 8 bits": cache_in_8_bits,
    "window": window,
    "slide": slide,
    "early exit": early_exit,
    "server": server,
    "inspect": inspect,
    "prune heads": prune_heads,
    "prune neurons": prune_neurons,
    "prune layers": prune_layers,
    "teach": teach,
    "train": train,
    "evaluate": evaluate,
}
NEEDS = {"early exit": "early_exit", "teach": "distillation"}
NEEDS |= dict.fromkeys(("prune heads", "prune neurons", "prune layers"), "pruning")
# In `make test`: those that differ most from the default block, where a check is fast.
FAST_FAMILIES = ("gpt2", "gemma2", "cohere", "olmo2")
FAST_CHECKS = ("window", "inspect", "prune heads", "prune layers", "teach", "evaluate")


def cases():
    for ability in ABILITIES:
        for family in NAMES:
            is_fast = family in FAST_FAMILIES and ability.name in FAST_CHECKS
            marks = () if is_fast else pytest.mark.more
            yield pytest.param(ability, family, marks=marks, id=f"{ability.name}-{family}")


@pytest.mark.parametrize(("ability", "family"), list(cases()))
def test_a_family_does_what_the_page_says(ability, family):
    if NEEDS.get(ability.name, "early_exit") not in FEATURES:
        pytest.skip(f"needs the feature {NEEDS[ability.name]}")
    if family not in ability.refused:
        assert CHECKS[ability.name](family) == ability.outcome(family)
        return
    with pytest.raises(UserError) as caught:
        CHECKS[ability.name](family)
    assert ability.refused[family] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_page_lists_every_check():
    assert [ability.name for ability in ABILITIES] == list(CHECKS)
    assert set(NAMES) == set(FAMILIES)
    page = (ROOT / "docs" / "reference" / "families.md").read_text(encoding="utf-8")
    for family in NAMES:
        assert f"| `{family}` |" in page
