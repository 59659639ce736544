"""The API through OpenAI's own client."""

import asyncio
import json
import math

import jsonschema
import openai
import pytest
import torch
from installed import needs
from pydantic import BaseModel, Field

from thinker.data.chat import chat
from thinker.generation import Generator, SamplingParams
from thinker.interop import load

MESSAGES = [{"role": "user", "content": "Hi 3"}]
CHARACTERS = {
    "prompt": "é漢",
    "max_tokens": 40,
    "seed": 3,
}  # a text with bytes that are no characters


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def complete(client):
    return lambda **fields: client.completions.create(model="served", **fields)


@pytest.fixture(scope="module")
def answer(client):
    def ask(**fields):
        return client.chat.completions.create(
            **{"model": "chat", "messages": MESSAGES, "max_tokens": 12} | fields
        )

    return ask


@pytest.fixture(scope="module")
def generator(served_run):
    return Generator(*load(served_run), slide=True)


@pytest.fixture(scope="module")
def chat_generator(chat_run):
    return Generator(*load(chat_run), slide=True)


@pytest.fixture(scope="module")
def generate(generator):
    """What a request for one completion has to give: a Completion of generate()."""

    def generate(prompt, max_tokens=16, **options):
        tokens = generator.encode(prompt) if isinstance(prompt, str) else prompt
        (completion,) = generator.generate([""], SamplingParams(max_tokens, **options), [tokens])
        return completion

    return generate


@pytest.fixture(scope="module")
def chat_generate(chat_generator):
    def generate(messages, max_tokens=12, **options):
        tokens = chat.encode_prompt(chat_generator.tokenizer, messages)
        (completion,) = chat_generator.generate(
            [""], SamplingParams(max_tokens, **options), [tokens]
        )
        return completion

    return generate


def test_models(client):
    served, tuned = client.models.list()
    assert (served.id, served.object, served.owned_by, served.chat) == (
        "served",
        "model",
        "thinker",
        False,
    )
    assert (tuned.id, tuned.chat, tuned.context_length, tuned.vocab_size) == (
        "chat",
        True,
        160,
        300,
    )
    assert client.models.retrieve("chat") == tuned


def test_a_completion_is_that_of_generate(complete, generate):
    got = complete(prompt="Line 7", seed=5)
    (choice,) = got.choices
    known = generate("Line 7", seed=5)
    assert (got.object, got.model, choice.index, choice.seed) == ("text_completion", "served", 0, 5)
    assert (choice.text, choice.finish_reason, choice.logprobs) == (
        known.text,
        known.finish_reason,
        None,
    )
    usage = got.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (
        known.prompt_tokens,
        len(known.token_ids),
    )
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert (
        complete(prompt="Line 7", seed=5).usage.prompt_tokens_details.cached_tokens
        == known.prompt_tokens - 1
    )


def test_an_answer_is_that_of_generate(answer, chat_generate):
    messages = [{"role": "system", "content": "Be kind."}, *MESSAGES]
    got = answer(messages=messages, seed=5)
    (choice,) = got.choices
    known = chat_generate(messages, seed=5)
    assert (got.object, choice.message.role) == ("chat.completion", "assistant")
    assert (choice.message.content, choice.finish_reason) == (known.text, known.finish_reason)
    assert got.usage.prompt_tokens == known.prompt_tokens
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": " 3"}]
    assert (
        answer(messages=[messages[0], {"role": "user", "content": parts}], seed=5).choices
        == got.choices
    )


def test_an_answer_without_limit_may_fill_the_context(answer):
    got = answer(max_tokens=None, seed=1)
    assert got.choices[0].finish_reason == "stop" or got.usage.total_tokens == 161


def test_max_completion_tokens_is_the_new_name_of_max_tokens(answer):
    assert answer(max_tokens=None, max_completion_tokens=4, seed=1).usage.completion_tokens == 4


def test_an_answer_can_be_sent_back(answer):
    """Clients send the message as they got it, with fields such as "refusal": null."""
    message = answer(seed=1).choices[0].message
    plain = [*MESSAGES, {"role": "assistant", "content": message.content}, *MESSAGES]
    known = answer(messages=plain, seed=2).choices
    assert answer(messages=[*MESSAGES, message, *MESSAGES], seed=2).choices == known
    assert answer(messages=[*MESSAGES, message.model_dump(), *MESSAGES], seed=2).choices == known


