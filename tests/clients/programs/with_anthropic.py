"""anthropic, against a server of no flags. ``URL`` and the model's name as arguments."""

import sys

import anthropic

URL, MODEL = sys.argv[1:3]
client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
MESSAGES = [{"role": "user", "content": "What is the weather in Paris?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
GREEDY = {"temperature": 0}
TOOL = {"name": "weather", "description": "The weather of a city.", "input_schema": SCHEMA}


def chat() -> None:
    reply = client.messages.create(model=MODEL, max_tokens=20, messages=MESSAGES, extra_body=GREEDY)
    assert reply.content[0].text
    assert reply.usage.output_tokens <= 20


def stream() -> None:
    whole = client.messages.create(model=MODEL, max_tokens=20, messages=MESSAGES, extra_body=GREEDY).content[0].text
    with client.messages.stream(model=MODEL, max_tokens=20, messages=MESSAGES, extra_body=GREEDY) as events:
        assert "".join(events.text_stream) == whole


def tool() -> None:
    reply = client.messages.create(
        model=MODEL, max_tokens=200, messages=MESSAGES, tools=[TOOL], tool_choice={"type": "tool", "name": "weather"}
    )
    call = reply.content[-1]
    assert (call.type, call.name, reply.stop_reason) == ("tool_use", "weather", "tool_use")
    assert isinstance(call.input["city"], str)
    more = [
        *MESSAGES,
        {"role": "assistant", "content": reply.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "Sunny."}]},
    ]
    assert client.messages.create(model=MODEL, max_tokens=20, messages=more, tools=[TOOL]).content


def structured() -> None:
    """By a tool that must be called, as Anthropic's own guide has it; streamed."""
    with client.messages.stream(
        model=MODEL, max_tokens=200, messages=MESSAGES, tools=[TOOL], tool_choice={"type": "any"}
    ) as events:
        assert isinstance(events.get_final_message().content[-1].input["city"], str)


def error() -> None:
    try:
        client.messages.create(model=MODEL, max_tokens=20, messages=MESSAGES, extra_body={"temperature": -7})
    except anthropic.BadRequestError as failure:
        assert "temperature" in str(failure), failure
    else:
        raise AssertionError("it was served")


for check in (chat, stream, tool, structured, error):
    check()
    print("ok", check.__name__, flush=True)
