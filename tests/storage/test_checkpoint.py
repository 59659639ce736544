"""A checkpoint is whole or not there; damage is found and named."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from data.tokenizer import make_tokenizer
from errors import UserError
from model import Thinker, ThinkerConfig
from storage import checkpoint, load
from storage.checkpoint import Damaged
from storage.run_directory import RunDirectory


def make_thinker(**kwargs):
    return Thinker(ThinkerConfig(vocab_size=270, d_model=16, n_layers=1, n_heads=2, max_seq_len=32, **kwargs))


@pytest.fixture
def run(tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.create()
    make_tokenizer("byte", []).save(run.path)
    for step in (1, 2, 3):
        torch.manual_seed(step)
        training = {"random.cpu": torch.get_rng_state()}
        checkpoint.save(run.checkpoints / f"step-{step:08d}", make_thinker(), {"step": step}, training)
    return run


@pytest.mark.parametrize("tied", [False, True])
def test_round_trip_is_exact(tmp_path, tied):
    thinker = make_thinker(tie_embeddings=tied)
    checkpoint.save(tmp_path / "step-00000001", thinker, {"step": 1})
    again, tokenizer = load(tmp_path / "step-00000001")
    assert tokenizer is None
    assert again.config == thinker.config
    for (name, a), b in zip(thinker.named_parameters(), again.parameters()):
        assert torch.equal(a, b), name
    assert (again.head.weight is again.embedding.weight) == tied
    tokens = torch.randint(0, 270, (1, 9))
    assert torch.equal(again(tokens), thinker.eval()(tokens))


def test_load_takes_the_latest_with_its_tokenizer(run):
    thinker, tokenizer = load(run.path)
    torch.manual_seed(3)
    assert torch.equal(thinker.embedding.weight, make_thinker().embedding.weight)
    assert tokenizer.decode(tokenizer.encode("hé")) == "hé"
    assert not thinker.training
    older, _ = load(run.path, checkpoint="step-00000001")
    assert not torch.equal(older.embedding.weight, thinker.embedding.weight)


def damage_flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def damage_truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def damage_swap(path):
    shutil.copy(path.parents[1] / "step-00000001" / path.name, path)


FILES = ["config.json", "model.safetensors", "training.safetensors", "state.json", "manifest.json"]


DAMAGE = [(name, damage) for name in FILES for damage in (damage_flip, damage_truncate, Path.unlink, damage_swap)]
DAMAGE.remove(("config.json", damage_swap))  # the same in every step of a run


@pytest.mark.parametrize(("name", "damage"), DAMAGE)
def test_damage_is_passed_over_and_named(run, capsys, name, damage):
    damage(run.checkpoints / "step-00000003" / name)
    assert run.latest() == run.checkpoints / "step-00000002"
    said = capsys.readouterr().err
    assert "step-00000003" in said
    assert (name in said) or damage is damage_swap
    assert "step-00000002 instead" in said


def test_nothing_whole_ends_in_one_error(run):
    for folder in run.checkpoints.iterdir():
        (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"no checkpoint in .* is whole"):
        run.latest()


def test_half_written_is_invisible(run):
    (run.checkpoints / ".step-00000004.123.tmp").mkdir()
    assert run.latest().name == "step-00000003"


def test_a_failed_save_leaves_no_debris_and_the_old_one_whole(run, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    before = sorted(p.name for p in run.checkpoints.iterdir())
    monkeypatch.setattr(checkpoint, "_flush", full)
    with pytest.raises(OSError, match="No space"):
        checkpoint.save(run.checkpoints / "step-00000003", make_thinker(), {"step": 3})
    assert sorted(p.name for p in run.checkpoints.iterdir()) == before
    checkpoint.verify(run.checkpoints / "step-00000003")


def test_shapes_are_checked_before_loading(tmp_path):
    checkpoint.save(tmp_path / "a", make_thinker(), {})
    other = Thinker(ThinkerConfig(vocab_size=271, d_model=16, n_layers=1, n_heads=2))
    before = [parameter.clone() for parameter in other.parameters()]
    with pytest.raises(Damaged, match="has embedding.weight as F32 270 16 where F32 271 16 belongs"):
        checkpoint.load_weights(other, tmp_path / "a")
    assert all(map(torch.equal, before, other.parameters()))


def test_a_pickle_under_our_names_never_runs(run, tmp_path):
    """Every file that is read, replaced by a pickle that would leave a trace, with a manifest that agrees."""
    trace = tmp_path / "trace"
    evil = b"cposix\nsystem\n(S'touch %s'\ntR." % str(trace).encode()
    for name in FILES:
        folder = run.checkpoints / "step-00000003"
        backup = (folder / name).read_bytes()
        (folder / name).write_bytes(evil)
        if name != "manifest.json":
            import hashlib
            import json

            manifest = json.loads((folder / "manifest.json").read_text())
            manifest[name] = [len(evil), hashlib.sha256(evil).hexdigest()]
            kept = (folder / "manifest.json").read_bytes()
            (folder / "manifest.json").write_text(json.dumps(manifest))
        code = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r}); from storage import load; "
        code += f"load({str(folder)!r}); from storage.checkpoint import read_tensors, read_json; "
        code += "from pathlib import Path; "
        code += f"folder = Path({str(folder)!r}); read_tensors(folder / 'training.safetensors'); "
        code += "read_json(folder / 'state.json')"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode != 0
        assert "Damaged" in done.stderr, done.stderr
        assert not trace.exists()
        (folder / name).write_bytes(backup)
        if name != "manifest.json":
            (folder / "manifest.json").write_bytes(kept)
    assert load(run.path)[0] is not None


def test_metrics_are_cut_where_the_run_goes_on(run):
    for step in range(1, 6):
        run.log({"step": step, "train_loss": 1.0})
    with run.metrics.open("a") as file:
        file.write('{"step": 6, "train')  # a crash in the middle of a line
    assert [line["step"] for line in run.read_metrics()] == [1, 2, 3, 4, 5]
    run.cut_metrics(3, None)
    run.log({"step": 4, "train_loss": 2.0})
    assert [line["step"] for line in run.read_metrics()] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: path / "nowhere", "does not exist"),
        (lambda path: path, "no run directory"),
    ],
)
def test_folders_that_are_no_run(tmp_path, make, says):
    with pytest.raises(UserError, match=says):
        load(make(tmp_path))


def test_a_missing_checkpoint_names_those_there_are(run):
    with pytest.raises(UserError, match="there are: step-00000001, step-00000002, step-00000003"):
        load(run.path, checkpoint="step-7")
    with pytest.raises(UserError, match="no best checkpoint"):
        load(run.path, checkpoint="best")
