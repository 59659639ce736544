"""Recovers the choices behind a story of `tales` from its text. The grammar is unambiguous."""

from __future__ import annotations

from collections.abc import Iterator

from thinker.data import tales


def derivations(text: str) -> Iterator[tales.Story]:
    """Every derivation of exactly this text, by depth-first search with an explicit stack."""
    # A state: position in the text, operations, the next of them, the caller's (operations, next, caller), bindings,
    # events. Bindings are copied when they change and events are linked backwards, so states can share them.
    stack: list[tuple] = [(0, (tales.Call(tales.GRAMMAR.story),), 0, None, {}, None)]
    while stack:
        position, ops, step, caller, bound, events = stack.pop()
        while True:
            if step == len(ops):
                if caller is None:
                    if position == len(text):
                        yield tales.make_story(text, _unlink(events))
                    break
                ops, step, caller = caller
                continue
            op = ops[step]
            step += 1
            kind = type(op)
            if kind is tales.Text:
                if not text.startswith(op.text, position):
                    break
                position += len(op.text)
            elif kind is tales.RecallWord:
                surface = bound[op.name][op.form]
                if not text.startswith(surface, position):
                    break
                position += len(surface)
                events = (tales.Choice(tales.RECALL, op.name, op.form, 0.0), events)
            elif kind is tales.SampleWord:
                match = tales.WORD_WITH_ARTICLE.match(text, position)
                item = op.by_surface.get(match.group()) if match else None
                if item is None:
                    break
                position = match.end()
                if op.name:
                    bound = {**bound, op.name: item}
                events = (tales.Choice("filler", op.name or op.source, item[""], op.log_prob), events)
            else:
                rule, caller = op.rule, (ops, step, caller)
                if rule.cumulative:
                    for alternative, choice in zip(rule.alternatives, rule.choices):
                        first = alternative[0]
                        if type(first) is not tales.Text or text.startswith(first.text, position):
                            stack.append((position, alternative, 0, caller, bound, (choice, events)))
                    break
                ops, step = rule.alternatives[0], 0


def parse(text: str) -> tales.Story:
    """The story that has this text, with its choices; ValueError if the grammar has no such story."""
    found = list(derivations(text))
    if not found:
        raise ValueError("this text is not a story of the grammar")
    assert len(found) == 1, f"the grammar is ambiguous: {len(found)} derivations of {text!r}"
    return found[0]


def _unlink(events: tuple | None) -> list[tales.Choice]:
    choices = []
    while events is not None:
        choice, events = events
        choices.append(choice)
    return choices[::-1]
