"""What an exercise says of answers that are missing, wrong or broken."""

import pytest
import torch

from thinker.lessons.exercise import call, exercise, is_near
from thinker.lessons.pictures import Heatmap, SideBySide


@exercise
def check_three(answer):
    """The number 3, or a function that returns it."""
    value = call(answer) if callable(answer) else answer
    return None if is_near(value, 3.0) else "Not yet: count again."


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (3, "Right."),
        (lambda: 3.0001, "Right."),
        (4, "Not yet: count again."),
        (..., "Not answered yet: replace the dots."),
        (lambda: ..., "Not answered yet: replace the dots."),
        (lambda: None, "Not answered yet: replace the dots."),
        (lambda: 1 / 0, "Not yet: your code raised ZeroDivisionError: division by zero"),
        (
            [3, 3],
            "Not yet: your code raised ValueError: the answer has shape (2,), but it needs ()",
        ),
        ("three", "Not yet: your code raised"),
    ],
)
def test_an_answer_gets_a_sentence(answer, text, capsys):
    verdict = check_three(answer)
    printed = capsys.readouterr().out.strip()
    assert printed.startswith(text)
    assert bool(verdict) == (text == "Right.")


def test_a_heatmap_in_text_and_html():
    one = Heatmap("weights <b>", [[1.0, -torch.inf], [0.25, 0.75]], ["a", "b"], ["a&", "b"])
    assert str(one).splitlines() == [
        "weights <b>",
        "     a&       b",
        "a  1.00  hidden",
        "b  0.25    0.75",
    ]
    html = SideBySide(one, one)._repr_html_()
    assert html.count("<table") == 2
    assert "weights &lt;b&gt;" in html
    assert "a&amp;" in html
    assert html.count("hidden</td>") == 2
