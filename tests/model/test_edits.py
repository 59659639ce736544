"""An edit of the plain source takes effect everywhere: training, sampling, evaluation and
inspection.

Each test edits a copy of the package, as a researcher would. Faster forms that compute something
else stand aside, and one line says so.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from thinker.native.compiler import has_compiler

ROOT = Path(__file__).parents[2]
WORKER = ROOT / "tests" / "edit_worker.py"
SOURCES = ("*.py", "*.c", "*.h", "*.txt", "*.json")
UP = "        up = self.up_proj(x)  # (B, T, d_ff)\n"
ATTEND = "return attend(q, k, v, mask, self.scale, self.attn_logit_softcap, self.sinks)"
TRANSFORMER, ATTENTION = "model/transformer.py", "model/attention.py"
MLP, PROJECTION, RMS_NORM = (
    f"{TRANSFORMER}:MLP",
    f"{ATTENTION}:Attention",
    "model/layers.py:RMSNorm",
)
WHOLE_MODEL = "the model"  # is what stands aside in native decoding

# name: (file, {old text: new text}, what stands aside in training, and in inference)
EDITS = {
    "gelu": (TRANSFORMER, {"self.activation(gate) * up": "F.gelu(gate) * up"}, [MLP], [MLP]),
    "bias": (
        TRANSFORMER,
        {
            "self.gate_proj = Linear(config.d_model, config.d_ff, config.mlp_bias)\n"
            "        self.up_proj = Linear(config.d_model, config.d_ff, config.mlp_bias)\n"
            "        self.down_proj = Linear(config.d_ff, config.d_model, config.mlp_bias)\n"
            "        self.activation = ACTIVATIONS.get(config.activation)\n\n    "
            'def forward(self, x: Tensor) -> Tensor:\n        """(B, T, C) -> (B, T, C)."""\n'
            "        gate": "self.gate_proj = Linear(config.d_model, config.d_ff, bias=True)\n"
            "        self.up_proj = Linear(config.d_model, config.d_ff, bias=True)\n"
            "        self.down_proj = Linear(config.d_ff, config.d_model, bias=True)\n"
            "        self.activation = ACTIVATIONS.get(config.activation)\n\n    "
            'def forward(self, x: Tensor) -> Tensor:\n        """(B, T, C) -> (B, T, C)."""\n'
            "        gate"
        },
        [],  # all faster forms know biases
        [],
    ),
    "layernorm": (
        "model/layers.py",
        {
            "        # Unlike x.square()": "        x = x - x.mean(dim=-1, keepdim=True)\n"
            "        # Unlike x.square()"
        },
        [PROJECTION, RMS_NORM],
        [WHOLE_MODEL],
    ),
    "rope": (
        "model/positions.py",
        {"x.roll(x.shape[-1] // 2, dims=-1), sin)": "x.roll(x.shape[-1] // 2, dims=-1), -sin)"},
        [PROJECTION],
        [WHOLE_MODEL],
    ),
    "scores": (
        ATTENTION,
        {ATTEND: ATTEND.replace("self.scale", "0.5 * self.scale")},
        [],  # no faster form replaces attend() in training
        [WHOLE_MODEL],
    ),
    "layer 1": (
        ATTENTION,
        {
            "        self.scale = ": "        self.layer_index = layer\n        self.scale = ",
            "        q, k = self.q_norm(q), self.k_norm(k)\n": "        q, k = self.q_norm(q), "
            "self.k_norm(k)\n        if self.layer_index == 1:\n            q = 1.5 * q\n",
        },
        [PROJECTION],
        [PROJECTION],
    ),
    "beyond 64": (
        TRANSFORMER,
        {UP: f"{UP}        up = torch.cat((up[:, :64], 2 * up[:, 64:]), dim=1)\n"},
        [MLP],
        [MLP],
    ),
    "train only": (
        TRANSFORMER,
        {UP: f"{UP}        if self.training:\n            up = 1.2 * up\n"},
        [MLP],
        [],
    ),
}
IN_SHORT = ("gelu", "scores", "beyond 64")


def results_of(folder, changes):
    """Copy the package, edit a file, and run the worker there."""
    package = folder / "thinker"
    rooms = [path for path in ROOT.iterdir() if (path / "__init__.py").exists()]
    package.mkdir()
    for room in rooms:
        if room.name not in ("tests", "lessons", "benchmarks", "docs"):
            ignore = shutil.ignore_patterns("__pycache__", "*.so")
            shutil.copytree(room, package / room.name, ignore=ignore)
    for file in ROOT.glob("*.py"):
        shutil.copy(file, package)
    for name, texts in changes.items():
        source = (package / name).read_text(encoding="utf-8")
        for old, new in texts.items():
            assert source.count(old) == 1, f"{name} has changed; write this edit anew: {old!r}"
            source = source.replace(old, new)
        (package / name).write_text(source, encoding="utf-8")
    shutil.copy(WORKER, folder / "worker.py")
    done = subprocess.run(
        [sys.executable, "worker.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def unedited(tmp_path_factory):
    return results_of(tmp_path_factory.mktemp("unedited"), {})


def says(notice, parts):
    """Whether one line names these parts, or none is written if there are none."""
    return all(part in notice for part in parts) if parts else notice == ""


def test_without_an_edit_nothing_stands_aside(unedited):
    assert unedited["notices"] == [[], []]
    assert unedited["random"]["notices"] == ["", "", ""]
    assert unedited["fast"] == pytest.approx(unedited["plain"], rel=1e-5)


CASES = [pytest.param(name, marks=[] if name in IN_SHORT else pytest.mark.stress) for name in EDITS]


@pytest.mark.skipif(not has_compiler(), reason="needs a C compiler")
@pytest.mark.parametrize("name", CASES)
def test_an_edit_takes_effect(name, tmp_path, unedited):
    file, texts, in_training, in_inference = EDITS[name]
    results = results_of(tmp_path, {file: texts})

    # Training, from random weights and from trained ones: as without kernels, and not as before the
    # edit.
    assert results["fast"] == pytest.approx(results["plain"], rel=1e-4)
    assert results["fast"][3] != pytest.approx(unedited["fast"][3], rel=1e-5)
    for notices in results["notices"]:
        assert len(notices) == (1 if in_training else 0)
        assert says("".join(notices), in_training)

    for weights in ("trained", "random"):
        used = results[weights]
        assert used["fp32"] < 1e-4
        assert used["torch"] < 1e-4
        assert used["bf16"] < 0.1
        assert used["inspection"] < 1e-3
        native, of_torch, _ = used["notices"]
        assert says(native, in_inference)
        if in_inference != [WHOLE_MODEL]:  # fused modules of torch call what was edited
            assert says(of_torch, in_inference)

    if name == "train only":
        return
    before, after = unedited["random"], results["random"]
    assert after["evaluation"] != pytest.approx(before["evaluation"], rel=1e-7)
    assert after["logits"] != before["logits"]
