"""A chat in turns: every answer is what the whole chat gives from a fresh start, and only what is
new is read."""

import pytest
from installed import if_installed

from thinker.data.chat import chat
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.generation import Completion, Generator, SamplingParams
from thinker.generation.chat.chat_conversation import ChatConversation
from thinker.runtime.errors import UserError

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}assistant: {% endif %}"
# A template that leaves earlier answers out, as some leave out what was thought.
FORGETFUL = TEMPLATE.replace("{{ m.content }}", "{{ m.content if m.role != 'assistant' else '-' }}")
PARAMS = SamplingParams(
    max_new_tokens=6, seed=3, logit_bias={make_tokenizer("byte", []).eos_id: float("-inf")}
)


@pytest.fixture(scope="module")
def model(random_model):
    return random_model(vocab_size=264, max_seq_len=160)


def tokenizer(template=TEMPLATE):
    return make_tokenizer("byte", []).with_chat_template(template)


def fresh(generator, messages):
    """The answer to these messages without an earlier cache."""
    completion = Completion("")
    tokens = chat.encode_prompt(generator.tokenizer, messages)
    for _ in generator.stream_batch([completion], PARAMS, [tokens]):
        pass
    return completion.text, len(tokens)


@pytest.mark.parametrize("template", [TEMPLATE, FORGETFUL], ids=["plain", "forgetful"])
def test_every_answer_is_that_of_a_fresh_start(model, template):
    generator, passes = Generator(model, tokenizer(template)), []
    conversation = ChatConversation(generator, system="be brief")
    messages, n_known = [{"role": "system", "content": "be brief"}], 0
    for text in ("who?", "and why?", "oh"):
        messages.append({"role": "user", "content": text})
        answer, n_tokens = fresh(Generator(model, tokenizer(template)), messages)
        hook = generator.model.register_forward_pre_hook(
            lambda _, args: passes.append(args[0].shape[1])
        )
        assert "".join(conversation.reply(text, PARAMS)) == answer
        hook.remove()
        if template is TEMPLATE and answer.isascii():
            assert passes[0] <= n_tokens - n_known
        messages.append({"role": "assistant", "content": answer})
        assert conversation.messages == messages
        n_known = n_tokens
        passes.clear()
    assert conversation.text.startswith("system: be brief\n\nuser: who?\n\nassistant: ")


def test_undo_interruption_and_reset(model):
    conversation = ChatConversation(Generator(model, tokenizer()))
    list(conversation.reply("first", PARAMS))
    before = list(conversation.messages)
    pieces = conversation.reply("second", PARAMS)
    heard = next(pieces)
    pieces.close()
    assert conversation.messages == [*before, {"role": "user", "content": "second"},
                                     {"role": "assistant", "content": heard}]  # fmt: skip
    assert conversation.undo()
    assert conversation.messages == before
    answer, _ = fresh(
        Generator(model, tokenizer()), [*before, {"role": "user", "content": "third"}]
    )
    assert "".join(conversation.reply("third", PARAMS)) == answer
    conversation.reset()
    assert (conversation.messages, conversation.undo()) == ([], False)


@pytest.mark.parametrize(
    ("text", "message"), [(" ", "the message is empty"), ("x" * 200, "context")]
)
def test_a_message_that_is_refused_changes_nothing(model, text, message):
    conversation = ChatConversation(Generator(model, tokenizer()))
    list(conversation.reply("first", PARAMS))
    messages, tokens = list(conversation.messages), list(conversation.tokens)
    with pytest.raises(UserError, match=message):
        list(conversation.reply(text, PARAMS))
    assert (conversation.messages, conversation.tokens) == (messages, tokens)


SYSTEM = [{"role": "system", "content": "be brief"}]
UNSEEN = "the context of 160 tokens is full: the oldest turns of the chat are dropped "


