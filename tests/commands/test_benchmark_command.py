"""scripts/benchmark.py as a command, on models small enough to be timed in seconds."""

import json
import math
import sys

import in_process
import pytest
import torch
import yaml
from conftest import ROOT, run_script
from installed import needs
from rank_workers import many_bytes

from thinker.benchmarks.losses.ablation import COMMON_OVERRIDES, CORPORA, VARIANTS
from thinker.benchmarks.rank_launcher import launch_ranks
from thinker.benchmarks.speed import attention
from thinker.benchmarks.speed.step_parts import PARTS
from thinker.benchmarks.speed.train import SHAPES
from thinker.benchmarks.systems.before_after import MEASURES, summarize
from thinker.benchmarks.systems.published_shapes import PUBLISHED
from thinker.benchmarks.training_runs import train_all
from thinker.model import Thinker
from thinker.model.patterns.pattern_parser import PATTERNS
from thinker.runtime.errors import RunError, UserError
from thinker.training.config.load import load_config
from thinker.training.metrics import flops_per_token
from thinker.training.processes.training_process import TrainingProcess

BENCHMARK = ROOT / "scripts" / "benchmark.py"
pytestmark = pytest.mark.usefixtures("one_thread")
fork_processes, benchmark = in_process.fork_processes, in_process.run_in_process  # fixtures


def test_decode_compared_with_transformers_from_any_folder(benchmark, tmp_path):
    shown = benchmark(
        BENCHMARK, "decode", "--shape", "tiny", "--device", "cpu", "--prompt", "8", "--new", "6", "--repeats", "2",
        "--variants", "transformers-fp32,fp32,bf16@3,int8", "--out", "line.json",
    )  # fmt: skip
    result = json.loads(shown.splitlines()[-1])
    assert json.loads((tmp_path / "line.json").read_text()) == result
    assert [(row["name"], row["batch"]) for row in result["rows"]] == [
        ("transformers-fp32", 1), ("fp32", 1), ("bf16", 3), ("int8", 1),
    ]  # fmt: skip
    # 2 layers of 4·64² + 3·64·128 weights, an LM head of 512·64 and 5 norm weights of 64, in fp32;
    # a KV cache of 8 + 3.
    weights = 2 * (4 * 64**2 + 3 * 64 * 128) + 512 * 64 + 5 * 64
    assert result["rows"][1]["step_bytes"] == 4 * weights + 2 * 2 * 64 * 11 * 4
    assert result["rows"][0]["step_bytes"] == result["rows"][1]["step_bytes"]
    assert all(
        math.isfinite(row["decode_tokens_per_second"]) for row in result["rows"]
    )  # of a few noisy ms
    assert {"command", "date", "processor", "torch"} <= result["environment"].keys()


@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory in /proc")
def test_families_compared_with_transformers(benchmark, tmp_path):
    pytest.importorskip("transformers")
    options = ("--small", "--only", "gpt2", "--rounds", "1", "--new", "3", "--folder", tmp_path)
    shown = benchmark(BENCHMARK, "families", *map(str, options))
    result = json.loads(shown.splitlines()[-1])
    [row] = result["rows"]
    assert (row["name"], row["model_type"], row["note"]) == ("gpt2", "gpt2", "small")
    # 300 tokens and 1024 positions; a layer of 12·96² weights, 9·96 biases and two norms; a norm.
    n_parameters = (300 + 1024) * 96 + 12 * 96**2 + 13 * 96 + 2 * 96
    assert 4 * n_parameters < row["file_bytes"] < 4 * n_parameters + 5000  # and the header
    for side in ("thinker", "transformers"):
        assert row[side]["load_s"] > 0
        assert math.isfinite(row[side]["tokens_per_second"])  # of a few noisy ms
        assert row[side]["memory_bytes"] >= 0
    assert row["load_ratio"] == row["thinker"]["load_s"] / row["transformers"]["load_s"]
    assert row["native"] == (not row["notice"])
    assert not list(tmp_path.iterdir())  # the weights are gone


