"""The GPU campaign, rehearsed on the CPU: every stage of all parts, and what happens to a stage
that goes wrong."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, run_script

from thinker.benchmarks import contenders
from thinker.benchmarks.baselines import PlainGPT
from thinker.benchmarks.contenders import Calls, Contender, race
from thinker.benchmarks.gpu import gpu, gpu_memory
from thinker.benchmarks.gpu.first_text import NO_TRITON
from thinker.benchmarks.gpu.gpu_commands import OUTCOME, Command
from thinker.benchmarks.gpu.gpu_decoding import rates
from thinker.benchmarks.gpu.gpu_training import Campaign, summarize
from thinker.benchmarks.speed.decode import thinker_generate
from thinker.benchmarks.speed.train import SHAPES, add_rates, make_step

CPU = torch.device("cpu")
BENCHMARK = ROOT / "scripts" / "benchmark.py"
pytestmark = pytest.mark.usefixtures("one_thread")


def test_rehearsal_of_all_parts(tmp_path):
    out = tmp_path / "out"
    for part in gpu.PARTS:
        arguments = ("--part", part, "--out", out, "--rehearse", "--minutes", 60)
        done = run_script(BENCHMARK, "gpu", *arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1])["failures"] == [], done.stdout
    pictures = {"training.png", "profile.png", "decoding.png", "attention.png", "losses.png"}
    assert {path.name for path in out.iterdir()} == pictures | {"results.jsonl", "log.txt"}
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in pictures)
    results = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert not any("error" in result for result in results)
    notes = [(each["stage"], each["note"]) for each in results if "note" in each]
    has_triton = importlib.util.find_spec("triton") is not None
    without = [("first text", NO_TRITON), ("tiles", NO_TRITON)]
    assert notes == ([] if has_triton else without)
    for part, stages in gpu.PARTS.items():
        for stage in stages:
            names = [
                each["name"]
                for each in results
                if (each["part"], each["stage"]) == (part, stage.name)
            ]
            assert len(names) >= 2, stage.name
            assert names[-1] == "end"
    by_name = {(each["stage"], each["name"]): each for each in results}
    if has_triton:
        for cache in ("empty", "full"):
            text = by_name["first text", f"tiny, {cache} cache"]
            assert (text["decoder"], text["report"]) == ("FusedDecoder", "")
            assert text["ready_s"] > 0
            assert text["first_token_s"] > text["compile_s"] > 0
        tiles = by_name["tiles", "tiny: QKV_TILES"]
        assert len(tiles["trials"]) == 2
        assert tiles["step_s"] == min(trial["step_s"] for trial in tiles["trials"])
    decoded = by_name["decoding, 124m", "fp32-inductor"]
    # Two layers of width 64 with 4 heads of 16 and an MLP of 128, the head, the norms' weights,
    # and the keys and values of 8 + 2 positions.
    n_weights = 2 * (4 * 64 * 64 + 3 * 64 * 128) + 512 * 64 + 5 * 64
    assert decoded["step_bytes"] == 4 * (n_weights + 2 * 2 * 64 * (8 + 2))
    copied = by_name["decoding, 124m", "copy"]["bytes_per_second"]
    share = decoded["step_bytes"] / decoded["step_s"] / copied
    assert decoded["share_of_limit"] == pytest.approx(share)
    bits = by_name["whole path", "bits"]
    assert (bits["differing"], bits["losses"]) == (0, 8)
    assert by_name["whole path", "killed"]["exit_status"] == -signal.SIGKILL
    assert by_name["whole path", "tokens"]["equal"]
    assert by_name["cuda tests", "tests"]["outcomes"]  # a GPU where the tests run would pass them
    assert by_name["real training", "interrupted"]["exit_status"] == 143
    lines = by_name["real training", "metrics"]["lines"]
    steps = [line["step"] for line in lines if "train_loss" in line]
    assert steps == list(range(1, len(steps) + 1))  # resumed where it was interrupted
    assert "bits per byte" in by_name["real training", "evaluation"]["output"].replace("_", " ")
    assert by_name["precisions", "bf16 to fp32"]["ratio"] == pytest.approx(1, rel=0.01)
    for case in gpu_memory.CASES:
        row = by_name["memory", case.name]
        # A limit is for a GPU; without one, the whole batch fits.
        assert row["micro_batch_size"] == (4 if case.limit_gb is None else 8)
        n_weights = 2 * (4 * 64 * 64 + 3 * 64 * 192) + 2 * 256 * 64  # without norms
        # In fp32: weights and gradients, and what Muon and AdamW keep.
        n_kept = 3 * n_weights + 2 * 256 * 64
        assert 4 * n_kept < row["predicted_bytes"] < 4 * n_kept + 4e6
        assert row.keys().isdisjoint({"limit_bytes", "peak_memory_bytes", "predicted_to_measured"})
    assert not multiprocessing_children(out)


@pytest.mark.parametrize(
    ("peak", "is_right"), [(8.9, False), (9.2, True), (11, True), (11.2, False)]
)
def test_a_prediction_that_is_wrong_by_a_tenth_is_an_error(peak, is_right):
    result = {"name": "x", "predicted_bytes": 10.0, "peak_memory_bytes": peak}
    found = gpu_memory.compare(result, torch.device("cuda"))
    assert found["predicted_to_measured"] == pytest.approx(10 / peak)
    assert ("error" not in found) == is_right


def test_rates_of_a_step():
    """Numbers of an H200: 251 MB in 58.5 µs are its copy rate, 4.29 TB/s."""
    result = {"step_bytes": 251e6, "batch": 32}
    found = rates(result, 0.01, 0.01 + 127 * 117e-6, 128, 4.29e12)
    assert found["tokens_per_second"] == pytest.approx(32 / 117e-6)
    assert found["share_of_limit"] == pytest.approx(0.5, rel=0.01)
    assert "share_of_limit" not in rates(result, 0.01, 0.02, 128, None)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_the_search_tries_the_tiles_that_the_decoder_has():
    from thinker.benchmarks.gpu.tile_search import CANDIDATES
    from thinker.generation.fused import fused_step

    constants = {name for name in vars(fused_step) if name.endswith("_TILES")}
    assert constants == CANDIDATES.keys()
    for name, candidates in CANDIDATES.items():
        assert tuple(getattr(fused_step, name)) in candidates
        assert len(set(candidates)) == len(candidates)


def multiprocessing_children(folder):
    """Processes that still have the log of a campaign open."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            files = [os.readlink(file) for file in (process / "fd").iterdir()]
        except OSError:
            continue
        if str(folder / "log.txt") in files:
            found.append(process.name)
    return found


