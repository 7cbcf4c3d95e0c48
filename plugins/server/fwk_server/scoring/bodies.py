"""The fields of the requests and replies."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from fwk_server._common.chat.models import MAX_INPUTS, MAX_NAME, STRING, TOKEN_ID, Input, Standing, array
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
    """``POST /v1/score`` and ``/score``: ``text_1`` and ``text_2``, or SGLang's other fields of a generating model."""

    text_1: Texts = None
    text_2: Texts = None
    query: Input = Field(None, description="SGLang's: what stands before each item.")
    items: Input = Field(None, description="Texts, or arrays of token ids, as query is.")
    label_token_ids: Annotated[Any, WithJsonSchema(array(TOKEN_ID, 1_024, minItems=1))] = Field(
        None, description="Tokens whose probabilities behind query and item are the scores."
    )
    apply_softmax: bool | None = Field(None, description="True: the labels' probabilities add up to one.")
    item_first: bool | None = Field(None, description="True: items stand before the query.")
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


class LabelScores(Reply):
    """A row for each item, a probability for each label."""

    id: str
    object: Literal["scoring"]
    created: int
    model: str
    scores: list[list[float]]
    usage: dict[str, Any]


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
