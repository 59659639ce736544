"""The API through LangChain's classes for OpenAI."""

import pytest
from installed import needs

pytest.importorskip("langchain_openai")

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field
from tool_models import ASKED, BRIEF, WEATHER

from thinker.data.chat import chat
from thinker.generation import Generator, SamplingParams
from thinker.interop import load


class Cat(BaseModel):
    """A cat."""

    name: str = Field(description="what it is called", max_length=5)
    age: int = Field(ge=0, le=20)


@pytest.fixture
def options(server):
    return {"base_url": f"{server.url}/v1", "api_key": "none", "max_retries": 0, "seed": 1}


@pytest.fixture
def chat_model(options):
    return ChatOpenAI(model="chat", max_tokens=12, temperature=0.8, **options)


@pytest.fixture
def text_model(options):
    return OpenAI(model="served", max_tokens=12, temperature=0.8, **options)


@pytest.fixture(scope="module")
def answer(chat_run):
    """What generate() answers."""
    generator = Generator(*load(chat_run), slide=True)

    def answer(*messages):
        tokens = chat.encode_prompt(
            generator.tokenizer, [{"role": role, "content": text} for role, text in messages]
        )
        return generator.generate([""], SamplingParams(12, 0.8, seed=1), [tokens])[0].text

    return answer


def test_chat(chat_model, answer):
    got = chat_model.invoke("Hi 3")
    assert got.content == answer(("user", "Hi 3"))
    assert got.response_metadata["finish_reason"] in ("stop", "length")
    assert got.usage_metadata["output_tokens"] <= 12
    history = [SystemMessage("Be kind."), HumanMessage("Hi 3"), got, HumanMessage("More")]
    texts = [("system", "Be kind."), ("user", "Hi 3"), ("assistant", got.content), ("user", "More")]
    assert chat_model.invoke(history).content == answer(*texts)
    assert [one.content for one in chat_model.batch(["Hi 3", "Hi 4"])] == [
        answer(("user", "Hi 3")),
        answer(("user", "Hi 4")),
    ]


def test_a_streamed_chat(chat_model, answer):
    pieces = list(chat_model.stream("Hi 3"))
    assert "".join(piece.content for piece in pieces) == answer(("user", "Hi 3"))
    whole = sum(pieces[1:], pieces[0])
    assert isinstance(whole, AIMessage)
    with_usage = list(chat_model.stream("Hi 3", stream_usage=True))
    assert sum(with_usage[1:], with_usage[0]).usage_metadata["output_tokens"] <= 12


def test_logprobs(options):
    model = ChatOpenAI(model="chat", max_tokens=3, logprobs=True, top_logprobs=2, **options)
    content = model.invoke("Hi 3").response_metadata["logprobs"]["content"]
    assert len(content) <= 3
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)


@needs("structured_output")
def test_structured_output(options):
    model = ChatOpenAI(model="chat", max_tokens=150, **options)
    assert isinstance(model.with_structured_output(Cat, method="json_schema").invoke("Hi 3"), Cat)
    schema = {"title": "Cat", "description": "A cat.", **Cat.model_json_schema()}
    got = model.with_structured_output(schema, method="json_schema").invoke("Hi 3")
    assert Cat.model_validate(got)
    whole = model.with_structured_output(Cat, method="json_schema", include_raw=True).invoke("Hi 3")
    assert (whole["parsing_error"], type(whole["parsed"])) == (None, Cat)


@needs("structured_output")
def test_json_mode(options):
    model = ChatOpenAI(model="chat", max_tokens=150, **options)
    got = model.with_structured_output(method="json_mode", include_raw=True).invoke("Hi 3")
    assert (
        isinstance(got["parsed"], dict) or got["raw"].response_metadata["finish_reason"] == "length"
    )


def test_completions(text_model, served_run):
    generator = Generator(*load(served_run), slide=True)

    def known(prompt, seed=1):
        return generator.generate(prompt, SamplingParams(12, 0.8, seed=seed))[0].text

    assert text_model.invoke("Line 3") == known("Line 3")
    assert "".join(text_model.stream("Line 3")) == known("Line 3")
    assert text_model.batch(["Line 3", "cat"]) == [
        known("Line 3"),
        known("cat", seed=2),
    ]  # one request
    usage = text_model.generate(["Line 3"]).llm_output["token_usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


@needs("structured_output")
def test_default_structured_output(options):
    """Of the class for OpenAI: a JSON schema. `function_calling`: a tool that has to be called."""
    model = ChatOpenAI(model="chat", max_tokens=150, **options)
    assert isinstance(model.with_structured_output(Cat).invoke("Hi 3"), Cat)


@pytest.fixture
def tool_model(tool_server):
    def make(name, **more):
        settings = {"base_url": f"{tool_server.url}/v1", "api_key": "none", "max_retries": 0}
        return ChatOpenAI(model=name, temperature=0, max_tokens=300, **settings | more)

    return make


@tool
def weather(city: str) -> str:
    """The weather."""
    return "sunny"


@pytest.mark.parametrize("name", ["knows", "plain"])
def test_a_tool_is_called_and_its_result_is_read(tool_model, name):
    model = tool_model(name)
    bound = model.bind_tools([WEATHER])
    called = bound.invoke(ASKED[0]["content"])
    assert called.response_metadata["finish_reason"] == "tool_calls"
    [call] = called.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Rome"})
    result = weather.invoke(call)
    messages = [HumanMessage(ASKED[0]["content"]), called, result]
    assert bound.invoke(messages).content == "It is sunny."
    pieces = list(bound.stream(ASKED[0]["content"]))
    streamed = sum(pieces[1:], pieces[0])
    assert [(one["name"], one["args"]) for one in streamed.tool_calls] == [
        ("weather", {"city": "Rome"})
    ]
    assert streamed.content == called.content


@needs("structured_output")
@pytest.mark.parametrize("name", ["knows", "plain"])
def test_a_class_as_a_tool(tool_model, name):
    model = tool_model(name, logit_bias=BRIEF)
    got = model.with_structured_output(Cat, method="function_calling").invoke("Hi")
    assert isinstance(got, Cat)
    bound = model.bind_tools([Cat, weather], tool_choice="any", parallel_tool_calls=False)
    [call] = bound.invoke("Hi").tool_calls
    assert call["name"] in ("Cat", "weather")
