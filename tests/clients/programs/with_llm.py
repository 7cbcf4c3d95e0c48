"""simonw's llm, with a model as its users add one: in extra-openai-models.yaml. ``URL`` as the first argument."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

URL = sys.argv[1]
FOLDER = Path(tempfile.mkdtemp(prefix="fwk-llm-"))
os.environ["LLM_USER_PATH"] = str(FOLDER)
MODEL = f"- model_id: ours\n  model_name: tiny\n  api_base: {URL}/v1\n"
(FOLDER / "extra-openai-models.yaml").write_text(MODEL + MODEL.replace("ours", "raw") + "  completion: true\n")

import llm  # noqa: E402 - it reads its folder when it is imported


def chat() -> None:
    reply = llm.get_model("ours").prompt("Hello", max_tokens=12, temperature=0, stream=False, key="none")
    assert reply.text()
    assert reply.usage().output <= 12


def stream() -> None:
    model = llm.get_model("ours")
    whole = model.prompt("Hello", max_tokens=12, temperature=0, stream=False, key="none").text()
    assert "".join(model.prompt("Hello", max_tokens=12, temperature=0, key="none")) == whole


def n() -> None:
    """llm has no option n: a conversation of two turns instead."""
    conversation = llm.get_model("ours").conversation()
    assert conversation.prompt("Hello", max_tokens=4, key="none").text() is not None
    assert conversation.prompt("And?", max_tokens=4, key="none").text() is not None
    assert len(conversation.responses) == 2


def logprobs() -> None:
    reply = llm.get_model("raw").prompt("Hello", max_tokens=4, logprobs=2, stream=False, key="none")
    reply.text()
    assert len(reply.response_json["choices"][0]["logprobs"]["token_logprobs"]) <= 4


def error() -> None:
    try:
        llm.get_model("ours").prompt("Hello", max_tokens=10**6, stream=False, key="none").text()
    except Exception as failure:
        assert "max_tokens" in str(failure), failure
    else:
        raise AssertionError("it was served")


def command_line() -> None:
    command = [sys.executable, "-m", "llm", "-m", "ours", "-o", "max_tokens", "6", "--key", "none", "Hello"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


for check in (chat, stream, n, logprobs, error, command_line):
    check()
    print("ok", check.__name__, flush=True)
