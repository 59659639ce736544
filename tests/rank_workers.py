"""What the ranks of tests do, each in a process of its own: targets for fork_server.run_ranks()."""

import contextlib
import io
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from thinker import checkpoint
from thinker.checkpoint import CheckpointManager
from thinker.data.batches.prefetch import Batch
from thinker.model import ThinkerConfig
from thinker.runtime.errors import UserError
from thinker.runtime.ranks import full_tensor
from thinker.training.config.load import load_config, validate_config
from thinker.training.distributed import process_group
from thinker.training.run import build_trainer
from thinker.training.settings.resolve import resolve_settings
from thinker.training.state import resume
from thinker.training.state.run_state import RunState
from thinker.training.step import TrainingStep, build_model

CPU, ROWS, T = torch.device("cpu"), 8, 24
SHAPE = {
    "attention_sinks": True,
    "token_shift": True,
    "value_embeddings": True,
    "bigram_rows": 51,
    "vocab_size": 97,
    "d_model": 31,
    "n_layers": 2,
    "n_heads": 3,
    "n_kv_heads": 1,
    "head_dim": 10,
    "d_ff": 77,
}
CONFIG = ThinkerConfig(**SHAPE, max_seq_len=T)  # nothing divides by two or four


def batch(step, dist, isolate=False):
    """A rank's rows of a step's batch; in the last rows hardly a target is counted, and in the
    first all are."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(97, (ROWS, T + 1), generator=generator)
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[
        torch.rand(targets.shape, generator=generator) < torch.linspace(0, 0.95, ROWS)[:, None]
    ] = -1
    count, rows = int((targets >= 0).sum()), ROWS // dist.world_size
    own = slice(dist.rank * rows, (dist.rank + 1) * rows)
    return Batch(inputs[own], targets[own], count, (inputs[own] < 9).cumsum(1) if isolate else None)


def make_step(dist, model_config=CONFIG, optimizer="adamw", **train):
    """A training step of the model that seed 1 draws."""
    train = {
        "max_steps": 50,
        "batch_size": max(ROWS, train.get("micro_batch_size", 1) * dist.world_size),
        "precision": "fp32",
        "compile": False,
        "parallel": "ddp",
    } | train
    train.setdefault("micro_batch_size", ROWS // dist.world_size)
    config = validate_config(
        {"train": train, "optimizer": {"name": optimizer}, "data": {"seq_len": T}}
    )
    if not torch.distributed.is_initialized():
        dist.init_process_group("cpu", 600.0)
    with contextlib.redirect_stderr(io.StringIO()):  # tests compare what ranks print when they fail
        settings = resolve_settings(config, model_config, CPU, dist=dist)
    return TrainingStep(build_model(model_config, 1, CPU), settings, dist=dist)


def full_state(step):
    """Weights and optimizer state, whole, as a safetensors file can hold them."""
    tensors = checkpoint.model_tensors(step.model) | step.optimizers.tensors()
    return {
        name: full_tensor(tensor.detach()).clone().contiguous() for name, tensor in tensors.items()
    }


def train_steps(dist, out, steps, options):
    """Make so many steps. Returns (loss, gradient norm) of each; `out` gets all that there is
    then."""
    step = make_step(dist, **options)
    found = [
        [float(number) for number in step(batch(number, dist), 1.0)] for number in range(steps)
    ]
    tensors = full_state(step)
    if dist.is_main:
        save_file(tensors, out)
    return found


def compare_gradients(dist, folder, steps, options):
    """The clipped gradients of each step, into a file each; where there are files already, from the
    weights in them.

    Returns: for each step how far each gradient is, relative to its norm, from that in the file.
    """
    step, found, far = make_step(dist, **options), {}, []
    update = step.optimizers.step

    def kept(skip):
        found.clear()
        for name, parameter in step.model.named_parameters():
            found[name] = full_tensor(parameter.grad.detach()).clone()
        update(skip)

    step.optimizers.step = kept
    for number in range(steps):
        path = Path(folder, f"{number}.safetensors")
        if path.exists():
            theirs = load_file(path)
            with torch.no_grad():
                for name, parameter in step.model.named_parameters():
                    value = theirs[f"weight {name}"]
                    if hasattr(parameter, "to_local"):
                        own, parts = parameter.to_local(), value.chunk(dist.world_size)
                        if len(own):
                            own.copy_(parts[dist.rank])
                    else:
                        parameter.copy_(value)
        else:
            weights = {
                f"weight {name}": p.detach().clone() for name, p in step.model.named_parameters()
            }
        norm = step(batch(number, dist), 1.0)[1]
        found["norm of all"] = norm.reshape(1)
        if path.exists():
            sizes = {name: float(theirs[name].norm()) or 1.0 for name in found}
            far.append(
                {name: float((g - theirs[name]).norm()) / sizes[name] for name, g in found.items()}
            )
        else:
            save_file(found | weights, path)
    return far


def save_checkpoints(dist, folder, parallel):
    """Two steps with each optimizer, then checkpoints of them, whole and sharded, and what was
    saved in them."""
    for optimizer in ("adamw", "muon"):
        step = make_step(dist, optimizer=optimizer, parallel=parallel)
        for number in range(2):
            step(batch(number, dist), 1.0)
        tensors = full_state(step)
        for sharded in (False, True):
            place = Path(
                folder,
                f"{optimizer}-{dist.world_size}-{parallel}-{'sharded' if sharded else 'whole'}",
            )
            if dist.is_main:
                place.mkdir()
                save_file(tensors, place / "was.safetensors")
            dist.broadcast_object()
            saver = CheckpointManager(place, 1, dist=dist, sharded=sharded)
            state = RunState(step=2).model_dump(mode="json")
            saver.save(
                "step", 2, checkpoint.checkpoint_files(step.model, state, step.optimizers.tensors())
            )
            dist.broadcast_object()  # rank 0 has written


def restore_checkpoints(dist, folder, parallel, places):
    """Take checkpoints up. Returns what is not bit for bit as it was saved, and the loss of a step
    from each."""
    changed, losses = [], {}
    for place in (Path(folder, name) for name in places):
        step = make_step(dist, optimizer=place.name.split("-")[0], parallel=parallel)
        resume.restore(place / "step-00000002", step, RunState(step=2))
        found, was = full_state(step), load_file(place / "was.safetensors")
        assert found.keys() == was.keys()
        assert any(name.startswith("optimizer.") for name in was)
        changed += [
            f"{place.name} {name}" for name in was if not torch.equal(found[name], was[name])
        ]
        losses[place.name] = float(step(batch(2, dist), 1.0)[0])
    return changed, losses


def train_and_record_inputs(dist, config, overrides):
    """Train by a config, from where its run stands. Returns the inputs of each step as this rank
    saw them."""
    trainer, seen = build_trainer(load_config(config, overrides), dist), []

    class Noting:
        def __call__(self, given, factor):
            seen.append(given.inputs.tolist())
            return step(given, factor)

        def __getattr__(self, name):
            return getattr(step, name)

    step, trainer.step = trainer.step, Noting()
    assert trainer.train() == 0
    return seen


def gradients_of_a_frequent_token(dist, precision, parallel):
    """The gradients of a batch in which every other one of 12,288 tokens is the same, unclipped;
    and how many of a matrix's numbers bf16 could hold.
    """
    rows = 512 // dist.world_size
    step = make_step(
        dist, parallel=parallel, precision=precision, grad_clip=1e9, micro_batch_size=rows
    )
    tokens = torch.randint(97, (512, T), generator=torch.Generator().manual_seed(3))
    tokens[:, ::2] = 5
    tokens, found = tokens[dist.rank * rows : (dist.rank + 1) * rows], {}
    update = step.optimizers.step

    def kept(skip):
        found.update(
            {
                name: full_tensor(p.grad.detach()).clone()
                for name, p in step.model.named_parameters()
            }
        )
        update(skip)

    step.optimizers.step = kept
    for _ in range(3):  # from the second on the blocks are not the identity any more
        step(Batch(tokens, tokens.roll(-1, 1), 512 * T), 0.1)
    matrix = found["blocks.0.mlp.down_proj.weight"]
    return {name: g.flatten().tolist() for name, g in found.items()}, float(
        (matrix.bfloat16() == matrix).float().mean()
    )


def gradients_missing_before_micro_batches(dist, parallel):
    """Before each of two micro-batches: whether a matrix has no gradient yet, which FSDP2 sums
    before it is there."""
    step, seen = make_step(dist, parallel=parallel, micro_batch_size=2), []
    weight = step.optimizers.optimizers[0].param_groups[0]["params"][0]
    step.model.register_forward_pre_hook(lambda *given: seen.append(weight.grad is None))
    step(batch(0, dist), 1.0)
    return seen


def evaluate_and_signal(dist, config, overrides):
    """A signal to the last rank alone, as all hear of it, and what an evaluation says before and
    after."""
    trainer = build_trainer(load_config(config, overrides), dist)
    before = trainer.evaluator(trainer.model, trainer.poll_signals)
    if dist.rank == dist.world_size - 1:
        trainer.signal_handler.number = 15
    after = trainer.evaluator(trainer.model, trainer.poll_signals)
    trainer.batches.close()
    return before.loss, before.n_tokens, after, trainer.stopping


def count_gloo_threads(dist):
    dist.init_process_group("cpu", 60.0)
    dist.gather_objects(None)
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return names.count("pt_gloo_runloop")


class RollCallClock:
    """A clock for rank 0 of four: it stands until all but rank 1 have answered, or left; then each
    look is a second."""

    def __init__(self, store):
        self.store, self.now = store, 0.0

    def monotonic(self):
        key = "left" if self.store.check(["left/0"]) else "alive"
        self.now += self.store.check([f"{key}/{rank}" for rank in (0, 2, 3)])
        return self.now

    sleep = staticmethod(time.sleep)


def fail_on_rank_1(dist, failure, seconds=None):
    """Rank 1 fails before the third step, while the others wait for it, for an answer and for the
    roll call, so long.

    Without `seconds` every wait that is not bound to last its time ends with an event, however busy
    the machine is.
    """
    process_group.ROLL_CALL_SECONDS = seconds or 600.0
    dist.init_process_group("cpu", seconds or 600.0)
    step = make_step(dist)
    for number in range(5):
        if number == 2 and seconds is None:
            if dist.rank == 1 and failure in ("exception", "network", "user error"):
                process_group.ROLL_CALL_SECONDS = 0.1  # rank 0 will not fail before it
            is_lost, hangs = failure.startswith(("killed", "hangs")), failure.startswith("hangs")
            if is_lost and dist.is_main:
                process_group.time, process_group.ROLL_CALL_SECONDS = (
                    RollCallClock(dist.store),
                    10.0,
                )
            if hangs and dist.rank > 1:
                dist.store.wait(["alive/0"])  # rank 0 is the first to miss rank 1
            if hangs or (
                is_lost and dist.rank > 1
            ):  # rank 3 may wait for rank 0, which has found rank 1 gone
                dist.timeout = 0.5
                torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=dist.timeout))
        if number == 2 and dist.rank == 1:
            if failure == "exception":
                raise ZeroDivisionError("boom on rank 1")
            if failure == "network":
                raise TimeoutError(
                    "the hub timed out"
                )  # an error of its own, not another rank's silence
            if failure == "user error":
                raise UserError("rank 1 cannot read its data")
            if failure == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if failure.startswith("hangs"):
                time.sleep(3600)  # the test kills it
        if number == 2 and failure == "hangs before an object":
            dist.gather_objects(number)  # rank 1 never comes here
        if number == 2 and failure == "user error on all ranks":
            raise UserError("nobody can read the data")
        dist.all_gather_scalars(number)
        step(batch(number, dist), 1.0)


def many_bytes(dist, n_bytes):
    """A result that no pipe holds at once; any other rank fails."""
    assert dist.is_main
    return bytes(n_bytes)
