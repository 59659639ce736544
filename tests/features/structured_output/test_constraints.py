"""Constrained decoding: texts match their JSON schema or regex, and everything else stays as it
was."""

import gc
import json
import math
import random
import re
import sys
import weakref

import jsonschema
import pytest
import torch
from conftest import examples, random_model
from hypothesis import given, settings
from hypothesis import strategies as st
from installed import needs
from metaspace_tokenizer import metaspace_tokenizer
from pairwise import pairwise

from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.features.structured_output import constraints
from thinker.features.structured_output.constraints import GrammarConstraint, pack_tokens
from thinker.features.structured_output.json_schema import canonical_schema
from thinker.generation import Completion, Generator, SamplingParams
from thinker.generation.chat.conversation import Conversation
from thinker.generation.sampler import banned_tokens, distribution, sample
from thinker.generation.sequence import allowed_tokens
from thinker.native import operations as native
from thinker.runtime.errors import UserError

pytestmark = pytest.mark.usefixtures("one_thread")
TOKENIZER = make_tokenizer("byte", [])
SAMPLE = 'The {"name": "Émile", "age": 12, "tags": ["漢", true, null]} goes on, [1.5, -2e3]\n' * 20
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
ANYTHING = "(?s:.*)"


def unigram(folder, byte_fallback):
    """A tokenizer that begins each text with a space; not every byte needs to have a token."""
    return metaspace_tokenizer(folder, {'":': -3.0, '▁"': -2.5, "name": -2.0}, byte_fallback)


@pytest.fixture(scope="module", params=["byte", "char", "bpe:400", "hf", "hf-without-bytes"])
def tokenizer(request, tmp_path_factory):
    if request.param.startswith("hf"):
        return unigram(tmp_path_factory.mktemp("tokenizer") / "hf", request.param == "hf")
    return make_tokenizer(request.param, [SAMPLE])


def has_all_bytes(tokenizer):
    return {bytes([byte]) for byte in range(256)} <= {
        tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)
    }


def model_for(tokenizer, seed=1, max_seq_len=256):
    return random_model(
        seed, 0.3, 0.4, vocab_size=tokenizer.vocab_size + 7, max_seq_len=max_seq_len
    )


@pytest.fixture(scope="module")
def model():
    return model_for(TOKENIZER)


def random_schema(rng, depth=0):
    """A random schema whose texts are of bounded length, so that most are complete in a few hundred
    tokens."""
    kinds = ["string", "integer", "number", "enum", "pattern", "const", "types"]
    kinds += ["object", "array", "tuple", "anyOf", "ref"] if depth < 2 else []
    kind = rng.choice(kinds)
    low = rng.randint(-50, 50)
    if kind == "string":
        shortest = rng.randrange(3)
        return {"type": "string", "minLength": shortest, "maxLength": shortest + rng.randrange(5)}
    if kind == "integer":
        return {
            "type": "integer",
            "minimum": low,
            rng.choice(["maximum", "exclusiveMaximum"]): low + rng.randint(1, 300),
        }
    if kind == "number":
        return {
            "type": "number",
            rng.choice(["minimum", "exclusiveMinimum"]): low / 4,
            "maximum": low / 4 + rng.randint(1, 9),
        }
    if kind == "enum":
        return {"enum": rng.sample([1, -2.5, "é", "two words", None, True, [1, {"a": "b"}]], 3)}
    if kind == "pattern":
        if rng.random() < 0.2:
            return {"type": "string", "pattern": "a[0-9]", "maxLength": 5}  # matches a part
        return {
            "type": "string",
            "pattern": rng.choice(["^[a-c]{2,4}$", "^\\d+-\\d{2}$", "^(ä|漢)x?$"]),
        }
    if kind == "const":
        return {"const": rng.choice(['a\n"b\\', 0, {"k": []}])}
    if kind == "types":
        return {"type": ["boolean", "null"], "description": "a flag"}
    inner = [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]
    if kind == "object":
        names = rng.sample(["a", "größe", "漢字", "with space", 'quo"te', "z"], len(inner))
        required = [name for name in names if rng.random() < 0.6]
        properties = dict(zip(names, inner))
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }
    if kind == "array":
        return {
            "type": "array",
            "items": inner[0],
            "minItems": rng.randrange(2),
            "maxItems": rng.randint(1, 3),
        }
    if kind == "tuple":
        return {"type": "array", "prefixItems": inner, "items": False, "minItems": len(inner)}
    if kind == "anyOf":
        return {"anyOf": inner}
    return {
        "type": "object",
        "properties": {"r": inner[0]},
        "required": ["r"],
        "additionalProperties": False,
    }


