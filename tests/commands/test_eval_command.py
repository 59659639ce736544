"""scripts/eval.py as a user runs it."""

import importlib.util
import json
import shutil

import pytest
import yaml
from conftest import ROOT, random_model

from thinker import interop
from thinker.api.evaluating import TextChoice, open_text
from thinker.data.tokenizers import tokenizer_conversion
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.evaluation import needle
from thinker.interop import huggingface, load
from thinker.interop.find import find_model
from thinker.runtime.errors import UserError

EVAL = ROOT / "scripts" / "eval.py"
YARN = "{type: yarn, factor: 4, original_max_seq_len: 32}"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def command(monkeypatch):
    """Runs main() in this process, which spares the time to import torch."""
    spec = importlib.util.spec_from_file_location("eval_command", EVAL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["eval.py", *map(str, arguments)])
        return module.main()

    return run


def test_long_tables_and_plot(run_script, tiny_run, tmp_path):
    completed = run_script(
        EVAL, tiny_run, "--long", "--windows", 8, "--device", "cpu", "--png", tmp_path / "a.png"
    )
    assert completed.returncode == 0, completed.stderr
    assert "trained length  32\n" in completed.stdout
    assert "skipped the needle test" in completed.stdout
    assert completed.stdout.count("beyond the trained length") == 3
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_long_json(command, tiny_run, capsys):
    results = []
    for extra in [], ["--rope-scaling", YARN]:
        assert command(tiny_run, "--long", "--factor", 3, "--device", "cpu", "--json", *extra) == 0
        results.append(json.loads(capsys.readouterr().out))
    plain, scaled = results
    assert (plain["source"], plain["window_length"], plain["needle"]) == ("text", 96, None)
    assert (
        plain["tokens"]
        == sum(plain["long"]["counts"])
        == sum(s["n_tokens"] for s in plain["long"]["segments"])
    )
    assert len(plain["long"]["by_position"]) == 96
    assert scaled["rope_scaling"] == YARN
    assert scaled["long"]["counts"] == plain["long"]["counts"]
    assert scaled["long"]["by_position"] != plain["long"]["by_position"]


def test_trained_length_and_windows_of_a_short_text(command, tiny_run, tmp_path, capsys):
    run = shutil.copytree(tiny_run, tmp_path / "run")
    tree = yaml.safe_load((run / "config.yaml").read_text())
    tree["data"]["seq_len"] = 16
    (run / "config.yaml").write_text(yaml.safe_dump(tree))
    assert command(run, "--long", "--factor", 10**13, "--device", "cpu") == 0
    output = capsys.readouterr().out
    assert "trained length  16\n" in output
    assert "  16-31  " in output
    assert ": the text is shorter" in output
    with pytest.raises(UserError, match="use a mapping such as"):
        command(run, "--long", "--rope-scaling", "", "--device", "cpu")


@pytest.mark.parametrize(
    ("source", "extra"), [("text", ["--path", ROOT / "README.md"]), ("tales", [])]
)
def test_long_on_another_source(command, tiny_run, tmp_path, capsys, monkeypatch, source, extra):
    monkeypatch.setattr(needle, "MAX_STORIES", 1)
    run = shutil.copytree(tiny_run, tmp_path / "run")
    tree = yaml.safe_load((run / "config.yaml").read_text())
    tree["data"] |= {"max_documents": 200, "cache_dir": str(tmp_path / "cache")}
    (run / "config.yaml").write_text(yaml.safe_dump(tree))
    picture = tmp_path / "a.png"
    options = [
        "--source",
        source,
        *extra,
        "--factor",
        2,
        "--windows",
        2,
        "--png",
        picture,
        "--device",
        "cpu",
    ]
    assert command(run, "--long", *options) == 0
    output = capsys.readouterr().out
    assert f"source  {source}\n" in output
    assert ("accuracy" in output) == (source == "tales")
    assert picture.stat().st_size > 10_000


