"""The words of a story against an independent parse of its text, and the clauses of tales.subjects
against English."""

import re

import pytest
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from story_parser import _derive

from thinker.data.text import story_words, tales

WORD = re.compile(r"[\w'-]+")


def parse_events(text):
    """The slots of a story from its text alone: (name, is a recall, word), without pronouns."""
    ends = [
        events
        for end, _, events in _derive(tales.GRAMMAR.story, text, (0, {}, ()))
        if end == len(text)
    ]
    bound, slots = {}, []
    for event in ends[0]:
        if event.kind == "filler":
            bound[event.name] = event.value
            slots.append((event.name, False, event.value))
        elif event.kind == tales.RECALL and not event.value.startswith("."):
            slots.append((event.name, True, bound[event.name]))
    return slots


@settings(max_examples=examples(60))
@given(st.integers(), st.integers(min_value=0))
def test_words_cover_the_text_and_slots_are_those_of_its_parse(seed, index):
    story = tales.generate_story(seed, index)
    words = story_words.find_words(story)
    texts = [story.text[word.start : word.end] for word in words]
    assert [(word.start, word.end) for word in words] == [
        match.span() for match in WORD.finditer(story.text)
    ]

    from_slots = [(text, word) for text, word in zip(texts, words) if word.source]
    slots, first_mentions = parse_events(story.text), {}
    assert [text.lower() for text, _ in from_slots] == [value.lower() for _, _, value in slots]
    for (text, word), (name, is_recall, value) in zip(from_slots, slots):
        assert value in {item[""] for item in tales.GRAMMAR.lists[word.source]}
        if is_recall:
            assert words[word.first_mention] is first_mentions[name]
            assert texts[word.first_mention].lower() == text.lower()
        else:
            assert word.first_mention is None
            first_mentions[name] = word
    assert {choice.value for choice in story.choices if choice.kind == "fact"} == {
        texts[word.first_mention] for word in words if word.first_mention is not None
    }
    for number, word in enumerate(words):
        assert max(word.subject, default=-1) < number
        for part in word.subject:  # the nearest word of this kind
            assert texts[part].lower() not in [text.lower() for text in texts[part + 1 : number]]
        assert not word.subject or word.part_of_speech == "verb"
        assert bool(word.part_of_speech) == bool(word.source or word.subject)


def test_a_text_of_other_choices_is_refused():
    story, other = tales.generate_story(1, 0), tales.generate_story(1, 1)
    with pytest.raises(AssertionError, match="other choices"):
        story_words.find_words(tales.Story(other.text, story.choices, story.log_prob))
    with pytest.raises(AssertionError, match="longer"):
        story_words.find_words(tales.Story(story.text + " End.", story.choices, story.log_prob))


def test_every_list_of_a_slot_has_a_part_of_speech():
    sources = {op.source for rule in tales.GRAMMAR.rules.values() for ops in rule.alternatives for op in ops
               if isinstance(op, tales.SampleWord)}  # fmt: skip
    assert sources == set(story_words.PARTS_OF_SPEECH)


def clauses(story):
    """The subjects and verbs of a story, such as "he came; he loved"."""
    words = story_words.find_words(story)
    texts = [story.text[word.start : word.end].lower() for word in words]
    return "; ".join(
        " ".join(texts[n] for n in (*word.subject, at))
        for at, word in enumerate(words)
        if word.subject
    )


@pytest.fixture(scope="module")
def examples_by_alternative():
    """A story that uses an alternative, by (rule, number)."""
    found = {}
    for story in (tales.generate_story(3, index) for index in range(1000)):
        for choice in story.choices:
            if choice.kind == "plot":
                found.setdefault((choice.name, int(choice.value)), story)
    return found


def test_every_line_of_the_file_fits_its_alternative(examples_by_alternative):
    alternatives = {
        (rule.name, n)
        for rule in tales.GRAMMAR.rules.values()
        for n in range(len(rule.alternatives))
    }
    assert set(story_words.SUBJECTS) <= alternatives
    assert set(story_words.SUBJECTS) <= set(examples_by_alternative)
    for story in examples_by_alternative.values():
        story_words.find_words(story)  # refuses a word that is not there


@pytest.mark.parametrize(
    ("rule", "number", "known"),
    [
        ("opening", 6, "{hero} was; she was"),
        ("home", 8, "(he|she) was; (he|she) owned; (he|she) loved"),
        ("home", 4, "(he|she) {pet} came; (he|she) {pet} loved"),
        ("night", 3, "{kin} felt; {hero} loved"),
        ("go", 9, "{pet} [a-z]+; {pet} took"),
        ("kind", 2, "{hero} gave; it felt"),  # gave it some food, and it felt
        ("stranger", 4, "{title} {surname} told; {thing} lost"),
        ("surprise_end", 2, "it knew; word was; it held"),
        ("storm", 3, "{friend} felt; storm taken"),
    ],
)
def test_subjects_are_those_that_a_reader_finds(examples_by_alternative, rule, number, known):
    story = examples_by_alternative[rule, number]
    known = known.format(**{choice.name: choice.value.lower() for choice in story.choices})
    assert re.search(rf"(^|; ){known}(;|$)", clauses(story)), clauses(story)


def test_a_verb_before_its_subject_has_none(examples_by_alternative):
    assert "sat" not in clauses(
        examples_by_alternative["meet", 0]
    )  # under a tree sat a very old fox


@pytest.mark.parametrize(
    "source", ["home 0: he came\nhome 0: he loved", "home 0: he\nhome 0: he came"]
)
def test_an_alternative_listed_twice_is_refused(source):
    with pytest.raises(AssertionError, match="home 0 is listed twice"):
        story_words.read_subjects(source)


def test_a_word_that_the_alternative_lacks_is_refused(monkeypatch):
    monkeypatch.setattr(story_words, "SUBJECTS", {("story", 0): [(["dragon"], ["flew"])]})
    with pytest.raises(AssertionError, match=r"tales.subjects: no flew among"):
        story_words.find_words(tales.generate_story(0, 0))
