"""langchain-openai. ``URL EMBEDDINGS_URL`` as arguments."""

import sys
from typing import Literal

import openai
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

URL, EMBEDDINGS = sys.argv[1:3]


def model(**settings) -> ChatOpenAI:
    return ChatOpenAI(
        **{"model": "tiny", "base_url": f"{URL}/v1", "api_key": "none", "max_retries": 0, "max_tokens": 12} | settings
    )


class Answer(BaseModel):
    """What structured output is read into."""

    colour: Literal["red", "green"]


def chat() -> None:
    reply = model(temperature=0).invoke("Hello")
    assert reply.content
    assert reply.usage_metadata["output_tokens"] <= 12


def stream() -> None:
    whole = model(temperature=0).invoke("Hello").content
    assert "".join(chunk.content for chunk in model(temperature=0).stream("Hello")) == whole


def n() -> None:
    result = model(n=2, temperature=1.0).generate([[HumanMessage("Hello")]])
    assert len(result.generations[0]) == 2


def logprobs() -> None:
    reply = model(logprobs=True, top_logprobs=2).invoke("Hello")
    assert all(len(entry["top_logprobs"]) == 2 for entry in reply.response_metadata["logprobs"]["content"])


def error() -> None:
    try:
        model(top_p=7).invoke("Hello")
    except openai.BadRequestError as failure:
        assert failure.param == "top_p", failure.body
    else:
        raise AssertionError("it was served")


def structured() -> None:
    reply = model(max_tokens=400).with_structured_output(Answer, method="json_schema").invoke("Which?")
    assert reply.colour in ("red", "green")


def tools() -> None:
    reply = (
        model(max_tokens=400, temperature=0)
        .bind_tools([Answer], tool_choice="Answer", parallel_tool_calls=False)
        .invoke("Which?")
    )
    assert reply.tool_calls[0]["name"] == "Answer", reply


def embeddings() -> None:
    client = OpenAIEmbeddings(
        model="tiny", base_url=f"{EMBEDDINGS}/v1", api_key="none", check_embedding_ctx_length=False, max_retries=0
    )
    first, second = client.embed_documents(["one", "two"])
    assert len(first) == len(second) > 0


for check in (chat, stream, n, logprobs, error, structured, tools, embeddings):
    check()
    print("ok", check.__name__, flush=True)
