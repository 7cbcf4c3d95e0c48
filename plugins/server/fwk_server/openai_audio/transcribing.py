"""Windows of a sound, one after another, to segments."""

from __future__ import annotations

import io
import math
import wave
import zlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from fwk.interfaces.dialect import Frontend, GenerateInput, PlacedInput
from fwk.interfaces.multimodal import MediaItem
from fwk.types import SamplingParams
from fwk_server._common.caller import Caller
from fwk_server._common.chat.outputs import Choice, Usage, run
from fwk_server.openai_audio.files import RATE, Recording
from fwk_server.openai_audio.request import Asked
from fwk_server.openai_audio.tokens import Speech, segments

MIN_SAMPLES = RATE // 100
"""What is left of a sound is heard if it is at least so long."""
WINDOWS, EXTRA = 4, 16
"""A sound is heard in so many times the windows that it has, and these; then in whole ones, so that it ends."""


@dataclass(slots=True)
class Segment:
    """What was said from one time to another, in seconds. seek: where its window begins, in hundredths of a second."""

    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    avg_logprob: float
    no_speech_prob: float

    @property
    def compression_ratio(self) -> float:
        """Of the text: above 2.4 it says the same again and again."""
        data = self.text.encode()
        return len(data) / len(zlib.compress(data))


@dataclass(slots=True)
class Transcription:
    """One sound on its way. The text is ``texts``, joined; the segments are there where windows had timestamps."""

    frontend: Frontend
    speech: Speech
    asked: Asked
    recording: Recording
    caller: Caller
    language: str = ""
    texts: list[str] = field(default_factory=list[str])
    segments: list[Segment] = field(default_factory=list[Segment])
    input_tokens: int = 0
    output_tokens: int = 0

    @property
    def text(self) -> str:
        """All that was said."""
        return "".join(self.texts).strip()

    @property
    def has_times(self) -> bool:
        """Whether the model writes timestamps: for the reply, or to find where a window ends."""
        return self.asked.has_times or self.recording.count > self.speech.window

    async def run(self) -> AsyncGenerator[str, None]:
        """Pieces of the text, as they are known."""
        recording, window = self.recording, self.speech.window
        seek, left = 0, WINDOWS * math.ceil(recording.count / window) + EXTRA
        while seek == 0 or seek + MIN_SAMPLES <= recording.count:
            placed = await self.frontend.run_blocking(self._placed, seek)
            if not self.language:
                self.language = await self._told(placed)
            if not self.has_times:
                async with aclosing(self._plain(placed)) as pieces:
                    async for piece in pieces:
                        yield piece
                return
            count = min(window, recording.count - seek)
            advance = await self._timed(placed, seek, count)
            left -= 1
            yield self.texts[-1]
            seek += advance if advance > 0 and left > 0 else window

    async def _plain(self, placed: PlacedInput) -> AsyncGenerator[str, None]:
        """All at once, without timestamps."""
        item = self._input(placed, self._prompt(is_first=True), has_times=False)
        async with aclosing(run(self.frontend, [item], Usage([item]))) as steps:
            async for _, deltas in steps:
                for delta in deltas:
                    self.output_tokens = delta.num_output_tokens
                    piece = delta.text if self.text else delta.text.lstrip()
                    if piece:
                        self.texts.append(piece)
                        yield piece

    async def _timed(self, placed: PlacedInput, seek: int, count: int) -> int:
        """Note the segments of a window; how many samples were understood."""
        item = self._input(placed, self._prompt(is_first=seek == 0), has_times=True)
        done = await self._done(item)
        tokens = [token for token in done.token_ids if token not in self.frontend.card.end_token_ids]
        found, advance = segments(tokens, self.speech.first_time, count)
        mean = sum(entry.logprob for entry in done.logprobs) / (len(tokens) + 1)
        silence = await self._silence(placed) if self.asked.format == "verbose_json" else 0.0
        texts: list[str] = []
        for start, end, ids in found:
            text = self.frontend.text.decode([token for token in ids if token < self.speech.start])
            if text.strip():
                times = [min(seek + place, self.recording.count) / RATE for place in (start, end)]
                self.segments.append(Segment(seek * 100 // RATE, times[0], times[1], text, ids, mean, silence))
                texts.append(text)
        self.texts.append("".join(texts))
        self.output_tokens += len(done.token_ids)
        return advance

    async def _told(self, placed: PlacedInput) -> str:
        """The language that the model hears."""
        languages = self.speech.languages
        [token] = (await self._done(self._one_of(placed, sorted(languages.values())))).token_ids
        return next(code for code, known in languages.items() if known == token)

    async def _silence(self, placed: PlacedInput) -> float:
        """The probability that no one speaks."""
        done = await self._done(self._one_of(placed, [self.speech.no_speech]))
        return math.exp(done.logprobs[0].logprob)

    async def _done(self, item: GenerateInput) -> Choice:
        choice = Choice()
        async with aclosing(run(self.frontend, [item], Usage([item]))) as steps:
            async for _, deltas in steps:
                for delta in deltas:
                    choice.add(delta)
        return choice

    def _prompt(self, *, is_first: bool) -> list[int]:
        """What the decoder begins with; the client's prompt comes before the first window."""
        text, ids = self.asked.prompt.strip(), list[int]()
        if text and is_first:
            ids = self.frontend.text.encode(f" {text}", add_special_tokens=False, parse_special=False)
        return self.speech.prefix(self.language, self.asked.task, ids, has_times=self.has_times)

    def _placed(self, seek: int) -> PlacedInput:
        """A window, decoded by the model's processor. Waits."""
        file = io.BytesIO()
        with wave.open(file, "wb") as out:
            out.setnchannels(1)
            out.setsampwidth(2)
            out.setframerate(RATE)
            out.writeframes(self.recording.window(seek, self.speech.window).tobytes())
        return self.frontend.place_media([self.speech.start], [MediaItem("audio", file.getvalue(), "file")])

    def _input(self, placed: PlacedInput, prompt: Sequence[int], *, has_times: bool) -> GenerateInput:
        extra = self.speech.extra(self.frontend, has_times=has_times)
        logprobs = 0 if self.asked.format == "verbose_json" else None
        asked = self.asked
        sampling = SamplingParams(temperature=asked.temperature, seed=asked.seed, extra=extra, logprobs=logprobs)
        return self._checked(placed, prompt, sampling)

    def _one_of(self, placed: PlacedInput, token_ids: list[int]) -> GenerateInput:
        """One of some tokens behind the start, and its probability among all."""
        sampling = SamplingParams(temperature=0, max_tokens=1, allowed_token_ids=token_ids, logprobs=0, ignore_eos=True)
        return self._checked(placed, [self.speech.start], sampling)

    def _checked(self, placed: PlacedInput, prompt: Sequence[int], sampling: SamplingParams) -> GenerateInput:
        caller = self.caller
        tokens = [*placed.token_ids[: placed.media[-1].end], *prompt]
        self.input_tokens += len(tokens)
        fields: dict[str, Any] = {"priority": caller.priority, "service": caller.service, "trace": caller.trace}
        return self.frontend.check(
            GenerateInput(
                tokens, sampling, media=placed.media, payload=placed.payload, label=caller.label, task="transcribe",
                operation="transcription", **fields,
            )
        )  # fmt: skip
