"""The words of a story of `tales`, and what the grammar knows about them.

The list each comes from, the first mention of a fact, the subject of a verb. All of it is exact,
because a story keeps the choices that the grammar made. `tales.subjects` names the verbs of each
alternative, with their subjects.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from thinker.data.text import tales

WORD = re.compile(r"[A-Za-z]+(?:-[A-Za-z]+)*")
LISTS = {  # by part of speech, the lists of the grammar
    "noun": "kin job pet wild place tree flower bag thing food hobby password weekday month sound",
    "name": "girl boy friend petname town surname title",
    "adjective": "trait age look spot bloom colour size used weather worry glad",
    "adverb": "manner way",
    "verb": "moved",
}
PARTS_OF_SPEECH = {}  # by list
for _part, _names in LISTS.items():
    PARTS_OF_SPEECH.update(dict.fromkeys(_names.split(), _part))

# The words of an alternative, without those of the rules it calls: each with a label, the text of a
# plain word or the name of a slot, and its index in the story.
Labels = list[tuple[str, int]]


@dataclass
class Word:
    """A word of a story, text[start:end]. Other words are given by their index."""

    start: int
    end: int
    source: str = ""  # list of the grammar; "" for a word of plain text, an article or a pronoun
    part_of_speech: str = ""  # of a word from a list, and of a verb with a subject
    first_mention: int | None = None  # the word that introduced the fact, for each later mention
    subject: tuple[int, ...] = ()  # the words of a verb's subject


def read_subjects(source: str) -> dict[tuple[str, int], list[tuple[list[str], list[str]]]]:
    """Parse tales.subjects.

    Returns by (rule, number of the alternative) a list of (parts of a subject, its verbs).
    """
    subjects = {}
    for line in source.splitlines():
        if not line or line.startswith("#"):
            continue
        head, _, text = line.partition(": ")
        rule, number = head.split()
        clauses = []
        for clause in text.split("; "):
            subject, *verbs = clause.split()
            clauses.append((subject.split("+"), verbs))
        assert (rule, int(number)) not in subjects, f"tales.subjects: {head} is listed twice"
        subjects[rule, int(number)] = clauses
    return subjects


SUBJECTS = read_subjects((Path(__file__).parent / "tales.subjects").read_text("ascii"))


def find_words(story: tales.Story) -> list[Word]:
    """Find the words of a story in the order of its text.

    Expands the grammar with the story's own choices.
    """
    search = _Search(story)
    search.expand(tales.GRAMMAR.story)
    assert search.length == len(story.text), "the story's text is longer than its choices"
    return search.words


class _Search:
    """The expansion of a story's rules, and the words found so far."""

    def __init__(self, story: tales.Story) -> None:
        self.text = story.text
        self.length = 0  # of the text that has been expanded
        self.words: list[Word] = []
        self._values: Iterator[str] = (choice.value for choice in story.choices)
        # By name, its word, and the index of its first mention.
        self._bound: dict[str, tuple[tales.Item, int]] = {}

    def expand(self, rule: tales.Rule) -> None:
        """Find the words of a rule."""
        number = 0
        if rule.cumulative:  # it has several alternatives
            number = int(next(self._values))
        labels: Labels = []
        for op in rule.alternatives[number]:
            if isinstance(op, tales.Call):
                self.expand(op.rule)
            elif isinstance(op, tales.Text):
                self._add(op.text, labels)
            elif isinstance(op, tales.SampleWord):
                self._add_sampled(op, labels)
            else:
                self._add_recalled(op, labels)
        self._find_verbs(SUBJECTS.get((rule.name, number), []), labels)

    def _add(self, text: str, labels: Labels) -> None:
        """Add the words of the next part of the text."""
        assert self.text.startswith(text, self.length), (
            f"the story has other choices than its text at {self.length}"
        )
        for match in WORD.finditer(text):
            labels.append((match.group().lower(), len(self.words)))
            self.words.append(Word(self.length + match.start(), self.length + match.end()))
        self.length += len(text)

    def _add_sampled(self, op: tales.SampleWord, labels: Labels) -> None:
        value = next(self._values)
        item = next(item for item in op.items if item[""] == value)
        self._add(item[op.form], labels)
        last = len(self.words) - 1  # the others are an article
        self.words[last].source = op.source
        self.words[last].part_of_speech = PARTS_OF_SPEECH[op.source]
        labels[-1] = ((op.name or op.source).upper(), last)
        self._bound[op.name] = (item, last)

    def _add_recalled(self, op: tales.RecallWord, labels: Labels) -> None:
        item, first = self._bound[op.name]
        self._add(item[op.form], labels)
        last = len(self.words) - 1
        if op.form.startswith("."):  # a pronoun
            labels[-1] = (op.form[1:].lower(), last)
            return
        word = self.words[last]
        word.source = self.words[first].source
        word.part_of_speech = self.words[first].part_of_speech
        word.first_mention = first
        labels[-1] = (op.name.upper(), last)

    def _find_verbs(self, clauses: list[tuple[list[str], list[str]]], labels: Labels) -> None:
        """Give the verbs of an alternative their subjects."""
        end = 0  # of the verbs found so far, an index into labels
        for subject, verbs in clauses:
            subject_words = None
            for verb in verbs:
                place = end + _index(labels[end:], verb)
                if subject_words is None:
                    before = labels[:place][::-1]  # the nearest word first
                    subject_words = tuple(before[_index(before, part)][1] for part in subject)
                word = self.words[labels[place][1]]
                word.part_of_speech = "verb"
                word.subject = subject_words
                end = place + 1


def _index(labels: Labels, label: str) -> int:
    """The place of the first word with a label."""
    for place, (each, _) in enumerate(labels):
        if each == label:
            return place
    names = " ".join(each for each, _ in labels)
    raise AssertionError(f"tales.subjects: no {label} among {names}")
