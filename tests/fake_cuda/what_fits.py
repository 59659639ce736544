"""Print the rows of the table "what-fits": the largest micro-batches whose planned memory fits on a
card. Run it as: python tests/fake_cuda/what_fits.py"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import fake_cuda  # noqa: F401 - before torch
import torch

from thinker.training.config.load import load_config
from thinker.training.settings.memory_estimate import estimate_memory, usable_fraction
from thinker.training.settings.resolve import resolve_settings

CONFIGS = Path(__file__).parents[2] / "configs"
CARDS = (8, 12, 16, 24, 40, 80)  # GB
SIZES = {"124M": (1, 2, 4, 8, 16, 32, 64, 128), "350M": (1, 2, 4, 8, 16, 32, 64)}
DEVICE = torch.device("cuda:0")
RECOMPUTED = "train.checkpoint_every_n_blocks=1"


def peaks(model: str, options: list[str]) -> dict[int, float]:
    """The planned GB of each micro-batch, up to the first that no card has room for."""
    path = CONFIGS / f"gpu-{model.lower()}.yaml"
    found = {}
    for size in SIZES[model]:
        config = load_config(path, [f"train.micro_batch_size={size}", *options])
        settings = resolve_settings(config, config.thinker_config(config.model.vocab_size), DEVICE)
        found[size] = estimate_memory(settings, size, DEVICE).peak / 1e9
        if found[size] > usable_fraction(DEVICE) * CARDS[-1]:
            break
    return found


def main() -> None:
    """Print a row of JSON for each card."""
    columns = {}
    for model in SIZES:
        columns[model] = peaks(model, [])
        columns[f"{model}, recomputed"] = peaks(model, [RECOMPUTED])
    rows = []
    for card in CARDS:
        row = {"card": f"{card} GB"}
        for name, of_size in columns.items():
            fitting = [
                size for size, peak in of_size.items() if peak <= usable_fraction(DEVICE) * card
            ]
            row[name] = ""
            if fitting:
                row[name] = f"{fitting[-1]} ({of_size[fitting[-1]]:.1f} GB)"
        rows.append(row)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
