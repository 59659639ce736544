"""scripts/export_hf.py and scripts/export_gguf.py as a user runs them."""

import functools
import importlib.util
import json
import re
import signal
import sys

import pytest
import torch
from conftest import ROOT, start_script
from training_runs import wait_for

from thinker import interop
from thinker.data.tokenizers import tokenizer_conversion
from thinker.generation import Generator
from thinker.interop import export_huggingface, huggingface, verify_export
from thinker.runtime.errors import RunError, UserError

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")
TRAIN, GENERATE, EXPORT = ROOT / "train.py", ROOT / "generate.py", ROOT / "scripts" / "export_hf.py"


@pytest.fixture
def command(monkeypatch, stress):
    """Runs a script's main() in this process, which spares the time to import torch and
    transformers.

    Tokenizers are compared on 5,000 texts only under --stress.
    """
    if not stress:
        fewer_texts = functools.partial(verify_export.verify_hf_export, n_texts=300)
        monkeypatch.setattr(verify_export, "verify_hf_export", fewer_texts)

    def run(name, *arguments, folder=ROOT / "scripts"):
        spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)  # where dataclasses look for it
        spec.loader.exec_module(module)
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        return module.main()

    return run


def test_a_run_as_a_folder_that_opens_there_and_here(run_script, tiny_run, tmp_path):
    out = tmp_path / "deep" / "model"
    done = run_script(EXPORT, tiny_run, out, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert ": qwen3, " in done.stdout
    assert "64 equal greedy tokens, 5,000 texts tokenized identically" in done.stdout
    names = {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    assert {path.name for path in out.iterdir()} == names | {"tokenizer_config.json"}
    assert {path.stat().st_mode & 0o777 for path in out.iterdir()} == {
        (out / "README.md").stat().st_mode & 0o777
    }
    card = (out / "README.md").read_text()
    last = [
        line for line in map(json.loads, (tiny_run / "metrics.jsonl").open()) if "val_loss" in line
    ][-1]
    assert card.startswith("---\nlibrary_name: transformers")
    assert f"| validation loss (nats per token) | {last['val_loss']:.4f} |" in card
    assert (tiny_run / "config.yaml").read_text().strip() in card
    follow(out)
    ours, tokenizer = interop.load(tiny_run)
    again, its = interop.load(out)
    assert all(
        torch.equal(a, b) for a, b in zip(ours.state_dict().values(), again.state_dict().values())
    )
    assert its.encode("Line 7: the cat") == tokenizer.encode("Line 7: the cat")
    options = ["--prompt", "Line", "--seed", 3, "--max-new-tokens", 20]
    texts = [run_script(GENERATE, path, *options) for path in (tiny_run, out)]
    assert texts[0].stdout == texts[1].stdout != ""
    done = run_script(EXPORT, tiny_run, out)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "already exists" in done.stderr


def follow(folder):
    """Do what the model card tells people to do."""
    code = (folder / "README.md").read_text().split("```python\n")[1].split("```")[0]
    exec(code.replace('folder = "."', f"folder = {str(folder)!r}"), {})


def chat_goes_beyond_the_context(run_script, run, options):
    """The oldest turns are left out, a message that is too long alone is refused, and --no-slide
    ends the chat."""
    lines = "1?\n2?\n3?\n4?\n" + "5? " * 30 + "\n/undo\n6?\n/show\n"
    turns = run_script(GENERATE, run, *options, input=lines)
    unseen, refused, removed = turns.stderr.splitlines()[1:]
    assert (turns.returncode, removed) == (0, "removed the last turn")
    assert unseen.startswith("the context of 32 tokens is full: the oldest turns")
    assert refused.startswith("error: the prompt has ")
    assert [number for number in range(1, 8) if f"user: {number}?" in turns.stdout] == [1, 2, 3, 6]
    stopped = run_script(GENERATE, run, *options, "--no-slide", input=lines)
    assert stopped.returncode == 0, stopped.stderr
    assert stopped.stderr.count("error: the prompt has ") > 1
    assert "oldest turns" not in stopped.stderr


def test_a_finetuned_run_answers_and_goes_out_merged_and_as_an_adapter(
    command, run_script, tiny_run, tmp_path, capsys
):
    """All of it by the commands of the docs: out, conversations with adapters, an answer, losses,
    out again."""
    talks, base, run = tmp_path / "talks.jsonl", tmp_path / "base", tmp_path / "run"
    rows = [
        [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"Line {i}."}]
        for i in range(50)
    ]
    talks.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    assert command("export_hf", tiny_run, base) == 0
    given = [
        f"run.init_from={base}",
        f"run.dir={run}",
        f"data.path={talks}",
        f"data.cache_dir={tmp_path}",
    ]
    given += ["data.seq_len=32", "train.max_steps=3", "train.device=cpu", "train.precision=fp32"]
    given += ["train.lora_rank=2", "data.val_fraction=0.2"]
    config = ROOT / "configs" / "finetune.yaml"
    without = run_script(TRAIN, config, *given)
    assert without.returncode == 2
    last = without.stderr.splitlines()[-1]
    assert "conversations need a chat template" in last
    done = run_script(TRAIN, config, *given, "data.chat_template=configs/chat.jinja", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert f'generate.py {run} --chat --prompt "your message"' in done.stdout
    options = ["--max-new-tokens", 8, "--seed", 1, "--chat"]
    answer = run_script(GENERATE, run, *options, "--prompt", "7?")
    assert answer.returncode == 0, answer.stderr
    assert "Assistant" not in answer.stdout
    turns = run_script(GENERATE, run, *options, "--interactive", input="7?\n\n/show\n")
    assert turns.returncode == 0, turns.stderr
    assert turns.stderr.splitlines()[1:] == ["error: the message is empty; type some text"]
    assert turns.stdout.startswith(answer.stdout)
    assert turns.stdout.endswith(f"user: 7?\n\nassistant: {answer.stdout}")
    chat_goes_beyond_the_context(run_script, run, [*options, "--interactive"])
    refusals = [(run, " ", "--chat needs a message"), (tiny_run, "7?", "has no chat template")]
    for path, prompt, message in [*refusals, (run, "7? " * 30, "the model's context is 32")]:
        refused = run_script(GENERATE, path, *options, "--prompt", prompt)
        assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
        assert message in refused.stderr
    capsys.readouterr()
    assert command("eval", run, "--device", "cpu", "--json") == 0
    found = json.loads(capsys.readouterr().out)["losses"][0]
    last = [line for line in map(json.loads, (run / "metrics.jsonl").open()) if "val_loss" in line][
        -1
    ]
    assert found["nats_per_token"]["mean"] == pytest.approx(last["val_loss"], rel=1e-4)
    whole, adapter = tmp_path / "whole", tmp_path / "adapter"
    assert command("export_hf", run, whole) == 0
    assert command("export_hf", run, adapter, "--adapter") == 0
    assert ": adapter (rank 2, " in capsys.readouterr().out
    assert f"trained with Thinker for the model in `{base}`" in (adapter / "README.md").read_text()
    for folder in (whole, adapter):
        follow(folder)
        assert "apply_chat_template" in (folder / "README.md").read_text()
        capsys.readouterr()
        assert command("generate", folder, *options, "--prompt", "7?", folder=ROOT) == 0
        assert capsys.readouterr().out == answer.stdout
    base.rename(tmp_path / "moved")
    lost = run_script(GENERATE, adapter, *options, "--prompt", "7?")
    assert (lost.returncode, lost.stderr.count("\n")) == (2, 1)
    assert "put it next to the adapter" in lost.stderr


def test_the_architecture_is_that_of_the_base_or_as_asked(command, random_model, tmp_path, capsys):
    """Llama, Mistral and Phi-3 can express this model: the first is written if nothing is known."""
    model = random_model(qk_norm=False)
    interop.save(model, None, tmp_path / "ours")

    def model_type(folder):
        return json.loads((folder / "config.json").read_text())["model_type"]

    assert command("export_hf", tmp_path / "ours", tmp_path / "a") == 0
    assert model_type(tmp_path / "a") == "llama"
    assert command("export_hf", tmp_path / "ours", tmp_path / "b", "--model-type", "phi3") == 0
    assert "b: phi3, " in capsys.readouterr().out
    assert command("export_hf", tmp_path / "b", tmp_path / "c") == 0
    assert model_type(tmp_path / "b") == model_type(tmp_path / "c") == "phi3"
    assert command("export_hf", tmp_path / "b", tmp_path / "d", "--model-type", "llama") == 0
    assert model_type(tmp_path / "d") == "llama"
    for folder in "abcd":
        again, _ = interop.load(tmp_path / folder)
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, again.state_dict()[name])


def test_an_architecture_that_is_refused(command, random_model, tiny_run, tmp_path):
    interop.save(random_model(), None, tmp_path / "ours")
    out = tmp_path / "out"
    with pytest.raises(UserError, match="llama cannot express .*not have model.qk_norm=True$"):
        command("export_hf", tmp_path / "ours", out, "--model-type", "llama")
    for wrong, hint in (("lama", "; did you mean llama[?]$"), ("mamba", "starcoder2$")):
        message = f"^model_type is '{wrong}'; Thinker knows cohere, .*{hint}"
        with pytest.raises(UserError, match=message):
            command("export_hf", tmp_path / "ours", out, "--model-type", wrong)
    with pytest.raises(UserError, match="remove --model-type"):
        command("export_hf", tiny_run, out, "--adapter", "--model-type", "llama")
    assert not out.exists()


def test_an_export_that_cannot_be_written_or_cut_there_alike(
    command, tiny_run, tmp_path, random_model, monkeypatch
):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        command("export_hf", tiny_run, tmp_path / "file" / "model")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="already exists"):
        command("export_hf", tiny_run, ".")
    tokenizer = interop.load(tiny_run)[1]
    biased = random_model(vocab_size=tokenizer.vocab_size, qk_norm=False, attention_bias=True)
    monkeypatch.setattr(export_huggingface, "load", lambda *_, **__: (biased, tokenizer))
    with pytest.raises(RunError, match="for qwen2, it always splits text as Qwen does"):
        command("export_hf", tiny_run, tmp_path / "model")