def quick(device):
    yield {"name": "one", "value": float(torch.ones(2, device=device).sum())}


def failing(device):
    yield {"name": "before"}
    raise ValueError("it broke")


def killed(device):
    yield {"name": "before"}
    os.kill(os.getpid(), signal.SIGKILL)


def endless(path):
    child = subprocess.Popen([sys.executable, "-c", "import time\nwhile True: time.sleep(1)"])
    Path(path).write_text(str(child.pid))
    yield {"name": "before"}
    while True:
        signal.pause()


def is_running(pid):
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_stage_that_fails_leaves_its_results_and_the_next_one_runs(tmp_path):
    def stage(function, argument=CPU):
        def run(campaign, deadline):
            return contenders.stream(function, argument, deadline=deadline, **campaign.options)

        return gpu.Stage(function.__name__, 1, run)

    campaign = Campaign(CPU, "fp32", True, {"log": tmp_path / "log.txt"})
    recorder = gpu.Recorder(tmp_path / "results.jsonl", "A")
    for each in (stage(failing), stage(killed), stage(quick)):
        gpu.run_stage(each, campaign, time.monotonic() + 600, recorder)
    child = tmp_path / "child"
    started = contenders.stream(endless, child, deadline=time.monotonic() + 600)
    assert next(started) == {"name": "before"}  # so the deadline does not pass while it starts
    pid = int(child.read_text())
    assert is_running(pid)
    started.close()
    assert not is_running(pid)
    gpu.run_stage(stage(endless, child), campaign, time.monotonic(), recorder)
    results = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [(each["stage"], each["name"]) for each in results] == [
        ("failing", "before"), ("failing", "stage"), ("failing", "end"),
        ("killed", "before"), ("killed", "stage"), ("killed", "end"),
        ("quick", "one"), ("quick", "end"),
        ("endless", "stage"), ("endless", "end"),
    ]  # fmt: skip
    assert "ValueError: it broke" in results[1]["error"]
    assert "ended with exit code" in results[4]["error"]
    assert "TimeoutError" in results[8]["error"]


def make_counter(start, path=None):
    calls = {"a": lambda: None, "b": lambda: None}
    if start < 0:
        raise MemoryError("too large")
    return Calls(calls, {"start": start})


def make_stuck():
    while True:
        signal.pause()


def test_a_race_goes_on_without_those_that_fail():
    cases = [Contender("first", make_counter, (1,)), Contender("fails", make_counter, (-1,)),
             Contender("large", make_counter, (2,), 20)]  # fmt: skip
    results = {
        each["name"]: each
        for each in race(cases, CPU, 2, time.monotonic() + 600, n_at_once=2, memory_gb=10)
    }
    assert results["first"].keys() == results["large"].keys() == {
        "name", "first_s", "peak_memory_bytes", "start", "seconds"
    }  # fmt: skip
    assert [len(seconds) for seconds in results["first"]["seconds"].values()] == [2, 2]
    assert results["fails"].keys() == {"name", "error"}
    assert "MemoryError: too large" in results["fails"]["error"]
    (stuck,) = race([Contender("stuck", make_stuck, ())], CPU, 2, time.monotonic())
    assert stuck == {"name": "stuck", "error": "no result in time"}