def test_published_shapes_have_their_sizes():
    """Millions of parameters, without those that are tied."""
    transformers = pytest.importorskip("transformers")
    sizes = {"gpt2": 124.4, "pythia-70m": 70.4, "TinyStories-33M": 68.5, "gemma-3-270m": 268.1}
    sizes |= {"SmolLM2-135M": 134.5, "Qwen3-0.6B": 596.0, "Llama-3.2-1B": 1235.8}
    sizes |= {"OLMo-2-1B": 1484.9, "phi-3-mini": 650.0}
    assert sizes.keys() == PUBLISHED.keys()
    for name, published in PUBLISHED.items():
        config = transformers.AutoConfig.for_model(published.model_type, **published.config)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        n_parameters = sum(parameter.numel() for parameter in model.parameters())
        assert round(n_parameters / 1e6, 1) == sizes[name], name


def test_monitoring(benchmark):
    options = (
        "--device",
        "cpu",
        "--precisions",
        "fp32,int8",
        "--batches",
        "1,3",
        "--new",
        "9",
        "--repeats",
        "2",
    )
    shown = benchmark(BENCHMARK, "monitoring", "--shape", "tiny", *options)
    rows = json.loads(shown.splitlines()[-1])["rows"]
    assert [(row["precision"], row["batch"]) for row in rows] == [
        ("fp32", 1),
        ("fp32", 3),
        ("int8", 1),
        ("int8", 3),
    ]
    for row in rows:
        assert row["cost"] == pytest.approx(
            row["tokens_per_second"] / row["watched_tokens_per_second"] - 1
        )


def test_retrieval(benchmark):
    sizes = ("--window", "8", "--block", "4", "--retrieve", "2", "--lengths", "32", "64")
    shown = benchmark(
        BENCHMARK, "retrieval", "--shape", "tiny", "--repeats", "1", "--device", "cpu", *sizes
    )
    result = json.loads(shown.splitlines()[-1])
    of = {(row["kind"], row["length"]): row for row in result["rows"]}
    assert set(of) == {
        (kind, length) for kind in ("window", "retrieval", "full") for length in (32, 64)
    }
    assert all(row["ms"] > 0 for row in of.values())
    # 2 layers, 2 KV heads, 16 dimensions per head: blocks of 4 in int8 with 2 scales per position,
    # 4 keys in fp32.
    assert of["retrieval", 32]["bytes"] == 2 * 2 * (
        16 * (4 * (2 * 16 + 2 * 4) + 4 * 16 * 4) + 3 * 17 * 16 * 4
    )
    assert of["full", 64]["bytes"] - of["full", 32]["bytes"] == 2 * 2 * 32 * 2 * 16 * 4


@pytest.mark.stress
def test_before_after(benchmark):
    """This tree against its own last commit, each side in processes of its own."""
    measures = [measure for measure in MEASURES if measure != "step-12m"]  # which takes minutes
    sizes = ("--steps", "2", "--shape", "tiny", "--prompt", "16", "--new", "4", "--clients", "2")
    shown = benchmark(
        BENCHMARK, "before_after", "HEAD", *sizes, "--pairs", "1", "--repeats", "1",
        "--device", "cpu", "--threads", "1", "--only", *measures,
    )  # fmt: skip
    rows = json.loads(shown.splitlines()[-1])["rows"]
    assert [row["measure"] for row in rows] == measures
    for row in rows:
        assert min(row["old_s"], row["new_s"]) > 0
        assert row["ratio"] > 0


def test_before_after_reports_the_median_of_the_ratios():
    row = summarize("server", [2.0, 3.0, 8.0], [1.0, 4.0, 4.0])
    assert (row["old_s"], row["new_s"]) == (3.0, 4.0)
    assert row["ratios"] == [2.0, 0.75, 2.0]
    assert row["ratio"] == 2.0


def test_before_after_needs_a_commit_of_the_history():
    done = run_script(BENCHMARK, "before_after", "no-such-commit", "--only", "step-12m")
    assert done.returncode == 2
    assert "has no commit no-such-commit" in done.stderr


