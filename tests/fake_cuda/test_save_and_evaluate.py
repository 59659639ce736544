"""What saves and evaluations cost the loop: one copy of the state, and no wait per batch."""

import pytest
import torch
from device_trace import DeviceTrace
from test_training_step import OPTIONS, new_step

from thinker.checkpoint.model_files import checkpoint_files, to_cpu
from thinker.evaluation.loss import batch_losses
from thinker.training.state.saved_state import training_tensors

PLAIN = {name: values[0] for name, values in OPTIONS.items()}
N_BATCHES, BATCH_SIZE, T = 5, 4, 32


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_save_in_the_background_copies_each_tensor_once(gpu, optimizer):
    step, batch = new_step(gpu, PLAIN | {"optimizer": optimizer})
    step(batch, 1.0)  # creates the optimizers' state
    with DeviceTrace() as trace:
        live = checkpoint_files(step.model, {"step": 1}, training_tensors(step))
        files = to_cpu(live)
    sizes = [
        {
            key: tensor.nbytes
            for name in kind
            if "safetensors" in name
            for key, tensor in kind[name].items()
        }
        for kind in (live, files)
    ]
    assert sizes[0] == sizes[1]
    parameters = dict(step.model.named_parameters())
    assert parameters.keys() <= sizes[0].keys()
    assert sum(sizes[0].values()) > 2 * sum(each.nbytes for each in parameters.values())
    on_device = [
        x for name in live if "safetensors" in name for x in live[name].values() if x.is_cuda
    ]
    assert trace.reads == {"checkpoint/model_files.py:to_cpu": len(on_device)}
    assert trace.bytes_moved == 2 * sum(
        x.nbytes for x in on_device
    )  # read and written, nothing else
    for name in files:
        if "safetensors" in name:
            assert all(x.device.type == "cpu" for x in files[name].values())


class Windows:
    """Windows of one token over and over."""

    def __len__(self):
        return N_BATCHES * BATCH_SIZE

    def batch(self, indices):
        tokens = torch.zeros(len(indices), T, dtype=torch.int64)
        return tokens, tokens

    def document_ids(self, inputs):
        return None


def test_an_evaluation_waits_for_no_batch(gpu):
    """So the host prepares the next batches while the device computes."""
    step, batch = new_step(gpu, PLAIN)
    step(batch, 1.0)  # makes the tables of the rotation

    def loss_sum(inputs, targets, document_ids):
        return step.model(inputs, targets=targets, document_ids=document_ids)[0]

    with DeviceTrace() as trace:
        losses = [loss for _, loss in batch_losses(step.model, Windows(), BATCH_SIZE, loss_sum)]
    assert [loss.device for loss in losses] == [gpu] * N_BATCHES
    assert trace.reads == trace.waits == {}
    assert trace.uploads == {"runtime/device.py:to_device": 2 * N_BATCHES}
