"""The curve of rewards: its average by hand, and a picture in the run directory."""

import json

from PIL import Image

from thinker.features.rewards.judging.reward_plot import moving_average, plot_rewards


def test_a_moving_average_has_the_neighbors_of_both_sides():
    points = [(step, float(step**2)) for step in range(1, 21)]  # one neighbor on each side
    found = moving_average(points)
    assert [step for step, _ in found] == list(range(1, 21))
    assert found[0][1] == (1 + 4) / 2
    assert found[5][1] == (25 + 36 + 49) / 3
    assert found[-1][1] == (19**2 + 20**2) / 2
    assert moving_average([(3, 0.5)]) == [(3, 0.5)]


def test_the_picture_has_steps_and_evaluations(tmp_path):
    lines = [{"step": 0, "val_loss": 1.0, "val_reward": 0.1}]
    lines += [{"step": step, "train_loss": 1.0, "reward": step / 20} for step in range(1, 21)]
    lines.append({"step": 20, "val_loss": 1.0, "val_reward": 0.9})
    path = tmp_path / "reward.png"
    plot_rewards(lines, path, "runs/$mine: rewards")
    with_evaluations = path.read_bytes()
    with Image.open(path) as image:
        assert image.size == (960, 540)
    plot_rewards(
        [json.loads(json.dumps(line)) for line in lines[1:-1]], path, "runs/$mine: rewards"
    )
    assert path.read_bytes() != with_evaluations
