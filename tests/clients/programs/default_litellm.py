"""LiteLLM, against a server of no flags. ``URL`` and the model's name as arguments."""

import json
import sys

import litellm

URL, MODEL = sys.argv[1:3]
MESSAGES = [{"role": "user", "content": "How is the weather in Paris?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
SCHEMA = {"type": "object", "properties": {"colour": {"enum": ["red", "green"]}}, "required": ["colour"]}


def ask(**more: object):
    base = {"max_tokens": 100, "temperature": 0, "num_retries": 0, "max_retries": 0, "api_key": "none"}
    return litellm.completion(model=f"openai/{MODEL}", messages=MESSAGES, api_base=f"{URL}/v1", **base | more)


def chat() -> None:
    assert ask().choices[0].message.content


def stream() -> None:
    whole = ask().choices[0].message.content
    assert "".join(chunk.choices[0].delta.content or "" for chunk in ask(stream=True)) == whole


def tool() -> None:
    call = ask(tools=TOOLS, tool_choice="required").choices[0].message.tool_calls[0]
    assert isinstance(json.loads(call.function.arguments)["city"], str)


def structured() -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    assert json.loads(ask(response_format=wanted).choices[0].message.content)["colour"] in ("red", "green")


def error() -> None:
    try:
        ask(top_p=7)
    except litellm.BadRequestError as failure:
        assert "top_p" in str(failure), failure
    else:
        raise AssertionError("it was served")


for check in (chat, stream, tool, structured, error):
    check()
    print("ok", check.__name__, flush=True)
