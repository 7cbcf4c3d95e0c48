"""Requests that are valid JSON and wrong: each is refused as the client's fault, by the name of what is wrong."""

from __future__ import annotations

from typing import Any

from tests.helpers.client import connect
from tests.helpers.rig import VOCAB, Server
from tests.helpers.wrong_requests import Wrong, of_both, of_chat, of_completions

TEXT: dict[str, Any] = {"prompt": "Hi", "max_tokens": 1}
USER = {"role": "user", "content": "Hi"}
CHAT: dict[str, Any] = {"messages": [USER], "max_tokens": 1}


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f"} | function}


def said(*messages: Any) -> dict[str, Any]:
    return {"messages": list(messages)}


def grammar(**kind: Any) -> dict[str, Any]:
    return {"structured_outputs": kind}


def schema(of: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": of}}}


NO_IDS: list[Any] = [list(range(VOCAB)) * 3, [True], [1.0], ["1"], [None], [[1]], "12", {"1": 1}]
"""No lists of token ids, or of more than there are."""

BAD_WORDS: list[Any] = [[""], ["x" * 1025], ["a"] * 1025, ["é" * 40], [1], "word"]
COMPLETIONS: Wrong = [
    *of_both(VOCAB),
    *of_completions(VOCAB),
    *(({field: ids}, field) for field in ("stop_token_ids", "allowed_token_ids") for ids in NO_IDS),
    *(({"bad_words": words}, "bad_words") for words in BAD_WORDS),
    (grammar(regex="("), "structured_outputs.regex"),
    (grammar(regex="a", choice=["b"]), "structured_outputs"),
    (grammar(choice=[]), "structured_outputs.choice"),
    (grammar(json={"type": "thing"}), "structured_outputs.json"),
    (grammar(json={"$ref": "#/nowhere"}), "structured_outputs.json"),
    (grammar(grammar="start: ???"), "structured_outputs.grammar"),
]

CHATS: Wrong = [
    *of_both(VOCAB),
    *of_chat(),
    ({"messages": ""}, "messages"),
    (said({"content": "Hi"}), "messages[0]"),
    (said({"role": "user", "content": [{"type": "smell", "smell": "x"}]}), "messages[0]"),
    (said({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///x"}}]}), "messages[0]"),
    (said(USER, {"role": "assistant", "tool_calls": [{"id": "c1"}]}), "messages[1]"),
    (said(USER, {"role": "tool", "content": "4", "tool_call_id": "c1"}), "messages[1]"),
    ({"tools": {}}, "tools"),
    ({"tools": [tool(name="")]}, "tools"),
    ({"tools": [tool(name=7)]}, "tools"),
    ({"tools": [tool(parameters={"type": "thing"})]}, "tools"),
    ({"tools": [tool()], "tool_choice": "always"}, "tool_choice"),
    ({"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ({"response_format": {"type": "poem"}}, "response_format"),
    (schema({"type": "thing"}), "response_format"),
    (schema([1]), "response_format"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
]


async def test_each_is_refused_by_name(tiny: Server) -> None:
    assert len(COMPLETIONS) + len(CHATS) >= 86
    wrong: list[str] = []
    tiny.settle()
    async with connect(tiny) as client:
        for path, good, every in (("/v1/completions", TEXT, COMPLETIONS), ("/v1/chat/completions", CHAT, CHATS)):
            assert (await client.post(good, path))[0] == 200
            steps = tiny.stats()["steps"]
            for bad, param in every:
                status, reply = await client.post(good | bad, path)
                named = (reply.get("error") or {}).get("param") or ""
                if status != 400 or not named.startswith(param):
                    wrong.append(f"{str(bad)[:100]}: {status}, {named!r} for {param!r}: {str(reply)[:200]}")
            assert not wrong, "\n".join(wrong)
            assert tiny.stats()["steps"] == steps, "something refused was computed"
    tiny.check_invariants()
