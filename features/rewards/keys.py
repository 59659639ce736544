"""Keys of train.grpo, and what they cannot be combined with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_validator

from thinker.training.config.types import ConfigSection, Natural, Positive, Rate

if TYPE_CHECKING:
    from thinker.training.config.config import Config

SOURCE = "prompts"
Baseline = Literal["mean", "leave_one_out"]
Normalize = Literal["group", "none"]
Weight = Annotated[float, Field(ge=-1e9, le=1e9)]


class GRPOConfig(ConfigSection):
    """Learning from rewards of the model's own answers (features/rewards/guide.md)."""

    rewards: Annotated[dict[str, Weight], Field(min_length=1, examples=[{"exact": 1.0}])]
    """Verifiers and their weights: those of features/rewards/guide.md, or FILE.py:FUNCTION. A name
    alone has the weight 1."""
    group_size: Annotated[int, Field(ge=2, le=1024)] = 8
    """Answers to each prompt, which are compared with each other. It must divide
    train.batch_size."""
    max_new_tokens: Positive = 64
    """Longest answer, in tokens."""
    temperature: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    """Temperature of sampling, and of the probabilities that are trained."""
    prompt_tokens: Positive | None = None
    """For plain texts: how many tokens at the beginning of each text are the prompt."""
    updates: Positive = 1
    """Optimizer steps with the same answers. From the second on, ratios of probabilities are
    clipped."""
    clip: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """How far a ratio of probabilities may be from 1."""
    baseline: Baseline = "mean"
    """What is subtracted from a reward: the mean of the group, or that of its other answers
    (leave_one_out)."""
    normalize: Normalize = "group"
    """group: divide advantages by the group's standard deviation, and each answer's loss by its
    length (GRPO). none: by the longest length only (Dr. GRPO; with leave_one_out, RLOO)."""
    kl: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    """Weight of the divergence from the model that training starts from. 0: that model is not
    loaded."""
    drop_cut_answers: bool = False
    """Leave out answers that were cut at max_new_tokens."""
    max_mismatch: Rate | None = None
    """Stop the run if ln P of a sampled token differs by more than this between sampling and
    training. null: never."""
    timeout: Annotated[float, Field(gt=0, le=1e6)] = 10.0
    """Seconds that verifiers may take for an answer."""
    eval_prompts: Natural = 64
    """Prompts of the validation split that are answered at evaluations. 0: none."""

    @field_validator("rewards", mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {value: 1.0}
        return value


class RewardKeys(ConfigSection):
    """Keys of the section `train`."""

    grpo: GRPOConfig | None = None
    """Learn from rewards, such as `{rewards: exact}` (features/rewards/guide.md). null: from
    text."""
    exact: bool = False
    """With train.grpo on a CPU in fp32: sample and train on the same kernels, so that
    policy_mismatch is 0, and stop the run if it is not."""


def complete_config(tree: dict[str, Any]) -> None:
    """Answers are sampled when a step needs them, not ahead of time, and without dropout. Texts are
    evaluated as they are answered: each from its beginning."""
    if tree["train"].get("grpo") is not None:
        tree["data"].setdefault("num_workers", 0)
        tree["data"].setdefault("packing", "documents")
        tree["model"].setdefault("dropout", 0.0)
    if tree["train"].get("exact"):
        tree["train"].setdefault("device", "cpu")
        tree["train"].setdefault("precision", "fp32")


def check_grpo(config: Config) -> None:
    """Raise ValueError if other keys contradict train.grpo."""
    data, train = config.data, config.train
    grpo = train.grpo
    if train.exact:
        check_exact(config)
    if grpo is None:
        if SOURCE in [source.source for source in data.text_sources()]:
            raise ValueError(
                f"data.source={SOURCE} needs train.grpo, as prompts have no answers to learn; set "
                "train.grpo.rewards"
            )
        return
    if train.batch_size % grpo.group_size:
        raise ValueError(
            f"train.batch_size ({train.batch_size}) is not a multiple of train.grpo.group_size "
            f"({grpo.group_size})"
        )
    conflicts = {
        "data.sources": getattr(data, "sources", None) is not None,
        "data.buffer_tokens": getattr(data, "buffer_tokens", None) is not None,
        "data.clean": getattr(data, "clean", None) is not None,
        "data.val_tokens": data.val_tokens is not None,
        f"data.num_workers={data.num_workers}": data.num_workers != 0,
        "data.shift_windows=true": data.shift_windows,
        "data.document_masking=true": data.document_masking,
        "train.distill": getattr(train, "distill", None) is not None,
        "train.dpo": getattr(train, "dpo", None) is not None,
        "train.prune": getattr(train, "prune", None) is not None,
        "train.patience": train.patience is not None,
        "model.dropout": config.model.dropout > 0,
    }
    for key, is_set in conflicts.items():
        if is_set:
            raise ValueError(f"train.grpo cannot be combined with {key}; remove it")
    if grpo.temperature != 1 and train.lora_rank is not None:
        raise ValueError(
            f"train.grpo.temperature={grpo.temperature:g} cannot be combined with "
            "train.lora_rank; set it to 1"
        )


def check_exact(config: Config) -> None:
    """Raise ValueError if other keys contradict train.exact."""
    train = config.train
    if train.grpo is None:
        raise ValueError("train.exact needs train.grpo; set train.grpo.rewards")
    for key, wanted in {"device": "cpu", "precision": "fp32"}.items():
        if getattr(train, key) != wanted:
            raise ValueError(f"train.exact needs train.{key}={wanted}")
