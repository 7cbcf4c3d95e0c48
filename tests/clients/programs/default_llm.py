"""simonw's llm with tools and schemas, against a server of no flags. ``URL`` and the model's name as arguments."""

import json
import os
import sys
import tempfile
from pathlib import Path

URL, MODEL = sys.argv[1:3]
FOLDER = Path(tempfile.mkdtemp(prefix="fwk-llm-"))
os.environ["LLM_USER_PATH"] = str(FOLDER)
ENTRY = (
    f"- model_id: ours\n  model_name: {MODEL}\n  api_base: {URL}/v1\n  supports_tools: true\n  supports_schema: true\n"
)
(FOLDER / "extra-openai-models.yaml").write_text(ENTRY)

import llm  # noqa: E402 - it reads its folder when it is imported

SHORT = {"max_tokens": 100, "temperature": 0, "key": "none"}
SCHEMA = {"type": "object", "properties": {"colour": {"enum": ["red", "green"]}}, "required": ["colour"]}


def weather(city: str) -> str:
    """The weather of a city."""
    return f"Sunny in {city}."


def chat() -> None:
    assert llm.get_model("ours").prompt("Hello", stream=False, **SHORT).text()


def stream() -> None:
    model = llm.get_model("ours")
    assert "".join(model.prompt("Hello", **SHORT)) == model.prompt("Hello", stream=False, **SHORT).text()


def tool() -> None:
    """llm has no forced calls: the model may answer in words."""
    for streams in (False, True):
        reply = llm.get_model("ours").prompt("How is the weather in Paris?", tools=[weather], stream=streams, **SHORT)
        assert reply.text() or reply.tool_calls()
    chain = llm.get_model("ours").chain("How is the weather in Paris?", tools=[weather], **CHAINED)
    try:
        assert chain.text() is not None
    except ValueError as failure:  # a small model calls again and again
        assert "limit" in str(failure).lower(), failure


CHAINED = {"key": "none", "options": {"max_tokens": 60, "temperature": 0}}


def structured() -> None:
    reply = llm.get_model("ours").prompt("Which colour has grass?", schema=SCHEMA, stream=False, **SHORT)
    assert json.loads(reply.text())["colour"] in ("red", "green")


def error() -> None:
    try:
        llm.get_model("ours").prompt("Hello", stream=False, **SHORT | {"max_tokens": 10**6}).text()
    except Exception as failure:
        assert "max_tokens" in str(failure), failure
    else:
        raise AssertionError("it was served")


for check in (chat, stream, tool, structured, error):
    check()
    print("ok", check.__name__, flush=True)
