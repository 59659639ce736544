"""What a model imports: the code that it runs, and nothing of other kinds of models."""

import subprocess
import sys
from types import ModuleType

import pytest

from thinker.model import proof

# A forward pass, and a step of decoding. Prints the modules of model/ that are loaded then.
PROGRAM = """
import sys
import torch
from thinker import Thinker, ThinkerConfig
options = {OPTIONS}
model = Thinker(ThinkerConfig(vocab_size=61, d_model=32, n_layers=1, n_heads=2, **options))
tokens = torch.zeros(1, 300, dtype=torch.int64)
with torch.no_grad():
    model(tokens)
    cache = model.new_cache(1, 400)
    model(tokens, cache=cache)
    model(tokens[:, :1], cache=cache)
names = [name.removeprefix("thinker.model.") for name in sys.modules]
print(*[name for name in names if name.startswith(("kernels.", "patterns.", "inspection", "rope"))])
"""
PLAIN = {"patterns.pattern", "kernels.decode_attention"}
PARSER = {"patterns.pattern_parser", "patterns.position_patterns", "patterns.content_patterns"}


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({}, set()),
        ({"attention": "window(8)"}, PARSER | {"kernels.local_attention"}),
        ({"attention": "linear(8)"}, PARSER | {"kernels.linear_attention"}),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, {"rope_scaling"}),
    ],
    ids=["plain", "window", "linear", "scaled"],
)
def test_a_model_loads_what_it_uses(options, more):
    code = PROGRAM.replace("{OPTIONS}", repr(options))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == PLAIN | more


def test_a_proof_that_loads_code_of_the_model_is_kept(random_model, monkeypatch):
    calls = []

    def prove():
        module = ModuleType("thinker.model.loaded_by_the_proof")
        module.function = lambda x: x
        monkeypatch.setitem(sys.modules, module.__name__, module)
        calls.append(1)
        return "result"

    model = random_model()
    for _ in range(2):
        assert proof.kept(("a test",), model, prove) == "result"
    assert len(calls) == 1