def check(completion, schema, max_new_tokens):
    """Whether the text is complete; then it is valid. Otherwise it was cut, and says so."""
    if not completion.constraint_met:
        assert (completion.finish_reason, len(completion.token_ids)) == ("length", max_new_tokens)
        return False
    assert completion.finish_reason in ("stop", "length")
    jsonschema.validate(json.loads(completion.text), schema)
    return True


@pytest.mark.parametrize("compile", [None, False])
def test_random_schemas_give_valid_json(tokenizer, compile):
    generator = Generator(model_for(tokenizer), tokenizer, compile=compile)
    rng = random.Random(tokenizer.kind)
    schemas = [
        {"type": "object", "properties": {"x": random_schema(rng)}, "required": ["x"]}
        for _ in range(60)
    ]
    schemas = [schema | {"additionalProperties": False} for schema in schemas]
    if not has_all_bytes(tokenizer):
        schemas = [schema for schema in schemas if json.dumps(schema, ensure_ascii=False).isascii()]
    params = [
        SamplingParams(max_new_tokens=150, seed=seed, json_schema=schema)
        for seed, schema in enumerate(schemas)
    ]
    completions = []
    for start in range(0, len(params), 10):
        chosen = params[start : start + 10]
        completions += generator.generate(["x"] * len(chosen), chosen)
    complete = [check(*each, 150) for each in zip(completions, schemas)]
    assert sum(complete) > len(complete) / 2


def test_required_and_optional_properties_all_occur(model):
    schema = {
        "properties": {"é": {"enum": [1]}, "b": {"const": 2}},
        "type": "object",
        "additionalProperties": False,
    }
    params = SamplingParams(max_new_tokens=100, json_schema=schema)
    texts = [
        json.loads(one.text) for one in Generator(model, TOKENIZER).generate([""] * 40, params)
    ]
    assert {tuple(text) for text in texts} == {(), ("é",), ("b",), ("é", "b")}


def test_any_object_and_schemas_as_text(model):
    generator = Generator(model, TOKENIZER)
    for schema in (True, "true", {"type": "object"}, '{ "type": "object" }'):
        params = SamplingParams(max_new_tokens=40, json_schema=schema)
        assert params.json_schema == '{"type":"object"}'
        assert hash(params) == hash(SamplingParams(max_new_tokens=40, json_schema=True))
        assert generator.generate("", params)[0].text.startswith("{")
    ordered = SamplingParams(json_schema={"properties": {"b": {}, "a": {}}})
    assert (
        ordered.json_schema == '{"properties":{"b":{},"a":{}}}'
    )  # properties are generated in this order


WORDS = ["a", "ab", "abc goes on", "the", "the name", "漢", "漢字", "é\n"]


def test_exactly_the_tokens_that_can_continue_a_valid_text_are_allowed(tokenizer):
    texts = [word.encode() for word in WORDS]
    if not has_all_bytes(tokenizer):
        texts = [text for text in texts if text.isascii()]
    pattern = "|".join(
        re.escape(text.decode()).replace("\\ ", " ").replace("\\\n", "\n") for text in texts
    )
    rng, seen_ends = random.Random(0), 0
    for _ in range(60):
        constraint, text = GrammarConstraint(tokenizer, None, pattern), b""
        while constraint.can_continue:
            expected = [
                token
                for token in range(tokenizer.vocab_size)
                if (piece := tokenizer.token_bytes(token))
                and any(one.startswith(text + piece) for one in texts)
            ]
            if text in texts:
                expected = sorted([*expected, *tokenizer.eos_ids])
                seen_ends += 1
            banned = banned_tokens(
                constraint.allowed[None], tokenizer.vocab_size, torch.device("cpu")
            )[0]
            assert (~banned).nonzero()[:, 0].tolist() == expected
            assert constraint.is_complete == (text in texts)
            token = rng.choice(expected)
            if token in tokenizer.eos_ids:
                break
            constraint.append(token)
            text += tokenizer.token_bytes(token)
        assert text in texts
        assert constraint.is_complete
    assert seen_ends


