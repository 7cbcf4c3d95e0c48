"""The routes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from fwk.errors import InvalidRequest
from fwk.interfaces.dialect import Dialect, DialectContext, Frontend, SoundReading
from fwk.interfaces.lifecycle import Stage
from fwk_server._common.caller import caller_of
from fwk_server._common.chat.served import check_model
from fwk_server._common.documented import EVENTS, Reply, documented
from fwk_server._common.replies import EventStream, closed_on_disconnect, unless_gone
from fwk_server._common.upload import FORM_BYTES, Upload
from fwk_server.openai_audio import AudioOptions
from fwk_server.openai_audio.files import OneUpload, Recording, SoundFiles
from fwk_server.openai_audio.reply import events, whole
from fwk_server.openai_audio.request import LISTS, MAX_FIELD, TranscriptionForm, read
from fwk_server.openai_audio.tokens import Speech
from fwk_server.openai_audio.transcribing import Transcription

if TYPE_CHECKING:
    from fastapi import FastAPI

PATHS = {"transcribe": "/v1/audio/transcriptions", "translate": "/v1/audio/translations"}
MAX_PARTS = 32


class TranscriptionBody(Reply):
    """A transcription."""

    text: str


class ErrorBody(Reply):
    """Every error."""

    error: dict[str, Any]


class AudioDialect(Dialect):
    """OpenAI's routes of sound, over those models of the server that transcribe."""

    requests = dict.fromkeys(PATHS.values(), TranscriptionForm)
    elsewhere = {"/v1/audio/speech": "/v1/audio/speech is not served here: no model of this server speaks"}

    def __init__(self, context: DialectContext) -> None:
        super().__init__(context)
        options = context.options or AudioOptions()
        self._frontend = context.frontend
        self._max_bytes: int = options.max_sound_bytes
        self._files = SoundFiles(options.sound_files_bytes)
        self._speech: dict[str, Speech] = {}  # by model
        self.max_bodies = dict.fromkeys(PATHS.values(), options.max_sound_bytes + FORM_BYTES)
        context.lifecycle.on(Stage.CLOSE, self._close)

    async def _close(self) -> None:
        self._files.close()

    def routes(self, app: FastAPI) -> None:
        schema = TranscriptionForm.model_json_schema()
        fields = {**schema["properties"], "file": {"type": "string", "format": "binary"}}
        fields[LISTS[0]] = {"type": "array", "items": {"type": "string", "enum": ["segment"]}}
        form = {"schema": {"type": "object", "properties": fields, "required": ["file"]}}
        for task, path in PATHS.items():
            app.add_api_route(
                path,
                closed_on_disconnect(partial(self.transcribe, task)),
                methods=["POST"],
                response_model=None,
                name=task,
                description="Write down what is said." if task == "transcribe" else "Write in English what is said.",
                responses=documented(TranscriptionBody, ErrorBody, stream=EVENTS),
                openapi_extra={"requestBody": {"required": True, "content": {"multipart/form-data": form}}},
            )

    async def transcribe(self, task: str, request: Request) -> Response:
        """Answer a form."""
        if not any(peer.card.task == "transcribe" for peer in self._frontend.peers):
            self._refuse(self._frontend)
        caller = caller_of(request)
        upload = Upload(OneUpload(self._files, self._max_bytes), max_fields=MAX_PARTS, max_field=MAX_FIELD, lists=LISTS)
        try:
            await upload.read(request, self._frontend.run_blocking)
            asked = read(task, upload.fields, upload.lists)
            if upload.filename is None:
                raise InvalidRequest("file is missing: send it as a part of the form that has a filename", "file")
            if not upload.size:
                raise InvalidRequest("the file is empty", "file")
            frontend = self._served_by(asked.model)
            reading = frontend.service(SoundReading)
            assert reading is not None, "what has the task brings it"
            speech = await frontend.run_blocking(self._speech_of, frontend, reading)
            language = speech.language(asked.language)
            if task == "translate" and not speech.languages:
                raise InvalidRequest(f"the model {frontend.card.name!r} knows English alone and translates nothing")
            work = frontend.run_blocking(Recording.of, self._files, reading, upload.path)
            recording = await unless_gone(request, work)
        finally:
            upload.discard()
        done = Transcription(frontend, speech, asked, recording, caller, language)
        if asked.is_stream:
            return EventStream(events(done), self.error_body)
        await unless_gone(request, _all(done))
        return whole(done)

    def _speech_of(self, frontend: Frontend, reading: SoundReading) -> Speech:
        name = frontend.card.name
        if name not in self._speech:
            self._speech[name] = Speech.of(reading.settings(), frontend)
        return self._speech[name]

    def _served_by(self, name: str) -> Frontend:
        """The model of a name; without one the first that transcribes. Raises for one that does not."""
        peers = [peer for peer in self._frontend.peers if peer.is_called(name)]
        if name and not peers:
            check_model(name, self._frontend.card)
        found = peers or [peer for peer in self._frontend.peers if peer.card.task == "transcribe"]
        if found[0].card.task != "transcribe":
            self._refuse(found[0])
        return found[0]

    def _refuse(self, frontend: Frontend) -> None:
        card = frontend.card
        remedy = "ask it of a sound in a chat (input_audio), or " if card.media.get("audio") else ""
        raise InvalidRequest(
            f"the model {card.name!r} transcribes no sounds: {remedy}serve one that does, such as openai/whisper-small",
            "model",
        )


async def _all(done: Transcription) -> None:
    async for _ in done.run():
        pass
