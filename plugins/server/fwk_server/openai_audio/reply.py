"""A transcription in each of the formats."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.responses import Response

from fwk_server._common.replies import event, json_response
from fwk_server.openai_audio.transcribing import Segment, Transcription

TEXT = "text/plain; charset=utf-8"


def whole(done: Transcription) -> Response:
    """The reply in one piece."""
    form = done.asked.format
    if form == "text":
        return Response(f"{done.text}\n", media_type=TEXT)
    if form in ("srt", "vtt"):
        return Response(subtitles(done.segments, is_vtt=form == "vtt"), media_type=TEXT)
    body: dict[str, Any] = {"text": done.text, "usage": duration(done)}
    if form == "verbose_json":
        what = {"task": done.asked.task, "language": done.language, "duration": round(done.recording.seconds, 2)}
        body = {**what, **body, "segments": [_segment(done, i, one) for i, one in enumerate(done.segments)]}
    return json_response(body)


def _segment(done: Transcription, index: int, one: Segment) -> dict[str, Any]:
    return {
        "id": index,
        "seek": one.seek,
        "start": round(one.start, 2),
        "end": round(one.end, 2),
        "text": one.text,
        "tokens": one.tokens,
        "temperature": done.asked.temperature,
        "avg_logprob": one.avg_logprob,
        "compression_ratio": one.compression_ratio,
        "no_speech_prob": one.no_speech_prob,
    }


def duration(done: Transcription) -> dict[str, Any]:
    """What OpenAI counts of a sound."""
    return {"type": "duration", "seconds": round(done.recording.seconds, 2)}


def subtitles(segments: list[Segment], *, is_vtt: bool) -> str:
    """SubRip or WebVTT."""
    out = ["WEBVTT\n"] if is_vtt else []
    for index, one in enumerate(segments):
        times = f"{clock(one.start, is_vtt=is_vtt)} --> {clock(one.end, is_vtt=is_vtt)}"
        text = one.text.strip().replace("-->", "->")
        out.append(f"{times}\n{text}\n" if is_vtt else f"{index + 1}\n{times}\n{text}\n")
    return "\n".join(out) + ("\n" if segments else "")


def clock(seconds: float, *, is_vtt: bool) -> str:
    """``HH:MM:SS,mmm``; in WebVTT with a point."""
    whole, thousandths = divmod(round(seconds * 1000), 1000)
    minutes, second = divmod(whole, 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{second:02}{'.' if is_vtt else ','}{thousandths:03}"


async def events(done: Transcription) -> AsyncGenerator[bytes, None]:
    """The reply as server-sent events: what is said as it is known, and all of it at the end."""
    has_some = False
    async with aclosing(done.run()) as pieces:
        async for piece in pieces:
            piece = piece if has_some else piece.lstrip()
            if piece:
                has_some = True
                yield event({"type": "transcript.text.delta", "delta": piece})
    counts = {"input_tokens": done.input_tokens, "output_tokens": done.output_tokens}
    usage = {"type": "tokens", **counts, "total_tokens": sum(counts.values())}
    yield event({"type": "transcript.text.done", "text": done.text, "usage": usage})
