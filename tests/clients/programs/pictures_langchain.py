"""langchain-openai sends a picture in each form that it has. ``URL`` and the picture's base64 as arguments."""

import sys

from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI

URL, PICTURE = sys.argv[1:3]
TEXT = {"type": "text", "text": "What is this?"}
FORMS = {
    "image_url": {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PICTURE}"}},
    "image_block": {"type": "image", "base64": PICTURE, "mime_type": "image/png"},
    "source_type": {"type": "image", "source_type": "base64", "data": PICTURE, "mime_type": "image/png"},
}


def model(**settings) -> ChatOpenAI:
    common = {"model": "tiny", "base_url": f"{URL}/v1", "api_key": "none", "max_retries": 0, "max_tokens": 16}
    return ChatOpenAI(**common, temperature=0, **settings)


def shows(form: str, **settings) -> None:
    asked = model(**settings)
    plain = asked.invoke([HumanMessage([TEXT])])
    shown = asked.invoke([HumanMessage([FORMS[form], TEXT])])
    assert shown.usage_metadata["input_tokens"] > plain.usage_metadata["input_tokens"] + 10
    pieces = list(asked.stream([HumanMessage([FORMS[form], TEXT])]))
    assert "".join(piece.text for piece in pieces) == shown.text


for name in FORMS:
    shows(name)
    print("ok", name, flush=True)
shows("image_url", use_responses_api=True)
shows("image_block", use_responses_api=True)
print("ok responses", flush=True)