LOGITS = st.integers(2, 100).flatmap(
    lambda n: st.tuples(
        st.lists(st.floats(-30, 30, width=32), min_size=n, max_size=n),
        st.sets(st.integers(0, n - 1), min_size=1),
    )
)


@settings(max_examples=examples(200), deadline=None)
@given(LOGITS, st.sampled_from([0.3, 1.0, 2.0]), st.floats(0, 0.999))
def test_a_masked_distribution_is_the_renormalised_one(logits_and_allowed, temperature, uniform):
    values, allowed = logits_and_allowed
    logits, params = torch.tensor([values]), SamplingParams(temperature=temperature)
    packed = torch.from_numpy(pack_tokens(sorted(allowed), len(values)))[None]
    banned = banned_tokens(packed, len(values), logits.device)
    assert (~banned[0]).nonzero()[:, 0].tolist() == sorted(allowed)
    masked = logits.masked_fill(banned, -torch.inf)
    renormalised = (logits.double() / temperature).softmax(dim=-1).masked_fill(banned, 0)
    total = renormalised.sum()
    probs = distribution(masked, params)
    assert (probs[banned] == 0).all()
    if total > 1e-30:
        torch.testing.assert_close(probs.double(), renormalised / total, rtol=1e-4, atol=1e-7)
    for one in (params, SamplingParams(temperature=0)):
        token = sample(masked, one, torch.tensor([uniform], dtype=torch.float64), None, None)
        tokens, logprobs = native.sample(logits, len(values), [one.temperature], [uniform], packed)
        assert tokens == token.tolist()
        assert logprobs[0] == pytest.approx(logits.log_softmax(dim=-1)[0, token].item(), abs=1e-5)


@pytest.mark.parametrize("options", [{}, {"compile": False}, {"use_cache": False}])
def test_an_always_true_constraint_changes_nothing(model, options):
    generator = Generator(model, TOKENIZER, **options)
    ascii_only = dict.fromkeys(range(128, 256), -math.inf)  # single bytes above are no UTF-8
    for sampling in ({"temperature": 0}, {"temperature": 1.0, "top_k": 50}, {"temperature": 0.7}):
        params = {"max_new_tokens": 60, "logit_bias": ascii_only, **sampling}
        prompts = ["", "one", "two words"]
        free = generator.generate(prompts, SamplingParams(**params))
        constrained = generator.generate(prompts, SamplingParams(**params, regex=ANYTHING))
        for one, other in zip(free, constrained):
            assert (one.token_ids, one.logprobs, one.text) == (
                other.token_ids,
                other.logprobs,
                other.text,
            )
            assert (one.constraint_met, other.constraint_met) == (None, True)


OPTIONS = {
    "generator": [
        {}, {"compile": False}, {"use_cache": False}, {"bits": 8}, {"window": 12}, {"window": 9, "sinks": 3},
        {"slide": True}, {"slide": True, "compile": False}, {"dtype": "bf16"},
    ],
    "temperature": [0, 1.0],
    "filter": [{}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2}],
    "penalty": [{}, {"repetition_penalty": 1.5}, {"presence_penalty": 1.0}, {"frequency_penalty": 2.0}],
    "logit_bias": [(), {ord("a"): 5.0}, {ord("b"): -math.inf}],
    "logprobs": [0, 4],
    "max_new_tokens": [5, 60],
}  # fmt: skip


@pytest.mark.parametrize("case", pairwise(OPTIONS), ids=str)
def test_the_product_with_other_options(case):
    model = model_for(TOKENIZER, max_seq_len=32)
    generator = Generator(model, TOKENIZER, **case["generator"])
    shared = {
        name: case[name] for name in ("temperature", "logit_bias", "logprobs", "max_new_tokens")
    }
    shared |= case["filter"] | case["penalty"]
    pattern = "(a[bc]|[x-z]{2} ){10,15}"  # up to 45 tokens, more than the context
    params = [
        SamplingParams(**shared, seed=4, **more)
        for more in ({}, {"regex": pattern}, {"json_schema": PERSON}, {})
    ]
    free, matched, person, other = generator.generate(["", "prompt", "prompt", "second"], params)
    for completion, prompt, one in ((free, "", params[0]), (other, "second", params[3])):
        (alone,) = generator.generate([prompt], [one])
        assert (completion.token_ids, completion.text) == (alone.token_ids, alone.text)
        assert completion.logprobs == (
            pytest.approx(alone.logprobs, abs=1e-5) if case["generator"] else alone.logprobs
        )
    full = case["max_new_tokens"] == 60 and (
        "slide" in case["generator"] or "window" in case["generator"]
    )
    assert full <= bool(matched.constraint_met)
    if matched.constraint_met:
        assert re.fullmatch(pattern, matched.text)
    else:
        assert matched.finish_reason == "length"
        assert re.match("(a[bc]|[x-z]{2} )*(a|[x-z]{,2})$", matched.text)
    if person.constraint_met:
        jsonschema.validate(json.loads(person.text), PERSON)
    for completion in (matched, person):
        assert case["logit_bias"] != {ord("b"): -math.inf} or "b" not in completion.text
        assert len(completion.top_logprobs) == (
            len(completion.token_ids) if case["logprobs"] else 0
        )
        assert all(len(top) == 4 for top in completion.top_logprobs)


