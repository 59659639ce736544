"""thinker eval --verifier: pass@k by counting all choices, equal seeds, and the page of answers."""

import json
from itertools import combinations
from types import SimpleNamespace

import chromium
import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from conftest import ROOT, random_model, run_script
from training_contract import BASE, SMALL

from thinker.data.text.sources import open_source
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.evaluation.wilson import wilson_interval
from thinker.features.rewards.judging.flags import prompts_from_flags
from thinker.features.rewards.judging.judge_model import Judged
from thinker.features.rewards.judging.pass_at_k import estimate, ks, pass_at_k
from thinker.features.rewards.judging.samples_page import page
from thinker.features.rewards.keys import GRPOConfig
from thinker.features.rewards.prompts import Prompt, read_prompt
from thinker.features.rewards.rollouts import SampledAnswer
from thinker.generation.engine import Generator
from thinker.generation.sampling_params import SamplingParams
from thinker.interop import load
from thinker.training.config.load import load_config
from thinker.training.run import build_trainer

browser = chromium.browser
MY_REWARDS = """
def score(answer):
    if answer.text.startswith("z"):
        raise ValueError("no idea")
    return {"vowels": sum(c in "aeiou" for c in answer.text), "n": answer.row["n"] / 10}
"""


@pytest.mark.parametrize("n_answers", [1, 2, 5, 8])
def test_pass_at_k_counts_all_choices(n_answers):
    for n_right in range(n_answers + 1):
        is_right = [number < n_right for number in range(n_answers)]
        for k in range(1, n_answers + 1):
            chosen = list(combinations(is_right, k))
            expected = sum(map(any, chosen)) / len(chosen)
            assert pass_at_k(n_right, n_answers, k) == pytest.approx(expected)


