"""Free memory under the limits of control groups, and what is refused for its size."""

import pytest
import torch

from thinker.runtime import memory
from thinker.runtime.checks import divisors
from thinker.runtime.errors import UserError

CPU, MB = torch.device("cpu"), 10**6
VERSIONS = {  # as in /proc/self/cgroup, then the files of the group
    "2": ("0::/a/b\n", "a/b", "max", "current", ""),
    "2, whole container": ("0::/\n", "", "max", "current", ""),
    "1": (
        "9:name=systemd:/\n4:memory:/a/b\n0::/\n",
        "memory/a/b",
        "limit_in_bytes",
        "usage_in_bytes",
        "total_",
    ),
    "1, seen from inside": (
        "4:memory:/of/the/host\n",
        "memory",
        "limit_in_bytes",
        "usage_in_bytes",
        "total_",
    ),
}


@pytest.fixture
def cgroup(tmp_path, monkeypatch, request):
    """Writes the files of a control group, in which this process seems to be: returns its
    folder."""
    membership, folder, limit, used, prefix = VERSIONS[request.param]
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)
    monkeypatch.setattr(memory, "MEMBERSHIP", tmp_path / "membership")
    (tmp_path / "membership").write_text(membership)

    def write(limit_bytes, used_bytes, cached_bytes):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / f"memory.{limit}").write_text(f"{limit_bytes}\n")
        (tmp_path / folder / f"memory.{used}").write_text(f"{used_bytes}\n")
        half = cached_bytes // 2
        stat = f"anon 17\n{prefix and 'inactive_file 3'}\n{prefix}inactive_file {half}\n{prefix}active_file {half}\n"
        (tmp_path / folder / "memory.stat").write_text(stat)

    return write


@pytest.mark.parametrize("cgroup", VERSIONS, indirect=True)
def test_a_limit_of_a_control_group_counts_but_not_what_it_has_cached(cgroup, monkeypatch):
    unlimited = memory.free_memory(CPU)
    assert 2**20 < unlimited < 2**50
    cgroup(300 * MB, 250 * MB, 100 * MB)
    assert memory.free_memory(CPU) == 150 * MB
    memory.check_memory({"weights": 150 * MB}, CPU, "lower it")
    swap = memory._host_memory()[1]
    with pytest.raises(
        UserError, match=r"at least .* of memory \(weights .*, batch 1 KB\), but .* available"
    ):
        memory.check_memory({"weights": 150 * MB + swap, "batch": 1000}, CPU, "lower it")
    with pytest.raises(UserError, match="in each of 2 processes"):
        memory.check_memory({"weights": (150 * MB + swap) // 2 + 1}, CPU, "lower it", n_processes=2)


@pytest.mark.parametrize("n", [1, 2, 12, 36, 97, 1000, 2**24])
def test_divisors(n):
    assert divisors(n) == [d for d in range(1, n + 1) if n % d == 0]


def test_the_divisors_of_a_large_number_are_counted_at_once():
    assert len(divisors(10**12)) == 13 * 13


@pytest.mark.parametrize(
    ("size", "text"), [(5, "0.005 KB"), (2500, "2.5 KB"), (3.6e9, "3.6 GB"), (7e18, "7,000 PB")]
)
def test_format_bytes(size, text):
    assert memory.format_bytes(size) == text
