"""ollama sends a picture through each of its doors. ``URL`` and the picture's base64 as arguments."""

import base64
import sys
import tempfile
from pathlib import Path

import ollama

URL, PICTURE = sys.argv[1:3]
client = ollama.Client(host=URL)
GREEDY = {"temperature": 0, "num_predict": 8}


def asked(**more) -> list[dict]:
    return [{"role": "user", "content": "What is this?", **more}]


def chat() -> None:
    plain = client.chat("tiny", asked(), options=GREEDY).prompt_eval_count
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "it.png"
        path.write_bytes(base64.b64decode(PICTURE))
        for image in (PICTURE, base64.b64decode(PICTURE), path):
            assert client.chat("tiny", asked(images=[image]), options=GREEDY).prompt_eval_count > plain + 10


def stream() -> None:
    whole = client.chat("tiny", asked(images=[PICTURE]), options=GREEDY).message.content
    parts = client.chat("tiny", asked(images=[PICTURE]), options=GREEDY, stream=True)
    assert "".join(part.message.content for part in parts) == whole


def generate() -> None:
    plain = client.generate("tiny", "What is this?", options=GREEDY)
    shown = client.generate("tiny", "What is this?", images=[PICTURE], options=GREEDY)
    assert shown.prompt_eval_count > plain.prompt_eval_count + 10
    parts = client.generate("tiny", "What is this?", images=[PICTURE], options=GREEDY, stream=True)
    assert "".join(part.response for part in parts) == shown.response


def capabilities() -> None:
    assert "vision" in client.show("tiny").capabilities


def error() -> None:
    try:
        client.chat("tiny", asked(images=[b"not an image"]))
    except ollama.ResponseError as failure:
        assert failure.status_code == 400, failure
        assert "messages[0].images[0]" in str(failure), failure
    else:
        raise AssertionError("it was served")


for check in (chat, stream, generate, capabilities, error):
    check()
    print("ok", check.__name__, flush=True)
