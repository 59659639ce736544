"""The words of a story of `tales`: the list each comes from, the first mention of a fact, the subject of a verb.

All of it is exact, because a story keeps the choices that the grammar made. `tales.subjects` names the verbs of each
alternative, with their subjects.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from thinker.data.text import tales

WORD = re.compile(r"[A-Za-z]+(?:-[A-Za-z]+)*")
LISTS = {  # part of speech -> lists of the grammar
    "noun": "kin job pet wild place tree flower bag thing food hobby password weekday month sound",
    "name": "girl boy friend petname town surname title",
    "adjective": "trait age look spot bloom colour size used weather worry glad",
    "adverb": "manner way",
    "verb": "moved",
}
PARTS_OF_SPEECH = {name: part for part, names in LISTS.items() for name in names.split()}


@dataclass
class Word:
    """A word of a story, text[start:end]. Other words are given by their index."""

    start: int
    end: int
    source: str = ""  # list of the grammar; "" for a word of plain text, an article or a pronoun
    part_of_speech: str = (
        ""  # of a word from a list, and of a verb with a subject; "" for all others
    )
    first_mention: int | None = None  # the word that introduced the fact, for each later mention
    subject: tuple[int, ...] = ()  # the words of a verb's subject


def read_subjects(source: str) -> dict[tuple[str, int], list[tuple[list[str], list[str]]]]:
    """Parse tales.subjects: (rule, number of the alternative) -> [(parts of a subject, its verbs), ...]."""
    subjects = {}
    for line in source.splitlines():
        if line and not line.startswith("#"):
            head, _, clauses = line.partition(": ")
            rule, number = head.split()
            words = [clause.split() for clause in clauses.split("; ")]
            assert (rule, int(number)) not in subjects, f"tales.subjects: {head} is listed twice"
            subjects[rule, int(number)] = [(subject.split("+"), verbs) for subject, *verbs in words]
    return subjects


SUBJECTS = read_subjects((Path(__file__).parent / "tales.subjects").read_text("ascii"))


def find_words(story: tales.Story) -> list[Word]:
    """Find the words of a story in the order of its text, by expanding the grammar with the story's own choices."""
    choices, words, length = iter(story.choices), [], 0
    bound: dict[
        str, tuple[tales.Item, int]
    ] = {}  # name -> its word, and the index of the first mention

    def expand(rule: tales.Rule) -> None:
        nonlocal length
        number = int(next(choices).value) if rule.cumulative else 0
        labels: list[
            tuple[str, int]
        ] = []  # the words of this alternative, without those of the rules it calls
        for op in rule.alternatives[number]:
            if isinstance(op, tales.Call):
                expand(op.rule)
                continue
            if isinstance(op, tales.Text):
                text = op.text
            elif isinstance(op, tales.SampleWord):
                value = next(choices).value
                item = next(item for item in op.items if item[""] == value)
                text = item[op.form]
            else:
                item, first = bound[op.name]
                text = item[op.form]
            assert story.text.startswith(text, length), (
                f"the story has other choices than its text at {length}"
            )
            for match in WORD.finditer(text):
                labels.append((match.group().lower(), len(words)))
                words.append(Word(length + match.start(), length + match.end()))
            length += len(text)
            if isinstance(op, tales.SampleWord):  # its word is the last one, after an article
                words[-1].source, words[-1].part_of_speech = op.source, PARTS_OF_SPEECH[op.source]
                bound[op.name] = item, len(words) - 1
                labels[-1] = (op.name or op.source).upper(), len(words) - 1
            elif isinstance(op, tales.RecallWord) and op.form.startswith("."):
                labels[-1] = op.form[1:].lower(), len(words) - 1
            elif isinstance(op, tales.RecallWord):
                words[-1].source, words[-1].part_of_speech = (
                    words[first].source,
                    words[first].part_of_speech,
                )
                words[-1].first_mention = first
                labels[-1] = op.name.upper(), len(words) - 1
        end = 0  # of the verbs found so far, an index into labels
        for subject, verbs in SUBJECTS.get((rule.name, number), []):
            subject_words = None
            for verb in verbs:
                end += 1 + _index(labels[end:], verb)
                if subject_words is None:
                    before = labels[: end - 1][::-1]  # the nearest word first
                    subject_words = tuple(before[_index(before, part)][1] for part in subject)
                word = words[labels[end - 1][1]]
                word.part_of_speech, word.subject = "verb", subject_words

    expand(tales.GRAMMAR.story)
    assert length == len(story.text), "the story's text is longer than its choices"
    return words


def _index(labels: list[tuple[str, int]], label: str) -> int:
    found = [place for place, (each, _) in enumerate(labels) if each == label]
    assert found, f"tales.subjects: no {label} among {' '.join(each for each, _ in labels)}"
    return found[0]