def test_structured(benchmark):
    shown = benchmark(
        BENCHMARK, "structured", "--shape", "tiny", "--precisions", "fp32,int8", "--new", "9"
    )
    rows = json.loads(shown.splitlines()[-1])["rows"]
    assert (
        len({(row["precision"], row["sampling"], row["constraint"]) for row in rows})
        == len(rows)
        == 2 * 2 * 4
    )
    for row in rows:
        assert row["mask_s"] > 0
        assert row["constrained_s"] > 0
        assert row["share"] == row["constrained_s"] / row["step_s"]


def test_serving(benchmark):
    shown = benchmark(
        BENCHMARK,
        "serving",
        "--shape",
        "2m",
        "--clients",
        1,
        3,
        "--prompt",
        5,
        "--new",
        4,
        "--repeats",
        1,
    )
    result = json.loads(shown.splitlines()[-1])
    assert [row["clients"] for row in result["rows"]] == [1, 3]
    for row in result["rows"]:
        assert row["rates"].keys() == {"engine", "server"}
        assert min(row["engine_tokens_per_second"], row["server_tokens_per_second"]) > 0
    assert result["first_token"]["alone_ms"] > 0


def test_latency(benchmark):
    shown = benchmark(BENCHMARK, "latency", "--shape", "tiny", "--new", 40, "--repeats", 3)
    rows = json.loads(shown.splitlines()[-1])["rows"]
    assert [row["side"] for row in rows] == ["engine", "whole", "stream"]
    for row in rows:
        assert 0 < row["per_token_ms"] <= row["one_token_ms"]


@pytest.mark.parametrize(
    ("flag", "file"), [("--png", "nowhere/a.png"), ("--png", "a.jpg"), ("--out", "nowhere/a")]
)
def test_a_result_that_cannot_be_written_is_known_first(flag, file, tmp_path):
    done = run_script(BENCHMARK, "decode_lengths", "--shape", "tiny", flag, file, cwd=tmp_path)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert file in done.stderr


def test_decode_lengths_and_their_plot(tmp_path):
    done = run_script(
        BENCHMARK, "decode_lengths", "--shape", "tiny", "--device", "cpu", "--repeats", "2", "--png", "a.png",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])["lengths"]
    assert [row["length"] for row in rows] == [64, 128, 256, 512, 1024, 2048, 4096]
    assert rows[-1]["full_cache_bytes"] == 64 * rows[0]["full_cache_bytes"]
    assert rows[-1]["window_cache_bytes"] == rows[0]["window_cache_bytes"]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--variants", "fp33"], "unknown variant fp33 in --variants; use names"),
        (["--variants", "transformers"], "unknown variant transformers in --variants; use names"),
        (["--variants", "fp32@all"], "unknown variant fp32@all in --variants; use names"),
        (["--new", "1"], "use at least --new 2 --prompt 2 --repeats 1"),
        (["--device", "gpu"], "device 'gpu' is not available"),
    ],
)
def test_decode_rejects_mistakes(arguments, message):
    done = run_script(BENCHMARK, "decode", "--shape", "tiny", *arguments)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert message in done.stderr


@pytest.mark.usefixtures("fork_processes")
def test_train_compared_with_transformers(benchmark, tmp_path):
    shown = benchmark(
        BENCHMARK, "train", "--shape", "tiny", "--device", "cpu", "--precision", "fp32", "--repeats", "1",
        "--no-compile", "--png", "rates.png", "--out", "train.jsonl",
    )  # fmt: skip
    result = json.loads(shown.splitlines()[-1])
    assert result == json.loads((tmp_path / "train.jsonl").read_text())
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")
    assert min(result["peak_memory_bytes"].values()) > 0
    names = {"thinker eager, adamw", "thinker eager, muon", "transformers eager, adamw"}
    assert result["tokens_per_second"].keys() == names
    for name in names:
        assert result["tokens_per_second"][name] == pytest.approx(4 * 32 / result["step_s"][name])
    speeds = result["tokens_per_second"]
    ratio = speeds["thinker eager, adamw"] / speeds["transformers eager, adamw"]
    assert result["ratios"] == {"thinker eager to transformers eager": pytest.approx(ratio)}
    with torch.device("meta"):
        flops = flops_per_token(Thinker(SHAPES["tiny"].model_config()), seq_len=32)
    for name in names:
        assert result["mfu"][name] == pytest.approx(
            flops * speeds[name] / result["matrix_product_flops"]
        )


