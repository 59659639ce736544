"""The HTML report of a pruned model, in a browser."""

import html_report_fixtures
import pytest
from html_report_fixtures import tokens

from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.features.pruning import pruning
from thinker.interpretability import head_reports, html_report, reports

browser, free_tabs = html_report_fixtures.browser, html_report_fixtures.free_tabs  # fixtures
visit = html_report_fixtures.visit
pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_pruned_model(random_model, tmp_path, visit):
    tokenizer = make_tokenizer("byte", [])
    left = pruning.prune(random_model(vocab_size=tokenizer.vocab_size, n_kv_heads=4), [(0, 1)])
    prompt = reports.Prompt.from_text(left, tokenizer, "abc abc")
    explorer = html_report.make_explorer(left, tokenizer, prompt)
    html_report.write_html_report(
        tmp_path / "p.html",
        "pruned",
        head_reports.report_heads(left, prompt, head_reports.random_repeats(left), "all"),
        explorer,
    )
    tab = visit(tmp_path / "p.html")
    assert [
        tab.get_by_role("gridcell", name="pruned").count(),
        tab.get_by_role("gridcell").count(),
    ] == [1, 8]
    tab.get_by_role("gridcell", name="pruned").click()
    tokens(tab).nth(4).click()
