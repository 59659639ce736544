"""Which checkpoints a run keeps, and what a save in the background may not do."""

import errno
import os
import shutil
import threading

import pytest
import torch
from safetensors.torch import load_file

from thinker import checkpoint
from thinker.checkpoint import CheckpointManager, list_checkpoints, write_files


def files(value, size=8):
    return {
        "config.json": {"a": 1},
        "model.safetensors": {"w": torch.full((size,), float(value))},
        "state.json": {"step": value},
        "training.safetensors": {"m": torch.full((size,), -float(value))},
    }


def names(folder, kind="step"):
    return [int(path.name.split("-")[1]) for path in list_checkpoints(folder, kind)]


@pytest.fixture(params=[False, True], ids=["foreground", "background"])
def background(request):
    return request.param


@pytest.mark.parametrize(
    ("last", "every", "kept"),
    [(1, None, [10]), (3, None, [8, 9, 10]), (2, 4, [4, 8, 9, 10]), (1, 1, [*range(1, 11)])],
)
def test_the_last_and_the_milestones_are_kept(tmp_path, background, last, every, kept):
    saver = CheckpointManager(tmp_path, last, every, background)
    for step in range(1, 11):
        saver.save("step", step, files(step))
    saver.wait()
    saver.close()
    assert names(tmp_path) == kept
    for folder in list_checkpoints(tmp_path):
        checkpoint.verify(folder)


def test_of_the_best_the_one_written_last_stays_whatever_its_number(tmp_path, background):
    """After going back to an older checkpoint a better one may come earlier than one that is
    there."""
    saver = CheckpointManager(tmp_path, 1, None, background)
    for step in (450, 420, 430):
        saver.save("best", step, files(step))
        saver.wait()
        assert names(tmp_path, "best") == [step]
    saver.save("step", 1, files(1))
    saver.close()
    assert (names(tmp_path, "best"), names(tmp_path)) == ([430], [1])


def test_the_old_one_goes_only_when_the_new_one_is_whole(tmp_path, background, monkeypatch):
    saver = CheckpointManager(tmp_path, 1, None, background)
    saver.save("step", 1, files(1))
    saver.wait()

    def full(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(write_files, "sync_to_disk", full)
    with pytest.raises(OSError, match="No space"):  # noqa: PT012 - in the background it is the next one that tells
        saver.save("step", 2, files(2))
        saver.wait()
    saver.close()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    checkpoint.verify(tmp_path / "step-00000001")


def test_training_may_change_the_tensors_while_they_are_written(tmp_path, monkeypatch):
    may_write, write = threading.Event(), write_files.write_checkpoint

    def late(*arguments):
        assert may_write.wait(20)
        write(*arguments)

    monkeypatch.setattr(write_files, "write_checkpoint", late)
    saver = CheckpointManager(tmp_path, 2, None, background=True)
    live = files(1)
    saver.save("step", 1, live)  # returns although nothing may be written yet
    live["model.safetensors"]["w"].zero_()
    assert names(tmp_path) == []
    may_write.set()
    saver.wait()
    saver.close()
    assert load_file(tmp_path / "step-00000001" / "model.safetensors")["w"].tolist() == [1.0] * 8


def test_one_is_written_at_a_time_so_memory_for_one_copy_is_enough(tmp_path, monkeypatch):
    writing, most, write = [], [], write_files.write_checkpoint

    def watched(folder, *arguments):
        writing.append(folder)
        most.append(len(writing))
        write(folder, *arguments)
        writing.remove(folder)

    monkeypatch.setattr(write_files, "write_checkpoint", watched)
    saver = CheckpointManager(tmp_path, 2, None, background=True)
    for step in range(1, 6):
        saver.save("step", step, files(step, 1 << 16))
        assert len(names(tmp_path)) >= min(step - 1, 2)  # all before it are there
    saver.close()
    assert max(most) == 1


def test_a_failed_save_is_told_at_the_next_step(tmp_path):
    """The folder is gone, so the thread cannot write; another save is not needed to learn that."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    saver = CheckpointManager(folder, 2, None, background=True)
    saver.save("step", 1, files(1))
    saver.wait()
    saver.check()
    shutil.rmtree(folder)
    saver.save("step", 2, files(2))
    (writing,) = saver._writing
    assert isinstance(writing.exception(timeout=60), FileNotFoundError)
    with pytest.raises(FileNotFoundError):
        saver.check()
    saver.check()  # it is told once
    saver.close()


def test_the_checkpoints_of_a_step_do_not_wait_for_each_other(tmp_path, monkeypatch):
    """But those of the next step do, so that copies of one step are in memory at most."""
    may_write, write, saved = threading.Event(), write_files.write_checkpoint, []

    def late(folder, *arguments):
        assert may_write.wait(60)
        write(folder, *arguments)

    monkeypatch.setattr(write_files, "write_checkpoint", late)
    saver = CheckpointManager(tmp_path, 2, None, background=True)
    saver.save("best", 1, files(1))
    saver.save("step", 1, files(1))  # both return although nothing may be written yet

    def save_next():
        saver.save("step", 2, files(2))
        saved.append([*names(tmp_path, "best"), *names(tmp_path)])

    thread = threading.Thread(target=save_next)
    thread.start()
    assert names(tmp_path, "best") == names(tmp_path) == saved == []
    may_write.set()
    thread.join()
    saver.close()
    assert saved[0][:2] == [1, 1]
    assert names(tmp_path) == [1, 2]