def test_run_and_export_have_the_same_losses(command, tiny_run, tmp_path, capsys):
    """The run's own validation, which its last line of metrics.jsonl has too; and any text, of
    either."""
    assert command(tiny_run, "--device", "cpu", "--json", "--context", "8,32") == 0
    results = json.loads(capsys.readouterr().out)
    last = [
        line for line in map(json.loads, (tiny_run / "metrics.jsonl").open()) if "val_loss" in line
    ][-1]
    short, trained = results["losses"]
    assert trained["context_length"] == results["trained_length"] == 32
    assert trained["nats_per_token"]["mean"] == pytest.approx(last["val_loss"], rel=1e-5)
    assert trained["bits_per_byte"]["mean"] == pytest.approx(last["val_bits_per_byte"], rel=1e-5)
    assert short["nats_per_token"]["mean"] > trained["nats_per_token"]["mean"]
    model, tokenizer = interop.load(tiny_run)
    folder = tmp_path / "hf"
    folder.mkdir()
    huggingface.save_pretrained(model, tokenizer, folder)
    tokenizer_conversion.write(tokenizer, folder, 32)
    options = [
        "--source",
        "text",
        "--path",
        ROOT / "README.md",
        "--max-tokens",
        700,
        "--device",
        "cpu",
    ]
    tables = []
    for path in tiny_run, folder:
        assert command(path, *options, "--png", tmp_path / "a.png") == 0
        output = capsys.readouterr().out
        tables.append(output.splitlines()[-6:])
        assert "perplexity" in output
    assert tables[0] == tables[1]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="choose data with --source"):
        command(folder, "--device", "cpu")


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("n_lines", [1, 40])  # shorter than the context, and longer
def test_a_text_has_the_score_that_generate_prints(
    run_script, tiny_run, text_file, tmp_path, add_bos, n_lines
):
    """The same tokens, without an end, in the same windows; a byte order mark is no part of either
    text."""
    model, tokenizer = interop.load(tiny_run)
    tokenizer.bos_prefix = [tokenizer.bos_id] if add_bos else []
    folder, file = tmp_path / "hf", tmp_path / "other.txt"
    folder.mkdir()
    huggingface.save_pretrained(model, tokenizer, folder)
    tokenizer_conversion.write(tokenizer, folder, 32)
    assert interop.load(folder)[1].bos_prefix == tokenizer.bos_prefix
    file.write_text(
        "".join(text_file.read_text().splitlines(keepends=True)[-n_lines:]), encoding="utf-8-sig"
    )
    scored = run_script(ROOT / "generate.py", folder, "--score", file, "--json", "--device", "cpu")
    options = ["--source", "text", "--path", file, "--device", "cpu"]
    evaluated = run_script(ROOT / "scripts/eval.py", folder, *options, "--json")
    score, values = json.loads(scored.stdout), json.loads(evaluated.stdout)
    (loss,) = values["losses"]
    assert (score["tokens"], score["bytes"]) == (loss["n_tokens"], loss["n_bytes"])
    assert loss["n_windows"] > 1 or n_lines == 1
    assert score["nats_per_token"] == pytest.approx(loss["nats_per_token"]["mean"], rel=1e-5)
    assert score["bits_per_byte"] == pytest.approx(loss["bits_per_byte"]["mean"], rel=1e-5)
    assert values["counted"] == "all tokens, without an end-of-text token"
    assert f"counted: {values['counted']}" in scored.stderr


def test_a_part_of_the_validation_data(command, tiny_run, capsys):
    """--max-tokens reads the first windows, and says so; the whole set and the whole text say
    nothing of a part."""
    assert command(tiny_run, "--device", "cpu", "--json") == 0
    whole = json.loads(capsys.readouterr().out)
    assert command(tiny_run, "--device", "cpu", "--json", "--max-tokens", 320) == 0
    part = json.loads(capsys.readouterr().out)
    assert whole["part"] is None
    (loss,), (full,) = part["losses"], whole["losses"]
    assert loss["n_windows"] == 10 < full["n_windows"]
    assert loss["n_tokens"] <= 320
    assert part["part"] == f"the beginning ({loss['n_tokens']:,} tokens counted; see --max-tokens)"
    assert loss["nats_per_token"]["mean"] == pytest.approx(full["nats_per_token"]["mean"], rel=0.3)
    assert command(tiny_run, "--device", "cpu", "--source", "text", "--path", ROOT / "README.md",
                   "--max-tokens", 320) == 0  # fmt: skip
    assert "part  the beginning (320 tokens counted; see --max-tokens)" in capsys.readouterr().out


