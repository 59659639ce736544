"""Forms of attention from the config to the text: trained by the real command, gone on with,
sampled from."""

import json

import pytest
import torch
import yaml
from conftest import ROOT, run_script
from installed import needs

from thinker.generation import Generator, SamplingParams
from thinker.interop import load
from thinker.runtime.errors import UserError
from thinker.training.config.load import load_config

PROMPT = "Line 7: the cat number 7 sat"
FORMS = {
    "ring": ["model.attention=window(8) | global(2)", "model.positions=alibi", "model.token_shift=true"],
    "mixed": ["model.attention=[linear(16), 'heads(window(4), strided(3))']", "data.document_masking=true",
              "model.token_shift=true"],
    "letters": ["model.attention=LG", "model.window=6", "model.positions=none", "model.attention_sinks=true"],
    "prefix": ["model.attention=prefix(5)", "model.positions=learned", "model.attn_logit_softcap=30"],
}  # fmt: skip


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.stress if name == "letters" else ()) for name in FORMS
    ],
)
def trained(request, train_args, tmp_path_factory):
    """A run of each form; the mixed one was stopped half-way and gone on with."""
    folder = tmp_path_factory.mktemp("forms") / request.param
    for steps in (4, 8) if request.param == "mixed" else (8,):
        done = run_script(
            *train_args, *FORMS[request.param], f"run.dir={folder}", f"train.max_steps={steps}"
        )
        assert done.returncode == 0, done.stderr
    return request.param, folder


def said(folder, **options):
    model, tokenizer = load(folder)
    params = SamplingParams(max_new_tokens=14, temperature=0)
    return Generator(model, tokenizer, **options).generate([PROMPT, PROMPT[:20]], params)


def test_a_form_trains_and_is_sampled_from(trained):
    name, folder = trained
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [line["train_loss"] for line in lines if "train_loss" in line]
    assert len(losses) == 8
    assert losses[-1] < losses[0]
    model = yaml.safe_load((folder / "config.yaml").read_text())["model"]
    assert model["attention"] == {
        "ring": "window(8) | global(2)",
        "letters": "LG",
        "prefix": "prefix(5)",
    }.get(name, ["linear(16)", "heads(window(4), strided(3))"])
    cached, uncached = said(folder), said(folder, use_cache=False)
    assert [one.token_ids for one in cached] == [one.token_ids for one in uncached]
    if name == "ring":
        done = run_script(
            ROOT / "generate.py", folder, "--prompt", PROMPT, "--greedy", "--max-new-tokens", "14"
        )
        assert done.stdout.split() == (PROMPT + cached[0].text).split()


def test_a_text_without_end_where_memory_is_bounded(trained):
    """The ring decodes ten times its context; the others end where theirs does."""
    name, folder = trained
    model, tokenizer = load(folder)
    completion = Generator(model, tokenizer).generate([PROMPT], SamplingParams(max_new_tokens=320))[
        0
    ]
    ended = completion.finish_reason == "stop"
    assert model.config.is_unbounded == (name == "ring")
    if name == "ring":
        assert ended or len(completion.token_ids) == 320
        tokens = torch.tensor(
            [[tokenizer.bos_id, *tokenizer.encode(PROMPT), *completion.token_ids]]
        )
        with torch.no_grad():
            logprobs = model(tokens[:, :-1])[0, -len(completion.token_ids) :].log_softmax(-1)
        known = logprobs.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), known, rtol=0, atol=1e-4)
    else:
        assert ended or completion.prompt_tokens + len(completion.token_ids) == 33


@needs("speculation")
def test_speculation_changes_no_text_and_is_refused_by_sums(trained):
    name, folder = trained
    if name == "mixed":
        with pytest.raises(UserError, match="its state cannot be rolled back"):
            said(folder, speculate=4)
    else:
        assert [one.token_ids for one in said(folder, speculate=4)] == [
            one.token_ids for one in said(folder)
        ]


def test_what_a_form_cannot_is_refused(trained):
    name, folder = trained
    with pytest.raises(
        UserError,
        match="window needs full attention and plain RoPE in all layers, no soft cap or sinks",
    ):
        said(folder, window=8)
    model, tokenizer = load(folder)
    if name == "prefix":
        with pytest.raises(
            UserError,
            match="the prompt has 1 tokens; the model's bidirectional prefix needs at least 5",
        ):
            Generator(model, tokenizer).generate([""])
    else:
        assert Generator(model, tokenizer).generate([""])[0].prompt_tokens == 1


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["model.attention=windows(8)"], "unknown pattern windows; did you mean window?"),
        (["model.attention=LG"], "needs model.window"),
        (
            ["model.attention=prefix(4)", "data.document_masking=true"],
            "data.document_masking cannot be combined with a prefix",
        ),
        (["model.rope_scaling={type: yarns, factor: 2}"], "did you mean yarn?"),
        (["model.attention=3"], "model.attention is 3; it must be text"),
        (["model.positions=alibis"], "model.positions is 'alibis'; it must be"),
        (["model.attention=[window(4), linear(8), full]"], "has 3 layers, but model.n_layers is 2"),
        (["model.attention=LLLG", "model.window=4"], "has 4 layers, but model.n_layers is 2"),
        (["model.attention=LX", "model.window=4"], "LX is not a list of layers; use the letters L"),
        (["model.attention=lg", "model.window=4"], "lg is not a list of layers; use the letters L"),
        (
            ["model.attention=[dilated(64, 2), full]"],
            "put quotes around a pattern that contains commas",
        ),
        (["model.attention=prefix(600)"], "is shorter than the prefix of 600"),
        (
            [
                "data.document_masking=true",
                "model.rope_scaling={type: dynamic, factor: 2, original_max_seq_len: 8}",
            ],
            "data.document_masking cannot be combined with dynamic model.rope_scaling",
        ),
    ],
)
def test_mistakes_in_a_recipe_are_one_line(overrides, says):
    with pytest.raises(UserError) as caught:
        load_config(
            ROOT / "tests" / "fixtures" / "base.yaml",
            ["model.n_layers=2", "model.n_heads=2", *overrides],
        )
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
