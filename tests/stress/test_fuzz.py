"""Coverage-guided fuzzing by atheris, where it is installed: no stack trace, no hang, no abort."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from thinker.data.corpus.corpus import prepare_corpus
from thinker.data.tokenizers import tokenizer_conversion

pytestmark = [
    pytest.mark.stress,
    pytest.mark.skipif(
        importlib.util.find_spec("atheris") is None, reason="needs atheris (pip install atheris)"
    ),
]

RUNS = 10_000
LLAMA = '{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 300, "hidden_size": 32, '
LLAMA += '"intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, '
LLAMA += '"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "max_position_embeddings": 64, '
LLAMA += '"tie_word_embeddings": false, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}'


@pytest.mark.parametrize(
    "target",
    ["config.json", "tokenizer.json", "config.yaml", "template", "shard", "corpus.json", "rows"],
)
def test_strangers_files(tmp_path, text_file, target):
    corpus = prepare_corpus(
        source="text",
        path=str(text_file),
        tokenizer="bpe:300",
        cache_dir=tmp_path / "cache",
        progress=False,
    )
    folder, seeds, found = corpus.folder, tmp_path / "seeds", tmp_path / "found"
    for made in (seeds, found):
        made.mkdir()
    (folder / "rows.jsonl").write_text(
        '{"text": "a"}\n[{"text": "b", "messages": [{"role": "x"}]}]\n'
    )
    (folder / "config.json").write_text(LLAMA)
    (folder / "config.yaml").write_bytes((ROOT / "configs/quickstart.yaml").read_bytes())
    (folder / "chat_template.jinja").write_bytes((ROOT / "configs/chat.jinja").read_bytes())
    names = {"template": "chat_template.jinja", "shard": "train-00000.tokens", "rows": "rows.jsonl"}
    if target == "tokenizer.json":
        tokenizer_conversion.write(corpus.tokenizer, folder, 64)
        (folder / "thinker-tokenizer.json").unlink()
        (folder / "chat_template.jinja").unlink()
    name = names.get(target, target)
    (seeds / "seed").write_bytes((folder / name).read_bytes())
    script = Path(__file__).with_name("fuzz.py")
    options = [
        f"-runs={RUNS}",
        "-timeout=60",
        "-rss_limit_mb=6000",
        "-seed=1",
        "-max_len=200000",
        f"-artifact_prefix={found}/",
    ]
    done = subprocess.run(
        [sys.executable, script, target, folder, found, seeds, *options],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    assert f"Done {RUNS} runs" in done.stderr or f"#{RUNS}" in done.stderr, done.stderr[-2000:]
