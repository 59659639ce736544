"""The checks of the lesson "Teach it to add" take right answers and name typical mistakes."""

import pytest
from installed import NAMES

if "rewards" not in NAMES:
    pytest.skip("the lesson needs rewards", allow_module_level=True)

from thinker.lessons.checks.teach_it_to_add import check_advantages, check_pass_at_2, check_verifier


def others(rewards, n=None):
    """The mean of the other rewards; n: what their sum is divided by."""
    return (rewards.sum() - rewards) / (n or len(rewards) - 1)


def graded(prompt, text, partial=0.5, lenient=False):
    """A verifier with mistakes."""
    a, b = prompt.removesuffix("=").split("+")
    right = str(int(a) + int(b))
    if text == right:
        return 1.0
    if lenient:
        return partial if text.endswith(right[-1]) else 0.0
    if text.isdigit() and text[-1] == right[-1]:
        return partial
    return 0.0


RIGHT = [
    (check_advantages, lambda rewards: rewards - others(rewards)),
    (check_pass_at_2, 13 / 28),
    (check_pass_at_2, 0.464),
    (check_verifier, graded),
]
WRONG = [
    (check_advantages, lambda rewards: rewards - rewards.mean(), "the mean of all answers"),
    (check_advantages, lambda rewards: (rewards - rewards.mean()) / rewards.std(), "GRPO's"),
    (check_advantages, lambda rewards: (rewards - others(rewards)) / rewards.std(), "leave out"),
    (check_advantages, lambda rewards: rewards - others(rewards, 5), "one fewer"),
    (check_advantages, lambda rewards: others(rewards) - rewards, "positive advantages"),
    (check_advantages, lambda rewards: rewards * 3, "the baseline 0.75"),
    (check_advantages, lambda rewards: ..., "Not answered yet"),
    (check_pass_at_2, 15 / 28, "both are wrong"),
    (check_pass_at_2, 0.4375, "drawn twice"),
    (check_pass_at_2, 0.5, "twice"),
    (check_pass_at_2, 0.25, "pass@1"),
    (check_pass_at_2, 0.9, "first compute"),
    (check_verifier, lambda prompt, text: 1.0, "'122' to 47+85= gets 1, but should get 0.5"),
    (check_verifier, lambda prompt, text: graded(prompt, text, partial=0.0), "should get 0.5"),
    (check_verifier, lambda prompt, text: graded(prompt, text, lenient=True), "'13 2' to"),
    (check_verifier, lambda prompt, text: float(int(text) == 132), "should get"),
    (check_verifier, lambda prompt, text: graded(prompt, str(int(text))), "raises ValueError"),
    (check_verifier, lambda prompt, text: ..., "Not answered yet"),
]


@pytest.mark.parametrize(("check", "answer"), RIGHT)
def test_right_answers(check, answer, capsys):
    assert check(answer)
    assert capsys.readouterr().out == "Right.\n"


@pytest.mark.parametrize(("check", "answer", "hint"), WRONG)
def test_mistakes_are_named(check, answer, hint, capsys):
    assert not check(answer)
    assert hint in capsys.readouterr().out
