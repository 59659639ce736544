"""The drawings of the lessons say what attention does."""

import pytest
import torch

from thinker.lessons.diagrams import attention_head, grouped_heads
from thinker.model.attention_dispatch import repeat_heads


def overlapping(figure):
    """Pairs of texts of a panel that overlap."""
    figure.draw_without_rendering()
    pairs = []
    for axes in figure.axes:
        boxes = [(text.get_text(), text.get_window_extent()) for text in axes.texts]
        for number, (name, box) in enumerate(boxes):
            pairs += [(name, other) for other, its in boxes[:number] if box.overlaps(its)]
    return pairs


@pytest.mark.parametrize("n_heads, counts", [(4, (4, 2, 1)), (6, (6, 3, 1))])
def test_a_query_head_is_drawn_to_the_kv_head_that_it_reads(n_heads, counts):
    figure = grouped_heads(n_heads, counts)
    for axes, K in zip(figure.axes, counts, strict=True):
        place = {}
        for text in axes.texts:
            if text.get_text().isdigit():
                place[text.get_position()] = int(text.get_text())
        drawn = {}
        for line in axes.lines:
            query, kv = line.get_xydata()
            drawn[place[tuple(query)]] = place[tuple(kv)]
        heads = torch.arange(K)[None, :, None, None]
        read = repeat_heads(heads, n_heads).flatten().tolist()  # as attention repeats them
        assert drawn == dict(enumerate(read))


@pytest.mark.parametrize("draw", [attention_head, grouped_heads])
def test_texts_do_not_overlap_and_fit(draw):
    figure = draw()
    assert overlapping(figure) == []
    for axes in figure.axes:
        for text in axes.texts:
            box = text.get_window_extent()
            assert 0 <= box.x0 < box.x1 <= figure.bbox.width
            assert 0 <= box.y0 < box.y1 <= figure.bbox.height
