"""A subclass of Thinker of a user: trained, resumed, opened where its class is known, and refused
elsewhere."""

import sys

import pytest
import torch
from torch import nn
from training_contract import small_config
from training_runs import assert_same_run

from thinker.checkpoint import load_model
from thinker.interop import load
from thinker.model import Thinker
from thinker.runtime.errors import UserError
from thinker.training.reports import summary
from thinker.training.run import build_trainer, train

pytestmark = pytest.mark.usefixtures("one_thread")


class ScaledThinker(Thinker):
    """Scales what its blocks compute by a learned number per channel."""

    def __init__(self, config):
        super().__init__(config)
        self.scale = nn.Parameter(torch.full((config.d_model,), 1.5))

    def forward_blocks(self, *arguments, **options):
        return super().forward_blocks(*arguments, **options) * self.scale


MORE = [
    ["train.ema_decay=0.9", "train.sample_every=3"],
    ["train.max_nonfinite_steps=1", "train.sample_every=null"],
]


@pytest.mark.parametrize("more", MORE, ids=["average and samples", "plain"])
def test_it_trains_resumes_and_opens(more, tmp_path, monkeypatch):
    monkeypatch.setattr(summary, "print_summary", lambda *arguments: None)
    more = [*more, "train.decay_fraction=0"]
    assert train(small_config(tmp_path, "whole", more), model=ScaledThinker) == 0
    for n_steps in (3, 6):
        config = small_config(tmp_path, "parts", [*more, f"train.max_steps={n_steps}"])
        assert train(config, model=ScaledThinker) == 0
    assert_same_run(tmp_path / "whole", tmp_path / "parts", 6)
    model, _ = load(tmp_path / "whole")
    assert type(model) is ScaledThinker
    assert not torch.equal(model.scale, torch.full((16,), 1.5))
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        scaled = model(tokens)
        model.scale.fill_(1.0)
        assert not torch.allclose(scaled, model(tokens))


def test_it_is_refused_where_its_class_is_unknown(tmp_path, monkeypatch):
    monkeypatch.setattr(summary, "print_summary", lambda *arguments: None)
    config = small_config(tmp_path, "run", ["train.max_steps=1"])
    assert train(config, model=ScaledThinker) == 0
    monkeypatch.delitem(sys.modules, __name__)
    with pytest.raises(UserError, match=f"has the class ScaledThinker of {__name__}; import that"):
        load_model(tmp_path / "run" / "checkpoints" / "step-00000001")


def test_it_does_not_start_from_another_model(tmp_path):
    config = small_config(tmp_path, "run", ["run.init_from=runs/x", "data.tokenizer=null"])
    with pytest.raises(UserError, match="run.init_from names the model"):
        build_trainer(config, model=ScaledThinker)
