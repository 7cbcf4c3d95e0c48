"""openai-agents and its default model class (Responses), with a server of no flags. ``URL`` and the model's name."""

import asyncio
import sys
from typing import Literal

import openai
from agents import Agent, ModelSettings, Runner, function_tool, set_default_openai_client, set_tracing_disabled
from pydantic import BaseModel

URL, MODEL = sys.argv[1:3]
set_tracing_disabled(True)
set_default_openai_client(
    openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0), use_for_tracing=False
)
QUESTION = "Which colour has grass?"
SHORT = ModelSettings(max_tokens=1000, temperature=0)


class Answer(BaseModel):
    """What structured output is read into."""

    colour: Literal["red", "green"]


@function_tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"Sunny in {city}."


def agent(**more: object) -> Agent:
    return Agent(**{"name": "one", "instructions": "Be brief.", "model": MODEL, "model_settings": SHORT} | more)


async def chat() -> None:
    assert (await Runner.run(agent(), QUESTION)).final_output


async def stream() -> None:
    result = Runner.run_streamed(agent(), QUESTION)
    deltas = [
        event.data.delta
        async for event in result.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    assert result.final_output
    assert "".join(deltas) == result.final_output


async def tool() -> None:
    settings = ModelSettings(max_tokens=200, temperature=0, tool_choice="required")
    asked = agent(tools=[weather], model_settings=settings, tool_use_behavior="stop_on_first_tool")
    result = await Runner.run(asked, "How is the weather in Paris?")
    kinds = [item.type for item in result.new_items]
    assert {"tool_call_item", "tool_call_output_item"} <= set(kinds), kinds  # one or several calls
    assert result.final_output.startswith("Sunny in ")


async def structured() -> None:
    assert (await Runner.run(agent(output_type=Answer), QUESTION)).final_output.colour in ("red", "green")


async def error() -> None:
    try:
        await Runner.run(agent(model_settings=ModelSettings(top_p=7)), QUESTION)
    except openai.BadRequestError as failure:
        assert "top_p" in str(failure), failure
    else:
        raise AssertionError("it was served")


async def main() -> None:
    for check in (chat, stream, tool, structured, error):  # in one event loop, as the client's connections are
        await check()
        print("ok", check.__name__, flush=True)


asyncio.run(main())
