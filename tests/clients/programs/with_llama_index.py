"""llama-index's class for servers like OpenAI's, against one of no flags. ``URL`` and the model's name as arguments."""

import sys
from typing import Literal

import openai
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

URL, MODEL = sys.argv[1:3]


def model(**more: object) -> OpenAILike:
    settings = {"is_chat_model": True, "is_function_calling_model": True, "temperature": 0.0, "max_tokens": 200}
    return OpenAILike(model=MODEL, api_base=f"{URL}/v1", api_key="none", max_retries=0, **settings | more)


class Answer(BaseModel):
    """What structured output is read into."""

    colour: Literal["red", "green"]


def weather(city: str) -> str:
    """The weather of a city."""
    return f"Sunny in {city}."


QUESTION = [ChatMessage(role="user", content="Which colour has grass?")]


def chat() -> None:
    assert model().chat(QUESTION).message.content
    assert model().complete("Hello").text


def stream() -> None:
    whole = model().chat(QUESTION).message.content
    assert "".join(part.delta for part in model().stream_chat(QUESTION)) == whole


def tool() -> None:
    found = model().chat_with_tools(
        [FunctionTool.from_defaults(weather)], user_msg="How is the weather in Paris?", tool_required=True
    )
    [call] = model().get_tool_calls_from_response(found)
    assert call.tool_name == "weather"


def structured() -> None:
    assert model().as_structured_llm(Answer).chat(QUESTION).raw.colour in ("red", "green")


def error() -> None:
    try:
        model(temperature=-7.0).chat(QUESTION)
    except (openai.BadRequestError, ValueError) as failure:
        assert "temperature" in str(failure), failure
    else:
        raise AssertionError("it was served")


for check in (chat, stream, tool, structured, error):
    check()
    print("ok", check.__name__, flush=True)
