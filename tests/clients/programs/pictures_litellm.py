"""LiteLLM sends a picture to each API that it speaks. ``URL`` and the picture's base64 as arguments."""

import asyncio
import sys

import litellm

URL, PICTURE = sys.argv[1:3]
DATA = f"data:image/png;base64,{PICTURE}"
TEXT = {"type": "text", "text": "What is this?"}
PLAIN = [{"role": "user", "content": [TEXT]}]
SHOWN = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": DATA}}, TEXT]}]
DOORS = {
    "openai": {"model": "openai/tiny", "api_base": f"{URL}/v1"},
    "anthropic": {"model": "anthropic/tiny", "api_base": URL},
    "ollama_chat": {"model": "ollama_chat/tiny", "api_base": URL},
    "ollama": {"model": "ollama/tiny", "api_base": URL},
}
COMMON = {"api_key": "none", "max_tokens": 8, "temperature": 0, "num_retries": 0}


def through(door: str) -> None:
    ask = {**COMMON, **DOORS[door]}
    plain = litellm.completion(**ask, messages=PLAIN).usage.prompt_tokens
    shown = litellm.completion(**ask, messages=SHOWN)
    assert shown.usage.prompt_tokens > plain + 10, (plain, shown.usage)
    chunks = list(litellm.completion(**ask, messages=SHOWN, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == shown.choices[0].message.content


def responses() -> None:
    content = [{"type": "input_image", "image_url": DATA}, {"type": "input_text", "text": "What is this?"}]
    ask = {"model": "openai/tiny", "api_base": f"{URL}/v1", "api_key": "none", "max_output_tokens": 16}
    plain = litellm.responses(**ask, input=[{"role": "user", "content": content[1:]}])
    assert litellm.responses(**ask, input=[{"role": "user", "content": content}]).usage.input_tokens > (
        plain.usage.input_tokens + 10
    )


def asynchronous() -> None:
    reply = asyncio.run(litellm.acompletion(**COMMON, **DOORS["openai"], messages=SHOWN))
    assert reply.usage.prompt_tokens > 40


for door in DOORS:
    through(door)
    print("ok", door, flush=True)
for check in (responses, asynchronous):
    check()
    print("ok", check.__name__, flush=True)
