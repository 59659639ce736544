"""The functions of `import thinker` give what the commands give."""

import json

import pytest
from conftest import ROOT, run_script

import thinker
from thinker import UserError

PROMPT = "Line 1 of the text"


@pytest.fixture(scope="module")
def opened(tiny_run):
    return thinker.load(tiny_run)


def command(script, *arguments):
    done = run_script(ROOT / "scripts" / script, *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def as_json(value):
    return json.loads(json.dumps(value))


def test_evaluate_on_the_validation_split(tiny_run):
    (result,) = thinker.evaluate(tiny_run, device="cpu")
    shown = command("eval.py", tiny_run, "--json", "--device", "cpu")
    assert as_json(result.to_dict()) == shown["losses"][0]


def test_evaluate_on_a_text(tiny_run, tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("A few words of my own.\n" * 40)
    flags = ["--source", "text", "--path", path, "--context", "8,16", "--confidence", "0.9"]
    shown = command("eval.py", tiny_run, *flags, "--max-tokens", "300", "--json")
    results = thinker.evaluate(
        tiny_run, path, context=[8, 16], confidence=0.9, max_tokens=300, device="cpu"
    )
    assert [as_json(result.to_dict()) for result in results] == shown["losses"]
    with pytest.raises(UserError, match="--context is 9999, longer than the text"):
        thinker.evaluate(tiny_run, path, context=[9999])


def test_plan(train_args, tmp_path):
    _, config, *overrides = map(str, train_args)
    shown = command("plan.py", config, *overrides, "--no-steps", "--json")
    planned = as_json(thinker.plan(config, overrides, measure=False))
    measured_now = {"free_bytes", "usable_bytes"}  # memory that other processes leave
    for name in planned.keys() - measured_now:
        assert planned[name] == shown[name], name
    by_name = thinker.plan("quickstart", ["model.vocab_size=3072"], measure=False)
    by_path = thinker.plan(
        ROOT / "configs" / "quickstart.yaml", ["model.vocab_size=3072"], measure=False
    )
    assert by_name["parameters"] == by_path["parameters"]


@pytest.mark.parametrize(
    ("report", "options"),
    [
        ("explain", {"layer": 1, "head": 1, "query": 2}),
        ("map", {"layer": 1}),
        ("flow", {"position": 3}),
        ("attribute", {"position": -2}),
        ("lens", {"position": 1}),
        ("patch", {"corrupt": "Line 2 of the text"}),
    ],
)
def test_inspect(opened, tiny_run, report, options):
    flags = []
    for name, value in options.items():
        flags += [f"--{name}", str(value)]
    shown = command(
        "inspect_model.py", report, tiny_run, "--prompt", PROMPT, *flags, "--json", "--device", "cpu"
    )  # fmt: skip
    assert as_json(thinker.inspect(*opened, report, PROMPT, **options).data) == shown


def test_inspect_scores_all_heads(opened):
    report = thinker.inspect(*opened, "heads", PROMPT)
    assert len(report.rows) == 4  # two layers of two heads


@pytest.mark.parametrize(
    ("report", "options", "message"),
    [
        ("atribute", {}, "there is no report atribute; did you mean attribute?"),
        ("map", {"position": 1}, "map has no option position; its options: layer, head"),
        ("map", {"layer": 9}, "--layer is 9; use 0 to 1"),
        ("heads", {"layer": 0}, "heads has no option layer; its options: none"),
        ("lens", {"position": 99}, "--position is 99"),
    ],
)
def test_mistakes_in_inspect(opened, report, options, message):
    with pytest.raises(UserError, match=message):
        thinker.inspect(*opened, report, PROMPT, **options)


def test_export_gguf(tiny_run, tmp_path):
    pytest.importorskip("gguf")
    export = thinker.export_gguf(tiny_run, tmp_path / "api.gguf", dtype="q8_0")
    flags = ["--dtype", "q8_0"]
    (tmp_path / "other").mkdir()
    done = run_script(
        ROOT / "scripts/export_gguf.py", tiny_run, tmp_path / "other" / "api.gguf", *flags
    )
    assert done.returncode == 0, done.stderr
    assert export.file.read_bytes() == (tmp_path / "other" / "api.gguf").read_bytes()
    assert export.n_bytes == export.file.stat().st_size
    for line in export.compared:
        assert line in done.stdout
    with pytest.raises(UserError, match="already exists"):
        thinker.export_gguf(tiny_run, tmp_path / "api.gguf")


def test_export_huggingface(tiny_run, tmp_path):
    transformers = pytest.importorskip("transformers")
    export = thinker.export_huggingface(tiny_run, tmp_path / "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert sum(parameter.numel() for parameter in model.parameters()) == export.n_parameters
    assert model.config.model_type == export.model_type
    assert export.compared in (tmp_path / "hf" / "README.md").read_text()
    with pytest.raises(UserError, match="already exists"):
        thinker.export_huggingface(tiny_run, tmp_path / "hf")
    with pytest.raises(UserError, match="--adapter needs a run that starts from"):
        thinker.export_huggingface(tiny_run, tmp_path / "adapter", adapter=True)
    assert not list(tmp_path.glob("*adapter*"))