def test_logprobs_are_those_of_the_unmodified_model(model):
    for options in ({}, {"compile": False}):
        (one,) = Generator(model, TOKENIZER, **options).generate(
            "ab", SamplingParams(regex="[xyz]{20}", temperature=0.5)
        )
        tokens = torch.tensor([[*TOKENIZER.bos_prefix, *TOKENIZER.encode("ab"), *one.token_ids]])
        logits = model(tokens)[0, :-1, : TOKENIZER.vocab_size].float().log_softmax(dim=-1)
        expected = logits.gather(1, tokens[0, 1:, None])[-20:, 0].tolist()
        assert one.logprobs == pytest.approx(expected, abs=1e-4)
        assert max(one.logprobs) < -1  # the letters are not what the model would say


def test_the_end_of_text_comes_only_where_the_grammar_permits_it(model):
    end = {TOKENIZER.eos_id: 1000.0}
    params = SamplingParams(regex="(ab){3,}", logit_bias=end, max_new_tokens=50)
    (one,) = Generator(model, TOKENIZER).generate("", params)
    assert (one.text, one.finish_reason, one.constraint_met) == ("ababab", "stop", True)
    assert one.token_ids[-1] == TOKENIZER.eos_id
    (one,) = Generator(model, TOKENIZER).generate(
        "", SamplingParams(regex="(ab){3}", logit_bias=end)
    )
    assert (one.text, one.finish_reason, len(one.token_ids)) == (
        "ababab",
        "stop",
        6,
    )  # nothing could follow
    (one,) = Generator(model, TOKENIZER).generate("", SamplingParams(regex="(?:)"))
    assert (one.text, one.finish_reason, one.token_ids) == ("", "stop", [TOKENIZER.eos_id])


def test_the_token_limit_cuts(model):
    generator = Generator(model, TOKENIZER)
    (cut,) = generator.generate("", SamplingParams(regex="a{9}", max_new_tokens=4))
    assert (cut.text, cut.finish_reason, cut.constraint_met) == ("aaaa", "length", False)
    never_ends = {TOKENIZER.eos_id: -math.inf}
    (cut,) = generator.generate(
        "", SamplingParams(regex="a*", logit_bias=never_ends, max_new_tokens=4)
    )
    assert (cut.text, cut.finish_reason, cut.constraint_met) == ("aaaa", "length", True)


@pytest.mark.parametrize("options", [{}, {"slide": True}, {"compile": False}])
def test_a_dead_end_cuts(options):
    params = SamplingParams(
        regex="a{3}b|c{3}b", logit_bias={ord("b"): -math.inf}, max_new_tokens=40
    )
    (one,) = Generator(model_for(TOKENIZER, max_seq_len=16), TOKENIZER, **options).generate(
        "", params
    )
    assert one.text in ("aaa", "ccc")
    assert (one.finish_reason, one.constraint_met) == ("length", False)


TOO_COMPLEX = "(([ab]{1,99}a|b){1,999}){1,999}"  # llguidance gives up after some 40 letters


def append_letters(constraint, n_letters=3000):
    """Add random letters to a text of TOO_COMPLEX."""
    letters = random.Random(0)
    for _ in range(n_letters):
        constraint.append(ord(letters.choice("ab")))


