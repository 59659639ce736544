"""A whole folder of each family, model and tokenizer, through the commands as a user runs them."""

import io
import json
import math
import sys

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("sentencepiece")

from tokenizer_kinds import KINDS, build, build_older_files  # noqa: E402

from thinker.commands.program import main  # noqa: E402
from thinker.data.tokenizers.saved_tokenizer import load_tokenizer  # noqa: E402

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
    "head_dim": 16,
}
OWN_SIZES = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 16},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16},
}
TEXT = "Once upon a time, there was 1234.\n\n  Ruth's café;\tyes \n"


def build_folder(name, folder):
    """A random model of transformers, and the tokenizer of its kind."""
    make = build_older_files if name == "opt" else build  # as it was published
    kind = make(name, folder)
    ids = json.loads((folder / "config.json").read_text())
    tokenizer = load_tokenizer(folder)
    standard = transformers.AutoConfig.for_model(kind.model_type)
    sizes = {key: value for key, value in SIZES.items() if hasattr(standard, key)}
    sizes |= OWN_SIZES.get(kind.model_type, {})
    config = transformers.AutoConfig.for_model(
        kind.model_type,
        vocab_size=(tokenizer.vocab_size + 15) // 16 * 16,
        bos_token_id=ids.get("bos_token_id"),
        eos_token_id=ids["eos_token_id"],
        pad_token_id=None,
        initializer_range=0.2,
        **sizes,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    return kind, model, tokenizer


@pytest.fixture
def thinker(monkeypatch, capsys, tmp_path):
    """Runs a command; returns what it prints to standard output."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments, stdin=""):
        monkeypatch.setattr(sys, "argv", ["thinker", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        capsys.readouterr()
        status = main()
        done = capsys.readouterr()
        assert status == 0, done.err
        return done.out

    return run


TRAINING = [
    "train.max_steps=5",
    "data.seq_len=64",
    "train.batch_size=2",
    "train.device=cpu",
    "train.compile=false",
    "train.report=false",
    "data.val_fraction=0.2",
    "data.cache_dir=cache",
]


@pytest.mark.more
@pytest.mark.parametrize("name", KINDS)
def test_a_folder_of_each_family_goes_through_the_commands(tmp_path, thinker, name):
    folder = tmp_path / "given"
    folder.mkdir()
    kind, model, tokenizer = build_folder(name, folder)

    ids = tokenizer.bos_prefix + tokenizer.encode(TEXT, allow_special=True)
    prompt = torch.tensor([ids])
    continued = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=tokenizer.eos_ids,
        pad_token_id=tokenizer.eos_id,
        # Ids without a token, which pad the matrix, are never sampled here.
        suppress_tokens=list(range(tokenizer.vocab_size, model.config.vocab_size)) or None,
    )
    expected = continued[0, len(ids) :].tolist()
    options = ["--greedy", "--max-new-tokens", "12", "--json"]
    sample = json.loads(thinker("generate", folder, "--prompt", TEXT, *options))
    assert sample["token_ids"] == expected

    (tmp_path / "text.txt").write_text(TEXT * 40, encoding="utf-8")
    (tmp_path / "short.txt").write_text(TEXT, encoding="utf-8")
    score = json.loads(thinker("generate", folder, "--score", "short.txt", "--json"))
    scored = torch.tensor([[tokenizer.bos_id, *tokenizer.encode(TEXT)]])
    with torch.no_grad():
        logits = model(scored[:, :-1]).logits[0, :, : tokenizer.vocab_size]
    mean = torch.nn.functional.cross_entropy(logits.double(), scored[0, 1:]).item()
    assert math.isclose(score["nats_per_token"], mean, rel_tol=1e-4)

    data = ["data.source=text", "data.path=text.txt", "data.assistant_only_loss=false"]
    run = ["run.dir=tuned", "train.lora_rank=4", f"run.init_from={folder}"]
    thinker("train", "finetune", *run, *data, *TRAINING)
    thinker("generate", "tuned", "--prompt", TEXT, "--max-new-tokens", "4")
    thinker("export", "hf", "tuned", "exported")
    if kind.template is None:
        return

    question = {"role": "user", "content": "Who is Noah?"}
    answer = {"role": "assistant", "content": "A brave boy.\n\nYes."}
    rows = []
    for number in range(40):
        first = {"role": "user", "content": f"Who is {number}?"}
        rows.append(json.dumps({"messages": [first, answer, question, answer]}) + "\n")
    (tmp_path / "talks.jsonl").write_text("".join(rows))
    assert thinker("chat", folder, "--max-new-tokens", "4", stdin="Who is Noah?\nWhy?\n")
    run = ["run.dir=chat", f"run.init_from={folder}", "data.path=talks.jsonl"]
    thinker("train", "finetune", *run, *TRAINING)
    asked = ["--chat", "--prompt", "Who is Noah?", "--max-new-tokens", "4"]
    thinker("generate", "chat", *asked)
