"""What may change when a run is resumed, and what is said about it."""

import shutil

import pytest
import torch
from conftest import run_script
from training_runs import assert_same_run, assert_same_tensors, checkpoint_steps

from thinker.checkpoint.run_directory import RunDirectory
from thinker.data.tokenizers.saved_tokenizer import load_tokenizer
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.runtime.errors import UserError
from thinker.training.config.load import validate_config
from thinker.training.settings.resolve import resolve_settings
from thinker.training.state import resume
from thinker.training.state.run_state import RunState

CUT = """
import glob, os, runpy, sys

pattern, sys.argv = sys.argv[1], sys.argv[2:]


def cut(event, arguments):
    if event == "os.rename" and "step-00000002" in str(arguments[1]):
        for path in glob.glob(pattern):
            os.truncate(path, 0)


sys.addaudithook(cut)
runpy.run_path(sys.argv[0], run_name="__main__")
"""
CPU = torch.device("cpu")
TREE = {"data": {"seq_len": 32, "source": "text", "path": "a.txt"},
        "train": {"max_steps": 9, "batch_size": 8, "precision": "fp32", "compile": False}}  # fmt: skip
# Of every section, keys with another value than in TREE. What is not refused may change, whatever
# it says.
FREE = {
    "data": {"cache_dir": "elsewhere", "num_workers": 5, "streaming": False, "path": "b.txt"},
    "optimizer": {"lr": 0.5, "betas": [0.5, 0.6], "weight_decay": 0.1},
    "train": {"max_steps": 10, "micro_batch_size": 2, "precision": "bf16", "checkpoint_every_n_blocks": 1,
              "eval_every": 3, "save_every": 3, "patience": 4, "keep_last": 7, "log_every": 2, "dist_timeout_s": 7.0},
    "tracking": {"wandb": "offline", "project": "mine", "name": "other"},
}  # fmt: skip
FIXED = {
    "run": {"seed": 2},
    "model": {"d_model": 128, "dropout": 0.1, "max_seq_len": 64},
    "data": {"chat_template": "b.jinja", "val_tokens": "b.bin", "seq_len": 16, "packing": "documents",
             "val_fraction": 0.2, "tokenizer": "byte", "shift_windows": True, "document_masking": True,
             "max_documents": 3},
    "optimizer": {"name": "adamw"},
    "train": {"batch_size": 16, "ema_decay": 0.9},
}  # fmt: skip
SAID = {"micro_batch_size": (8, 2), "precision": ("fp32", "bf16")}


def settings_with(section=None, key=None, value=None):
    tree = {name: dict(keys) for name, keys in TREE.items()}
    if section:
        tree.setdefault(section, {})[key] = value
    config = validate_config(tree)
    return config, resolve_settings(config, config.thinker_config(300), CPU)


def all_keys(sections):
    return [
        (section, key, value) for section, keys in sections.items() for key, value in keys.items()
    ]


def check(section, key, value):
    _, before = settings_with()
    config, after = settings_with(section, key, value)
    sections = config.model_dump(mode="json", exclude={"model", "tracking", "extensions"}) | {
        "model": after.model.to_dict()
    }
    resume.check_unchanged(RunDirectory("runs/x"), before, sections)
    return before, after


@pytest.mark.parametrize(("section", "key", "value"), all_keys(FIXED))
def test_what_decides_weights_or_batches_is_refused(section, key, value):
    with pytest.raises(UserError, match=rf"^{section}.{key} is .*; undo the change"):
        check(section, key, value)


@pytest.mark.parametrize(("section", "key", "value"), all_keys(FREE))
def test_the_rest_may_change_and_says_so_where_the_last_bits_will(section, key, value, capsys):
    before, after = check(section, key, value)
    capsys.readouterr()
    resume.warn_about_changes(
        RunState(settings=before, machine={"threads": "1"}), {"threads": "1"}, after
    )
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("changed since the last save: ")
    assert f"{section}.{key} " in lines[0]
    said = [line for line in lines if "differ slightly from an uninterrupted run" in line]
    expected = [f"train.{key}: %s -> %s" % SAID[key]] if key in SAID else []
    assert [line.split(";")[0] for line in said] == expected