def test_a_command_is_killed_with_what_it_has_started(tmp_path):
    script = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import signal; signal.pause()'])"
    with Command([sys.executable, "-c", script], tmp_path / "log.txt") as command:
        assert command.result("sleep", time.monotonic())["error"].endswith(
            "still running at the deadline"
        )
        group = command.process.pid
    with pytest.raises(ProcessLookupError):
        os.killpg(group, 0)


def event(name, start, end, kind="CUDA", is_user_annotation=False):
    return SimpleNamespace(
        name=name, time_range=SimpleNamespace(start=start, end=end), device_type=SimpleNamespace(name=kind),
        is_user_annotation=is_user_annotation, cpu_children=[],
    )  # fmt: skip


def test_a_profile_by_groups_of_kernels():
    events = [
        event("aten::mm", 0, 900, "CPU"),
        event("optimizer", 40, 60, is_user_annotation=True),
        event("ProfilerStep*", 0, 100, is_user_annotation=True),
        event("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NTT", 0, 20),
        event("sm90_xmma_gemm_bf16bf16_bf16f32", 40, 50),
        event("triton_poi_fused__scaled_dot_product_flash_attention_3", 20, 30),
        event("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", 25, 35),  # in another stream
        event("void at::native::vectorized_elementwise_kernel<4>", 60, 70),
        event("Memcpy HtoD (Pinned -> Device)", 95, 100),
    ]
    found = summarize(events, torch.device("cuda"), n_steps=2)
    us = {name: round(seconds * 1e6, 6) for name, seconds in found["seconds"].items()}
    assert us == {
        "matrix products": 10,
        "optimizer": 5,
        "elementwise and norm": 10,
        "attention": 5,
        "copies": 2.5,
    }
    assert found["idle_share"] == pytest.approx(0.4)  # 35 to 40, 50 to 60, 70 to 95
    assert found["launches"] == 3
    assert found["step_s"] == pytest.approx(50e-6)


def test_outcomes_of_pytest_serial_and_parallel():
    text = """tests/test_cuda.py::test_flex[longformer(50, 4, 3)-sinks-64] PASSED [ 10%]
tests/test_cuda.py::test_two_gpus[ddp] SKIPPED (needs two CUDA GPUs) [ 20%]
[gw1] [ 30%] FAILED tests/test_cuda.py::test_flex[prefix(300)--36]
FAILED tests/test_cuda.py::test_flex[prefix(300)--36] - AssertionError
SKIPPED [2] tests/test_cuda.py:216: needs two CUDA GPUs"""
    assert OUTCOME.findall(text) == ["PASSED", "SKIPPED", "FAILED"]


def test_the_plain_gpt_compiles_whole_and_learns():
    shape = SHAPES["tiny"]._replace(n_micro_batches=2)
    step = make_step("plain eager, adamw", shape, CPU, "fp32")
    first = float(step())
    assert float(step()) < first == pytest.approx(5.545, abs=0.1)  # ln 256
    model = PlainGPT(2, 64, 2, 256, 32)
    tokens = torch.randint(256, (2, 32))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(tokens, tokens), model(tokens, tokens))
    large = PlainGPT.__new__(PlainGPT)
    with torch.device("meta"):
        large.__init__(12, 768, 12, 50304, 1024)
    assert sum(p.numel() for p in large.parameters()) == pytest.approx(
        124.4e6, rel=0.001
    )  # GPT-2's, without biases


def test_all_prompts_are_of_one_length_and_different():
    def generate(texts, params, prompt_tokens):
        assert {len(tokens) for tokens in prompt_tokens} == {5}
        assert len({tuple(tokens) for tokens in prompt_tokens}) == len(texts) == 256
        return [SimpleNamespace(token_ids=[0] * params.max_new_tokens) for _ in texts]

    thinker_generate(SimpleNamespace(generate=generate), batch=256, n_prompt=5)(3)


def test_rates_of_a_contender():
    result = {
        "seconds": {"step": [0.4, 0.5, 0.9]},
        "first_s": {"step": 7.0},
        "tokens": 1000,
        "flops": 2e9,
    }
    rates = add_rates(result | {"peak_flops": 1e10})
    assert (rates["step_s"], rates["tokens_per_second"], rates["first_step_s"]) == (0.5, 2000, 7.0)
    assert rates["mfu"] == pytest.approx(0.4)
    assert "mfu" not in add_rates(result)


@pytest.mark.stress
def test_import_closure_names_what_a_bare_machine_lacks():
    found = gpu.import_closure()["imported"]
    assert {
        "torch",
        "pydantic",
        "pydantic_core",
        "tiktoken",
        "yaml",
        "matplotlib",
        "transformers",
    } <= set(found)
    assert not {"datasets", "wandb", "rustbpe", "lm_eval", "gguf"} & set(found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_mistakes(tmp_path):
    for arguments, message in {
        ("--part", "A", "--out", tmp_path): "no CUDA GPU is available",
        ("--rehearse",): "gpu needs --part first, A or B with --out DIR",
    }.items():
        done = run_script(BENCHMARK, "gpu", *arguments)
        assert done.returncode == 2
        assert message in done.stderr
