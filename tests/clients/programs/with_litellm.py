"""LiteLLM. ``URL EMBEDDINGS_URL`` as arguments."""

import asyncio
import sys

import litellm

URL, EMBEDDINGS = sys.argv[1:3]
HELLO = [{"role": "user", "content": "Hello"}]
ASK = {
    "model": "openai/tiny", "api_base": f"{URL}/v1", "api_key": "none", "messages": HELLO, "max_tokens": 12,
    "temperature": 0, "num_retries": 0,
}  # fmt: skip


def chat() -> None:
    reply = litellm.completion(**ASK)
    assert reply.choices[0].message.content
    assert reply.usage.completion_tokens <= 12


def stream() -> None:
    whole = litellm.completion(**ASK).choices[0].message.content
    chunks = list(litellm.completion(**ASK, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole


def n() -> None:
    assert len(litellm.completion(**ASK | {"n": 2, "temperature": 1}).choices) == 2


def logprobs() -> None:
    reply = litellm.completion(**ASK, logprobs=True, top_logprobs=2)
    assert all(len(entry.top_logprobs) == 2 for entry in reply.choices[0].logprobs.content)


def error() -> None:
    try:
        litellm.completion(**ASK | {"top_p": 7})
    except litellm.BadRequestError as failure:
        assert "top_p" in str(failure)
    else:
        raise AssertionError("it was served")


def text_completion() -> None:
    ask = {"model": "text-completion-openai/tiny", "api_base": f"{URL}/v1", "api_key": "none", "temperature": 0}
    assert litellm.text_completion(**ask, prompt="Hello", max_tokens=12).choices[0].text


def embeddings() -> None:
    reply = litellm.embedding("openai/tiny", ["one", "two"], api_base=f"{EMBEDDINGS}/v1", api_key="none")
    assert len(reply.data) == 2


def asynchronous() -> None:
    async def work() -> None:
        whole = (await litellm.acompletion(**ASK)).choices[0].message.content
        pieces = [chunk async for chunk in await litellm.acompletion(**ASK, stream=True)]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in pieces) == whole

    asyncio.run(work())


for check in (chat, stream, n, logprobs, error, text_completion, embeddings, asynchronous):
    check()
    print("ok", check.__name__, flush=True)
