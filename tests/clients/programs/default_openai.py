"""openai's Python library, against a server of no flags. ``URL`` and the model's name as arguments."""

import io
import json
import sys
import time
from typing import Literal

import openai
from pydantic import BaseModel

URL, MODEL = sys.argv[1:3]
client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
MESSAGES = [{"role": "user", "content": "How is the weather in Paris?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "The weather of a city.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]


class Answer(BaseModel):
    """What structured output is read into."""

    colour: Literal["red", "green"]


def ask(**more: object):
    return client.chat.completions.create(
        model=MODEL, messages=MESSAGES, **{"max_tokens": 100, "temperature": 0} | more
    )


def chat() -> None:
    assert ask().choices[0].message.content
    assert client.models.list().data[0].id == MODEL


def stream() -> None:
    """The helper takes an answer that was cut short for an error: this one ends at a word."""
    asked = {"stop": ["a", "e", "i"], "max_tokens": 1000}
    whole = ask(**asked).choices[0].message.content
    chunks = ask(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, temperature=0, **asked) as events:
        assert events.get_final_completion().choices[0].message.content == whole


def tool() -> None:
    assert ask(tools=TOOLS).choices[0].message
    [call] = ask(tools=TOOLS, tool_choice="required", parallel_tool_calls=False).choices[0].message.tool_calls
    assert isinstance(json.loads(call.function.arguments)["city"], str)


def structured() -> None:
    asked = {"model": MODEL, "messages": MESSAGES, "response_format": Answer, "max_tokens": 400}
    assert client.chat.completions.parse(**asked).choices[0].message.parsed.colour in ("red", "green")


def responses() -> None:
    asked = {"model": MODEL, "input": "Hello", "max_output_tokens": 50, "temperature": 0}
    reply = client.responses.create(**asked)
    with client.responses.stream(**asked) as events:
        *_, last = events  # completed, or incomplete where the model had more to say
    assert last.response.output_text == reply.output_text != ""
    more = client.responses.create(**asked | {"input": "And now?"}, previous_response_id=reply.id)
    assert more.previous_response_id == reply.id
    parsed = client.responses.parse(model=MODEL, input="Which colour has grass?", text_format=Answer)
    assert parsed.output_parsed.colour in ("red", "green")
    function = {"type": "function", **FUNCTION}
    called = client.responses.create(**asked, tools=[function], tool_choice="required")
    assert "function_call" in [item.type for item in called.output]


def batches() -> None:
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 5}
    lines = [
        json.dumps({"custom_id": str(i), "method": "POST", "url": "/v1/chat/completions", "body": body})
        for i in range(3)
    ]
    given = client.files.create(file=("in.jsonl", io.BytesIO("\n".join(lines).encode())), purpose="batch")
    batch = client.batches.create(input_file_id=given.id, endpoint="/v1/chat/completions", completion_window="24h")
    deadline = time.monotonic() + 60
    while batch.status not in ("completed", "failed"):
        assert time.monotonic() < deadline, batch
        time.sleep(0.2)
        batch = client.batches.retrieve(batch.id)
    rows = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    assert {row["custom_id"] for row in rows} == {"0", "1", "2"}
    assert all(row["response"]["status_code"] == 200 for row in rows)


def error() -> None:
    try:
        ask(top_p=7)
    except openai.BadRequestError as failure:
        assert failure.param == "top_p", failure.body
    else:
        raise AssertionError("it was served")


for check in (chat, stream, tool, structured, responses, batches, error):
    check()
    print("ok", check.__name__, flush=True)
