"""The checks of the lesson "Make it small" take right answers and name typical mistakes."""

import pytest
from installed import NAMES

if not {"pruning", "quantization_study"} <= NAMES:
    pytest.skip("the lesson needs pruning and quantization_study", allow_module_level=True)

from thinker.lessons.checks.make_it_small import check_bytes, check_choice, check_round


def rounding(highest=None, is_signed=False, is_cut=False, only_codes=False):
    """An answer to the first exercise, with a mistake. highest: from bits to the largest code."""

    def round_row(row, bits):
        largest = row.max() if is_signed else row.abs().max()
        scale = largest / (highest(bits) if highest else 2 ** (bits - 1) - 1)
        codes = (row / scale).trunc() if is_cut else (row / scale).round()
        return codes if only_codes else codes * scale

    return round_row


WRONG = [
    (check_round, rounding(only_codes=True), "these are the codes"),
    (check_round, rounding(is_cut=True), "cut off"),
    (check_round, rounding(is_signed=True), "largest magnitude"),
    (check_round, rounding(lambda bits: 2**bits - 1), "yours reach 255"),
    (check_round, rounding(lambda bits: 2 ** (bits - 1)), "yours reach 128"),
    (check_round, rounding(lambda bits: 127), "It depends on `bits`"),
    (check_round, rounding(lambda bits: 7), "is 127, not 7"),
    (check_round, lambda row, bits: row, "unchanged"),
    (check_round, lambda row, bits: row.round(), "the scale is the largest"),
    (check_round, lambda row, bits: row[:2], "shape"),
    (check_round, lambda row, bits: ..., "Not answered yet"),
    (check_bytes, 562_500, "embedding is missing"),
    (check_bytes, 675_000, "not in 4 bits"),
    (check_bytes, 1_300_000, "scales are missing"),
    (check_bytes, 10_900_000, "these are bits"),
    (check_bytes, 762_500, "takes 4 bytes"),
    (check_bytes, 6_962_500, "bits to bytes"),
    (check_bytes, 3_300_000, "share the 16 bits"),
    (check_bytes, 1, "bits per weight"),
    (check_choice, "A", "with 0.9 MB"),
    (check_choice, "b", "measured on"),
    (check_choice, "D", "in quotes"),
    (check_choice, 3, "in quotes"),
]


@pytest.mark.parametrize(("check", "answer", "hint"), WRONG)
def test_a_mistake_gets_its_hint(check, answer, hint, capsys):
    assert not check(answer)
    assert hint in capsys.readouterr().out


def test_right_answers_are_right():
    assert check_round(rounding())
    assert check_bytes(1_362_500)
    assert check_choice("C")
    assert check_choice(" c")