def test_table_columns_are_aligned(command, tiny_run, tmp_path, capsys):
    """PackedDataset that overlap; a text that the model finds very odd; no floor where there is
    none."""
    odd = tmp_path / "odd.txt"
    odd.write_text("ÿþ\x00" * 2000)
    options = [
        "--source",
        "text",
        "--path",
        odd,
        "--context",
        "16,32",
        "--stride",
        8,
        "--device",
        "cpu",
    ]
    assert command(tiny_run, *options) == 0
    output = capsys.readouterr().out
    assert f"path  {odd}\n" in output
    assert "stride  8\n" in output
    head, *rows = next(part for part in output.split("\n\n") if "perplexity" in part).splitlines()
    assert len(rows) == 2
    assert {len(row) for row in rows} == {len(head)}
    assert "floor" not in head
    assert [row.split()[0] for row in rows] == ["16", "32"]
    assert (
        command(
            tiny_run, "--source", "tales", "--max-tokens", 3000, "--context", 600, "--device", "cpu"
        )
        == 0
    )
    output = capsys.readouterr().out
    assert "against the floor" in output
    assert "the lowest possible loss" in output


def test_learned_positions_limit_long_windows(command, tiny_run, random_model, capsys, monkeypatch):
    model, tokenizer = interop.load(tiny_run)
    learned = random_model(vocab_size=model.config.vocab_size, max_seq_len=32, positions="learned")
    monkeypatch.setattr(interop, "load", lambda *_: (learned, tokenizer))
    assert command(tiny_run, "--long", "--windows", 2, "--device", "cpu") == 0
    output = capsys.readouterr().out
    assert "the model has 32 learned positions" in output
    assert "beyond the trained length" not in output
    with pytest.raises(UserError, match="RoPE"):
        command(tiny_run, "--long", "--rope-scaling", YARN, "--device", "cpu")


def test_user_errors_are_one_line_and_status_2(run_script, tiny_run):
    completed = run_script(EVAL, tiny_run, "--long", "--stride", 4)
    assert completed.returncode == 2
    assert completed.stderr == "error: --stride has no effect with --long; remove it\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--long", "--factor", "0"], "at least 1"),
        (["--long", "--tasks", "x"], "--long has no effect with --tasks"),
        (["--tasks", "x", "--context", "8"], "--context has no effect with --tasks"),
        (["--limit", "3"], "--limit has no effect without --tasks"),
        (["--factor", "3"], "--factor has no effect without --long"),
        (["--stride", "0"], "--stride is 0"),
        (["--confidence", "1"], "--confidence is 1.0"),
        (["--context", "64,x"], "--context 64,x is not a list"),
        (["--context", "1"], "not a list of lengths"),
        (["--confidence", "0.9999999999999999"], "0.9999"),
        (
            ["--long", "--max-tokens", "9"],
            "--max-tokens has no effect with --long unless --source is set",
        ),
        (
            ["--context", "16,32", "--stride", "17", "--device", "cpu"],
            "use 1 to the context length, 16",
        ),
        (
            ["--source", "tales", "--max-tokens", "99", "--stride", "8", "--device", "cpu"],
            "with packed documents",
        ),
        (["--context", "9999999", "--device", "cpu"], "--context is 9999999, longer than the text"),
        (["--stride", "9999999", "--device", "cpu"], "the stride is 9999999 tokens"),
        (["--tasks", "x", "--include", "nowhere"], "nowhere is not a folder"),
        (["--tasks", "x", "--shots", "-1"], "--shots is -1; use at least 0"),
        (["--tasks", " ,"], "--tasks is empty; list at least one, such as hellaswag"),
        (["--png", "a.pdf"], "cannot write plot a.pdf"),
        (["--source", "jsonl"], "--path"),
        (["--long", "--windows", "none"], "invalid int"),
        (["--long", "--source", "text"], "--path"),
        (["--long", "--path", "README.md"], "--source text"),
        (["--long", "--source", "text", "--path", "nowhere.txt"], "nowhere.txt"),
        (["--long", "--rope-scaling", "{type: yarn"], "is not a mapping"),
        (["--long", "--rope-scaling", "{type: jarn}"], "did you mean yarn"),
        (["--long", "--checkpoint", "step-7"], "no checkpoint step-7"),
        (["--long", "--device", "tpu"], "tpu"),
        (["--long", "--windows", "1", "--png", "nowhere/a.png"], "nowhere/a.png"),
    ],
)
def test_invalid_arguments_raise(command, tiny_run, arguments, message):
    with pytest.raises(UserError, match=message):
        command(tiny_run, *arguments)


