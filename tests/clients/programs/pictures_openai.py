"""openai-python sends a picture through each of its doors. ``URL`` and the picture's base64 as arguments."""

import asyncio
import sys

import openai

URL, PICTURE = sys.argv[1:3]
DATA = f"data:image/png;base64,{PICTURE}"
SETTINGS = {"base_url": f"{URL}/v1", "api_key": "none", "max_retries": 0}
client = openai.OpenAI(**SETTINGS)
TEXT = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}]}]
SHOWN = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": DATA}}, *TEXT[0]["content"]]}]
ASK = {"model": "tiny", "max_tokens": 8, "temperature": 0}
QUESTION = {"type": "input_text", "text": "What is this?"}
RESPOND = {"model": "tiny", "max_output_tokens": 16, "temperature": 0}


def chat() -> None:
    plain, shown = (client.chat.completions.create(**ASK, messages=messages).usage for messages in (TEXT, SHOWN))
    assert shown.prompt_tokens > plain.prompt_tokens + 10, (plain, shown)
    image = {"type": "image_url", "image_url": {"url": DATA, "detail": "low"}}
    again = client.chat.completions.create(
        **ASK, messages=[{"role": "user", "content": [image, TEXT[0]["content"][0]]}]
    )
    assert again.usage.prompt_tokens == shown.prompt_tokens


def stream() -> None:
    whole = client.chat.completions.create(**ASK, messages=SHOWN).choices[0].message.content
    chunks = client.chat.completions.create(**ASK, messages=SHOWN, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole


def responses() -> None:
    image = {"type": "input_image", "image_url": DATA, "detail": "auto"}
    plain = client.responses.create(**RESPOND, input=[{"role": "user", "content": [QUESTION]}])
    shown = client.responses.create(**RESPOND, input=[{"role": "user", "content": [image, QUESTION]}])
    assert shown.usage.input_tokens > plain.usage.input_tokens + 10
    events = list(
        client.responses.create(**RESPOND, input=[{"role": "user", "content": [image, QUESTION]}], stream=True)
    )
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == shown.output_text
    assert events[-1].response.output_text == shown.output_text


def responses_file() -> None:
    file = {"type": "input_file", "filename": "it.png", "file_data": DATA}
    image = {"type": "input_image", "image_url": DATA, "detail": "auto"}
    found = [
        client.responses.create(**RESPOND, input=[{"role": "user", "content": [part, QUESTION]}]).usage.input_tokens
        for part in (file, image)
    ]
    assert found[0] == found[1]


def asynchronous() -> None:
    async def work() -> int:
        async with openai.AsyncOpenAI(**SETTINGS) as other:
            return (await other.chat.completions.create(**ASK, messages=SHOWN)).usage.prompt_tokens

    assert asyncio.run(work()) > 40


def error() -> None:
    wrong = {"type": "image_url", "image_url": {"url": "data:image/png;base64,bm90IGFuIGltYWdl"}}
    try:
        client.chat.completions.create(**ASK, messages=[{"role": "user", "content": [wrong]}])
    except openai.BadRequestError as failure:
        assert failure.param == "messages[0].content[0].image_url", failure.body
    else:
        raise AssertionError("it was served")
    wrong = {"type": "input_image", "image_url": "data:image/png;base64,bm90IGFuIGltYWdl"}
    try:
        client.responses.create(**RESPOND, input=[{"role": "user", "content": [wrong]}])
    except openai.BadRequestError as failure:
        assert failure.param == "input[0].content[0].image_url", failure.body
    else:
        raise AssertionError("it was served")


for check in (chat, stream, responses, responses_file, asynchronous, error):
    check()
    print("ok", check.__name__, flush=True)