def test_nothing_is_said_where_nothing_changed(capsys):
    _, settings = settings_with()
    capsys.readouterr()
    resume.warn_about_changes(RunState(settings=settings, machine={"ranks": "1"}), {}, settings)
    assert capsys.readouterr().err == ""


def test_the_number_of_workers_decides_no_bit(train_args, tiny_run, tmp_path):
    for workers in (0, 3):
        run = tmp_path / str(workers)
        shutil.copytree(tiny_run, run)
        done = run_script(
            *train_args, f"run.dir={run}", "train.max_steps=43", f"data.num_workers={workers}"
        )
        assert done.returncode == 0, done.stderr
        assert "data.num_workers 1 -> " in done.stderr
    assert_same_tensors(tmp_path / "0", tmp_path / "3", 43)


@pytest.fixture(scope="module")
def project(train_args, tmp_path_factory):
    """A folder with a text, a folder of texts, their cache, and finished runs on both; all its
    paths are relative."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "texts").mkdir()
    for i in range(60):
        (folder / "texts" / f"{i}.txt").write_text(
            "".join(f"Cat {j % 7} sat on mat {j % (i + 1)}.\n" for j in range(30))
        )
    (folder / "my.txt").write_text(
        "".join(path.read_text() for path in sorted((folder / "texts").iterdir()))
    )
    for name in ("my.txt", "texts"):
        done = run_in(folder, train_args, name)
        assert done.returncode == 0, done.stderr
    return folder


def run_in(folder, train_args, name, *overrides):
    options = [
        "data.cache_dir=cache",
        f"data.path={name}",
        f"run.dir=runs/{name}",
        "train.keep_last=9",
        *overrides,
    ]
    return run_script(*train_args, *options, cwd=folder)


@pytest.fixture
def interrupted(project, tmp_path):
    """The project moved to another folder, with runs that have stopped two steps before their
    end."""
    folder = shutil.copytree(project, tmp_path / "elsewhere")
    for run in (folder / "runs").iterdir():
        shutil.rmtree(run / "checkpoints" / "step-00000006")
    return folder


@pytest.mark.parametrize("name", ["my.txt", "texts"])
@pytest.mark.parametrize("change", ["nothing", "moved", "new cache", "gone"])
def test_what_the_text_is_decides_and_not_where_it_lies(
    train_args, project, interrupted, name, change
):
    overrides = {"moved": [f"data.path=new/{name}"], "new cache": ["data.cache_dir=new"]}.get(
        change, []
    )
    if change == "moved":
        (interrupted / "new").mkdir()
        (interrupted / name).rename(interrupted / "new" / name)
    elif change == "gone":
        (interrupted / name).rename(interrupted / "unmounted")
        if name == "texts":
            (interrupted / name).mkdir()  # a mount point
    done = run_in(interrupted, train_args, name, *overrides)
    assert done.returncode == 0, done.stderr
    assert "resuming from step 4" in done.stderr
    said = f"the text of data.source=text data.path={name} does not exist; using the cached tokens of the run"
    assert done.stderr.splitlines().count(said) == (change == "gone")
    assert (f"data.path {name} -> new/{name}" in done.stderr) == (change == "moved")
    assert_same_tensors(project / "runs" / name, interrupted / "runs" / name, 6)


@pytest.mark.parametrize(
    "change", ["edited", "another", "reordered", "missing", "gone without cache", "damaged cache"]
)
def test_another_text_or_none_is_refused(train_args, interrupted, change):
    text, name, overrides = interrupted / "my.txt", "my.txt", []
    message = "the text of data.source=text data.path={} has changed since the run in runs/{} started; undo the change, "
    if change == "edited":
        text.write_text(text.read_text().replace("Cat 1", "Cat 9", 1))
    elif change == "another":
        (interrupted / "new.txt").write_text(text.read_text() * 2)
        overrides = ["data.path=new.txt"]
    elif change == "reordered":
        name = "texts"
        (interrupted / name / "0.txt").rename(interrupted / name / "9999.txt")
    else:
        message = "data.path={} does not exist; "
        if change == "missing":
            overrides = ["data.path=mistyped.txt"]
        else:
            text.unlink()
            shards = list((interrupted / "cache").rglob("val-00000.tokens"))
            for shard in shards:
                shard.unlink() if change == "gone without cache" else shard.write_bytes(
                    shard.read_bytes()[:-9] + b"x" * 9
                )
    done = run_in(interrupted, train_args, name, *overrides)
    assert done.returncode == 2
    path = overrides[0].removeprefix("data.path=") if overrides else name
    assert message.format(path, name) in done.stderr.splitlines()[-1]
    assert not (interrupted / "runs" / name / "checkpoints" / "step-00000006").exists()


def test_comments_in_the_config_may_change(train_args, project, interrupted):
    train, config, *overrides = train_args
    edited = interrupted / "edited.yaml"
    edited.write_text("# A comment.\n" + config.read_text())
    done = run_in(interrupted, [train, edited, *overrides], "my.txt")
    assert done.returncode == 0, done.stderr
    assert "changed" not in done.stderr
    assert_same_tensors(project / "runs" / "my.txt", interrupted / "runs" / "my.txt", 6)


@pytest.mark.parametrize("change", ["nothing", "moved", "gone", "edited"])
def test_what_a_tokenizers_file_holds_decides(train_args, project, interrupted, change):
    tokenizer = load_tokenizer(project / "runs" / "my.txt")
    file = interrupted / "tokenizer.json"
    tokenizer.save(interrupted).rename(file)
    options = ["run.dir=runs/other", "data.tokenizer=tokenizer.json"]
    assert run_in(interrupted, train_args, "my.txt", *options).returncode == 0
    expected = shutil.copytree(interrupted / "runs" / "other", interrupted / "expected")
    shutil.rmtree(interrupted / "runs" / "other" / "checkpoints" / "step-00000006")
    if change == "moved":
        file.rename(interrupted / "moved.json")
        options[1] = "data.tokenizer=moved.json"
    elif change == "gone":
        file.unlink()
    elif change == "edited":
        make_tokenizer("bpe:300", ["other words " * 99]).save(interrupted).rename(file)
    done = run_in(interrupted, train_args, "my.txt", *options)
    said = "data.tokenizer=tokenizer.json does not exist; using the run's copy of it"
    assert done.stderr.splitlines().count(said) == (change == "gone")
    if change == "edited":
        assert done.returncode == 2
        line = "data.tokenizer=tokenizer.json has changed since the run in runs/other started; undo the change, "
        assert line in done.stderr.splitlines()[-1]
    else:
        assert done.returncode == 0, done.stderr
        assert_same_tensors(expected, interrupted / "runs" / "other", 6)


@pytest.mark.parametrize(
    "name", ["train-00000.tokens", "val-00000.tokens", "train-00000.windows-32"]
)
def test_a_file_of_the_cache_that_is_cut_while_it_is_read_costs_the_steps_since_the_checkpoint(
    train_args, tmp_path, name
):
    options = [
        "data.source=tales",
        "data.path=null",
        "data.max_documents=200",
        "data.packing=documents",
    ]
    command = [*train_args, *options, f"data.cache_dir={tmp_path / 'cache'}"]
    done = run_script(*command, f"run.dir={tmp_path / 'whole'}")
    assert done.returncode == 0, done.stderr
    (tmp_path / "cut.py").write_text(CUT)
    cut = [tmp_path / "cut.py", tmp_path / "cache/tokens/*" / name]
    command += [f"run.dir={tmp_path / 'run'}"]
    done = run_script(*cut, *command)
    assert done.returncode == 1, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert f"{name} was truncated while in use; run the same command again" in errors[0]
    assert "Traceback" not in done.stderr
    assert checkpoint_steps(tmp_path / "run") == [2]
    done = run_script(*command)
    assert done.returncode == 0, done.stderr
    assert_same_run(tmp_path / "whole", tmp_path / "run", 6)