def test_the_card_of_an_earlier_checkpoint_has_its_figures(
    command, train_args, run_script, tmp_path
):
    run = tmp_path / "run"
    done = run_script(*train_args, f"run.dir={run}", "train.keep_every=2")
    assert done.returncode == 0, done.stderr
    assert command("export_hf", run, tmp_path / "out", "--checkpoint", "4") == 0
    card = (tmp_path / "out" / "README.md").read_text()
    losses = {
        line["step"]: line["val_loss"]
        for line in map(json.loads, (run / "metrics.jsonl").open())
        if "val_loss" in line
    }
    assert set(losses) == {3, 6}
    assert "| at step 4 | |" in card
    assert f"| {losses[3]:.4f} |" in card
    assert f"| {losses[6]:.4f} |" not in card


def test_the_best_weights_in_shards_into_an_empty_folder(command, tiny_run, tmp_path, capsys):
    out = tmp_path / "model"
    out.mkdir()
    assert (
        command("export_hf", tiny_run, out, "--checkpoint", "best", "--shard-gigabytes", 5e-5) == 0
    )
    assert "verified with transformers" in capsys.readouterr().out
    assert len(list(out.glob("*.safetensors"))) > 1
    best, again = interop.load(tiny_run, checkpoint="best")[0], interop.load(out)[0]
    assert torch.equal(best.lm_head.weight, again.lm_head.weight)
    back = tmp_path / "again"
    assert command("export_hf", out, back) == 0  # a folder from there, opened here, goes out again
    assert (back / "config.json").read_text() == (out / "config.json").read_text()


