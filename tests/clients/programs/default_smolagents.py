"""smolagents, against a server of no flags. ``URL`` and the model's name as arguments."""

import json
import sys

from smolagents import OpenAIModel, Tool, ToolCallingAgent
from smolagents.models import ChatMessage, MessageRole

URL, MODEL = sys.argv[1:3]
QUESTION = [ChatMessage(role=MessageRole.USER, content="Which colour has grass?")]
SCHEMA = {"type": "object", "properties": {"colour": {"enum": ["red", "green"]}}, "required": ["colour"]}


def model(**more: object) -> OpenAIModel:
    settings = {"temperature": 0, "max_tokens": 100, "client_kwargs": {"max_retries": 0}}
    return OpenAIModel(model_id=MODEL, api_base=f"{URL}/v1", api_key="none", **settings | more)


class Weather(Tool):
    name = "weather"
    description = "The weather of a city."
    inputs = {"city": {"type": "string", "description": "its name"}}
    output_type = "string"

    def forward(self, city: str) -> str:
        return f"Sunny in {city}."


def chat() -> None:
    assert model().generate(QUESTION).content


def stream() -> None:
    parts = model().generate_stream(QUESTION)
    assert "".join(part.content or "" for part in parts) == model().generate(QUESTION).content


def tool() -> None:
    """A call that must be made, and an agent's loop of such calls; a small model may never say that it is done."""
    reply = model().generate(QUESTION, tools_to_call_from=[Weather()])
    assert reply.tool_calls[0].function.name == "weather"
    agent = ToolCallingAgent(tools=[Weather()], model=model(), max_steps=2, verbosity_level=0)
    agent.run("How is the weather in Paris?")  # raises AgentGenerationError for what the server refuses
    assert [call for step in agent.memory.steps for call in getattr(step, "tool_calls", None) or ()]


def structured() -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    assert json.loads(model().generate(QUESTION, response_format=wanted).content)["colour"] in ("red", "green")


def error() -> None:
    try:
        model(top_p=7).generate(QUESTION)
    except Exception as failure:
        assert "top_p" in str(failure), failure
    else:
        raise AssertionError("it was served")


for check in (chat, stream, tool, structured, error):
    check()
    print("ok", check.__name__, flush=True)
