"""What may change in train.grpo when a run resumes."""

from typing import Any

from thinker.training.state.resume import KeyChange

# They do not affect the weights. Nor does eval_prompts, but it affects which checkpoint is `best`.
MAY_CHANGE = ("timeout", "max_mismatch")


def grpo_reason(change: KeyChange) -> str:
    """Why train.grpo may not change so; "" if only limits have changed."""
    before, now = _fixed(change.was), _fixed(change.value)
    if not before or not now:
        return "" if before == now else change.reason
    for key, was in before.items():
        if now.get(key) != was:
            return (
                f"train.grpo.{key} is {now.get(key)!r}, but the run in {change.folder} started "
                f"with {was!r}"
            )
    return ""


def _fixed(options: Any) -> dict[str, Any]:
    """The keys that may not change; none without train.grpo."""
    if options is None:
        return {}
    return {key: value for key, value in dict(options).items() if key not in MAY_CHANGE}
