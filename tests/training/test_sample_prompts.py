"""What samples of a run go on from: nothing, a text, or a question."""

import json
from types import SimpleNamespace

import pytest
from conftest import ROOT
from training_contract import small_config

from thinker.data.chat import chat
from thinker.generation.engine import Generator
from thinker.generation.sampling_params import SamplingParams
from thinker.interop import load
from thinker.training.callback import find_callback
from thinker.training.callbacks.samples import MAX_TOKENS, TEMPERATURE, Samples
from thinker.training.reports import summary
from thinker.training.run import build_trainer, train

pytestmark = pytest.mark.usefixtures("one_thread")
TEMPLATE = ROOT / "configs" / "chat.jinja"


@pytest.fixture(autouse=True)
def no_summary(monkeypatch):
    monkeypatch.setattr(summary, "print_summary", lambda *arguments: None)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A run to start from."""
    folder = tmp_path_factory.mktemp("base")
    more = ["train.max_steps=1", "train.sample_every=null", "data.seq_len=96"]
    assert train(small_config(folder, "run", [*more, "model.max_seq_len=96"])) == 0
    return folder / "run"


def questions(folder, base, n=20):
    path = folder / "rows.jsonl"
    rows = [{"prompt": f"Say {number}", "completion": f"It is {number}."} for number in range(n)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return {f"Say {number}" for number in range(n)}, [
        "data.source=jsonl",
        f"data.path={path}",
        "data.max_documents=null",
        f"data.chat_template={TEMPLATE}",
        "data.assistant_only_loss=true",
        "data.tokenizer=null",
        f"run.init_from={base}",
        "data.val_fraction=0.3",
        "data.seq_len=96",
        "model.max_seq_len=96",
        "train.max_steps=2",
        "train.sample_every=2",
    ]


def sample_of(folder, overrides, capsys):
    """The sample after the last step, and what was printed for it."""
    assert train(small_config(folder, "run", overrides)) == 0
    (line,) = (folder / "run" / "samples.jsonl").read_text().splitlines()
    printed = [row for row in capsys.readouterr().err.splitlines() if row.startswith("step 2: ")]
    return json.loads(line), printed[-1]


def answer(folder, tokens):
    """What the saved model answers."""
    model, tokenizer = load(folder / "run")
    params = SamplingParams(max_new_tokens=MAX_TOKENS, temperature=TEMPERATURE, seed=2)
    return Generator(model, tokenizer).generate([""], params, [tokens])[0].text


def chat_tokens(folder, text):
    _, tokenizer = load(folder / "run")
    return chat.encode_prompt(tokenizer, [{"role": "user", "content": text}])


@pytest.mark.parametrize("prompt", ["", "Who are you?"])
def test_samples_of_a_chat_are_answers(prompt, base, tmp_path, capsys):
    """To the message of train.sample_prompt, or to the first question that is held out."""
    asked, overrides = questions(tmp_path, base)
    if prompt:
        overrides.append(f"train.sample_prompt={prompt}")
    sample, printed = sample_of(tmp_path, overrides, capsys)
    question = prompt
    if not prompt:
        (question,) = [one for one in asked if f"{one}\n" in sample["prompt"]]
    assert question in sample["prompt"]
    assert sample["text"] == answer(tmp_path, chat_tokens(tmp_path, question))
    assert printed == " ".join(f"step 2: {sample['prompt']} {sample['text']}".split())


def test_a_few_conversations_are_enough(base, tmp_path, capsys):
    """As in the guide: together they are shorter than a sequence, which is padded."""
    _, overrides = questions(tmp_path, base, n=10)
    overrides += ["data.seq_len=400", "model.max_seq_len=400", "data.val_fraction=0.45"]
    sample, _ = sample_of(tmp_path, overrides, capsys)
    assert "Say" in sample["prompt"]


def test_a_first_question_that_is_too_long_is_not_asked(base, tmp_path):
    _, overrides = questions(tmp_path, base)
    trainer = build_trainer(small_config(tmp_path, "run", overrides))
    samples = find_callback(trainer.callbacks, Samples)
    n_tokens = len(samples.prompt.tokens)
    for limit, is_asked in ((n_tokens, True), (n_tokens - 1, False)):
        config = SimpleNamespace(max_cached_len=limit, prefix=0)
        samples.setup(SimpleNamespace(model=SimpleNamespace(config=config)))
        assert ("Say" in samples.prompt.text) == is_asked
    assert samples.prompt.tokens == [samples.tokenizer.bos_id]


def test_texts_go_on_from_the_prompt_alone(tmp_path, capsys):
    more = ["train.max_steps=2", "train.sample_every=2", "train.sample_prompt=One day"]
    sample, printed = sample_of(tmp_path, more, capsys)
    assert sample["prompt"] == "One day"
    assert printed == " ".join(f"step 2: One day{sample['text']}".split())
    _, tokenizer = load(tmp_path / "run")
    tokens = [*tokenizer.bos_prefix, *tokenizer.encode("One day")]
    assert sample["text"] == answer(tmp_path, tokens)