def test_the_interval_is_that_of_as_many_answers_as_prompts():
    found = estimate([0, 1, 2, 2], n_answers=2, k=1)
    assert found.share == pytest.approx((0 + 0.5 + 1 + 1) / 4)
    assert (found.low, found.high) == wilson_interval(found.share, 4, 0.95)
    assert [ks(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two runs, prompts, and a verifier."""
    folder = tmp_path_factory.mktemp("judging")
    for name, n_steps in (("before", 2), ("after", 30)):
        overrides = [
            *SMALL,
            f"data.cache_dir={folder / 'cache'}",
            f"run.dir={folder / name}",
            f"train.max_steps={n_steps}",
        ]
        assert build_trainer(load_config(BASE, overrides)).train() == 0
    rows = [{"text": f"Once upon a time {n} there was", "n": n} for n in range(12)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "my_rewards.py").write_text(MY_REWARDS)
    return folder


def evaluate(folder, *flags):
    """Run `thinker eval --verifier`."""
    command = ["-m", "thinker", "eval", folder / "after"]
    command += ["--verifier", f"{folder / 'my_rewards.py'}:score", "--max-new-tokens", "6"]
    return run_script(*command, *flags)


def prompts_of(folder):
    return ["--source", "jsonl", "--path", folder / "rows.jsonl", "--prompt-tokens", "5"]


def test_both_models_are_judged_with_the_same_random_numbers(folder, tmp_path):
    flags = [*prompts_of(folder), "--before", folder / "before", "--samples", "3", "--json"]
    done = evaluate(folder, *flags, "--right", "2", "--page", tmp_path / "page.html")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    names = [judged["name"] for judged in found["models"]]
    assert names == [f"before: {folder / 'before'}", str(folder / "after")]
    for judged in found["models"]:
        model, tokenizer = load(judged["name"].removeprefix("before: "))
        generator = Generator(model, tokenizer)
        totals = []
        for number, sample in enumerate(judged["samples"]):
            text = f"Once upon a time {number} there was"
            prompt = tokenizer.decode(tokenizer.encode(text)[:5])
            assert sample["prompt"] == prompt
            for place, answer in enumerate(sample["answers"]):
                params = SamplingParams(max_new_tokens=6, seed=3 * number + place)
                (alone,) = generator.generate([prompt], params)
                assert answer["text"] == alone.text
                if alone.text.startswith("z"):
                    assert answer["parts"] is None
                    totals.append(np.nan)
                    continue
                total = sum(c in "aeiou" for c in alone.text) + number / 10
                assert answer["reward"] == pytest.approx(total)
                totals.append(total)
        assert judged["reward"] == pytest.approx(np.nanmean(totals))
        is_right = np.array(totals).reshape(-1, 3) >= 2
        first, *_, last = judged["pass_at_k"]
        assert first["share"] == pytest.approx(is_right.mean())
        assert last["share"] == pytest.approx(is_right.any(1).mean())
    text = (tmp_path / "page.html").read_text()
    assert str(folder / "before") in text
    assert "http" not in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--verifier needs prompts; add --source jsonl"),
        (["--source", "pysource"], "--verifier needs prompts; use --source jsonl"),
        (["--source", "tales"], "prompts are the beginnings of these texts; set their length"),
        (["--source", "tales", "--prompt-tokens", "0"], "--prompt-tokens: "),
        (["--source", "tales", "--prompt-tokens", "100000"], "has no prompt that leaves 6 tokens"),
        (["--source", "tales", "--path", "a"], "--path has no effect with --source tales"),
        (["--source", "tales", "--column", "a"], "--column has no effect with --source tales"),
        (["--source", "jsonl"], "--source jsonl needs --path FILE"),
        (["--source", "tales", "--right", "nan"], "--right is nan; use a number"),
        (["--source", "tales", "--verifier", "absent.py:a"], "absent.py is not a file"),
        (["--source", "tales", "--verifier", "exat"], "did you mean exact?"),
        (["--source", "tales", "--before", "absent"], "absent does not exist"),
        (["--source", "tales", "--samples", "0"], "--samples is 0; use at least 1"),
        (["--source", "tales", "--long"], "--long has no effect with --verifier"),
        (["--source", "tales", "--page", "absent/page.html"], "cannot write absent/page.html"),
    ],
)
def test_mistakes_are_one_line(folder, flags, message):
    done = evaluate(folder, *flags)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert message in done.stderr


def test_an_empty_prompt_is_named(folder, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": ""}\n')
    done = evaluate(folder, "--source", "jsonl", "--path", path)
    assert done.returncode == 2
    assert "row 0 of" in done.stderr
    assert "prompt is empty" in done.stderr


@pytest.mark.parametrize("has_template", [False, True])
def test_rows_are_read_as_in_training(tmp_path, has_template):
    """With a chat template, prompt and completion are a conversation, whose answer the row has;
    without one, the prompt is a text."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "2+2?", "completion": "four", "wanted": 4}\n')
    tokenizer = make_tokenizer("byte", [])
    model = random_model(vocab_size=tokenizer.vocab_size, max_seq_len=200)
    if has_template:
        tokenizer = tokenizer.with_chat_template((ROOT / "configs" / "chat.jinja").read_text())
    options = GRPOConfig(rewards="exact", max_new_tokens=4)
    arguments = SimpleNamespace(source="jsonl", path=str(path), column=None, limit=None)
    (found,) = prompts_from_flags(arguments, options, model, tokenizer)
    name = "jsonl" if has_template else "prompts"
    (document,) = open_source(name, path=str(path)).documents()
    assert found == read_prompt(document, tokenizer, None)
    assert found.row.get("answer") == ("four" if has_template else None)


def test_a_verifier_that_never_works_is_an_error(folder):
    """Not a share of 0."""
    flags = ["--source", "tales", "--prompt-tokens", "5", "--samples", "1", "--limit", "2"]
    done = evaluate(folder, *flags)
    assert done.returncode == 2
    assert "KeyError: 'n' (line 5)" in done.stderr
    assert "error: verifiers could not judge any answer" in done.stderr.splitlines()[-1]


def test_flags_of_verifiers_need_one(folder):
    done = run_script("-m", "thinker", "eval", folder / "after", "--samples", "3")
    assert done.returncode == 2
    assert "--samples has no effect without --verifier; remove it" in done.stderr


HOSTILE = "</p></td><script>window.evil = 1</script>\x1b[31m\x00 \u202e \udce9"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_shows_any_text_in_a_browser(browser, tmp_path, scheme):
    tokenizer = make_tokenizer("byte", [])
    prompts = [Prompt(tokenizer.encode("a"), HOSTILE, {}), Prompt([1], "Two\n lines", {})]
    answers = [[SampledAnswer([1], [0.0], HOSTILE, False, None)] * 2] * 2
    totals = np.array([[1.0, 0.25], [np.nan, 0.5]])
    judged = [(name, Judged(prompts, answers, totals, 1.0)) for name in (HOSTILE, "other")]
    path = tmp_path / "page.html"
    path.write_text(page({"model": HOSTILE, "before": None}, judged), encoding="utf-8")
    context = browser.new_context(color_scheme=scheme, viewport={"width": 360, "height": 700})
    tab = context.new_page()
    tab.goto(path.as_uri())
    assert tab.evaluate("window.evil") is None
    assert tab.locator(".answer").count() == 8
    assert tab.locator(".good").all_inner_texts() == ["1", "1"]
    bad = ["0.25", "0.25", "no reward", "0.5", "no reward", "0.5"]
    assert tab.locator(".bad").all_inner_texts() == bad
    result = Axe().run(tab)
    assert result.violations_count == 0, result.generate_report()
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360
    context.close()
