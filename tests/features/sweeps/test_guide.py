"""The program in the guide, which proposes, trains for a fixed time, and keeps or discards."""

import ast
import re
import subprocess
import sys

import pytest
import sweep_runs
from conftest import ROOT
from sweep_runs import COMMAND

tiny_config = sweep_runs.tiny_config  # a fixture
GUIDE = ROOT / "features" / "sweeps" / "guide.md"


@pytest.mark.more
def test_the_loop_of_the_guide_runs_and_continues(tiny_config, tmp_path):
    (program,) = re.findall(r"(?ms)^```python\n(.*?)^```$", GUIDE.read_text(encoding="utf-8"))
    script = tmp_path / "sweep_command.py"
    script.write_text(COMMAND.format(module="sweep_command", name="sweep"))
    for part, replacement in (
        ('"-m", "thinker", "sweep"', f"{str(script)!r}"),
        ('"quickstart", "data.max_documents=3000"', f"{str(tiny_config)!r}"),
    ):
        assert part in program
        program = program.replace(part, replacement)
    (tmp_path / "loop.py").write_text(program)
    shown = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "loop.py"], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        shown.append(done.stdout)
    first, second, best = shown[0].splitlines()
    for line in (first, second):
        assert re.fullmatch(r"(keep|discard) model\.\w+=\d+: \d\.\d{4} instead of \d\.\d{4}", line)
    assert ast.literal_eval(best).keys() == {"model.d_model", "model.n_layers"}
    assert shown[1] == shown[0]  # everything is reused
    assert done.stderr.count("continues") == 0
