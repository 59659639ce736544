"""A parser of `tales`: it finds the choices that made a story, and whether they are the only
ones."""

from __future__ import annotations

from thinker.data.text import tales

State = tuple[
    int, dict[str, tales.Item], tuple[tales.Choice, ...]
]  # position in the text, bindings, events


def parse(text: str) -> tales.Story:
    """The story that has this text, with its choices. Raises ValueError if the grammar has no such
    story."""
    found = [
        events
        for end, _, events in _derive(tales.GRAMMAR.story, text, (0, {}, ()))
        if end == len(text)
    ]
    if not found:
        raise ValueError("this text is not a story of the grammar")
    assert len(found) == 1, f"the grammar is ambiguous: {len(found)} derivations of {text!r}"
    return tales.story_of(text, list(found[0]))


def _derive(rule: tales.Rule, text: str, state: State) -> list[State]:
    """The states behind all matches of the rule at the state's position."""
    position, bound, events = state
    found = []
    for choice, ops in zip(rule.choices, rule.alternatives):
        states = [(position, bound, (*events, choice) if rule.cumulative else events)]
        for op in ops:
            states = [after for before in states for after in _match(op, text, before)]
        found += states
    return found


def _match(op: tales.Op, text: str, state: State) -> list[State]:
    """The states behind all matches of one construct."""
    if isinstance(op, tales.Call):
        return _derive(op.rule, text, state)
    position, bound, events = state
    if isinstance(op, tales.Text):
        expected = op.text
    elif isinstance(op, tales.RecallWord):
        expected = bound[op.name][op.form]
        events += (tales.Choice(tales.RECALL, op.name, op.form, 0.0),)
    else:
        match = tales.WORD_WITH_ARTICLE.match(text, position)
        expected = match.group() if match else ""
        item = next((item for item in op.items if item[op.form] == expected), None)
        if item is None:
            return []
        bound = {**bound, op.name: item} if op.name else bound
        events += (tales.Choice("filler", op.name or op.source, item[""], op.log_prob),)
    return (
        [(position + len(expected), bound, events)] if text.startswith(expected, position) else []
    )
