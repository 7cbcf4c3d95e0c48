"""openai-python: sync, async, the streaming helpers, parse, tools, embeddings. ``URL EMBEDDINGS_URL`` as arguments."""

import asyncio
import sys
from typing import Literal

import openai
from pydantic import BaseModel

URL, EMBEDDINGS = sys.argv[1:3]
CLIENT = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
HELLO = [{"role": "user", "content": "Hello"}]
ASK = {"model": "tiny", "messages": HELLO, "max_tokens": 12, "temperature": 0}
WORD = {**ASK, "extra_body": {"structured_outputs": {"regex": "[a-z]{5}"}}}
"""It ends by itself: the helpers make an error of an answer that was cut."""

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Answer(BaseModel):
    """What ``parse`` reads."""

    colour: Literal["red", "green"]
    is_sure: bool


def chat() -> None:
    reply = CLIENT.chat.completions.create(**ASK)
    assert reply.choices[0].message.content, reply
    assert reply.usage.completion_tokens <= 12


def stream() -> None:
    whole = CLIENT.chat.completions.create(**ASK).choices[0].message.content
    chunks = list(CLIENT.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole
    assert chunks[-1].usage.total_tokens > 0


def stream_helper() -> None:
    whole = CLIENT.chat.completions.create(**WORD).choices[0].message.content
    with CLIENT.chat.completions.stream(**WORD) as events:
        kinds = {event.type for event in events}
        final = events.get_final_completion()
    assert final.choices[0].message.content == whole, final
    assert {"chunk", "content.delta", "content.done"} <= kinds, kinds


def n() -> None:
    reply = CLIENT.chat.completions.create(**ASK | {"n": 2, "temperature": 1, "seed": 3})
    assert [choice.index for choice in reply.choices] == [0, 1]


def logprobs() -> None:
    entries = CLIENT.chat.completions.create(**ASK, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert all(len(entry.top_logprobs) == 3 and entry.logprob <= 0 for entry in entries)
    legacy = CLIENT.completions.create(model="tiny", prompt="Hello", max_tokens=4, logprobs=2)
    assert len(legacy.choices[0].logprobs.token_logprobs) == len(legacy.choices[0].logprobs.tokens)


def error() -> None:
    try:
        CLIENT.chat.completions.create(**ASK | {"top_p": 7})
    except openai.BadRequestError as failure:
        assert failure.param == "top_p", failure.body
        assert failure.type == "invalid_request_error", failure.body
    else:
        raise AssertionError("it was served")
    try:
        CLIENT.chat.completions.create(**ASK | {"model": "nobody"})
    except openai.NotFoundError as failure:
        assert failure.code == "model_not_found", failure.body
    else:
        raise AssertionError("it was served")


def parse() -> None:
    reply = CLIENT.chat.completions.parse(**ASK | {"max_tokens": 400}, response_format=Answer)
    assert isinstance(reply.choices[0].message.parsed, Answer), reply


def parse_streamed() -> None:
    with CLIENT.chat.completions.stream(**ASK | {"max_tokens": 400}, response_format=Answer) as events:
        assert isinstance(events.get_final_completion().choices[0].message.parsed, Answer)


def tools() -> None:
    ask = ASK | {"max_tokens": 400, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    reply = CLIENT.chat.completions.create(**ask)
    (call,) = reply.choices[0].message.tool_calls
    assert reply.choices[0].finish_reason == "tool_calls"
    assert call.function.name == "weather"
    with CLIENT.chat.completions.stream(**ask) as events:
        (streamed,) = events.get_final_completion().choices[0].message.tool_calls
    assert streamed.function.arguments == call.function.arguments


def embeddings() -> None:
    client = openai.OpenAI(base_url=f"{EMBEDDINGS}/v1", api_key="none", max_retries=0)
    reply = client.embeddings.create(model="tiny", input=["one", "two"])
    floats = client.embeddings.create(model="tiny", input=["one", "two"], encoding_format="float")
    assert [item.embedding for item in reply.data] == [item.embedding for item in floats.data]


def models() -> None:
    assert [model.id for model in CLIENT.models.list()] == ["tiny"]
    assert CLIENT.models.retrieve("tiny").id == "tiny"


def asynchronous() -> None:
    async def work() -> None:
        async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0) as client:
            whole = (await client.chat.completions.create(**ASK)).choices[0].message.content
            pieces = [c async for c in await client.chat.completions.create(**ASK, stream=True)]
            assert "".join(c.choices[0].delta.content or "" for c in pieces) == whole
            async with client.chat.completions.stream(**WORD) as events:
                assert len((await events.get_final_completion()).choices[0].message.content) == 5

    asyncio.run(work())


for check in (
    chat, stream, stream_helper, n, logprobs, error, parse, parse_streamed, tools, embeddings, models, asynchronous,
):  # fmt: skip
    check()
    print("ok", check.__name__, flush=True)
