"""LiteLLM's two routes for Ollama. ``URL EMBEDDINGS_URL SCRIPTED_URL``; the last one's model calls tools."""

import asyncio
import json
import sys

import litellm

URL, EMBEDDINGS, SCRIPTED = sys.argv[1:4]
ROUTES = ("ollama", "ollama_chat")
HELLO = [{"role": "user", "content": "Hello"}]
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
TOOLS = [{"type": "function", "function": {"name": "Bash", "description": "Run it.", "parameters": PARAMETERS}}]


def ask(route: str, **more: object) -> dict[str, object]:
    """No key is given: Ollama has none."""
    base = {"model": f"{route}/tiny", "api_base": URL, "messages": HELLO, "max_tokens": 12, "temperature": 0}
    return base | {"num_retries": 0} | more


def chat() -> None:
    for route in ROUTES:
        reply = litellm.completion(**ask(route))
        assert reply.choices[0].message.content, route
        assert 0 < reply.usage.completion_tokens <= 12, reply.usage


def stream() -> None:
    for route in ROUTES:
        whole = litellm.completion(**ask(route)).choices[0].message.content
        chunks = list(litellm.completion(**ask(route), stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole, route


def error() -> None:
    for route in ROUTES:
        try:
            litellm.completion(**ask(route, top_p=7))
        except litellm.BadRequestError as failure:
            assert "top_p" in str(failure), failure
        else:
            raise AssertionError("it was served")


def text_completion() -> None:
    reply = litellm.text_completion("Hello", model="ollama/tiny", api_base=URL, max_tokens=12, temperature=0)
    assert reply.choices[0].text


def embeddings() -> None:
    reply = litellm.embedding("ollama/tiny", ["one", "two"], api_base=EMBEDDINGS)
    assert len(reply.data) == 2
    assert len(reply.data[0]["embedding"]) == 64


def asynchronous() -> None:
    async def work(route: str) -> None:
        whole = (await litellm.acompletion(**ask(route))).choices[0].message.content
        pieces = [chunk async for chunk in await litellm.acompletion(**ask(route), stream=True)]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in pieces) == whole, route

    for route in ROUTES:
        asyncio.run(work(route))


def commands(streams: bool) -> None:
    """Two calls, each with its result, and an answer."""
    messages, made = [{"role": "user", "content": "Write a note and read it"}], []
    for result in ("", "written by a tool", None):
        given = ask("ollama_chat", model="ollama_chat/scripted", api_base=SCRIPTED, max_tokens=200)
        reply = litellm.completion(**given | {"messages": messages, "tools": TOOLS, "stream": streams})
        if streams:
            reply = litellm.stream_chunk_builder(list(reply))
        choice = reply.choices[0]
        if result is None:
            assert "The note says: written by a tool" in choice.message.content, choice
            assert choice.finish_reason == "stop", choice
            break
        [call] = choice.message.tool_calls
        assert call.function.name == "Bash", call
        assert choice.finish_reason == "tool_calls", choice
        made.append(json.loads(call.function.arguments)["command"])
        messages += [choice.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": result}]
    assert made == ["echo written by a tool > note.txt", "cat note.txt"], made


def tool() -> None:
    commands(False)


def tool_streamed() -> None:
    commands(True)


def tool_by_prompt() -> None:
    """The older route offers tools in the prompt's text, and reads the call from an answer in JSON."""
    given = ask("ollama", model="ollama/scripted", api_base=SCRIPTED, max_tokens=200)
    choice = litellm.completion(**given | {"tools": TOOLS}).choices[0]
    [call] = choice.message.tool_calls
    assert call.function.name == "Bash", call
    assert json.loads(call.function.arguments) == {"command": "echo written by a tool > note.txt"}, call
    assert choice.finish_reason == "tool_calls", choice


for check in (chat, stream, error, text_completion, embeddings, asynchronous, tool, tool_streamed, tool_by_prompt):
    check()
    print("ok", check.__name__, flush=True)
