"""What is worth saying about the conversations of a corpus, once it is tokenized."""

import re
from collections import Counter

import numpy as np

from thinker.data.chat.chat import is_trained
from thinker.data.text.document import Document, Message
from thinker.data.tokenizers.tokenizer import Tokenizer

MARKER = re.compile(r"<\|[^|<>\s{}'\"]{1,40}\|>")  # such as <|im_end|>


class ChatReport:
    """Counts conversations that are split into answers, and how answers end."""

    def __init__(self, tokenizer: Tokenizer, knows_answers: bool) -> None:
        """knows_answers: the targets of rows are their answers; otherwise they are all tokens."""
        self.tokenizer = tokenizer
        self.knows_answers = knows_answers
        self.names = {number: name for name, number in tokenizer.special_tokens.items()}
        self.n_conversations = 0
        self.n_split = 0
        self.n_rows = 0
        self.n_answers = 0
        self.n_open = 0  # answers that no special token ends
        self.n_empty = 0  # answers that are trained, and have no text
        self.unread: dict[str, None] = {}  # what was said about columns of rows, in order
        self.other_ends: Counter[str] = Counter()  # special tokens that do not end texts

    def add(self, document: Document, rows: list[tuple[np.ndarray, np.ndarray]]) -> None:
        """Count a conversation: the ids of its rows, and which of them are targets."""
        self.n_conversations += 1
        self.n_empty += sum(map(_is_empty_answer, document.messages))
        if document.unread:
            self.unread[document.unread] = None
        self.n_rows += len(rows)
        if len(rows) > 1:
            self.n_split += 1
        if not self.knows_answers:
            return
        for ids, is_target in rows:
            for token_id in self._answer_ends(ids, is_target, is_one=len(rows) > 1):
                self._count_end(token_id)

    def _answer_ends(self, ids: np.ndarray, is_target: np.ndarray, is_one: bool) -> list[int]:
        """The last token of each answer in a row. A template may mark several parts of an answer.

        is_one: the row has one answer. In a row with several, each ends with an EOS token.
        """
        is_last = is_target & ~np.append(is_target[1:], False)
        ends = ids[is_last].tolist()
        answers = ends[-1:]
        if not is_one:
            answers = [end for end in ends[:-1] if end in self.tokenizer.eos_ids] + answers
        return answers

    def _count_end(self, token_id: int) -> None:
        self.n_answers += 1
        if token_id in self.tokenizer.eos_ids:
            return
        name = self.names.get(token_id)
        if name is None:
            self.n_open += 1
        else:
            self.other_ends[name] += 1

    def lines(self) -> list[str]:
        """What a user should know; nothing for ordinary conversations."""
        lines = []
        unknown = unknown_markers(self.tokenizer)
        if unknown:
            lines.append(
                f"the chat template writes {', '.join(unknown)}, for which this tokenizer has no "
                "tokens: they are plain text of several tokens, which messages can contain, too"
            )
        if self.n_empty:
            plural = "" if self.n_empty == 1 else "s"
            lines.append(
                f"{self.n_empty:,} trained answer{plural} without text: the model learns to end "
                "at once"
            )
        if self.n_split:
            lines.append(
                f"{self.n_split:,} of {self.n_conversations:,} conversations are trained as one "
                f"row per answer ({self.n_rows:,} rows): the chat template or the tokenizer gives "
                "their answers other contexts in a longer conversation than in a chat"
            )
        eos = self.names.get(self.tokenizer.eos_id, str(self.tokenizer.eos_id))
        if self.n_open:
            lines.append(
                f"the chat template ends {self.n_open:,} of {self.n_answers:,} answers with no "
                f"special token; {eos} is added, which ends texts of this model"
            )
        for name, count in self.other_ends.most_common():
            lines.append(
                f"{count:,} of {self.n_answers:,} answers end with {name}, which does not end "
                f"texts of this model; {eos} is added"
            )
        return lines


def unknown_markers(tokenizer: Tokenizer) -> list[str]:
    """What looks like a special token in the chat template, and is none of the tokenizer."""
    found = dict.fromkeys(MARKER.findall(tokenizer.chat_template or ""))
    return [name for name in found if len(tokenizer.encode(name, allow_special=True)) > 1]


def _is_empty_answer(message: Message) -> bool:
    if message["role"] != "assistant" or not is_trained(message):
        return False
    return not message.get("content", "").strip() and not message.get("tool_calls")
