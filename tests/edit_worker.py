"""Run in a copy of the package: what training, sampling, evaluation and inspection compute there,
as JSON."""

import contextlib
import io
import json

import torch

from thinker.data.batches.prefetch import Batch
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.generation import Generator
from thinker.model import ThinkerConfig
from thinker.training.config.load import validate_config
from thinker.training.settings.resolve import resolve_settings
from thinker.training.step import TrainingStep, build_model

T = 80
CPU = torch.device("cpu")
TOKENIZER = make_tokenizer("byte", [])
CONFIG = ThinkerConfig(
    TOKENIZER.vocab_size, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=48, max_seq_len=128
)


def batch(seed):
    tokens = torch.randint(250, (4, T + 1), generator=torch.Generator().manual_seed(seed))
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), 4 * T, None)


def train(kernels, initial=None):
    """Losses, the model, and the notices of a few steps."""
    section = {
        "precision": "fp32",
        "compile": False,
        "micro_batch_size": 4,
        "batch_size": 4,
        "max_steps": 9,
        "kernels": kernels,
    }
    tree = {"train": section, "optimizer": {"name": "adamw", "lr": 0.01}}
    settings = resolve_settings(validate_config(tree), CONFIG, CPU)
    notices = io.StringIO()
    with contextlib.redirect_stderr(notices):
        step = TrainingStep(build_model(CONFIG, 1, CPU, initial), settings)
    losses = [float(step(batch(seed), 1.0)[0]) for seed in range(4)]
    return losses, step.model, notices.getvalue().splitlines()


@torch.no_grad()
def cached_logits(model, new_cache):
    """Logits of a prompt and of single tokens, read into a cache."""
    tokens = batch(7).inputs[:1]
    cache = new_cache(1, T)
    parts = [model(part, cache=cache) for part in tokens.split([70, *[1] * (T - 70)], dim=1)]
    return torch.cat(parts, dim=1)


@torch.no_grad()
def use(model):
    """Sampling, evaluation and inspection of a model."""
    model.eval()
    plain = cached_logits(model, model.new_cache)
    results = {"notices": []}
    for name, options in {
        "fp32": {},
        "torch": {"compile": False},
        "bf16": {"dtype": "bf16"},
    }.items():
        generator = Generator(model, TOKENIZER, **options)
        found = cached_logits(generator.decoder.step, generator.model.new_cache)
        results[name] = float((found.float() - plain).abs().max() / plain.abs().max())
        results["notices"].append(generator.kernel_problem)
    tokens, targets = batch(8).inputs, batch(8).targets
    results["evaluation"] = float(model(tokens, targets=targets)[0])
    results["logits"] = plain[0, ::9, :6].tolist()
    path = "blocks.1.attention"
    with model.record(f"{path}.weights", f"{path}.v", f"{path}.heads") as seen:
        model(tokens)
    by_head = seen[f"{path}.v"].repeat_interleave(2, dim=1)
    heads = seen[f"{path}.heads"]
    difference = (seen[f"{path}.weights"] @ by_head - heads).abs().max()
    results["inspection"] = float(difference / heads.abs().max())
    return results


def random_model():
    model = build_model(CONFIG, 1, CPU)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def main():
    torch.set_num_threads(1)
    fast, trained, notices = train("auto")
    plain, _, _ = train("off")
    torch.manual_seed(5)
    resumed, _, more = train("auto", build_copy(trained))
    resumed_plain, _, _ = train("off", build_copy(trained))
    print(
        json.dumps(
            {
                "fast": fast + resumed,
                "plain": plain + resumed_plain,
                "notices": [notices, more],
                "trained": use(trained),
                "random": use(random_model()),
            }
        )
    )


def build_copy(model):
    new = build_model(CONFIG, 1, CPU)
    new.load_state_dict(model.state_dict())
    return new


if __name__ == "__main__":
    main()