def test_a_text_at_a_limit_fails_alike_each_time():
    messages = []
    for _ in range(3):
        constraint = GrammarConstraint(TOKENIZER, None, TOO_COMPLEX)
        with pytest.raises(UserError, match="regex is too complex for a text of") as caught:
            append_letters(constraint)
        messages.append(str(caught.value))
    assert len(set(messages)) == 1
    assert "\n" not in messages[0]


def test_a_text_at_a_limit_harms_no_other():
    regex = f"Q[0-9]{{40}}|{TOO_COMPLEX}"
    begun = GrammarConstraint(TOKENIZER, None, regex)  # shares the grammar with the next text
    with pytest.raises(UserError, match="too complex"):
        append_letters(GrammarConstraint(TOKENIZER, None, regex))
    later = GrammarConstraint(TOKENIZER, None, regex)
    for constraint in (begun, later):
        for char in "Q0123456789" + "7" * 30:
            allowed = banned_tokens(constraint.allowed[None], 256, torch.device("cpu"))[0]
            assert not allowed[ord(char)]
            constraint.append(ord(char))
        assert constraint.is_complete


def test_a_text_whose_grammar_others_used_up_is_what_it_is_alone():
    alone = GrammarConstraint(TOKENIZER, None, TOO_COMPLEX)
    append_letters(alone, 20)
    begun = GrammarConstraint(TOKENIZER, None, TOO_COMPLEX)
    append_letters(begun, 10)
    with pytest.raises(UserError, match="too complex"):
        append_letters(GrammarConstraint(TOKENIZER, None, TOO_COMPLEX))
    letters = random.Random(0)
    for _ in range(10):
        letters.choice("ab")
    for _ in range(10):
        begun.append(ord(letters.choice("ab")))
    assert begun.can_continue
    assert torch.equal(begun.allowed, alone.allowed)


def test_stop_strings(model):
    generator = Generator(model, TOKENIZER)
    (one,) = generator.generate("", SamplingParams(regex="(ab){5}", stop=["ba"]))
    assert (one.text, one.finish_reason, one.constraint_met) == ("a", "stop", False)
    (one,) = generator.generate("", SamplingParams(regex="(ab)+", stop=["abab"]))
    assert (one.text, one.finish_reason, one.constraint_met) == ("", "stop", False)
    (one,) = generator.generate("", SamplingParams(regex="(ab){5}", stop=["x", "abababababa"]))
    assert (one.text, one.finish_reason, one.constraint_met) == ("ababababab", "stop", True)


def test_sliding_keeps_the_state():
    small = model_for(TOKENIZER, max_seq_len=16)
    (one,) = Generator(small, TOKENIZER, slide=True).generate(
        "", SamplingParams(regex="(a[0-9]){40}")
    )
    assert re.fullmatch("(a[0-9]){40}", one.text)
    assert one.n_slides > 5


