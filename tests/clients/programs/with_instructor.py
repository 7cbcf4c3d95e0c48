"""instructor in all its modes for OpenAI, against a server of no flags. ``URL`` and the model's name as arguments."""

import sys
from collections.abc import Iterable
from typing import Literal

import instructor
import openai
from instructor import Mode
from pydantic import BaseModel

URL, MODEL = sys.argv[1:3]
plain = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
MESSAGES = [{"role": "user", "content": "Which colour has grass?"}]


class Answer(BaseModel):
    """What structured output is read into."""

    colour: Literal["red", "green"]


FREE = ((Mode.JSON, Answer), (Mode.MD_JSON, Answer), (Mode.PARALLEL_TOOLS, Iterable[Answer]))
"""Modes in which nothing makes the model write what is wanted: a small one may fail, the server may not."""


def ask(mode: Mode, kind: object = Answer, **more: object) -> object:
    client = instructor.from_openai(plain, mode=mode)
    return client.chat.completions.create(
        model=MODEL, messages=MESSAGES, response_model=kind, max_tokens=200, max_retries=0, temperature=0, **more
    )


def chat() -> None:
    assert plain.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=12).choices[0].message.content


def stream() -> None:
    client = instructor.from_openai(plain, mode=Mode.TOOLS)
    parts = list(
        client.chat.completions.create_partial(
            model=MODEL, messages=MESSAGES, response_model=Answer, max_tokens=200, max_retries=0
        )
    )
    assert parts[-1].colour in ("red", "green")


def tool() -> None:
    for mode in (Mode.TOOLS, Mode.TOOLS_STRICT):
        assert ask(mode).colour in ("red", "green"), mode


def structured() -> None:
    assert ask(Mode.JSON_SCHEMA).colour in ("red", "green")
    for mode, kind in FREE:
        try:
            ask(mode, kind)
        except Exception as failure:
            causes = (failure, failure.__cause__, failure.__context__)
            assert not any(isinstance(cause, openai.APIError) for cause in causes), failure
            assert "Error code" not in str(failure), failure


def error() -> None:
    try:
        ask(Mode.TOOLS, top_p=7)
    except Exception as failure:
        assert "top_p" in str(failure), failure
    else:
        raise AssertionError("it was served")


for check in (chat, stream, tool, structured, error):
    check()
    print("ok", check.__name__, flush=True)
