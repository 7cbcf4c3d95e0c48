"""The part in the server: the vectors of inputs, for dialects and for ``fwk.LLM``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
import numpy as np

from fwk.errors import RequestFailed
from fwk.interfaces.dialect import EmbedInput, GenerateInput, OutputDelta, VectorMaker, check_task
from fwk.interfaces.feature import RequestPart, ServerPart
from fwk_features.pooling import Vector, Wanted

Text = str | list[int]


class PoolingServer(ServerPart, VectorMaker):
    """Runs prompts that nothing follows, and gathers what comes back with their ends."""

    def open(self, item: GenerateInput | EmbedInput, caller: str) -> RequestPart | None:
        return PoolingCall() if isinstance(item, EmbedInput) else None

    async def vectors(self, items: Sequence[EmbedInput]) -> list[bytes]:
        calls = [asyncio.ensure_future(self._vector(item)) for item in items]
        try:
            return await asyncio.gather(*calls)
        finally:
            for call in calls:
                call.cancel()

    async def _vector(self, item: EmbedInput) -> bytes:
        assert self.context.frontend is not None
        async with aclosing(self.context.frontend.generate(item)) as replies:
            deltas = [delta async for some in replies for delta in some]
        return _made(deltas[-1].vector, deltas[-1].error)

    def operations(self) -> Mapping[str, Callable[..., Any]]:
        return {"embed": self.embed, "classify": self.classify, "classify_pairs": self.classify_pairs}

    def embed(self, texts: Text | Sequence[Text], use_tqdm: bool | None = None) -> np.ndarray:
        """Embeddings of texts (or token ids): [num_texts, size] float32, in the texts' order.

        Of a model that makes a vector of each token: [num_tokens, size], one text's after another. Raises
        ``InvalidRequest`` before anything runs when a text is wrong, or when the model generates text.
        """
        return self._computed("embed", map(self._input, _as_list(texts)), use_tqdm)

    def classify(self, texts: Text | Sequence[Text]) -> np.ndarray:
        """What a classifier or a reward model makes of texts (or token ids), before any softmax or sigmoid.

        Returns [num_texts, num_labels] float32. Raises as ``embed`` does.
        """
        return self._computed("classify", map(self._input, _as_list(texts)))

    def classify_pairs(self, pairs: Sequence[tuple[str, str]]) -> np.ndarray:
        """The same of pairs of texts, each read as one input, as cross-encoders do: query and document."""
        return self._computed("classify", (self._pair(*pair) for pair in pairs))

    def _input(self, text: Text) -> EmbedInput:
        return EmbedInput(self.context.text.encode(text) if isinstance(text, str) else list(text))

    def _pair(self, first: str, second: str) -> EmbedInput:
        ids, start = self.context.text.encode_pair(first, second)
        return EmbedInput(ids, segment_start=start)

    def _computed(self, task: str, items: Any, use_tqdm: bool | None = None) -> np.ndarray:
        context = self.context
        check_task(context.model_name, context.task, task)
        assert context.prompts is not None
        assert context.compute is not None, "operations are fwk.LLM's"
        made = [np.frombuffer(_made(done.vector), "<f4") for done in context.compute(list(items), use_tqdm)]
        return np.concatenate([vector.reshape(-1, context.prompts.vector_size) for vector in made])


class PoolingCall(RequestPart):
    """One input."""

    async def enter(self, item: EmbedInput) -> Wanted:
        return Wanted(item.segment_start)

    async def output(self, delta: OutputDelta, event: msgspec.Struct | None) -> OutputDelta:
        if isinstance(event, Vector):
            delta.vector = event.data
        return delta


def _made(vector: bytes | None, error: str | None = None) -> bytes:
    """Raises ``RequestFailed`` where nothing was made."""
    if vector is None:
        raise RequestFailed(error or "the engine made no embedding")
    return vector


def _as_list(texts: Text | Sequence[Text]) -> list[Text]:
    if isinstance(texts, str):
        return [texts]
    items: list[Any] = list(texts)
    return [items] if items and isinstance(items[0], int) else items