def test_null_means_the_default(client, answer, complete):
    names = [
        "temperature",
        "top_p",
        "n",
        "stop",
        "logit_bias",
        "presence_penalty",
        "frequency_penalty",
        "logprobs",
    ]
    nulls = dict.fromkeys([*names, "stream", "stream_options", "user"])
    assert (
        answer(seed=3, **nulls, top_logprobs=None, response_format=None).choices
        == answer(seed=3).choices
    )
    assert (
        complete(prompt="L", seed=3, max_tokens=None, **nulls).choices
        == complete(prompt="L", seed=3).choices
    )
    first, second = (complete(prompt="L", seed=None).choices[0] for _ in range(2))
    assert first.seed != second.seed
    assert complete(prompt="L", seed=first.seed).choices[0].text == first.text


def test_n_and_several_prompts(complete, answer, generate, generator, chat_generate):
    got = complete(prompt=["Line 3", "the cat"], n=2, seed=7, max_tokens=9)
    for index, choice in enumerate(got.choices):
        known = generate(["Line 3", "the cat"][index // 2], 9, seed=7 + index)
        assert (choice.index, choice.seed, choice.text) == (index, 7 + index, known.text)
    n_prompt = sum(len(generator.encode(prompt)) for prompt in ("Line 3", "the cat"))
    n_new = sum(
        len(generate(["Line 3", "the cat"][i // 2], 9, seed=7 + i).token_ids) for i in range(4)
    )
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (n_prompt, n_new)
    ids = [generator.encode(prompt) for prompt in ("Line 3", "the cat")]
    assert complete(prompt=ids, n=2, seed=7, max_tokens=9).choices == got.choices
    (alone,) = complete(prompt=ids[0], seed=7, max_tokens=9).choices
    assert alone.text == got.choices[0].text
    texts = [choice.message.content for choice in answer(n=3, seed=4).choices]
    assert texts == [chat_generate(MESSAGES, seed=4 + index).text for index in range(3)]


OPTIONS = {
    "greedy": {"temperature": 0},
    "nucleus": {"temperature": 0.7, "top_p": 0.8},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    "bias": {"logit_bias": {"97": 4.0, "98": -100}},
    "ours": {"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.2},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_sampling_options_reach_the_sampler(complete, answer, generate, chat_generate, options):
    ours = {
        name: value
        for name, value in options.items()
        if name in ("top_k", "min_p", "repetition_penalty")
    }
    others = {name: value for name, value in options.items() if name not in ours}
    given = {**others, "extra_body": ours, "seed": 2, "max_tokens": 30}
    known = options | {
        "logit_bias": {int(token): bias for token, bias in options.get("logit_bias", {}).items()}
    }
    assert (
        complete(prompt="Line", **given).choices[0].text
        == generate("Line", 30, seed=2, **known).text
    )
    assert (
        answer(**given).choices[0].message.content
        == chat_generate(MESSAGES, 30, seed=2, **known).text
    )


def test_stop(complete, answer):
    whole = complete(prompt="Line", seed=1, max_tokens=40).choices[0].text
    stop = whole[5:8]
    (choice,) = complete(prompt="Line", seed=1, max_tokens=40, stop=stop).choices
    assert (choice.text, choice.finish_reason) == (whole[: whole.index(stop)], "stop")
    assert complete(prompt="Line", seed=1, max_tokens=40, stop=["never there", stop]).choices == [
        choice
    ]
    whole = answer(seed=1).choices[0].message.content
    assert (
        answer(seed=1, stop=whole[1]).choices[0].message.content == whole[: whole.index(whole[1])]
    )


def test_logprobs_are_those_of_generate(complete, generate, generator):
    (choice,) = complete(**CHARACTERS, logprobs=3, extra_body={"return_token_ids": True}).choices
    known = generate(CHARACTERS["prompt"], 40, seed=3, logprobs=3)
    logprobs, tokenizer = choice.logprobs, generator.tokenizer
    assert choice.token_ids == known.token_ids
    assert choice.prompt_token_ids == generator.encode(CHARACTERS["prompt"])
    # Without kernels for any number of rows, the last bits depend on the texts beside it.
    tolerance = 0 if generator.is_batch_invariant else 1e-5
    assert logprobs.token_logprobs == pytest.approx(known.logprobs, rel=0, abs=tolerance)
    likeliest = zip(logprobs.top_logprobs, known.top_logprobs, strict=True)
    for token, logprob, (top, known_top) in zip(known.token_ids, known.logprobs, likeliest):
        values = [*known_top.values(), *[logprob] * (token not in known_top)]
        assert list(top.values()) == pytest.approx(values, rel=0, abs=tolerance)
    assert any(token.startswith("bytes:\\x") for token in logprobs.tokens)
    data = [tokenizer.token_bytes(token) for token in known.token_ids]
    for token, octets in zip(logprobs.tokens, data):
        assert bytes_of(token) == octets or (not octets and token in tokenizer.special_tokens)
    starts = [len(b"".join(data[:index]).decode(errors="ignore")) for index in range(len(data))]
    assert logprobs.text_offset == sorted(logprobs.text_offset)
    assert all(
        abs(mine - start) <= choice.text.count("\ufffd")
        for mine, start in zip(logprobs.text_offset, starts)
    )


def bytes_of(token):
    escaped = token.removeprefix("bytes:")
    return token.encode() if escaped == token else bytes.fromhex(escaped.replace("\\x", ""))


def test_offsets_index_the_text(complete):
    bias = {str(token): -1e9 for token in range(128, 256)}  # only whole characters
    (choice,) = complete(prompt="L", seed=1, max_tokens=40, logit_bias=bias, logprobs=0).choices
    ends = [*choice.logprobs.text_offset[1:], len(choice.text)]
    pieces = [choice.text[start:end] for start, end in zip(choice.logprobs.text_offset, ends)]
    assert len(pieces) > 5
    assert [token for token in choice.logprobs.tokens if token != "<|bos|>"] == [
        piece for piece in pieces if piece
    ]
    # The reference: one more than asked for, the token that was chosen.
    own = [
        {name: value} for name, value in zip(choice.logprobs.tokens, choice.logprobs.token_logprobs)
    ]
    assert choice.logprobs.top_logprobs == own


def test_logprobs_of_an_answer(answer, chat_generate, chat_generator):
    (choice,) = answer(seed=3, logprobs=True, top_logprobs=2, max_tokens=30).choices
    known = chat_generate(MESSAGES, 30, seed=3, logprobs=2)
    content = choice.logprobs.content
    assert [entry.logprob for entry in content] == known.logprobs
    assert [bytes(entry.bytes or []) for entry in content] == list(
        map(chat_generator.tokenizer.token_bytes, known.token_ids)
    )
    tops = [
        [(bytes(top.bytes or []), top.logprob) for top in entry.top_logprobs] for entry in content
    ]
    token_bytes = chat_generator.tokenizer.token_bytes
    assert tops == [
        [(token_bytes(token), value) for token, value in top.items()] for top in known.top_logprobs
    ]
    assert all(math.exp(entry.logprob) <= 1 and len(entry.top_logprobs) == 2 for entry in content)
    (bare,) = answer(seed=3, logprobs=True, max_tokens=30).choices
    assert [(entry.token, entry.top_logprobs) for entry in bare.logprobs.content] == [
        (e.token, []) for e in content
    ]


def test_tokens_as_token_ids(complete, answer, generate):
    flags = {"return_tokens_as_token_ids": True}
    (choice,) = complete(prompt="Line", seed=3, logprobs=1, extra_body=flags).choices
    assert choice.logprobs.tokens == [
        f"token_id:{token}" for token in generate("Line", seed=3).token_ids
    ]
    assert all(
        token.startswith("token_id:") for top in choice.logprobs.top_logprobs for token in top
    )
    (choice,) = answer(seed=3, logprobs=True, extra_body=flags | {"return_token_ids": True}).choices
    assert [entry.token for entry in choice.logprobs.content] == [
        f"token_id:{token}" for token in choice.token_ids
    ]


def known_scores(generator, tokens):
    """The log-probabilities of tokens in one plain pass: of each given those before, and of all."""
    with torch.no_grad():
        logits = generator.model(torch.tensor([tokens]))[0, :, : generator.tokenizer.vocab_size]
    logprobs = logits.log_softmax(-1)
    return [logprobs[i, token].item() for i, token in enumerate(tokens[1:])], logprobs


@pytest.mark.parametrize("kind", ["text", "ids", "ids with BOS"])
@pytest.mark.parametrize("max_tokens", [0, 1, 12])
def test_echo_scores_the_prompt(complete, generator, kind, max_tokens):
    """As harnesses use it: element i of each list belongs to token i of the prompt they sent."""
    text = "Line 7: the é漢 cat sat."
    ids = generator.tokenizer.encode(text)
    bos = generator.tokenizer.bos_prefix
    assert len(bos) == 1
    sent = {"text": text, "ids": ids, "ids with BOS": bos + ids}[kind]
    n_given = len(ids) + (kind == "ids with BOS")
    flags = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    options = {
        "seed": 3,
        "echo": True,
        "max_tokens": max_tokens,
        "logprobs": 2,
        "extra_body": flags,
    }
    got = complete(prompt=sent, **options)
    (choice,) = got.choices
    lists = choice.logprobs
    assert choice.prompt_token_ids == bos + ids
    assert len(choice.token_ids) == max_tokens or choice.finish_reason == "stop"
    assert choice.text == text + generator.tokenizer.decode(choice.token_ids)
    assert got.usage.prompt_tokens == len(bos + ids)
    assert got.usage.completion_tokens == len(choice.token_ids)
    expected = [*(bos + ids)[-n_given:], *choice.token_ids]
    assert lists.tokens == [f"token_id:{token}" for token in expected]
    known, logprobs = known_scores(generator, bos + ids + choice.token_ids)
    known = [None, *known[len(known) - len(expected) + 1 :]]
    assert lists.token_logprobs[0] is lists.top_logprobs[0] is None
    assert lists.token_logprobs[1:] == pytest.approx(known[1:], abs=1e-4)
    for top, token in zip(lists.top_logprobs[1:], expected[1:]):
        assert top[f"token_id:{token}"] <= max(top.values())
        assert len(top) in (2, 3)
    best = logprobs.amax(-1).tolist()[len(bos + ids) - n_given :]
    found = [max(top.values()) for top in lists.top_logprobs[1:]]
    assert found == pytest.approx(best[: len(found)], abs=1e-4)
    streamed = [chunk.choices[0] for chunk in complete(prompt=sent, stream=True, **options)]
    assert "".join(piece.text for piece in streamed) == choice.text
    for name, value in lists.model_dump().items():
        parts = [getattr(piece.logprobs, name) for piece in streamed if piece.logprobs]
        assert [one for part in parts for one in part] == value
    assert [piece.finish_reason for piece in streamed if piece.finish_reason] == [
        choice.finish_reason
    ]


def test_offsets_of_an_echo_index_the_text(complete):
    bias = {str(token): -1e9 for token in range(128, 256)}  # only whole characters
    options = {"seed": 1, "max_tokens": 20, "logit_bias": bias, "logprobs": 0, "echo": True}
    (choice,) = complete(prompt="Line 7: cat", **options).choices
    starts = choice.logprobs.text_offset
    ends = [*starts[1:], len(choice.text)]
    pieces = [choice.text[start:end] for start, end in zip(starts, ends)]
    assert [piece for piece in pieces if piece] == [
        token for token in choice.logprobs.tokens if token != "<|bos|>"
    ]
    assert choice.text.startswith("Line 7: cat")


def test_echo_of_several_prompts_without_logprobs(complete):
    prompts = ["Line 3", "the cat"]
    plain = complete(prompt=prompts, n=2, seed=7, max_tokens=9).choices
    echoed = complete(prompt=prompts, n=2, seed=7, max_tokens=9, echo=True).choices
    for index, (choice, known) in enumerate(zip(echoed, plain, strict=True)):
        assert choice.text == prompts[index // 2] + known.text
        assert (choice.logprobs, choice.finish_reason) == (None, known.finish_reason)
    (alone,) = complete(prompt="", echo=True, max_tokens=0, logprobs=1).choices
    assert (alone.text, alone.logprobs.tokens) == ("", [])


def test_token_prompts_get_the_bos_token_of_text_prompts(complete, generator):
    """A harness tokenizes without special tokens, and the model never saw a text without BOS."""
    ids = generator.tokenizer.encode("Line 7")
    bos = generator.tokenizer.bos_prefix
    options = {"seed": 5, "max_tokens": 9}
    known = complete(prompt="Line 7", **options).choices[0].text
    for sent in (ids, bos + ids):
        assert complete(prompt=sent, **options).choices[0].text == known
    flags = {"add_special_tokens": False, "return_token_ids": True}
    (bare,) = complete(prompt=ids, **options, extra_body=flags).choices
    assert bare.prompt_token_ids == ids
    (known,) = generator.generate([""], SamplingParams(9, seed=5), [ids])
    assert bare.text == known.text


@pytest.mark.parametrize("n_tokens", [3, 8, 9, 50])
def test_a_prompt_is_cut_to_its_last_tokens(complete, generator, n_tokens):
    """As the same token ids alone; what is echoed begins where they do."""
    text = "Line 7: the cat"
    ids = [*generator.tokenizer.bos_prefix, *generator.tokenizer.encode(text)]
    options = {"seed": 5, "max_tokens": 9}
    flags = {"truncate_prompt_tokens": n_tokens, "return_token_ids": True}
    (found,) = complete(prompt=text, **options, extra_body=flags).choices
    assert found.prompt_token_ids == ids[-n_tokens:]
    bare = {"add_special_tokens": False}
    (known,) = complete(prompt=ids[-n_tokens:], **options, extra_body=bare).choices
    assert found.text == known.text
    (echoed,) = complete(prompt=text, **options, echo=True, extra_body=flags).choices
    assert echoed.text == generator.tokenizer.decode(ids[-n_tokens:]) + known.text
    (scored,) = complete(prompt=text, **options, echo=True, logprobs=1, extra_body=flags).choices
    has_bos = n_tokens >= len(ids)
    assert len(scored.logprobs.tokens) == min(n_tokens, len(ids)) - has_bos + 9


HARMLESS = {
    "user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "safety_identifier": "s",
    "prompt_cache_key": "k", "prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "implicit"},
}  # fmt: skip


def test_fields_that_change_no_answer_are_accepted(complete, answer):
    known = answer(seed=3).choices
    more = {"modalities": ["text"], "reasoning_effort": "none", "verbosity": "medium"}
    more |= {"prediction": {"type": "content", "content": "cat"}, "parallel_tool_calls": True}
    named = [{**MESSAGES[0], "name": "Ruth"}]
    assert answer(seed=3, messages=named, extra_body=HARMLESS | more).choices == known
    known = complete(prompt="L", seed=3, n=2).choices
    for best_of in (1, 2):
        more = {"best_of": best_of, "echo": False, "suffix": ""}
        assert complete(prompt="L", seed=3, n=2, extra_body=HARMLESS | more).choices == known
    options = {"stream": True, "stream_options": {"include_obfuscation": False}}
    assert len(list(answer(seed=3, **options))) > 2


@pytest.mark.parametrize("n", [1, 3])
def test_a_streamed_completion_is_the_same(complete, n):
    fields = {**CHARACTERS, "n": n, "logprobs": 2, "extra_body": {"return_token_ids": True}}
    whole = complete(**fields)
    chunks = list(complete(**fields, stream=True, stream_options={"include_usage": True}))
    *others, last = chunks
    assert (last.choices, last.usage.total_tokens) == ([], whole.usage.total_tokens)
    assert all(chunk.usage is None and chunk.id == last.id for chunk in others)
    for known in whole.choices:
        pieces = [chunk.choices[0] for chunk in others if chunk.choices[0].index == known.index]
        assert "".join(piece.text for piece in pieces) == known.text
        assert [token for piece in pieces for token in piece.token_ids] == known.token_ids
        *_, end = pieces
        assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + [
            known.finish_reason
        ]
        assert (pieces[0].seed, pieces[0].prompt_token_ids) == (known.seed, known.prompt_token_ids)
        for name, value in known.logprobs.model_dump().items():
            assert [
                one for piece in pieces if piece.logprobs for one in getattr(piece.logprobs, name)
            ] == value
        assert not hasattr(end, "seed") or end is pieces[0]


@pytest.mark.parametrize("n", [1, 3])
def test_a_streamed_answer_is_the_same(answer, n):
    fields = {"seed": 3, "n": n, "logprobs": True, "top_logprobs": 2, "max_tokens": 30}
    whole = answer(**fields)
    chunks = list(answer(**fields, stream=True))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)
    for known in whole.choices:
        pieces = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == known.index]
        assert pieces[0].delta.role == "assistant"
        assert "".join(piece.delta.content or "" for piece in pieces) == known.message.content
        entries = [entry for piece in pieces if piece.logprobs for entry in piece.logprobs.content]
        assert entries == known.logprobs.content
        assert pieces[-1].finish_reason == known.finish_reason


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_of_an_answer_has_the_shape_of_openais(answer, n):
    """Role first, then a token per chunk, then the reason, then the numbers of tokens."""
    flags = {"return_token_ids": True}
    options = {"stream": True, "stream_options": {"include_usage": True}, "extra_body": flags}
    *chunks, last = answer(seed=3, n=n, max_tokens=30, **options)
    assert (last.choices, last.usage.total_tokens > 0) == ([], True)
    assert [chunk.choices[0].index for chunk in chunks[:n]] == list(range(n))
    n_tokens = 0
    for index in range(n):
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        deltas = [choice.delta.model_dump(exclude_unset=True) for choice in choices]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert {tuple(delta) for delta in deltas[1:-1]} == {("content",)}
        assert deltas[-1] == {}
        reasons = [choice.finish_reason for choice in choices]
        assert reasons[:-1] == [None] * (len(choices) - 1)
        assert reasons[-1] in ("stop", "length")
        sizes = [len(choice.token_ids) for choice in choices]
        assert sizes == [0] + [1] * (len(choices) - 2) + [0]
        n_tokens += sum(sizes)
    assert n_tokens == last.usage.completion_tokens


def test_a_stream_with_tokens_has_one_per_chunk(complete):
    options = {"seed": 3, "max_tokens": 40, "extra_body": {"return_token_ids": True}}
    chunks = list(complete(prompt="Line", stream=True, **options))
    sizes = [len(chunk.choices[0].token_ids) for chunk in chunks]
    known = complete(prompt="Line", **options).choices[0]
    assert sizes == [1] * len(known.token_ids)
    assert chunks[-1].choices[0].finish_reason == known.finish_reason


def test_a_stream_without_tokens_joins_what_a_step_adds(complete):
    options = {"seed": 3, "max_tokens": 40, "prompt": "Line"}
    pieces = [chunk.choices[0] for chunk in complete(stream=True, **options)]
    known = complete(**options).choices[0]
    assert "".join(piece.text for piece in pieces) == known.text
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish_reason == known.finish_reason
    assert all(piece.text for piece in pieces[:-1])
    assert len(pieces) <= 40


def test_the_asynchronous_client(server, complete, answer):
    async def ask():
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0
        ) as client:
            create, chat_create = client.completions.create, client.chat.completions.create
            fields = {"model": "chat", "messages": MESSAGES, "max_tokens": 12}
            requests = [create(model="served", prompt="Line", seed=seed) for seed in range(8)]
            texts = [got.choices[0].text for got in await asyncio.gather(*requests)]
            answers = [
                got.choices[0]
                for got in await asyncio.gather(*(chat_create(**fields, seed=s) for s in (1, 2)))
            ]
            stream = await create(model="served", prompt="Line", seed=0, stream=True)
            text = "".join([chunk.choices[0].text async for chunk in stream])
            stream = await chat_create(**fields, seed=1, stream=True)
            return (
                texts,
                answers,
                text,
                "".join([chunk.choices[0].delta.content or "" async for chunk in stream]),
            )

    texts, answers, text, said = asyncio.run(ask())
    assert texts == [complete(prompt="Line", seed=seed).choices[0].text for seed in range(8)]
    assert answers == [answer(seed=seed).choices[0] for seed in (1, 2)]
    assert (text, said) == (texts[0], answers[0].message.content)


class Cat(BaseModel):
    """A class for a model's answer."""

    name: str = Field(max_length=5)
    age: int = Field(ge=0, le=20)
    likes: list[str] = Field(max_length=0)


@needs("structured_output")
def test_json(client, answer, complete):
    schema = {
        "type": "json_schema",
        "json_schema": {"name": "cat", "schema": Cat.model_json_schema()},
    }
    ended = 0
    for seed in range(4):
        fields = {"seed": seed, "max_tokens": 120}
        contents = [
            (choice.message.content, choice)
            for choice in answer(**fields, response_format=schema).choices
        ]
        got = complete(prompt="L", **fields, extra_body={"response_format": schema}).choices
        for content, choice in [*contents, *((choice.text, choice) for choice in got)]:
            if choice.finish_reason == "stop":
                jsonschema.validate(json.loads(content), Cat.model_json_schema())
                ended += 1
        (choice,) = answer(**fields, response_format={"type": "json_object"}).choices
        assert choice.finish_reason == "length" or isinstance(
            json.loads(choice.message.content), dict
        )
    assert ended
    assert answer(seed=1, response_format={"type": "text"}).choices == answer(seed=1).choices


@needs("structured_output")
def test_json_of_a_pydantic_class(client):
    ask = {"model": "chat", "messages": MESSAGES, "response_format": Cat, "seed": 1}
    assert isinstance(
        client.chat.completions.parse(**ask, max_tokens=150).choices[0].message.parsed, Cat
    )
    with client.chat.completions.stream(**ask, max_tokens=150) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Cat)
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**ask, max_tokens=3)
