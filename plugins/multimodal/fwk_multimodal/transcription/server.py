"""The part in the server, and the one for jobs, which decodes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from fwk.errors import InvalidRequest
from fwk.interfaces.dialect import EmbedInput, GenerateInput, SoundReading
from fwk.interfaces.feature import JobPart, JobPartContext, ServerPart, ServerPartContext
from fwk_multimodal._common.sound import HOP, Limit, pieces
from fwk_multimodal.transcription import TranscriptionOptions, transcribes

WHY = "that this server transcribes (--max-sound-seconds)"
CPU_SECONDS, CPU_SECONDS_PER_MB = 30.0, 3.0
"""What decoding a file may take: so many, and so many more for each million bytes of it, up to a share of its most
seconds."""
SHARE = 0.1
JOB_BYTES = 2**30


class SoundJob(msgspec.Struct, frozen=True):
    """A file to decode; none: tell of the checkpoint."""

    source: str = ""
    target: str = ""
    name: str = ""


class SoundJobs(JobPart):
    """Decodes files, in a process that can be killed."""

    def __init__(self, context: JobPartContext) -> None:
        window = 2 * HOP * context.config.integer("max_source_positions")
        self._settings = {**context.checkpoint.generation_config(), "window": window}
        options: TranscriptionOptions = context.options
        self._limit = Limit(options.max_sound_seconds, WHY)

    def run(self, body: bytes) -> bytes:
        work = msgspec.msgpack.decode(body, type=SoundJob)
        return msgspec.msgpack.encode(self._decoded(work) if work.source else self._settings)

    def _decoded(self, work: SoundJob) -> int:
        count = 0
        with open(work.source, "rb") as source, open(work.target, "wb") as target:
            for part in pieces(source, work.name, self._limit):
                count += len(part)
                target.write((part.clip(-1, 1 - 2**-15) * 2**15).round().astype("<i2").tobytes())
        return count


class Transcription(ServerPart, SoundReading):
    """Has files decoded, and refuses prompts without a sound; of a model that does not transcribe, it does nothing."""

    def __init__(self, context: ServerPartContext) -> None:
        super().__init__(context)
        self._found: Mapping[str, Any] | None = None
        self._max_seconds: int = context.options.max_sound_seconds
        self._takes_part = context.config is not None and transcribes(context.config.raw)
        if context.frontend is not None and self._takes_part:
            context.frontend.card = replace(context.frontend.card, task="transcribe")
            context.jobs.warm_up()

    def check(self, item: GenerateInput | EmbedInput) -> None:
        if self._takes_part and not getattr(item, "media", None):
            raise InvalidRequest(
                f"the model {self.context.model_name!r} writes down what it hears: send a sound to "
                "/v1/audio/transcriptions, or to fwk.LLM.generate as media",
                "prompt",
            )

    def settings(self) -> Mapping[str, Any]:
        found = self._found
        if found is None:
            found = self._found = self._run(SoundJob(), "reading the model's settings", CPU_SECONDS)
        assert found is not None
        return found

    def decode(self, source: Path, target: Path, name: str) -> int:
        seconds = min(os.stat(source).st_size / 1e6 * CPU_SECONDS_PER_MB, self._max_seconds * SHARE)
        return self._run(SoundJob(str(source), str(target), name), "decoding the sound", CPU_SECONDS + seconds)

    def _run(self, work: SoundJob, what: str, seconds: float) -> Any:
        body = msgspec.msgpack.encode(work)
        return msgspec.msgpack.decode(self.context.jobs.run(body, what, cpu_seconds=seconds, max_bytes=JOB_BYTES))
