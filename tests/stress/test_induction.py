"""configs/induction.yaml as it stands: two layers that learn to look up what followed the same
token before."""

import json

import pytest
from conftest import ROOT, run_script


@pytest.mark.stress
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_induction_heads_grow_all_at_once(tmp_path, seed):
    config, inspect = ROOT / "configs" / "induction.yaml", ROOT / "scripts" / "inspect_model.py"
    given = "run.dir=run", f"run.seed={seed}", "train.device=cpu"
    done = run_script(ROOT / "train.py", config, *given, cwd=tmp_path, timeout=1200)
    assert done.returncode == 0, done.stderr
    looked = run_script(inspect, "heads", "run", "--over-training", "--json", cwd=tmp_path)
    assert looked.returncode == 0, looked.stderr
    found = json.loads(looked.stdout)
    best = dict(zip(found["steps"], map(max, found["induction"])))
    assert best[1000] > 0.8
    assert best[250] < 0.2
