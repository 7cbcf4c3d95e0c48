"""anthropic sends a picture through each of its doors. ``URL`` and the picture's base64 as arguments."""

import sys

import anthropic

URL, PICTURE = sys.argv[1:3]
client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
SOURCE = {"type": "base64", "media_type": "image/png", "data": PICTURE}
IMAGE, TEXT = {"type": "image", "source": SOURCE}, {"type": "text", "text": "What is this?"}
ASK = {"model": "tiny", "max_tokens": 8, "extra_body": {"temperature": 0}}
SHOWN = [{"role": "user", "content": [IMAGE, TEXT]}]
TOOL = {"name": "look", "input_schema": {"type": "object", "properties": {}}}
CALLED = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}


def length(usage) -> int:
    return usage.input_tokens + (usage.cache_read_input_tokens or 0)


def chat() -> None:
    plain = client.messages.create(**ASK, messages=[{"role": "user", "content": [TEXT]}])
    shown = client.messages.create(**ASK, messages=SHOWN)
    assert length(shown.usage) > length(plain.usage) + 10


def stream() -> None:
    whole = client.messages.create(**ASK, messages=SHOWN).content[0].text
    with client.messages.stream(**ASK, messages=SHOWN) as events:
        assert "".join(events.text_stream) == whole


def count_tokens() -> None:
    counted = client.messages.count_tokens(model="tiny", messages=SHOWN).input_tokens
    assert counted == length(client.messages.create(**ASK, messages=SHOWN).usage)


def tool_result() -> None:
    def asked(content) -> int:
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": content}
        messages = [{"role": "user", "content": "Look."}, {"role": "assistant", "content": [CALLED]}]
        messages.append({"role": "user", "content": [result]})
        return length(client.messages.create(**ASK, messages=messages, tools=[TOOL]).usage)

    assert asked([IMAGE, TEXT]) > asked([TEXT]) + 10


def error() -> None:
    wrong = {"type": "image", "source": {**SOURCE, "data": "bm90IGFuIGltYWdl"}}
    try:
        client.messages.create(**ASK, messages=[{"role": "user", "content": [wrong]}])
    except anthropic.BadRequestError as failure:
        assert "messages[0].content[0].source" in str(failure), failure
    else:
        raise AssertionError("it was served")


for check in (chat, stream, count_tokens, tool_result, error):
    check()
    print("ok", check.__name__, flush=True)
