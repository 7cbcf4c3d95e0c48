"""pydantic-ai with tool and native output, against a server of no flags. ``URL`` and the model's name as arguments."""

import asyncio
import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, ModelHTTPError, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

URL, MODEL = sys.argv[1:3]
model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key="none"))
QUESTION = "Which colour has grass?"
SHORT = {"max_tokens": 200, "temperature": 0}


class Answer(BaseModel):
    """What structured output is read into."""

    colour: Literal["red", "green"]


def chat() -> None:
    assert Agent(model, model_settings=SHORT).run_sync(QUESTION).output


def stream() -> None:
    async def run() -> str:
        async with Agent(model, model_settings=SHORT).run_stream(QUESTION) as result:
            return "".join([text async for text in result.stream_text(delta=True)])

    assert asyncio.run(run()) == Agent(model, model_settings=SHORT).run_sync(QUESTION).output


def tool() -> None:
    result = Agent(model, output_type=ToolOutput(Answer), model_settings=SHORT).run_sync(QUESTION)
    assert result.output.colour in ("red", "green")
    agent = Agent(model, model_settings=SHORT)

    @agent.tool_plain
    def weather(city: str) -> str:
        """The weather of a city."""
        return f"Sunny in {city}."

    assert agent.run_sync("Say hello.").output is not None


def structured() -> None:
    result = Agent(model, output_type=NativeOutput(Answer), model_settings=SHORT).run_sync(QUESTION)
    assert result.output.colour in ("red", "green")


def error() -> None:
    try:
        Agent(model, model_settings={"top_p": 7}).run_sync(QUESTION)
    except ModelHTTPError as failure:
        assert failure.status_code == 400, failure
        assert "top_p" in str(failure), failure
    else:
        raise AssertionError("it was served")


for check in (chat, stream, tool, structured, error):
    check()
    print("ok", check.__name__, flush=True)
