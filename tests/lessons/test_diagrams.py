"""The drawings of the lessons say what attention does."""

import pytest
import torch

from thinker.lessons.materials.diagrams import attention_head, grouped_heads
from thinker.model.attention_dispatch import repeat_heads


def extents(axes):
    """The names of a panel with the places of their boxes: left, bottom, right, top."""
    found = []
    for text in axes.texts:
        if text.get_text():  # arrows are texts without words
            box = (text.get_bbox_patch() or text).get_window_extent()
            found.append((text.get_text(), box.x0, box.y0, box.x1, box.y1))
    return found


@pytest.mark.parametrize(("n_heads", "counts"), [(4, (4, 2, 1)), (6, (6, 3, 1))])
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
    figure.draw_without_rendering()
    for axes in figure.axes:
        names = extents(axes)
        for number, (name, left, bottom, right, top) in enumerate(names):
            assert 0 <= left < right <= figure.bbox.width, name
            assert 0 <= bottom < top <= figure.bbox.height, name
            for other, its_left, its_bottom, its_right, its_top in names[:number]:
                is_beside = right <= its_left or its_right <= left
                assert is_beside or top <= its_bottom or its_top <= bottom, (name, other)
