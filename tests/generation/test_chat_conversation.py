"""A chat in turns: every answer is what the whole chat gives from a fresh start, and only what is new is read."""

import pytest

from thinker.data import chat
from thinker.data.tokenizer_factory import make_tokenizer
from thinker.generation import Completion, Generator, SamplingParams
from thinker.generation.chat_conversation import ChatConversation
from thinker.runtime.errors import UserError

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}assistant: {% endif %}"
# A template that leaves earlier answers out, as some leave out what was thought.
FORGETFUL = TEMPLATE.replace("{{ m.content }}", "{{ m.content if m.role != 'assistant' else '-' }}")
PARAMS = SamplingParams(max_new_tokens=6, seed=3, logit_bias={make_tokenizer("byte", []).eos_id: float("-inf")})


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
        hook = generator.model.register_forward_pre_hook(lambda _, args: passes.append(args[0].shape[1]))
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
    answer, _ = fresh(Generator(model, tokenizer()), [*before, {"role": "user", "content": "third"}])
    assert "".join(conversation.reply("third", PARAMS)) == answer
    conversation.reset()
    assert (conversation.messages, conversation.undo()) == ([], False)


@pytest.mark.parametrize(("text", "message"), [(" ", "a message needs text"), ("x" * 200, "context")])
def test_a_message_that_is_refused_changes_nothing(model, text, message):
    conversation = ChatConversation(Generator(model, tokenizer()))
    list(conversation.reply("first", PARAMS))
    messages, tokens = list(conversation.messages), list(conversation.tokens)
    with pytest.raises(UserError, match=message):
        list(conversation.reply(text, PARAMS))
    assert (conversation.messages, conversation.tokens) == (messages, tokens)