def test_nothing_stays_of_an_export_that_is_refused_or_proved_wrong(
    command, tiny_run, tmp_path, monkeypatch, random_model
):
    tokenizer = interop.load(tiny_run)[1]
    for positions in ("alibi", "relative"):
        odd = random_model(vocab_size=tokenizer.vocab_size, positions=positions)
        loaded = odd, tokenizer
        with monkeypatch.context() as patch:
            patch.setattr(export_huggingface, "load", lambda *_, found=loaded, **__: found)
            with pytest.raises(UserError, match=f"model.positions={positions}"):
                command("export_hf", tiny_run, tmp_path / "model")
    write = tokenizer_conversion.write
    with monkeypatch.context() as patch:

        def write_another(tokenizer, folder, *lengths):
            write(tokenizer, folder, *lengths)
            content = json.loads((folder / "tokenizer.json").read_text())
            content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\s+|\S+"
            (folder / "tokenizer.json").write_text(json.dumps(content))

        patch.setattr(tokenizer_conversion, "write", write_another)
        with pytest.raises(RunError, match="nothing was written"):
            command("export_hf", tiny_run, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("keep")
    with pytest.raises(UserError, match="already exists"):
        command("export_hf", tiny_run, tmp_path / "full")
    with pytest.raises(UserError, match="positive"):
        command("export_hf", tiny_run, tmp_path / "model", "--shard-gigabytes", 0)


def test_a_run_as_gguf(command, tiny_run, tmp_path, capsys):
    pytest.importorskip("gguf")
    assert command("export_gguf", tiny_run, tmp_path / "a.gguf", "--dtype", "f32") == 0
    shown = capsys.readouterr().out
    assert "verified by reading it back" in shown
    assert "llama.cpp" in shown
    with pytest.raises(UserError, match="OUT .*a.gguf already exists"):
        command("export_gguf", tiny_run, tmp_path / "a.gguf")
    with pytest.raises(UserError, match="its folder does not exist"):
        command("export_gguf", tiny_run, tmp_path / "b" / "a.gguf")
    model, _ = interop.load(tiny_run)
    (tmp_path / "bare").mkdir()
    huggingface.save_pretrained(model, None, tmp_path / "bare")
    with pytest.raises(UserError, match="no tokenizer"):
        command("export_gguf", tmp_path / "bare", tmp_path / "c.gguf")
    assert [path.name for path in tmp_path.glob("*.gguf")] == ["a.gguf"]
    assert not list(tmp_path.glob(".*"))


def test_a_run_as_gguf_in_4_bits_with_its_score(command, tiny_run, text_file, tmp_path, capsys):
    pytest.importorskip("gguf")
    out = tmp_path / "a.gguf"
    assert command("export_gguf", tiny_run, out, "--dtype", "q4_0", "--score", text_file) == 0
    pattern = (
        r"(?m)^q4_0: (\d\.\d{4}) bits per byte, ([+-]\d\.\d\d)% \(full weights: (\d\.\d{4})\)$"
    )
    rounded, change, full = map(float, re.search(pattern, capsys.readouterr().out).groups())
    model, tokenizer = interop.load(tiny_run)
    assert full == pytest.approx(
        Generator(model, tokenizer).score(text_file.read_text()).bits_per_byte, abs=1e-4
    )
    assert change == pytest.approx(100 * (rounded / full - 1), abs=0.01)
    assert change != 0
    (tmp_path / "empty").write_text("")
    for name, message in {
        "empty": "is empty",
        "missing": "cannot read .*missing: No such file",
    }.items():
        with pytest.raises(UserError, match=message):
            command("export_gguf", tiny_run, tmp_path / "b.gguf", "--score", tmp_path / name)


def test_a_command_that_is_ended_leaves_no_temporary_files(tiny_run, tmp_path):
    process = start_script(EXPORT, tiny_run, tmp_path / "model")
    assert wait_for((tmp_path / ".model.tmp").exists, process), process.output()
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 143
    assert list(tmp_path.iterdir()) == []