@pytest.mark.usefixtures("fork_processes")
def test_linear_cross_entropy_compared_with_the_plain_loss(benchmark, tmp_path):
    shown = benchmark(
        BENCHMARK, "linear_cross_entropy", "--rows", "4096", "--width", "16", "--vocab", "5000", "--device", "cpu",
        "--precision", "fp32", "--repeats", "1",
    )  # fmt: skip
    result = json.loads(shown.splitlines()[-1])
    assert result["peak_bytes"]["plain"] > 2 * 4 * 4096 * 5000  # logits and their gradient
    assert result["ratios"]["memory"] < 1 / 3


def write_config(train_args, folder, name, *overrides):
    """The config of the tiny run, with overrides, as a file of its own."""
    config = load_config(str(train_args[1]), [*train_args[2:], *overrides])
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return path


@pytest.mark.usefixtures("fork_processes")
def test_time_to_loss(benchmark, train_args, tmp_path):
    slow = write_config(
        train_args,
        tmp_path,
        "slow",
        "optimizer.name=adamw",
        "optimizer.lr=0.001",
        "train.eval_every=null",
    )
    fast = write_config(train_args, tmp_path, "fast", "train.eval_every=2")
    shown = benchmark(
        BENCHMARK, "time_to_loss", slow, fast, "train.max_steps=10", "--tune", "optimizer.lr=0.00001,0.001",
        "--png", "curves.png", "--out", "result.jsonl",
    )  # fmt: skip
    result = json.loads(shown.splitlines()[-1])
    assert result == json.loads((tmp_path / "result.jsonl").read_text())
    untuned, tuned, candidate = result["rows"]
    assert tuned["val_loss"] < untuned["val_loss"]
    assert result["baseline"] == tuned["name"] == "slow optimizer.lr=0.001"
    assert [row["step"] for row in result["rows"]] == [10, 10, 10]
    assert candidate["val_loss"] < tuned["val_loss"]
    reached = result["reached"]
    assert reached["val_loss"] <= tuned["val_loss"]
    assert reached["step"] in (2, 4, 6, 8, 10)
    assert result["ratios"] == {
        key: reached[key] / tuned[key] for key in ("step", "tokens", "elapsed_s")
    }
    assert all(row["peak_memory_bytes"] > 0 for row in result["rows"])
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    shown = benchmark(BENCHMARK, "time_to_loss", fast, slow, "train.max_steps=2")
    result = json.loads(shown.splitlines()[-1])
    assert (result["reached"], result["ratios"]) == (None, {})
    assert "slow did not reach" in shown


@pytest.mark.usefixtures("fork_processes")
def test_no_run_starts_after_one_has_failed(tmp_path):
    configs = [ROOT / "configs" / f"{name}.yaml" for name in ("pysource", "quickstart")]
    runs = [TrainingProcess(config.stem, config, [], tmp_path / config.stem) for config in configs]
    (tmp_path / "pysource").write_text("a file where the run needs a folder")
    with pytest.raises(UserError, match="^pysource: "):
        train_all(runs)
    assert not (tmp_path / "quickstart").exists()


@pytest.mark.stress
def test_time_to_loss_of_gpt2(benchmark, train_args, tmp_path):
    baseline = write_config(
        train_args, tmp_path, "baseline", "optimizer.name=adamw", "optimizer.lr=0.001", "optimizer.weight_decay=0.1",
        "train.max_steps=20", "model.n_kv_heads=null",
    )  # fmt: skip
    candidate = write_config(train_args, tmp_path, "candidate", "train.max_steps=5")
    shown = benchmark(BENCHMARK, "time_to_loss", baseline, candidate, "--gpt2")
    gpt2, thinker = json.loads(shown.splitlines()[-1])["rows"]
    assert (gpt2["step"], thinker["step"]) == (20, 5)
    assert 20 * 4 * 32 - 32 * 20 <= gpt2["tokens"] <= 20 * 4 * 32
    assert gpt2["val_loss"] < math.log(300)  # it learned