def test_streaming_and_conversations(model):
    generator, params = (
        Generator(model, TOKENIZER, slide=True),
        SamplingParams(json_schema=PERSON, seed=3),
    )
    assert "".join(generator.stream("x", params)) == generator.generate("x", params)[0].text
    conversation = Conversation(generator)
    for turn in range(3):
        jsonschema.validate(json.loads("".join(conversation.reply(f"turn {turn}", params))), PERSON)
        assert list(conversation.news()) == []
    "".join(conversation.reply("x", SamplingParams(regex="a{9}", max_new_tokens=3)))
    assert "cut before the JSON schema or regex was complete" in " ".join(conversation.news())


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"regex": ""}, "regex is ''; use a non-empty string"),
        ({"regex": 3}, "regex is 3; use a non-empty string"),
        ({"regex": "a\ud800"}, "regex contains a lone surrogate"),
        ({"regex": "["}, "regex cannot be used: unclosed character class"),
        ({"regex": "(?=a)b"}, "regex cannot be used: look-around"),
        ({"regex": "\\bx"}, "regex cannot be used: .*not supported"),
        (
            {"regex": "ab", "logit_bias": {97: -math.inf}},
            "regex cannot be used: no token can begin a text that matches it",
        ),
        ({"json_schema": True, "regex": "a"}, "json_schema and regex cannot be combined"),
        (
            {"json_schema": "{"},
            "json_schema is .*, which is not valid JSON .*; use a JSON schema as a dict",
        ),
        ({"json_schema": {"const": {1}}}, "json_schema is .*, which is not valid JSON"),
        ({"json_schema": {"minimum": math.nan}}, "json_schema is .*, which is not valid JSON"),
        ({"json_schema": 3}, "json_schema is 3; use a JSON schema as a dict"),
        ({"json_schema": False}, "json_schema is False; use a JSON schema as a dict"),
        (
            {"json_schema": {"typ": "object"}},
            "keyword 'typ', which is not supported; correct or remove it",
        ),
        (
            {"json_schema": {"properties": {"not": {"not": {}}}}},
            "keyword 'not', which is not supported",
        ),
        (
            {"json_schema": {"anyOf": [{"uniqueItems": True}]}},
            "keyword 'uniqueItems', which is not supported",
        ),
        ({"json_schema": {"x-guidance": {"lenient": True}}}, "keyword 'x-guidance'"),
        ({"json_schema": {"type": "foo"}}, "json_schema cannot be used: Invalid type: foo"),
        ({"json_schema": {"$ref": "http://example.com/x"}}, "json_schema cannot be used: Resource"),
        (
            {"json_schema": {"type": "integer", "minimum": 3, "maximum": 1}},
            "json_schema cannot be used: Unsatisfiable",
        ),
        (
            {"json_schema": {"oneOf": [{"type": "integer"}, {"type": "number"}]}},
            "oneOf constraints are not supported$",
        ),
        ({"json_schema": {"properties": {"\ud800": {}}}}, "json_schema cannot be used"),
    ],
)
def test_mistakes_are_reported_before_anything_is_generated(model, params, message):
    generator = Generator(model, TOKENIZER)
    with pytest.raises(UserError, match=message) as error:
        generator.new_sequence(0, Completion(""), SamplingParams(**params), [97])
    assert "\n" not in str(error.value)


def test_names_of_properties_and_values_are_no_keywords():
    properties = {"not": {"type": "object", "default": {"typ": 1}, "enum": [{"typ": 2}]}}
    SamplingParams(json_schema={"type": "object", "properties": properties, "$defs": {"typ": True}})


def test_a_gpu_that_reads_several_tokens_at_once_reads_one_with_a_constraint(model):
    generator = Generator(model, TOKENIZER, compile=False)
    params = [
        SamplingParams(regex="(ab|c){20}", max_new_tokens=40),
        SamplingParams(max_new_tokens=40),
    ]
    expected = generator.generate(["", ""], params)
    generator.decoder.steps_per_read = 16  # as on a GPU
    assert generator.generate(["", ""], params) == expected


@needs("speculation")
def test_speculation_is_refused(model):
    with pytest.raises(UserError, match="cannot be combined with speculate"):
        Generator(model, TOKENIZER, speculate=2).generate("", SamplingParams(regex="a"))


def test_names_of_properties_may_be_any_strings():
    """Zod says so of records. A property may have the name of the keyword."""
    record = {"type": "object", "additionalProperties": {"type": "null"}}
    schema = {"properties": {"propertyNames": {"type": "string"}, "a": record}}
    named = json.loads(json.dumps(schema))
    named["properties"]["a"]["propertyNames"] = {"type": "string"}
    assert json.loads(canonical_schema(named)) == schema
    named["properties"]["a"]["propertyNames"] = {"type": "string", "maxLength": 3}
    with pytest.raises(UserError, match="keyword 'propertyNames'"):
        canonical_schema(named)


def test_without_llguidance(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    generator = Generator(model, make_tokenizer("byte", []))
    assert generator.generate("", SamplingParams(max_new_tokens=2))[0].token_ids
    with pytest.raises(UserError, match=r"pip install '.\[serve\]'"):
        generator.generate("", SamplingParams(regex="a"))


def test_grammars_are_compiled_once_and_freed_with_the_tokenizer(model):
    tokenizer = make_tokenizer("byte", [])
    generator = Generator(model, tokenizer)
    for seed in range(3):
        generator.generate(["", "b"], SamplingParams(regex="ab|cd", seed=seed))
    assert constraints._compilers[tokenizer].grammar.cache_info().misses == 1
    reference = weakref.ref(tokenizer)
    del tokenizer, generator
    gc.collect()
    assert reference() is None


def test_free_sequences_have_no_mask(model):
    sequence = Generator(model, TOKENIZER).new_sequence(0, Completion(""), SamplingParams(), [97])
    assert sequence.constraint is None
    assert allowed_tokens([sequence, sequence]) is None
