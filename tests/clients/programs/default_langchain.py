"""langchain-openai, against a server of no flags. ``URL`` and the model's name as arguments."""

import sys
from typing import Literal

import openai
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

URL, MODEL = sys.argv[1:3]


def model(**settings: object) -> ChatOpenAI:
    base = {"model": MODEL, "base_url": f"{URL}/v1", "api_key": "none", "max_retries": 0, "max_tokens": 100}
    return ChatOpenAI(**base | {"temperature": 0} | settings)


class Answer(BaseModel):
    """A colour."""

    colour: Literal["red", "green"]


def chat() -> None:
    assert model().invoke("Hello").content


def stream() -> None:
    whole = model().invoke("Hello").content
    assert "".join(chunk.content for chunk in model().stream("Hello")) == whole


def tool() -> None:
    assert model().bind_tools([Answer]).invoke("Hello") is not None
    reply = model().bind_tools([Answer], tool_choice="any").invoke("Which colour has grass?")
    assert reply.tool_calls[0]["name"] == "Answer"


def structured() -> None:
    for method in ("json_schema", "function_calling"):
        reply = model().with_structured_output(Answer, method=method).invoke("Which colour has grass?")
        assert reply.colour in ("red", "green"), method


def error() -> None:
    try:
        model(top_p=7).invoke("Hello")
    except openai.BadRequestError as failure:
        assert failure.param == "top_p", failure.body
    else:
        raise AssertionError("it was served")


for check in (chat, stream, tool, structured, error):
    check()
    print("ok", check.__name__, flush=True)
