"""What needs a GPU: skipped, visibly, where there is none."""

import json

import pytest
import torch
from conftest import ROOT, run_script

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

# The 124M recipe on text that needs no network.
PYDOCS = [
    ROOT / "train.py",
    ROOT / "configs" / "gpu-124m.yaml",
    "data.source=pydocs",
    "data.path=null",
    "data.config=null",
    "data.max_documents=null",
    "data.tokenizer=bpe:8192",
    "data.val_fraction=0.02",
    "model.vocab_size=null",
    "train.batch_size=32",
    "train.eval_windows=32",
    "train.sample_every=null",
    "train.log_every=1",
]


def losses(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["train_loss"] for line in lines if "train_loss" in line]


def test_bf16_compiled_follows_fp32_resumes_and_samples(tmp_path):
    runs = {}
    for name, options in {
        "bf16": ["train.precision=bf16", "train.compile=true"],
        "fp32": ["train.precision=fp32", "train.compile=false"],
    }.items():
        runs[name] = tmp_path / name
        common = [*PYDOCS, *options, f"run.dir={runs[name]}", f"data.cache_dir={tmp_path / 'cache'}"]
        assert run_script(*common, "train.max_steps=150", timeout=900).returncode == 0
        done = run_script(*common, "train.max_steps=200", timeout=900)
        assert done.returncode == 0, done.stderr
        assert "going on from step 150" in done.stderr
    bf16, fp32 = losses(runs["bf16"]), losses(runs["fp32"])
    assert len(bf16) == len(fp32) == 200
    assert sum(bf16[-20:]) / 20 == pytest.approx(sum(fp32[-20:]) / 20, rel=0.02)
    done = run_script(
        ROOT / "generate.py", runs["bf16"], "--device", "cuda", "--prompt", "def ", "--max-new-tokens", "20"
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > len("def \n")


def test_cached_logits_equal_uncached_ones(make_thinker):
    thinker = make_thinker().cuda()
    tokens = torch.randint(0, 61, (3, 40), device="cuda")
    with torch.no_grad():
        full = thinker(tokens)
    cache = thinker.new_cache(3, 40)
    pieces = [thinker(chunk, cache=cache) for chunk in tokens.split([7, 1, 20, 12], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), full, rtol=0, atol=1e-4)


def test_a_bad_step_changes_no_bit_although_the_host_does_not_know():
    from data.ahead import Batch
    from model import ThinkerConfig
    from training.recipe import check_recipe
    from training.step import TrainingStep, draw

    config = ThinkerConfig(vocab_size=50, d_model=32, n_layers=2, n_heads=2, max_seq_len=16)
    train = {"precision": "fp32", "compile": False, "micro_batch_size": 4, "batch_size": 4, "max_steps": 9}
    step = TrainingStep(draw(config, 1, torch.device("cuda")), check_recipe({"train": {**train, "skip_bad_steps": 1}}))
    tokens = torch.randint(50, (4, 17))
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), 64)
    step(batch, 1.0)
    everything = {**step.thinker.state_dict(), **step.optimizers.tensors()}
    before = {name: tensor.clone() for name, tensor in everything.items()}
    hook = step.thinker.norm.weight.register_hook(lambda gradient: gradient * float("nan"))
    torch.cuda.set_sync_debug_mode("error")
    step(batch, 1.0)
    torch.cuda.set_sync_debug_mode("default")
    hook.remove()
    assert all(torch.equal(tensor, before[name]) for name, tensor in everything.items())
    step(batch, 1.0)
    assert not torch.equal(step.thinker.head.weight, before["head.weight"])