@needs("ladder")
def test_ladder_plans_as_the_command_does(benchmark, train_args, tmp_path):
    config = write_config(train_args, tmp_path, "small", "model.n_kv_heads=null")
    keys = ["model.d_model=64", "train.max_steps=96"]
    shown = benchmark(BENCHMARK, "ladder", config, *keys, "--sizes", "4", "--gap", "4", "--plan")
    sizes = json.loads(shown.splitlines()[-1])["sizes"]
    assert len(sizes) == 5
    assert sizes[-1]["steps"] == 96
    assert sizes[-2]["flops"] <= sizes[-1]["flops"] / 4


@needs("auto_size")
@pytest.mark.usefixtures("fork_processes")
def test_size_rule(benchmark, tmp_path):
    text = tmp_path / "my.txt"
    text.write_text("".join(f"Line {n}: a cat sat on mat {n % 7}.\n" for n in range(200)))
    command = ["size_rule", text, "--characters", "4000", "--minutes", "0.01", "--shapes", "8x1x1"]
    shown = benchmark(BENCHMARK, *map(str, command), "--folder", str(tmp_path / "runs"))
    auto, fixed = json.loads(shown.splitlines()[-1])["rows"]
    assert [auto["shape"], fixed["shape"]] == ["auto", "8x1x1"]
    excess = auto["bits_per_byte"] / min(auto["bits_per_byte"], fixed["bits_per_byte"]) - 1
    assert f"auto is at most {excess:.1%} above the best size" in shown
    configs = [tmp_path / f"runs/my-4000-0.01-{shape}/config.yaml" for shape in ("auto", "8x1x1")]
    widths = [yaml.safe_load(path.read_text())["model"]["d_model"] for path in configs]
    assert widths[0] > widths[1] == 8
    done = run_script(
        BENCHMARK, "size_rule", text, "--characters", "1000000", "--folder", tmp_path / "other"
    )
    assert done.returncode == 2
    assert "lower --characters" in done.stderr


