"""``fwk chat``: a terminal chat with a running server, or with a model loaded here."""

from __future__ import annotations

import http.client
import json
import sys
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fwk.cli.common import note, read_options
from fwk.cli.option_parsing import Parser
from fwk.errors import FwkError, RequestFailed
from fwk.process.log import set_up_log
from fwk.types import SamplingParams
from fwk_kit.cli.generate import add_sampling_flags

Messages = list[dict[str, str]]
Answer = Callable[[Messages], Iterator[str]]

HELP = "commands: /clear forget the conversation, /system TEXT set a system message, /exit leave"


def run(argv: Sequence[str]) -> int:
    """Talk until the input ends."""
    parser = Parser("fwk chat", description="Talk to a model in the terminal.", allow_abbrev=False)
    parser.add_argument("--url", help="a running server, such as http://127.0.0.1:8000; else a model is loaded here")
    parser.add_argument("--key", help="API key of that server")
    parser.add_argument("--system", help="system message")
    add_sampling_flags(parser, None)
    if any(word == "--url" or word.startswith("--url=") for word in argv):
        arguments = parser.parse_args(argv)
        return converse(_remote(arguments), arguments.system)
    plugins, config, arguments = read_options(parser, argv)
    set_up_log("warning")
    from fwk.engine.llm import LLM  # noqa: PLC0415 - torch comes with it

    with LLM.from_config(config, plugins, note) as llm:

        def answer(messages: Messages) -> Iterator[str]:
            yield from llm.stream(llm.text.chat_ids(messages), _sampling(arguments))

        return converse(answer, arguments.system)


def converse(answer: Answer, system: str | None) -> int:
    """The dialogue itself."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        note(HELP)
    messages = _fresh(system)
    while True:
        try:
            text = input("> " if is_terminal else "").strip()
        except EOFError:
            return 0
        if not text:
            continue
        if text in ("/exit", "/quit"):
            return 0
        if text == "/clear":
            messages = _fresh(system)
            continue
        if text.startswith("/system"):
            system = text.removeprefix("/system").strip() or None
            messages = _fresh(system)
            continue
        if text.startswith("/"):
            note(HELP)
            continue
        messages.append({"role": "user", "content": text})
        _reply(answer, messages)


def _reply(answer: Answer, messages: Messages) -> None:
    """Print one answer as it comes and remember it; Ctrl-C cuts it short, an error takes the question back."""
    reply = ""
    try:
        for piece in answer(messages):
            reply += piece
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        pass
    except FwkError as error:
        note(f"error: {error}")
        messages.pop()
        return
    print()
    messages.append({"role": "assistant", "content": reply})


def _fresh(system: str | None) -> Messages:
    return [{"role": "system", "content": system}] if system else []


def _sampling(arguments: Any) -> SamplingParams:
    return SamplingParams(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        seed=arguments.seed,
    )


def _remote(arguments: Any) -> Answer:
    """Answers from a server that speaks OpenAI's API."""
    url = urllib.parse.urlsplit(arguments.url if "//" in arguments.url else f"http://{arguments.url}")
    connect = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection

    def answer(messages: Messages) -> Iterator[str]:
        body: dict[str, Any] = {"messages": messages, "stream": True, "temperature": arguments.temperature}
        for name in ("max_tokens", "seed"):
            if getattr(arguments, name) is not None:
                body[name] = getattr(arguments, name)
        if arguments.top_p != 1.0:
            body["top_p"] = arguments.top_p
        if arguments.top_k:
            body["top_k"] = arguments.top_k
        headers = {"content-type": "application/json"}
        if arguments.key:
            headers["authorization"] = f"Bearer {arguments.key}"
        connection = connect(url.netloc, timeout=600)
        try:
            path = url.path.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
            connection.request("POST", path, json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise RequestFailed(_error_of(response.read()) or f"HTTP {response.status}")
            yield from _pieces(response)
        except OSError as error:
            raise RequestFailed(f"{arguments.url}: {error}") from None
        finally:
            connection.close()

    return answer


def _pieces(response: http.client.HTTPResponse) -> Iterator[str]:
    for line in response:
        if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
            continue
        event = json.loads(line[5:])
        if "error" in event:
            raise RequestFailed(event["error"].get("message", "the server reported an error"))
        for choice in event.get("choices", []):
            yield choice["delta"].get("content") or ""


def _error_of(body: bytes) -> str | None:
    try:
        return json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return None
