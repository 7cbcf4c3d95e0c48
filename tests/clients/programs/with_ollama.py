"""ollama, against a server of no flags. ``URL`` and the model's name as arguments."""

import sys
from typing import Literal

import ollama
from pydantic import BaseModel

URL, MODEL = sys.argv[1:3]
client = ollama.Client(host=URL)
MESSAGES = [{"role": "user", "content": "What is the weather in Paris?"}]
GREEDY = {"temperature": 0, "num_predict": 20}


class Answer(BaseModel):
    """What structured output is read into."""

    colour: Literal["red", "green"]


def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: Its name.
    """
    return f"Sunny in {city}."


def chat() -> None:
    assert client.chat(MODEL, MESSAGES, options=GREEDY).message.content
    assert client.generate(MODEL, "Hello", options=GREEDY).response
    assert MODEL in [model.model.removesuffix(":latest") for model in client.list().models]


def stream() -> None:
    whole = client.chat(MODEL, MESSAGES, options=GREEDY).message.content
    assert "".join(part.message.content for part in client.chat(MODEL, MESSAGES, options=GREEDY, stream=True)) == whole


def tool() -> None:
    """Ollama has no forced calls: the model may answer in words, and a call has the right shape."""
    reply = client.chat(MODEL, MESSAGES, tools=[weather], options={"temperature": 0, "num_predict": 100})
    assert reply.message.content or reply.message.tool_calls
    for call in reply.message.tool_calls or []:
        assert call.function.name
    call = {"function": {"name": "weather", "arguments": {"city": "Paris"}}}
    more = [
        *MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "Sunny.", "tool_name": "weather"},
    ]
    reply = client.chat(MODEL, more, tools=[weather], options=GREEDY)
    assert reply.message.content or reply.message.tool_calls
    del more[-1]["tool_name"]  # as Home Assistant asks
    window = GREEDY | {"num_ctx": 8192}
    parts = list(client.chat(MODEL, more, tools=[weather], stream=True, keep_alive=-1, options=window, think=False))
    assert parts[-1].done
    assert any(part.message.content or part.message.tool_calls for part in parts)


def structured() -> None:
    reply = client.chat(MODEL, MESSAGES, format=Answer.model_json_schema(), options={"num_predict": 100})
    assert Answer.model_validate_json(reply.message.content)


def error() -> None:
    try:
        client.chat("no-such-model", MESSAGES)
    except ollama.ResponseError as failure:
        assert failure.status_code == 404, failure
    else:
        raise AssertionError("it was served")


for check in (chat, stream, tool, structured, error):
    check()
    print("ok", check.__name__, flush=True)
