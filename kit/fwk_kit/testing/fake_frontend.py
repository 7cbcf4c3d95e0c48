"""A scripted frontend over a byte tokeniser: what a dialect talks to, without an engine."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from fwk.errors import InvalidRequest
from fwk.interfaces.dialect import (
    AnyInput,
    EmbedInput,
    Frontend,
    GenerateInput,
    Input,
    ModelCard,
    OutputDelta,
    TextTools,
)
from fwk.interfaces.feature import ServerPart
from fwk.types import TokenLogprobs
from fwk.types.sampling import MAX_N, check_token_ids

BOS, EOS = 256, 257
SPECIAL = {BOS: "<bos>", EOS: "<eos>"}
VOCAB_SIZE = 258
MAX_MODEL_LEN = 4096


class ByteText(TextTools):
    """Every byte is a token, so that characters of several tokens are common."""

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        return [BOS] * add_special_tokens + list(text.encode())

    def decode(self, token_ids, skip_special_tokens: bool = True) -> str:
        pieces = b"".join(
            b"" if skip_special_tokens and token_id in SPECIAL else self.token_bytes(token_id) for token_id in token_ids
        )
        return pieces.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return SPECIAL[token_id].encode() if token_id in SPECIAL else bytes([token_id])

    def render_chat(
        self, messages, *, tools=None, add_generation_prompt=True, continue_final_message=False, kwargs=None
    ) -> str:
        self.seen = SimpleNamespace(messages=messages, tools=tools, kwargs=kwargs)
        turns = [f"[{message['role']}]{message['content']}" for message in messages]
        return "".join(turns) + ("[assistant]" if add_generation_prompt else "")


Step = list[OutputDelta] | Exception | float
Script = Callable[[GenerateInput], Iterable[Step]]


def score(token_id: int, num_top: int) -> TokenLogprobs:
    """A made-up but reproducible score: the chosen token is the second likeliest."""
    top = [((token_id + 1 + i) % 256, -0.25 - i) for i in range(num_top)]
    return TokenLogprobs(token_id, -0.5 - token_id / 1000, 2, top)


def deltas_of(
    item: GenerateInput,
    text: str,
    *,
    index: int = 0,
    finish: str = "stop",
    stop_reason: str | int | None = None,
    cached_tokens: int = 0,
) -> list[OutputDelta]:
    """One delta per byte; text comes when its character is whole. The last one has the finish reason."""
    deltas, pending = [], b""
    data = text.encode()
    for i, byte in enumerate(data):
        pending += bytes([byte])
        try:
            piece, pending = pending.decode(), b""
        except UnicodeDecodeError:
            piece = ""
        delta = OutputDelta(index, piece, [byte], num_output_tokens=i + 1, cached_tokens=cached_tokens)
        if item.sampling.logprobs is not None:
            delta.logprobs = [score(byte, item.sampling.logprobs)]
        num_top = item.sampling.prompt_logprobs
        if i == 0 and num_top is not None:
            # As the engine does: only the first sequence scores the prompt.
            scored = item.prompt_token_ids[1:] if index == 0 else []
            delta.prompt_logprobs = [None, *(score(token, num_top) for token in scored)]
        deltas.append(delta)
    deltas[-1].finish_reason = finish  # type: ignore[assignment]
    deltas[-1].stop_reason = stop_reason
    return deltas


def interleaved(*sequences: list[OutputDelta]) -> list[list[OutputDelta]]:
    """One step per round, with the next delta of every sequence that still has one."""
    rounds = max(map(len, sequences))
    return [[deltas[i] for deltas in sequences if i < len(deltas)] for i in range(rounds)]


def default_script(item: GenerateInput) -> Iterable[Step]:
    """Each choice says its own text, up to ``max_tokens`` bytes."""
    sequences = []
    for index in range(item.n):
        text = f"Grüße {index} 🙂!"
        full = deltas_of(item, text, index=index, cached_tokens=4)
        limit = item.sampling.max_tokens or len(full)
        if limit < len(full):
            full = full[:limit]
            full[-1].finish_reason = "length"
        sequences.append(full)
    return interleaved(*sequences)


class FakeFrontend(Frontend):
    """Answers every input by ``script``, and counts what becomes of it."""

    def __init__(self) -> None:
        self.card = ModelCard("tiny", "org/tiny", 1_700_000_000, MAX_MODEL_LEN, VOCAB_SIZE)
        self.text = ByteText()
        self.default_sampling = {}
        self.params: list[type] = []
        self.parts: list[ServerPart] = []
        self.script: Script = default_script
        self.items: list[GenerateInput] = []
        self.sources: list[AsyncIterator[list[OutputDelta]]] = []
        self.num_aborted = 0
        self.num_finished = 0
        self.num_blocking = 0
        self.embedded: list[EmbedInput] = []
        self.embed_seconds = 0.0
        self.embed_error: Exception | None = None

    async def run_blocking(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        self.num_blocking += 1
        return await asyncio.to_thread(function, *args, **kwargs)

    def check(self, item: Input) -> Input:
        if not isinstance(item, GenerateInput):
            return item
        for part in self.parts:
            part.check(item)
        item.sampling.check(VOCAB_SIZE)
        if not 1 <= item.n <= MAX_N:
            raise InvalidRequest("n", "n")
        if not item.prompt_token_ids:
            raise InvalidRequest("prompt is empty", "prompt")
        check_token_ids(item.prompt_token_ids, VOCAB_SIZE, "prompt", MAX_MODEL_LEN - 1)
        return item

    def generate(self, item: AnyInput) -> AsyncGenerator[list[OutputDelta], None]:
        assert isinstance(item, GenerateInput), "inputs that nothing follows go to embed"
        source = next(filter(None, (part.answer(item) for part in self.parts)), None)
        if source is not None:
            return source
        source = self._generate(item)
        self.sources.append(source)  # so that only closing it ends it, never the garbage collector
        return source

    async def _generate(self, item: GenerateInput) -> AsyncGenerator[list[OutputDelta], None]:
        self.items.append(item)
        ended = False
        try:
            for step in self.script(item):
                if isinstance(step, Exception):
                    ended = True
                    raise step
                if isinstance(step, int | float):
                    await asyncio.sleep(step)
                else:
                    await asyncio.sleep(0)
                    yield step
            ended = True
        finally:
            self.num_finished += ended
            self.num_aborted += not ended

    def check_embed(self, item: EmbedInput) -> EmbedInput:
        if not item.token_ids:
            raise InvalidRequest("the input is empty", "input")
        check_token_ids(item.token_ids, VOCAB_SIZE, "input", MAX_MODEL_LEN)
        return item

    async def embed(self, items: Sequence[EmbedInput]) -> list[bytes]:
        """Of each input: its length, its first and its last token, and a number float32 cannot hold exactly."""
        self.embedded += items
        try:
            await asyncio.sleep(self.embed_seconds)
            if self.embed_error is not None:
                raise self.embed_error
        except asyncio.CancelledError:
            self.num_aborted += len(items)
            raise
        ids = [item.token_ids for item in items]
        return [struct.pack("<4f", len(tokens), tokens[0], tokens[-1], 0.1) for tokens in ids]

    @property
    def processor_params(self):
        return self.params