def test_checkpoint_outside_its_run(command, tiny_run, tmp_path):
    (checkpoint,) = sorted((tiny_run / "checkpoints").glob("step-*"))[-1:]
    alone = shutil.copytree(checkpoint, tmp_path / "a" / "b" / "alone")
    with pytest.raises(UserError, match="no tokenizer"):
        command(alone, "--long", "--device", "cpu")
    shutil.copy(tiny_run / "thinker-tokenizer.json", tmp_path / "a")
    with pytest.raises(UserError, match="not in a run directory"):
        command(alone, "--long", "--device", "cpu")
    tree = yaml.safe_load((tiny_run / "config.yaml").read_text())
    tree["data"] |= {
        "source": "tales",
        "path": None,
        "max_documents": 50,
        "cache_dir": str(tmp_path / "cache"),
    }
    (tmp_path / "a" / "config.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(UserError, match="choose data with --source"):
        command(alone, "--long", "--device", "cpu")


def test_what_a_strangers_config_names_is_read_only_on_request(
    command, tiny_run, tmp_path, capsys, monkeypatch
):
    """The tokens of a run trained here are in the cache; without it `path` is not even looked
    for."""
    run, arguments = (
        shutil.copytree(tiny_run, tmp_path / "run"),
        ["--context", "16", "--json", "--device", "cpu"],
    )
    assert command(run, *arguments, "--checkpoint", "best") == 0
    capsys.readouterr()
    assert command(run, *arguments) == 0
    expected = capsys.readouterr().out.replace(str(tiny_run), str(run))
    tree = yaml.safe_load((run / "config.yaml").read_text())
    path, tree["data"]["path"] = tree["data"]["path"], "/**/*"  # a search that takes long
    (run / "config.yaml").write_text(yaml.safe_dump(tree))
    assert command(run, *arguments) == 0  # from the cache
    assert capsys.readouterr().out == expected
    tree["data"]["cache_dir"] = str(tmp_path / "cache")
    (run / "config.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(
        UserError,
        match=r"add --read-data to read .*data.path='/\*\*/\*'.*, or choose data with --source",
    ):
        command(run, *arguments)
    assert not (tmp_path / "cache").exists()
    tree["data"]["path"] = path
    (tmp_path / "file").touch()
    tree["data"]["cache_dir"] = str(tmp_path / "file" / "cache")  # where nothing can be written
    (run / "config.yaml").write_text(yaml.safe_dump(tree))
    assert command(run, *arguments, "--read-data") == 0
    output = capsys.readouterr()
    assert output.out == expected
    assert output.err.count("file/cache is not writable") == 1
    tree["data"]["cache_dir"] = str(tmp_path / "cache")
    (run / "config.yaml").write_text(yaml.safe_dump(tree))
    monkeypatch.setattr(
        "thinker.data.corpus.corpus_builder.make_tokenizer", None
    )  # the run's own tokenizer is taken
    assert command(run, *arguments, "--read-data") == 0
    assert capsys.readouterr().out == expected
    tree["data"] |= {"val_fraction": 0.3, "cache_dir": str(tmp_path / "another cache")}
    (run / "config.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(
        UserError, match="the text of data.source=text data.path=.* has changed since training"
    ):
        command(run, *arguments, "--read-data")
    with pytest.raises(UserError, match="--read-data has no effect with --source"):
        command(run, *arguments, "--read-data", "--source", "tales")


@pytest.mark.parametrize("packing", ["contiguous", "documents"])
@pytest.mark.parametrize("masking", ["true", "false"])
def test_the_same_loss_as_in_training(
    run_script, train_args, command, tmp_path, capsys, packing, masking
):
    """Short documents, each of one word: what other documents say matters to a model that was not
    trained on them."""
    rows = [
        {"text": " ".join([("cat", "dog", "owl", "fox")[i % 4]] * (3 + i % 5))} for i in range(400)
    ]
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(row | {"id": i}) + "\n" for i, row in enumerate(rows))
    )
    data = [
        "data.source=jsonl",
        f"data.path={tmp_path}/rows.jsonl",
        "data.tokenizer=byte",
        "data.val_fraction=0.3",
    ]
    data += [f"data.packing={packing}", f"data.document_masking={masking}", "train.max_steps=30"]
    done = run_script(*train_args, *data, f"run.dir={tmp_path}/run")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert command(tmp_path / "run", "--device", "cpu", "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)["losses"]
    assert found["nats_per_token"]["mean"] == pytest.approx(lines[-1]["val_loss"], rel=1e-4)
    # Other texts are read as those of training.
    choice = TextChoice("jsonl", f"{tmp_path}/rows.jsonl")
    folder = find_model(tmp_path / "run")
    _, tokenizer = load(folder)
    text = open_text(choice, folder, tokenizer, tmp_path)
    assert text.layout == {"packing": packing, "document_masking": masking == "true"}


@pytest.mark.parametrize("prefix", [0, 20])
def test_targets_of_long_conversations_that_are_not_counted_are_named(
    command, tmp_path, capsys, prefix
):
    template = "{% for m in messages %}{{ m.content }}{{ eos_token if m.role == 'assistant' else '?' }}{% endfor %}"
    tokenizer = make_tokenizer("byte", []).with_chat_template(template)
    attention = {"attention": f"prefix({prefix})"} if prefix else {}
    interop.save(
        random_model(vocab_size=tokenizer.vocab_size, **attention), tokenizer, tmp_path / "model"
    )
    rows = []
    for number in range(1, 7):
        answer = "y" * 10 * number
        rows.append(
            [{"role": "user", "content": "where"}, {"role": "assistant", "content": answer}]
        )
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    n_all = sum(10 * number + 1 for number in range(1, 7))
    arguments = [tmp_path / "model", "--source", "jsonl", "--path", path, "--device", "cpu"]
    assert command(*arguments, "--context", "32,48,60", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    expected = []
    for length, loss in zip((32, 48, 60), result["losses"], strict=True):
        n_cut = sum(max(0, 7 + 10 * number - length) for number in range(1, 7))
        n_counted = loss["n_tokens"]
        if prefix == 0:
            assert n_counted == n_all - n_cut
        n_in_prefix = n_all - n_cut - n_counted
        if n_cut:
            expected.append(
                f"conversations are cut at context {length}: {n_cut} of {n_all} targets "
                f"({n_cut / n_all:.1%}) are lost"
            )
        if n_in_prefix:
            expected.append(
                f"{n_in_prefix} of {n_all} targets ({n_in_prefix / n_all:.1%}) are lost in the "
                f"bidirectional prefix of {prefix} tokens"
            )
    assert result["lost_targets"] == expected
    assert (n_in_prefix > 0) == (prefix > 0)
    assert command(*arguments, "--context", "32,48,60") == 0
    assert "\n".join(expected) in capsys.readouterr().out
