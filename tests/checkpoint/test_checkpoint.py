"""A checkpoint is whole or not there; damage is found and named."""

import errno
import hashlib
import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch

from thinker import checkpoint
from thinker.checkpoint import CorruptCheckpoint, UnsupportedFormat, write_files
from thinker.checkpoint.run_directory import RunDirectory
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.interop import load
from thinker.model import Thinker, ThinkerConfig
from thinker.runtime.errors import UserError


def random_model(**kwargs):
    return Thinker(
        ThinkerConfig(vocab_size=270, d_model=16, n_layers=1, n_heads=2, max_seq_len=32, **kwargs)
    )


@pytest.fixture
def run(tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.create()
    make_tokenizer("byte", []).save(run.path)
    for step in (1, 2, 3):
        torch.manual_seed(step)
        training = {"optimizer.momentum": torch.full((1000,), float(step))}
        checkpoint.save(
            run.checkpoints / f"step-{step:08d}", random_model(), {"step": step}, training
        )
    return run


@pytest.mark.parametrize("tied", [False, True])
def test_round_trip_is_exact(tmp_path, tied):
    model = random_model(tie_embeddings=tied)
    checkpoint.save(tmp_path / "best-00000001", model, {"step": 1})
    again, tokenizer = load(tmp_path / "best-00000001")
    assert tokenizer is None
    assert again.config == model.config
    for (name, a), b in zip(model.named_parameters(), again.parameters()):
        assert torch.equal(a, b), name
    assert (again.lm_head.weight is again.embedding.weight) == tied
    tokens = torch.randint(0, 270, (1, 9))
    assert torch.equal(again(tokens), model.eval()(tokens))


def test_a_model_does_not_change_with_the_file_it_was_loaded_from(tmp_path):
    model = random_model()
    checkpoint.save(tmp_path / "best-00000001", model, {"step": 1})
    again, _ = load(tmp_path / "best-00000001")
    file = tmp_path / "best-00000001" / checkpoint.MODEL
    with file.open("r+b") as opened:
        opened.write(b"\xff" * file.stat().st_size)
    for (name, a), b in zip(model.named_parameters(), again.parameters()):
        assert torch.equal(a, b), name
    os.truncate(file, 0)
    tokens = torch.randint(0, 270, (1, 9))
    assert torch.equal(again(tokens), model.eval()(tokens))


def test_load_takes_the_latest_with_its_tokenizer(run):
    model, tokenizer = load(run.path)
    torch.manual_seed(3)
    assert torch.equal(model.embedding.weight, random_model().embedding.weight)
    assert tokenizer.decode(tokenizer.encode("hé")) == "hé"
    assert not model.training
    older, _ = load(run.path, checkpoint="step-00000001")
    assert not torch.equal(older.embedding.weight, model.embedding.weight)


def damage_flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def damage_truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def damage_swap(path):
    shutil.copy(path.parents[1] / "step-00000001" / path.name, path)


FILES = ["config.json", "model.safetensors", "training.safetensors", "state.json", "manifest.json"]


DAMAGE = [
    (name, damage)
    for name in FILES
    for damage in (damage_flip, damage_truncate, Path.unlink, damage_swap)
]
DAMAGE.remove(("config.json", damage_swap))  # the same in every step of a run


@pytest.mark.parametrize(("name", "damage"), DAMAGE)
def test_damage_is_passed_over_and_named(run, capsys, name, damage):
    damage(run.checkpoints / "step-00000003" / name)
    assert run.latest() == run.checkpoints / "step-00000002"
    said = capsys.readouterr().err
    assert "step-00000003" in said
    assert (
        name in said or damage is damage_swap or name == "manifest.json"
    )  # a sum that differs names its file
    assert "step-00000002 instead" in said


def is_found_damaged(folder, path):
    """Whether verify() finds damage, and names the file (or the one beside it that it belongs
    with)."""
    try:
        checkpoint.verify(folder)
    except (
        CorruptCheckpoint,
        UnsupportedFormat,
    ) as error:  # the manifest's version may be the damaged byte
        return str(path or folder) in str(error)
    return False


@pytest.mark.parametrize("name", FILES)
def test_no_byte_of_a_file_can_change_unseen(run, name, stress):
    """Every byte of the manifest, with several masks under --stress; of others 50 bytes, or 200 and
    more, with one."""
    folder = run.checkpoints / "step-00000003"
    path = folder / name
    whole = path.read_bytes()
    rng = random.Random(1)
    limit = 5000 if stress or name == "manifest.json" else 50
    places = (
        range(len(whole))
        if len(whole) < limit
        else sorted(rng.sample(range(len(whole)), min(limit, 200)))
    )
    for at in places:
        for mask in (
            (1, 0x20, 0x2A, 0x80)
            if name == "manifest.json" and stress
            else (1 << rng.randrange(8),)
        ):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ mask]) + whole[at + 1 :])
            assert is_found_damaged(folder, None if name == "manifest.json" else path), (at, mask)
    for length in {0, 1, len(whole) // 2, len(whole) - 1}:
        path.write_bytes(whole[:length])
        assert is_found_damaged(folder, path), length
    path.write_bytes(whole + b"\n")
    assert is_found_damaged(folder, path)
    path.unlink()
    assert is_found_damaged(folder, path)
    path.symlink_to(run.path / "elsewhere")
    (run.path / "elsewhere").write_bytes(whole)
    assert name == "manifest.json" or is_found_damaged(folder, path)
    path.unlink()
    path.write_bytes(whole)
    checkpoint.verify(folder)


def test_a_whole_checkpoint_under_another_steps_name_is_seen(run):
    shutil.rmtree(run.checkpoints / "step-00000003")
    shutil.copytree(run.checkpoints / "step-00000001", run.checkpoints / "step-00000003")
    with pytest.raises(
        CorruptCheckpoint, match=r"step-00000003.state.json is from a different step"
    ):
        checkpoint.verify(run.checkpoints / "step-00000003")


def test_another_format_version_is_refused_in_one_line_that_names_both(run):
    path = run.checkpoints / "step-00000003" / "manifest.json"
    manifest = json.loads(path.read_text())
    for version, content in ((1, manifest["files"]), (3, manifest | {"format_version": 3})):
        path.write_text(json.dumps(content, indent=1) + "\n")
        for open_run in (run.latest, lambda: load(run.path)):
            with pytest.raises(
                UnsupportedFormat, match=f"has checkpoint format {version}, but .* reads format 2"
            ):
                open_run()


def test_a_manifest_that_leaves_a_file_out_is_seen(run):
    folder = run.checkpoints / "step-00000003"
    for name in ("config.json", "model.safetensors", "state.json"):
        manifest = json.loads((folder / "manifest.json").read_text())
        del manifest["files"][name]
        (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
        with pytest.raises(CorruptCheckpoint, match="does not list config.json"):
            checkpoint.verify(folder)


@pytest.mark.parametrize(
    "name", ["../state.json", "/etc/hostname", "a/b", "..", "", ".", "x" * 300, "a\0b"]
)
def test_no_path_leaves_the_folder(run, name):
    folder = run.checkpoints / "step-00000003"
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = [9, "0" * 64]
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    with pytest.raises(CorruptCheckpoint, match="manifest.json is damaged"):
        checkpoint.verify(folder)


def test_what_a_crash_left_is_tidied_and_what_it_had_replaced_put_back(run):
    folder = run.checkpoints
    for left in (".step-00000004.tmp", ".best-00000002.123.tmp", ".step-00000001.removed"):
        (folder / left).mkdir()
    (folder / "step-00000003").rename(
        folder / ".step-00000003.replaced"
    )  # the crash came before the new one's rename
    shutil.copytree(
        folder / "step-00000002", folder / ".step-00000002.replaced"
    )  # and here after it
    (folder / ".mine").mkdir()
    checkpoint.recover(folder)
    names = sorted(path.name for path in folder.iterdir())
    assert names == [".mine", "step-00000001", "step-00000002", "step-00000003"]
    checkpoint.verify(folder / "step-00000003")


def test_a_pipe_or_a_folder_in_a_files_place_is_no_file(run):
    """Reading a named pipe would wait for ever."""
    for name in FILES:
        path = run.checkpoints / "step-00000003" / name
        whole = path.read_bytes()
        path.unlink()
        os.mkfifo(path)
        assert is_found_damaged(path.parent, path)
        path.unlink()
        path.mkdir()
        assert is_found_damaged(path.parent, path)
        path.rmdir()
        path.write_bytes(whole)


def test_a_configuration_that_asks_for_the_moon_takes_no_memory(run):
    folder = run.checkpoints / "step-00000003"
    config = json.loads((folder / "config.json").read_text())
    for key, value in (
        ("n_layers", 10**9),
        ("vocab_size", 10**18),
        ("d_ff", 2**62),
        ("max_seq_len", 10**15),
    ):
        (folder / "config.json").write_text(json.dumps(config | {key: value}))
        if key == "max_seq_len":
            with pytest.raises(UserError, match="max_seq_len"):
                checkpoint.load_model(folder)
        else:
            with pytest.raises(UserError):
                checkpoint.load_model(folder)


def test_nothing_whole_ends_in_one_error(run):
    for folder in run.checkpoints.iterdir():
        (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"all checkpoints in .* are damaged"):
        run.latest()


def test_half_written_is_invisible(run):
    (run.checkpoints / ".step-00000004.123.tmp").mkdir()
    assert run.latest().name == "step-00000003"


def test_a_failed_save_leaves_no_debris_and_the_old_one_whole(run, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    before = sorted(p.name for p in run.checkpoints.iterdir())
    monkeypatch.setattr(write_files, "sync_to_disk", full)
    with pytest.raises(OSError, match="No space"):
        checkpoint.save(run.checkpoints / "step-00000003", random_model(), {"step": 3})
    assert sorted(p.name for p in run.checkpoints.iterdir()) == before
    checkpoint.verify(run.checkpoints / "step-00000003")


def test_shapes_are_checked_before_loading(tmp_path):
    checkpoint.save(tmp_path / "a", random_model(), {})
    other = Thinker(ThinkerConfig(vocab_size=271, d_model=16, n_layers=1, n_heads=2))
    before = [parameter.clone() for parameter in other.parameters()]
    with pytest.raises(
        CorruptCheckpoint, match="tensor embedding.weight: found F32 270 16, expected F32 271 16"
    ):
        checkpoint.load_weights(other, tmp_path / "a")
    assert all(map(torch.equal, before, other.parameters()))


def test_a_pickle_under_our_names_never_runs(run, tmp_path):
    """Every file that is read, replaced by a pickle that would leave a trace, with a manifest that
    agrees."""
    trace = tmp_path / "trace"
    evil = b"cposix\nsystem\n(S'touch %s'\ntR." % str(trace).encode()
    for name in FILES:
        folder = run.checkpoints / "step-00000003"
        backup = (folder / name).read_bytes()
        (folder / name).write_bytes(evil)
        if name != "manifest.json":
            manifest = json.loads((folder / "manifest.json").read_text())
            manifest["files"][name] = [len(evil), hashlib.sha256(evil).hexdigest()]
            kept = (folder / "manifest.json").read_bytes()
            (folder / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(CorruptCheckpoint):  # noqa: PT012 (which of them reads the file depends on it)
            load(str(folder))
            checkpoint.read_header(folder, "training.safetensors")
            checkpoint.read_json(folder / "state.json")
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
    run.truncate_logs(3, None)
    run.log({"step": 4, "train_loss": 2.0})
    assert [line["step"] for line in run.read_metrics()] == [1, 2, 3, 4]
    run.metrics.unlink()
    os.mkfifo(run.metrics)  # reading it would wait for ever
    assert list(run.read_metrics()) == []
    run.truncate_logs(4, None)
    assert not run.metrics.exists()


def test_samples_are_cut_where_the_run_goes_on(run):
    for step in (2, 4, 6):
        run.log_sample(step, "Once", f" upon\na {step}")
    with run.samples.open("a") as file:
        file.write('{"step": "8", "prompt": "", "text": ""}\n{"step": 8}\n[]\n{"step": 8, "pro')
    run.truncate_logs(4, None)
    run.log_sample(6, "Once", "")
    assert list(run.read_samples()) == [
        {"step": 2, "prompt": "Once", "text": " upon\na 2"},
        {"step": 4, "prompt": "Once", "text": " upon\na 4"},
        {"step": 6, "prompt": "Once", "text": ""},
    ]
    target = run.samples.rename(run.path / "elsewhere")
    run.samples.symlink_to(target)
    run.truncate_logs(4, None)
    assert len(target.read_text().splitlines()) == 3  # no file behind a link is changed
    assert not run.samples.exists()


@pytest.mark.parametrize(
    ("make", "says"),
    [(lambda path: path / "nowhere", "does not exist"), (lambda path: path, "not a run directory")],
)
def test_folders_that_are_no_run(tmp_path, make, says):
    with pytest.raises(UserError, match=says):
        load(make(tmp_path))


def test_a_missing_checkpoint_names_those_there_are(run):
    with pytest.raises(UserError, match="available: step-00000001, step-00000002, step-00000003"):
        load(run.path, checkpoint="step-7")
    with pytest.raises(UserError, match="has no checkpoint best .available: step-00000001"):
        load(run.path, checkpoint="best")
