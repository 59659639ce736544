"""Commands that read a model, on a GPU: each gives what it gives on the CPU."""

import concurrent.futures
import json

import httpx
import pytest
import torch
from conftest import ROOT, run_script

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
COMMANDS = {
    "eval": ["scripts/eval.py", "RUN", "--json"],
    "early exit": ["scripts/early_exit.py", "RUN", "--early-exit", "0.02,0.9", "--texts", "4", "--json"],
    "sensitivity": ["scripts/sensitivity.py", "RUN", "--texts", "4", "--budget", "5", "--out", "OUT", "--json"],
    "prune": ["scripts/prune.py", "RUN", "--neurons", "0.5", "--texts", "4", "--out", "OUT", "--json"],
    "prune weights": ["scripts/prune.py", "RUN", "--weights", "0.5", "--texts", "4", "--out", "OUT", "--json"],
    "heads": ["scripts/inspect_model.py", "heads", "RUN", "--json"],
    "generate": ["generate.py", "RUN", "--prompt", "Line", "--temperature", "0", "--max-new-tokens", "8", "--json",
                 "--precision", "fp32", "--seed", "1"],
    "retrieve": ["generate.py", "RUN", "--prompt", "Line", "--max-new-tokens", "20", "--window", "8", "--retrieve", "2",
                 "--retrieve-block", "4", "--json", "--seed", "1"],
    "monitor": ["generate.py", "RUN", "--prompt", "Line", "--monitor", "--cache-bits", "8", "--json", "--seed", "1"],
}  # fmt: skip


def numbers_of(value):
    """All numbers in what JSON holds, without times."""
    if isinstance(value, dict):
        return [n for name, item in value.items() if "second" not in name for n in numbers_of(item)]
    if isinstance(value, list):
        return [number for item in value for number in numbers_of(item)]
    return [value] if isinstance(value, (int, float)) else []


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_gives_nearly_the_same_numbers_on_a_gpu(name, tiny_run, tmp_path):
    found = {}
    for device in ("cpu", "cuda"):
        words = {"RUN": str(tiny_run), "OUT": str(tmp_path / device)}
        command = [words.get(word, word) for word in COMMANDS[name]]
        done = run_script(ROOT / command[0], *command[1:], "--device", device)
        assert done.returncode == 0, done.stderr
        found[device] = [
            json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")
        ]
    if name not in ("retrieve", "monitor"):  # which sample in bf16 on a GPU
        assert numbers_of(found["cuda"]) == pytest.approx(
            numbers_of(found["cpu"]), rel=0.05, abs=0.02
        )


def test_a_server_on_a_gpu_answers_all_at_once(served_run, start_server):
    server = start_server(
        served_run, "--device", "cuda", "--monitor", "--max-batch", "8", forked=False
    )
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    shaped = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}

    def ask(index):
        body = {"model": "served", "prompt": "Line 7:", "max_tokens": 40, "seed": index % 4}
        if index % 8 == 7:
            body |= {"response_format": shaped}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        texts = list(pool.map(ask, range(24)))
    assert all(json.loads(texts[index]) in ({"n": 1}, {"n": 2}) for index in range(7, 24, 8))
    assert "thinker_attention_entropy" in httpx.get(f"{server.url}/metrics", timeout=60).text
    server.stop()