def test_step_parts(train_args, tmp_path):
    done = run_script(
        BENCHMARK, "step_parts", *train_args[1:], "--rounds", "2", "--out", tmp_path / "line.json"
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert json.loads((tmp_path / "line.json").read_text()) == result
    parts = result["microseconds"]
    assert set(parts) == {"step", *PARTS}
    assert min(parts[part] for part in ("step", "forward", "backward", "clipping", "AdamW")) > 0
    for part in parts:
        assert f"{part} " in done.stdout


def test_checkpoint_overhead(train_args, tmp_path):
    done = run_script(
        BENCHMARK,
        "checkpoint_overhead",
        *train_args[1:],
        "--rounds",
        "2",
        "--saves",
        "2",
        "--out",
        tmp_path / "line.json",
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert json.loads((tmp_path / "line.json").read_text()) == result
    assert min(result["foreground_save_s"], result["copy_s"]) > 0
    assert result["step_ratio"] > 0
    assert {"delay_s", "delay_error_s", "next_delay_s", "step_s", "parameters"} <= result.keys()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["time_to_loss", "a.yaml", "b.yaml"], "config a.yaml does not exist"),
        (["time_to_loss", "a.yaml", "b.yaml", "--tune", "optimizer.lr"], "has no values"),
        (
            [
                "time_to_loss",
                *[ROOT / "configs" / f"{name}.yaml" for name in ("pysource", "quickstart")],
            ],
            "read different data",
        ),
        (
            ["time_to_loss", *[ROOT / "configs" / "pysource.yaml"] * 2, "--gpt2"],
            "--gpt2 needs optimizer.name=adamw",
        ),
    ],
)
def test_training_benchmarks_reject_mistakes(command, message, tmp_path):
    done = run_script(BENCHMARK, *command, cwd=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert message in done.stderr


def test_attention_by_pattern_kernel_and_length(benchmark, monkeypatch, tmp_path):
    monkeypatch.setattr(attention, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(attention, "N_DECODED", 2)
    shown = benchmark(
        BENCHMARK, "attention", "--patterns", "full", "window(16)", "topk(4)", "linear(8)", "retrieve(8, 1)",
        "--kernels", "auto", "local", "--lengths", "64,128,512", "--heads", "2", "--head-dim", "8",
        "--repeats", "1", "--png", "a.png",
    )  # fmt: skip
    result = json.loads(shown.splitlines()[-1])
    rows = {(row["pattern"], row["kernel"], row["length"]): row for row in result["rows"]}
    cases = [
        ("full", "auto"),
        ("window(16)", "auto"),
        ("window(16)", "local"),
        ("topk(4)", "auto"),
        ("linear(8)", "auto"),
        ("retrieve(8, 1)", "auto"),
    ]
    assert [(fit["pattern"], fit["kernel"]) for fit in result["fits"]] == cases
    assert len(rows) == 3 * len(cases)
    assert rows["full", "auto", 512]["forward_flops"] == 4 * 2 * 8 * 512 * 513 / 2
    assert rows["window(16)", "auto", 64]["forward_flops"] == 4 * 2 * 8 * (64 * 16 - 15 * 16 / 2)
    for pattern in ("topk(4)", "retrieve(8, 1)"):
        assert (
            rows[pattern, "auto", 64]["forward_flops"] == rows["full", "auto", 64]["forward_flops"]
        )
    assert result["fits"][1]["memory_exponent"] < result["fits"][3]["memory_exponent"]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    wrong = run_script(BENCHMARK, "attention", "--lengths", "64,32")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)


def test_every_ablation_variant_is_a_valid_config():
    for file, batch_size, _ in CORPORA.values():
        for overrides in VARIANTS.values():
            config = load_config(
                ROOT / "benchmarks" / "configs" / file, [*COMMON_OVERRIDES, *overrides]
            )
            assert config.thinker_config(vocab_size=100).patterns
            assert config.train.batch_size >= batch_size
    all_overrides = " ".join(override for overrides in VARIANTS.values() for override in overrides)
    assert {name for name in PATTERNS.names() if name != "full" and name not in all_overrides} == {
        "random"
    }  # a part of bigbird
    wrong = run_script(BENCHMARK, "ablation", "--only", "linear(65)")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
    assert "unknown variant 'linear(65)'; choose from: full; window(32)" in wrong.stderr


def test_caches_in_few_bits(benchmark, tiny_run):
    flags = (
        "--shape",
        "tiny",
        "--lengths",
        "40",
        "--rows",
        "1",
        "2",
        "--repeats",
        "1",
        "--precisions",
        "fp32",
    )
    shown = benchmark(BENCHMARK, "kv_cache", *flags, "--runs", tiny_run, "--texts", "4")
    result = json.loads(shown.splitlines()[-1])
    assert [(row["rows"], row["bits"]) for row in result["speeds"]] == [
        (n, bits) for n in (1, 2) for bits in (None, 8, 4)
    ]
    sizes = {row["bits"]: row["bytes"] for row in result["speeds"] if row["rows"] == 1}
    assert sizes[8] == sizes[None] * (16 + 2) / (16 * 4)  # codes and a scale, of 16 numbers in fp32
    (loss,) = result["losses"]
    assert [row["bits"] for row in loss["rows"]] == [None, 8, 4]
    assert abs(loss["rows"][1]["change"]) < 0.01


@pytest.mark.more
def test_ranks_return_large_results_and_report_failures(capfd):
    assert launch_ranks(1, many_bytes, 1 << 20) == bytes(1 << 20)
    with pytest.raises(RunError, match="one of 2 ranks failed; its error is above"):
        launch_ranks(2, many_bytes, 1)
    assert "AssertionError" in capfd.readouterr().err
