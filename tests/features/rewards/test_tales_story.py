"""The verifier of stories, against the grammar and a parser that knows only right stories."""

import re

import pytest
from story_parser import parse

from thinker.data.text import tales
from thinker.features.rewards.verifiers.tales_story import read_story, tales_story
from thinker.features.rewards.verifiers.verifier import Answer


@pytest.fixture(scope="module")
def stories():
    return [tales.generate_story(seed=5, index=index) for index in range(300)]


def replaced_mention(story, number):
    """The text with another word of its list at the last mention of a fact, or None if the fact is
    mentioned only once."""
    facts = [choice for choice in story.choices if choice.kind == "fact"]
    fact = facts[number % len(facts)]
    places = [match.start() for match in re.finditer(rf"\b{re.escape(fact.value)}\b", story.text)]
    if len(places) < 2:
        return None
    words = [item[""] for items in tales.GRAMMAR.lists.values() for item in items]
    same_list = next(
        items
        for items in tales.GRAMMAR.lists.values()
        if any(item[""] == fact.value for item in items)
    )
    assert fact.value in words
    other = next(item[""] for item in same_list if item[""] != fact.value)
    last = places[-1]
    return story.text[:last] + other + story.text[last + len(fact.value) :]


def test_a_story_of_the_grammar_has_no_wrong_fact(stories):
    for story in stories:
        reading = read_story(story.text)
        assert reading.position == len(story.text)
        assert reading.wrong == 0
        assert reading.mentions > 0
        prompt, answer = story.text[:40], story.text[40:]
        assert tales_story(Answer(prompt, answer)) == {"grammar": 1.0, "facts": 1.0}


def test_another_word_of_the_list_is_a_wrong_fact(stories):
    n_tried = 0
    for number, story in enumerate(stories):
        text = replaced_mention(story, number)
        if text is None:
            continue
        n_tried += 1
        with pytest.raises(ValueError, match="not a story"):
            parse(text)
        assert read_story(text).wrong == 1
        assert tales_story(Answer("", text)) == {"grammar": 1.0, "facts": 0.0}
    assert n_tried > 200


def test_another_pronoun_is_a_wrong_fact(stories):
    n_tried = 0
    for story in stories:
        match = re.search(r"\b(She|He)\b", story.text)
        if match is None:
            continue
        other = {"She": "He", "He": "She"}[match.group()]
        text = story.text[: match.start()] + other + story.text[match.end() :]
        n_tried += 1
        assert read_story(text).wrong >= 1
    assert n_tried > 100


def test_a_text_outside_the_grammar_is_no_story(stories):
    for story in stories[:50]:
        text = story.text
        for other in (text[:-1], text[: len(text) // 2], f"{text} ", f" {text}", text.lower()):
            assert read_story(other) is None
            assert tales_story(Answer("", other)) == {"grammar": 0.0, "facts": 0.0}
        places = text.replace("magic", "tragic", 1)
        assert read_story(places) is None
    assert read_story("") is None
