"""The routes."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from fwk.errors import InvalidRequest
from fwk.interfaces.dialect import EmbedInput, GenerateInput, openai_error
from fwk_server._common import body
from fwk_server._common.caller import Caller, caller_of
from fwk_server._common.chat.dialect import ChatDialect
from fwk_server._common.chat.models import MAX_INPUTS, Standing
from fwk_server._common.chat.served import check_model
from fwk_server._common.inputs import read_prompts
from fwk_server._common.replies import json_response, off_loop, unless_gone
from fwk_server.scoring.bodies import (
    ClassifyRequest,
    LabelScores,
    ListReply,
    PoolingRequest,
    RerankReply,
    RerankRequest,
    ScoreRequest,
)
from fwk_server.scoring.labels import label_inputs, label_scores
from fwk_server.scoring.scores import PairScorer, probabilities

if TYPE_CHECKING:
    from fastapi import FastAPI

Body = TypeVar("Body", bound=Standing)
RERANK = ("/v1/rerank", "/rerank", "/v2/rerank")
SCORE = ("/v1/score", "/score")


class PoolingDialect(ChatDialect):
    """Scores and vectors of the served model."""

    requests = {
        **dict.fromkeys(RERANK, RerankRequest),
        **dict.fromkeys(SCORE, ScoreRequest),
        "/classify": ClassifyRequest,
        "/pooling": PoolingRequest,
    }

    def routes(self, app: FastAPI) -> None:
        for path in RERANK:
            self.route(app, path, self.rerank, reply=RerankReply)
        for path in SCORE:
            self.route(app, path, self.score, reply=ListReply | LabelScores)
        self.route(app, "/classify", self.classify, reply=ListReply)
        self.route(app, "/pooling", self.pooling, reply=ListReply)

    def error_body(self, status: int, message: str, param: str | None, code: str | None) -> dict[str, Any]:
        return openai_error(status, message, param, code)

    async def rerank(self, request: Request) -> Response:
        """Order documents by what they have to do with a query."""

        def read(call: RerankRequest, caller: Caller) -> tuple[list[str], PairScorer, list[EmbedInput]]:
            texts = _documents(call.documents)
            scorer = PairScorer(self.frontend)
            return texts, scorer, scorer.inputs([call.query], texts, ("query", "documents"))

        call, (texts, scorer, items) = await self._read(request, RerankRequest, read)
        scores = scorer.scores(await unless_gone(request, self.frontend.embed(items)), 1, len(texts))
        keeps = call.return_documents
        if keeps is None:
            keeps = request.url.path != "/v2/rerank"
        best = sorted(range(len(texts)), key=lambda i: -scores[i])[: call.top_n or len(texts)]
        results: list[dict[str, Any]] = [{"index": i, "relevance_score": scores[i]} for i in best]
        if keeps:
            for result in results:
                result["document"] = {"text": texts[result["index"]]}
        reply = {"id": f"rerank-{uuid.uuid4().hex}", "model": self._name(call.model), "results": results}
        return json_response({**reply, "usage": _usage(items)})

    async def score(self, request: Request) -> Response:
        """Score pairs of texts: one with each of several, or as many with as many; or tokens behind query and items."""
        data = await body.read(request)
        if b'"label_token_ids"' in data or b'"query"' in data:
            return await self._score_labels(request, data)

        def read(call: ScoreRequest, caller: Caller) -> tuple[tuple[int, int], PairScorer, list[EmbedInput]]:
            if call.apply_softmax is not None or call.item_first is not None or call.items is not None:
                raise InvalidRequest("items, apply_softmax and item_first need query and label_token_ids", "query")
            first, second = _texts(call.text_1, "text_1"), _texts(call.text_2, "text_2")
            if len(first) not in (1, len(second)):
                raise InvalidRequest(
                    f"text_1 must be one text or as many as text_2 has ({len(second)}), not {len(first)}", "text_1"
                )
            scorer = PairScorer(self.frontend)
            return (len(first), len(second)), scorer, scorer.inputs(first, second, ("text_1", "text_2"))

        call, (sizes, scorer, items) = await self._read(request, ScoreRequest, read, data)
        scores = scorer.scores(await unless_gone(request, self.frontend.embed(items)), *sizes)
        data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]
        return self._list("score", call.model, data, items)

    async def _score_labels(self, request: Request, data: bytes) -> Response:
        caller = caller_of(request)

        def read() -> tuple[ScoreRequest, list[GenerateInput]]:
            call = body.validate(ScoreRequest, body.parse(data))
            check_model(call.model, self.frontend.card)
            for name in ("query", "items", "label_token_ids"):
                if getattr(call, name) is None:
                    raise InvalidRequest(f"{name} is required: scores of labels need query, items and labels", name)
            for name in ("text_1", "text_2"):
                if getattr(call, name) is not None:
                    raise InvalidRequest(f"{name} is for scores of pairs: leave it out, or query and items", name)
            return call, label_inputs(call, self.frontend, caller)

        call, items = await off_loop(request, self.frontend, read)
        num_labels = len(call.label_token_ids)
        work = label_scores(self.frontend, items, num_labels, bool(call.apply_softmax))
        scores = await unless_gone(request, work)
        num_tokens = sum(len(item.prompt_token_ids) for item in items[::num_labels])
        usage = {"prompt_tokens": num_tokens, "completion_tokens": 0, "total_tokens": num_tokens}
        head = {"id": f"score-{uuid.uuid4().hex}", "object": "scoring", "created": int(time.time())}
        return json_response({**head, "model": self._name(call.model), "scores": scores, "usage": usage})

    async def classify(self, request: Request) -> Response:
        """How probable each class is of each input."""

        def read(call: ClassifyRequest, caller: Caller) -> list[EmbedInput]:
            self.frontend.card.check_task("classify")
            return self._inputs(call, caller)

        call, items = await self._read(request, ClassifyRequest, read)
        labels, config = self.frontend.card.labels, self.frontend.card.config
        data: list[dict[str, Any]] = []
        for i, vector in enumerate(await unless_gone(request, self.frontend.embed(items))):
            numbers = np.frombuffer(vector, "<f4").astype(np.float64)
            found = numbers if call.use_activation is False else probabilities(numbers, config)
            label = labels[int(numbers.argmax())]
            data.append({"index": i, "label": label, "probs": found.tolist(), "num_classes": len(labels)})
        return self._list("classify", call.model, data, items)

    async def pooling(self, request: Request) -> Response:
        """What the model makes of each input: a vector, a vector for each token, or a classifier's outputs."""
        call, items = await self._read(request, PoolingRequest, self._inputs)
        size = self.frontend.card.embedding_size if self.frontend.card.has_token_vectors else None
        data: list[dict[str, Any]] = []
        for i, vector in enumerate(await unless_gone(request, self.frontend.embed(items))):
            numbers: Any = base64.b64encode(vector).decode()
            if call.encoding_format != "base64":
                found = np.frombuffer(vector, "<f4")
                numbers = (found.reshape(-1, size) if size else found).tolist()
            data.append({"index": i, "object": "pooling", "data": numbers})
        return self._list("pool", call.model, data, items)

    async def _read(
        self, request: Request, kind: type[Body], make: Callable[[Body, Caller], Any], data: bytes | None = None
    ) -> tuple[Body, Any]:
        """The body, and what ``make`` makes of it off the event loop. data: the body's bytes, where they were read."""
        if data is None:
            data = await body.read(request)
        caller = caller_of(request)

        def prepare() -> tuple[Body, Any]:
            call = body.validate(kind, body.parse(data))
            check_model(getattr(call, "model", None), self.frontend.card)
            made = make(call, caller)
            items: list[EmbedInput] = made[-1] if isinstance(made, tuple) else made
            items[:] = map(self.frontend.check_embed, items)
            return call, made

        return await off_loop(request, self.frontend, prepare)

    def _inputs(self, call: ClassifyRequest | PoolingRequest, caller: Caller) -> list[EmbedInput]:
        adds = call.add_special_tokens is not False
        prompts = read_prompts(call.input, adds, self.frontend, "input", MAX_INPUTS)
        urgency, service = call.urgency(caller), call.service(caller)
        return [EmbedInput(prompt.token_ids, urgency, caller.label, caller.trace, service) for prompt in prompts]

    def _name(self, asked: str | None) -> str:
        return asked or self.frontend.card.name

    def _list(self, kind: str, model: str | None, data: list[Any], items: Sequence[EmbedInput]) -> Response:
        head = {"id": f"{kind}-{uuid.uuid4().hex}", "object": "list", "created": int(time.time())}
        return json_response({**head, "model": self._name(model), "data": data, "usage": _usage(items)})


def _usage(items: Sequence[EmbedInput]) -> dict[str, int]:
    num_tokens = sum(len(item.token_ids) for item in items)
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def _texts(value: Any, name: str) -> list[str]:
    texts: list[Any] = value if isinstance(value, list) else [value]
    if not 1 <= len(texts) <= MAX_INPUTS or not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(f"{name} must be a text or 1 to {MAX_INPUTS} texts", name)
    return texts


def _documents(value: Any) -> list[str]:
    items: list[Any] = value if isinstance(value, list) else []
    texts: list[Any] = [cast("Any", item).get("text") if isinstance(item, Mapping) else item for item in items]
    if not 1 <= len(texts) <= MAX_INPUTS or not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(f"documents must be 1 to {MAX_INPUTS} texts, or objects with a text", "documents")
    return texts
