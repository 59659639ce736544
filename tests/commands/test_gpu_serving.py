"""The stage of the GPU campaign that asks a server, rehearsed on the CPU."""

import time

import pytest
import torch

from thinker.benchmarks.gpu import gpu, gpu_serving
from thinker.benchmarks.gpu.gpu_serving import REHEARSED, percentile, serving
from thinker.benchmarks.gpu.gpu_training import Campaign

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_stage_asks_a_real_server(tmp_path):
    options = {"log": tmp_path / "log.txt", "eager": True}
    campaign = Campaign(torch.device("cpu"), "fp32", True, options)
    start, *rows = serving(campaign, time.monotonic() + 500)
    assert start["name"] == "start"
    assert [row["clients"] for row in rows] == list(REHEARSED.clients)
    for row in rows:
        assert row["name"] == f"{row['clients']} clients"
        assert len(row["rates"]["engine"]) == len(row["rates"]["server"]) == REHEARSED.rounds
        assert row["server_tokens_per_second"] > 0
        ratio = row["server_tokens_per_second"] / row["engine_tokens_per_second"]
        assert row["server_to_engine"] == pytest.approx(ratio)
        assert 0 < row["first_token_median_s"] <= row["first_token_p95_s"]


def test_part_b_has_the_stage():
    assert gpu_serving.serving in [stage.run for stage in gpu.PARTS["B"]]


@pytest.mark.parametrize(("n", "expected"), [(1, 1), (2, 2), (20, 19), (21, 20), (100, 95)])
def test_a_share_of_the_values_is_at_most_the_percentile(n, expected):
    assert percentile([*range(n, 0, -1)], 0.95) == expected
