"""Settings of the process, in processes of their own."""

import os
import sys

import pytest
from fork_server import ROOT, run_script

CODE = """
import resource, torch
from thinker.runtime.backend import configure_backend
configure_backend(torch.device("cpu"))
for round in range(30):
    if round == 20:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(10_000_000)  # 40 MB: more than glibc would ever keep of itself
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_memory_is_kept_unless_the_environment_says_otherwise(tmp_path):
    script = tmp_path / "faults.py"
    script.write_text(CODE)
    kept, given_back = (
        run_script([script], ROOT, {**os.environ, **variables}, timeout=600)
        for variables in ({}, {"MALLOC_PERTURB_": "0"})
    )
    assert kept.returncode == 0, kept.stderr
    assert int(kept.stdout) < 1000
    assert int(given_back.stdout) > 10 * 10
