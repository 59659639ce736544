"""The API through pydantic-ai, with its default way to get an object: a tool that has to be called."""

import asyncio

import pytest
from installed import needs
from pydantic import BaseModel, Field
from tool_models import ASKED, BRIEF

pytest.importorskip("pydantic_ai", reason="needs pydantic-ai-slim[openai]")

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

NAMES = pytest.mark.parametrize("name", ["knows", "plain"])


class Cat(BaseModel):
    """A cat."""

    name: str = Field(description="what it is called", max_length=5)
    age: int = Field(ge=0, le=20)


class Tree(BaseModel):
    """A schema that refers to itself."""

    label: str = Field(max_length=3)
    children: list["Tree"] = Field(max_length=1)


@pytest.fixture
def model(tool_server):
    provider = OpenAIProvider(base_url=f"{tool_server.url}/v1", api_key="none")
    return lambda name: OpenAIChatModel(name, provider=provider)


SETTINGS = {"temperature": 0.0, "max_tokens": 300}


@NAMES
def test_text(model, name):
    def weather(city: str) -> str:
        """The weather."""

    agent = Agent(model(name), model_settings=SETTINGS, tools=[weather])
    assert agent.run_sync("Hi").output == "Hello!"


@needs("structured_output")
@NAMES
@pytest.mark.parametrize("kind", [Cat, Tree, list[int]], ids=["class", "tree", "list"])
def test_an_object(model, name, kind):
    biases = {"logit_bias": BRIEF | {"93": 90}}  # lists are short, too
    agent = Agent(model(name), output_type=kind, model_settings=SETTINGS | biases, retries=0)
    output = agent.run_sync("Hi").output
    assert isinstance(output, list if kind == list[int] else kind)


@needs("structured_output")
@NAMES
def test_a_streamed_object(model, name):
    settings = SETTINGS | {"logit_bias": BRIEF}
    agent = Agent(model(name), output_type=Cat, model_settings=settings, retries=0)

    async def ask():
        async with agent.run_stream("Hi") as run:
            return await run.get_output()

    assert isinstance(asyncio.run(ask()), Cat)


@NAMES
def test_a_tool_is_called(model, name):
    """The model answers from what the tool returned; pydantic-ai sends the whole history."""
    cities = []

    def weather(city: str) -> str:
        """The weather."""
        cities.append(city)
        return "sunny"

    agent = Agent(model(name), model_settings=SETTINGS, tools=[weather])
    assert agent.run_sync(ASKED[0]["content"]).output == "It is sunny."
    assert cities == ["Rome"]
