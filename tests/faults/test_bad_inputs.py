"""86 requests that are valid JSON and wrong: each is refused as the client's fault, by the name of what is wrong."""

from __future__ import annotations

from typing import Any

from tests.helpers.client import connect
from tests.helpers.rig import VOCAB, Server

TEXT: dict[str, Any] = {"prompt": "Hi", "max_tokens": 1}
USER = {"role": "user", "content": "Hi"}
CHAT: dict[str, Any] = {"messages": [USER], "max_tokens": 1}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ANSWER = {"role": "tool", "content": "4", "tool_call_id": "c1"}


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f"} | function}


def said(*messages: Any) -> dict[str, Any]:
    return {"messages": list(messages)}


def grammar(**kind: Any) -> dict[str, Any]:
    return {"structured_outputs": kind}


def schema(of: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": of}}}


COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": 7}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [[1], "a"]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [VOCAB]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": "x" * 100_000}, "prompt"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"min_tokens": 2}, "min_tokens"),
    ({"n": 0}, "n"),
    ({"n": 3, "best_of": 2}, "best_of"),
    ({"n": 100_000}, "n"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"seed": 2**64}, "seed"),
    ({"stop": [1]}, "stop"),
    ({"stop": {}}, "stop"),
    ({"stop": ["x"] * 1000}, "stop"),
    ({"stop_token_ids": [VOCAB]}, "stop_token_ids"),
    ({"stop_token_ids": "7"}, "stop_token_ids"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {str(VOCAB): 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
    ({"bad_words": [""]}, "bad_words"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": 1000}, "logprobs"),
    ({"echo": "yes"}, "echo"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    (grammar(regex="("), "structured_outputs.regex"),
    (grammar(regex="a", choice=["b"]), "structured_outputs"),
    (grammar(choice=[]), "structured_outputs.choice"),
    (grammar(json={"type": "thing"}), "structured_outputs.json"),
    (grammar(json={"$ref": "#/nowhere"}), "structured_outputs.json"),
    (grammar(grammar="start: ???"), "structured_outputs.grammar"),
]

CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    (said("Hi"), "messages[0]"),
    (said({}), "messages[0]"),
    (said({"role": "user"}), "messages[0]"),
    (said({"content": "Hi"}), "messages[0]"),
    (said({"role": "king", "content": "Hi"}), "messages[0]"),
    (said({"role": "user", "content": 7}), "messages[0]"),
    (said({"role": "user", "content": [{"type": "text"}]}), "messages[0]"),
    (said({"role": "user", "content": [{"type": "smell", "smell": "x"}]}), "messages[0]"),
    (said({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///x"}}]}), "messages[0]"),
    (said(USER, ANSWER), "messages[1]"),
    (said(USER, {"role": "assistant", "tool_calls": [CALL]}, ANSWER | {"tool_call_id": "c2"}), "messages[2]"),
    (said(USER, {"role": "assistant", "tool_calls": [{"id": "c1"}]}, ANSWER), "messages[1]"),
    (said(USER, {"role": "assistant", "tool_calls": "f()"}), "messages[1]"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 1000}, "top_logprobs"),
    ({"tools": {}}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tools": [tool(name="")]}, "tools"),
    ({"tools": [tool(name=7)]}, "tools"),
    ({"tools": [tool(parameters=[1])]}, "tools"),
    ({"tools": [tool(parameters={"type": "thing"})]}, "tools"),
    ({"tools": [tool(), tool()]}, "tools"),
    ({"tools": [tool()], "tool_choice": "always"}, "tool_choice"),
    ({"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "poem"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    (schema({"type": "thing"}), "response_format"),
    (schema([1]), "response_format"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
]


def test_there_are_86() -> None:
    assert len(COMPLETIONS) + len(CHATS) == 86


async def test_each_is_refused_by_name(tiny: Server) -> None:
    refused = 0
    wrong: list[str] = []
    tiny.settle()
    async with connect(tiny) as client:
        for path, good, every in (("/v1/completions", TEXT, COMPLETIONS), ("/v1/chat/completions", CHAT, CHATS)):
            assert (await client.post(good, path))[0] == 200
            steps = tiny.stats()["steps"]
            for bad, param in every:
                status, reply = await client.post(good | bad, path)
                named = (reply.get("error") or {}).get("param") or ""
                if status == 400 and named.startswith(param):
                    refused += 1
                else:
                    wrong.append(f"{str(bad)[:100]}: {status}, {named!r} for {param!r}: {str(reply)[:200]}")
            assert not wrong, "\n".join(wrong)
            assert tiny.stats()["steps"] == steps, "something refused was computed"
    assert refused == 86
    tiny.check_invariants()
