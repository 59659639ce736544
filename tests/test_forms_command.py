"""Forms of attention from the recipe to the text, by the real commands."""

import json

import pytest
import torch
import yaml
from conftest import ROOT, run_script

from generation import Generator, SamplingParams
from storage import load

GENERATE = ROOT / "generate.py"
FORMS = {
    "ring": ["model.attention=window(8) | global(2)", "model.positions=alibi"],
    "mixed": ["model.attention=[linear(16), 'heads(window(4), strided(3))']", "data.isolate_documents=true"],
    "letters": ["model.attention=LG", "model.window=6", "model.positions=none", "model.sink_logits=true"],
    "prefix": ["model.attention=prefix(5)", "model.positions=learned", "model.softcap=30"],
}


@pytest.fixture(scope="module", params=FORMS)
def trained(request, tiny, tmp_path_factory):
    """A run of each form, stopped half-way and gone on with."""
    folder = tmp_path_factory.mktemp("forms") / request.param
    for steps in (4, 8):
        done = run_script(*tiny, *FORMS[request.param], f"run.dir={folder}", f"train.max_steps={steps}")
        assert done.returncode == 0, done.stderr
    return request.param, folder


def test_a_form_trains_resumes_and_generates(trained):
    name, folder = trained
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [line["train_loss"] for line in lines if "train_loss" in line]
    assert len(losses) == 8
    assert losses[-1] < losses[0]
    model = yaml.safe_load((folder / "config.yaml").read_text())["model"]
    assert model["attention"] == {"ring": "window(8) | global(2)", "letters": "LG", "prefix": "prefix(5)"}.get(
        name, ["linear(16)", "heads(window(4), strided(3))"]
    )
    prompt = ["--prompt", "Line 7: the cat number"]
    texts = [
        run_script(GENERATE, folder, *prompt, "--max-new-tokens", "12", "--greedy", *more)
        for more in ([], ["--no-cache"])
    ]
    assert [text.returncode for text in texts] == [0, 0], texts[0].stderr + texts[1].stderr
    assert texts[0].stdout == texts[1].stdout


def test_a_text_without_end_where_memory_is_bounded(trained):
    """The ring decodes ten times its context; the others end where theirs does, or say so."""
    name, folder = trained
    thinker, tokenizer = load(folder)
    completion = Generator(thinker, tokenizer).generate(["Line 7: the cat"], SamplingParams(max_new_tokens=320))[0]
    ended = completion.finish_reason == "stop"
    if name == "ring":
        assert thinker.config.endless
        assert ended or len(completion.token_ids) == 320
        tokens = torch.tensor([[tokenizer.bos_id, *tokenizer.encode("Line 7: the cat"), *completion.token_ids]])
        with torch.no_grad():
            logprobs = thinker(tokens[:, :-1])[0, -len(completion.token_ids) :].log_softmax(-1)
        known = logprobs.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), known, rtol=0, atol=1e-4)
    else:
        assert not thinker.config.endless
        assert ended or completion.prompt_tokens + len(completion.token_ids) == 33


def test_speculation_changes_no_text_in_a_ring_and_is_refused_by_sums(trained):
    name, folder = trained
    arguments = [GENERATE, folder, "--prompt", "Line 7: the cat number 7 sat", "--max-new-tokens", "14", "--greedy"]
    plain, drafted = run_script(*arguments), run_script(*arguments, "--speculate", "4")
    if name == "mixed":
        assert drafted.returncode == 2
        assert "the sums of a linear layer forget nothing" in drafted.stderr
    else:
        assert plain.stdout == drafted.stdout


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--window", "8"], "this model has its own"),
        (["--compile"], "full attention, RoPE and plain scores"),
    ],
)
def test_what_a_form_cannot_is_refused(trained, flags, says):
    done = run_script(GENERATE, trained[1], "--prompt", "Line 7: the cat", "--seed", "1", *flags)
    assert done.returncode == 2
    assert says in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_prompt_shorter_than_the_prefix_is_refused(trained):
    done = run_script(GENERATE, trained[1], "--prompt", "", "--max-new-tokens", "2")
    assert done.returncode == (2 if trained[0] == "prefix" else 0)
    if trained[0] == "prefix":
        assert "the prompt has 1 tokens; the model reads its first 5 both ways" in done.stderr


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["model.attention=windows(8)"], "there is no windows; did you mean window?"),
        (["model.attention=LG"], "needs model.window"),
        (["model.attention=prefix(4)", "data.isolate_documents=true"], "does not go with data.isolate_documents"),
        (["model.rope_scaling={type: yarns, factor: 2}"], "did you mean yarn?"),
        (["model.attention=3"], "model.attention is 3; it must be text"),
        (["model.positions=alibis"], "model.positions is 'alibis'; it must be"),
        (["model.attention=[window(4), linear(8), full]"], "list of 1 to 2"),
    ],
)
def test_mistakes_in_a_recipe_are_one_line(tiny, tmp_path, overrides, says):
    done = run_script(*tiny, *overrides, f"run.dir={tmp_path / 'run'}")
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()