@pytest.mark.parametrize(
    "options", [{}, *if_installed("speculation", {"speculate": 3}), {"bits": 8}], ids=str
)
@pytest.mark.parametrize("template", [TEMPLATE, FORGETFUL], ids=["plain", "forgetful"])
@pytest.mark.parametrize("system", [None, "be brief"])
def test_the_oldest_turns_are_not_seen_where_the_chat_does_not_fit(
    model, template, system, options
):
    generator = Generator(model, tokenizer(template), slide=True, **options)
    conversation, messages = ChatConversation(generator, system), SYSTEM[: system is not None]
    n_system, said = len(messages), []

    def check(text):
        """Every turn that leaves room for an answer is seen, and the answer is that of a fresh
        start."""
        nonlocal messages
        messages = [*messages, {"role": "user", "content": text}]
        kept = [
            messages[:n_system] + messages[start:] for start in range(n_system, len(messages), 2)
        ]
        lengths = [len(chat.encode_prompt(generator.tokenizer, one)) for one in kept]
        start = next((n for n, length in enumerate(lengths) if length <= 160 - 6), len(kept) - 1)
        answer, _ = fresh(Generator(model, tokenizer(template), slide=True, **options), kept[start])
        assert "".join(conversation.reply(text, PARAMS)) == answer
        messages = [*messages, {"role": "assistant", "content": answer}]
        assert conversation.messages == messages
        said.append(list(conversation.news()))
        return start

    n_unseen = [check(f"{number} and " * 3) for number in range(8)]
    assert n_unseen == sorted(n_unseen)
    assert n_unseen[:2] == [0, 0]
    assert n_unseen[-1] > 2
    assert [len(lines) for lines in said] == [int(n == n_unseen.index(1)) for n in range(8)]
    assert said[n_unseen.index(1)][0].startswith(UNSEEN)
    with pytest.raises(UserError, match="the model's context is 160"):
        list(conversation.reply("x" * 160, PARAMS))
    assert conversation.messages == messages
    assert check("y" * 120) == 8  # fits alone
    assert conversation.undo()
    messages = messages[:-2]
    assert check("8 and " * 3) < 8  # those that were left out for the long message are seen again
    for _ in range(9):
        assert conversation.undo()
    assert (conversation.messages, conversation.undo()) == (messages[:n_system], False)


def test_room_for_an_answer_is_a_quarter_of_the_context_at_most(model):
    generator = Generator(model, tokenizer(), slide=True)
    for max_new_tokens, n_seen in [(20, 160 - 20), (40, 160 - 40), (10_000, 160 - 40)]:
        conversation = ChatConversation(generator)
        list(conversation.reply("a", SamplingParams(1, 0)))
        text = "b" * (n_seen - len(conversation.encode("")))
        for more, is_unseen in [("", False), ("b", True)]:
            pieces = conversation.reply(text + more, SamplingParams(max_new_tokens, 0))
            next(pieces)
            pieces.close()
            assert any(line.startswith(UNSEEN) for line in conversation.news()) == is_unseen
            conversation.undo()


def test_an_answer_longer_than_the_context_slides_and_the_chat_goes_on(model):
    conversation = ChatConversation(Generator(model, tokenizer(), slide=True))
    long = SamplingParams(200, seed=3, logit_bias=PARAMS.logit_bias)
    list(conversation.reply("who?", long))
    assert [line.split(":")[0] for line in conversation.news()] == [
        "the context of 160 tokens is full"
    ]
    pieces = conversation.reply("and why?", long)
    heard = "".join(next(pieces) for _ in range(3))
    pieces.close()
    assert conversation.messages[-1]["content"] == heard
    seen = [*conversation.messages[2:], {"role": "user", "content": "x"}]
    answer, _ = fresh(Generator(model, tokenizer(), slide=True), seen)
    assert "".join(conversation.reply("x", PARAMS)) == answer


@pytest.mark.parametrize("options", [{"window": 40, "sinks": 4}, {}])
def test_where_nothing_slides_every_turn_is_seen_or_the_message_refused(model, options):
    conversation = ChatConversation(Generator(model, tokenizer(), slide=bool(options), **options))
    for number in range(9):
        answer = conversation.reply(f"{number} and " * 3, PARAMS)
        if not options and len(conversation.encode(f"{number} and " * 3)) > 160:
            with pytest.raises(UserError, match="context"):
                list(answer)
            break
        assert list(answer)
    assert (len(conversation.messages) == 18) == bool(options)
    assert [line.split(" tokens")[0] for line in conversation.news()] == ["evicted"] * bool(options)
