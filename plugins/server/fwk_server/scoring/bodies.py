"""The fields of the requests and replies."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from fwk_server._common.chat.models import MAX_INPUTS, MAX_NAME, STRING, Input, Standing, array
from fwk_server._common.documented import Reply
from fwk_server._common.fields import CONTEXT

Name = Annotated[str, Field(max_length=MAX_NAME)]
Text = Annotated[str, WithJsonSchema(STRING)]
Texts = Annotated[Any, WithJsonSchema({"anyOf": [STRING, array(STRING, MAX_INPUTS, minItems=1)]})]
_DOCUMENT = {"type": "object", "required": ["text"], "properties": {"text": STRING}, "x-limit": CONTEXT}
Documents = Annotated[Any, WithJsonSchema(array({"anyOf": [STRING, _DOCUMENT]}, MAX_INPUTS, minItems=1))]


class RerankRequest(Standing):
    """``POST /v1/rerank``, ``/rerank`` and ``/v2/rerank``."""

    query: Text
    documents: Documents
    model: Name | None = None
    top_n: Annotated[int, Field(ge=1, le=MAX_INPUTS)] | None = Field(
        None, description="How many of the best to return."
    )
    return_documents: bool | None = Field(None, description="Default: true, and false for /v2/rerank (Cohere's).")


class ScoreRequest(Standing):
    """``POST /v1/score`` and ``/score``."""

    text_1: Texts
    text_2: Texts
    model: Name | None = None


class ClassifyRequest(Standing):
    """``POST /classify``."""

    input: Input
    model: Name | None = None
    use_activation: bool | None = Field(None, description="False: what the model's last layer gives out.")
    add_special_tokens: bool | None = None


class PoolingRequest(Standing):
    """``POST /pooling``."""

    input: Input
    model: Name | None = None
    encoding_format: Literal["float", "base64"] | None = None
    add_special_tokens: bool | None = None


class UsageReply(Reply):
    """Tokens that were read."""

    prompt_tokens: int
    total_tokens: int


class RerankResult(Reply):
    """One document."""

    index: int
    relevance_score: float
    document: dict[str, str] | None = None


class RerankReply(Reply):
    """Documents, the best first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: UsageReply


class ListReply(Reply):
    """Scores, classes or vectors, in the order of the inputs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[dict[str, Any]]
    usage: UsageReply
