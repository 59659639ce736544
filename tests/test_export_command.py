"""scripts/export_hf.py and scripts/export_gguf.py as a user runs them."""

import importlib.util
import json
import sys

import pytest
import torch
from conftest import ROOT

import storage
from data import tokenizer_json
from errors import Stopped, UserError
from storage import huggingface

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")
GENERATE, EXPORT = ROOT / "generate.py", ROOT / "scripts" / "export_hf.py"


@pytest.fixture
def command(monkeypatch):
    """Runs a script's main() in this process, which spares the time to import torch and transformers."""

    def run(name, *arguments):
        spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        return module.main()

    return run


def test_a_run_as_a_folder_that_opens_there_and_here(script, tiny_run, tmp_path):
    out = tmp_path / "deep" / "model"
    done = script(EXPORT, tiny_run, out, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "a qwen3 of" in done.stdout
    assert "64 greedy tokens equal, 5,000 texts tokenized equally" in done.stdout
    names = {"README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert {path.name for path in out.iterdir()} == names | {"tokenizer_config.json"}
    assert {path.stat().st_mode & 0o777 for path in out.iterdir()} == {(out / "README.md").stat().st_mode & 0o777}
    card = (out / "README.md").read_text()
    last = [line for line in map(json.loads, (tiny_run / "metrics.jsonl").open()) if "val_loss" in line][-1]
    assert card.startswith("---\nlibrary_name: transformers")
    assert f"| validation loss (nats a token) | {last['val_loss']:.4f} |" in card
    assert (tiny_run / "config.yaml").read_text().strip() in card
    code = card.split("```python\n")[1].split("```")[0].replace('folder = "."', f"folder = {str(out)!r}")
    exec(code, {})  # what the card tells people to do
    ours, tokenizer = storage.load(tiny_run)
    again, its = storage.load(out)
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), again.state_dict().values()))
    assert its.encode("Line 7: the cat") == tokenizer.encode("Line 7: the cat")
    options = ["--prompt", "Line", "--seed", 3, "--max-new-tokens", 20]
    texts = [script(GENERATE, path, *options) for path in (tiny_run, out)]
    assert texts[0].stdout == texts[1].stdout != ""
    done = script(EXPORT, tiny_run, out)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "is there already" in done.stderr


def test_the_best_weights_in_shards_into_an_empty_folder(command, tiny_run, tmp_path, capsys):
    out = tmp_path / "model"
    out.mkdir()
    assert command("export_hf", tiny_run, out, "--checkpoint", "best", "--shard-gigabytes", 5e-5) == 0
    assert "proved with transformers" in capsys.readouterr().out
    assert len(list(out.glob("*.safetensors"))) > 1
    best, again = storage.load(tiny_run, checkpoint="best")[0], storage.load(out)[0]
    assert torch.equal(best.head.weight, again.head.weight)
    back = tmp_path / "again"
    assert command("export_hf", out, back) == 0  # a folder from there, opened here, goes out again
    assert (back / "config.json").read_text() == (out / "config.json").read_text()


def test_nothing_stays_of_an_export_that_is_refused_or_proved_wrong(
    command, tiny_run, tmp_path, monkeypatch, make_thinker
):
    tokenizer = storage.load(tiny_run)[1]
    odd = make_thinker(vocab_size=tokenizer.vocab_size, positions="alibi")
    with monkeypatch.context() as patch:
        patch.setattr(storage, "load", lambda *_, **__: (odd, tokenizer))
        with pytest.raises(UserError, match="model.positions=alibi"):
            command("export_hf", tiny_run, tmp_path / "model")
    write = tokenizer_json.write
    with monkeypatch.context() as patch:

        def write_another(tokenizer, folder, length):
            write(tokenizer, folder, length)
            content = json.loads((folder / "tokenizer.json").read_text())
            content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\s+|\S+"
            (folder / "tokenizer.json").write_text(json.dumps(content))

        patch.setattr(tokenizer_json, "write", write_another)
        with pytest.raises(Stopped, match="nothing was written"):
            command("export_hf", tiny_run, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("keep")
    with pytest.raises(UserError, match="is there already"):
        command("export_hf", tiny_run, tmp_path / "full")
    with pytest.raises(UserError, match="positive"):
        command("export_hf", tiny_run, tmp_path / "model", "--shard-gigabytes", 0)


def test_a_run_as_gguf(command, tiny_run, tmp_path, capsys):
    pytest.importorskip("gguf")
    assert command("export_gguf", tiny_run, tmp_path / "a.gguf", "--dtype", "f32") == 0
    shown = capsys.readouterr().out
    assert "read back as it was written" in shown
    assert "llama.cpp" in shown
    with pytest.raises(UserError, match="is there already"):
        command("export_gguf", tiny_run, tmp_path / "a.gguf")
    with pytest.raises(UserError, match="is no folder"):
        command("export_gguf", tiny_run, tmp_path / "b" / "a.gguf")
    thinker, _ = storage.load(tiny_run)
    (tmp_path / "bare").mkdir()
    huggingface.save_folder(thinker, None, tmp_path / "bare")
    with pytest.raises(UserError, match="no tokenizer"):
        command("export_gguf", tmp_path / "bare", tmp_path / "c.gguf")
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["a.gguf"]
