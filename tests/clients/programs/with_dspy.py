"""dspy, against a server of no flags. ``URL`` and the model's name as arguments."""

import json
import sys
from typing import Literal

import dspy

URL, MODEL = sys.argv[1:3]
lm = dspy.LM(
    f"openai/{MODEL}", api_base=f"{URL}/v1", api_key="none", max_tokens=200, temperature=0.0, cache=False, num_retries=0
)
dspy.configure(lm=lm)


class Colour(dspy.Signature):
    """Name the colour."""

    thing: str = dspy.InputField()
    colour: Literal["red", "green"] = dspy.OutputField()


def chat() -> None:
    assert lm("Hello")[0]


def stream() -> None:
    """dspy streams programs. Nothing but words tells the model what to write: it may fail, the server may not."""
    program = dspy.streamify(dspy.Predict(Colour), async_streaming=False)
    try:
        assert list(program(thing="grass"))[-1].colour in ("red", "green")
    except Exception as failure:
        assert "AdapterParseError" in repr(failure), failure


def tool() -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
    function = {"name": "weather", "description": "The weather of a city.", "parameters": parameters}
    tools = [{"type": "function", "function": function}]
    [reply] = lm("How is the weather in Paris?", tools=tools, tool_choice="required")
    assert reply["tool_calls"][0]["function"]["name"] == "weather"


def structured() -> None:
    schema = {"type": "object", "properties": {"colour": {"enum": ["red", "green"]}}, "required": ["colour"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    assert json.loads(lm("Which colour has grass?", response_format=wanted)[0])["colour"] in ("red", "green")


def error() -> None:
    try:
        lm("Hello", top_p=7)
    except Exception as failure:
        assert "top_p" in str(failure), failure
    else:
        raise AssertionError("it was served")


for check in (chat, stream, tool, structured, error):
    check()
    print("ok", check.__name__, flush=True)
