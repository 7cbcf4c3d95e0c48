"""OpenAI's audio routes over a model that transcribes: ``/v1/audio/transcriptions`` and ``/v1/audio/translations``.

A file goes to the disk as it comes, is decoded in a process of its own, and cut into windows of what the model hears at
once; a window ends where its last whole segment does, by the timestamps that the model writes. A short one is answered
in one pass without timestamps, unless the format asks for them. A window is decoded once, at the temperature that is
asked for: there is no second try at another one, no text of earlier windows is given to later ones, and silence is not
left out.

Fields that no server of this API has are refused, and so are those of which nothing here takes notice.
"""

from fwk import DialectSpec, Options, hookimpl, option


class AudioOptions(Options):
    """Options of ``dialects.openai-audio``."""

    max_sound_bytes: int = option(
        2**28, "Bytes of the largest file of sound that is uploaded.", stability="beta", ge=1, le=2**40
    )
    sound_files_bytes: int = option(
        2**32,
        "Bytes of temporary files of all sounds that are being transcribed; beyond, uploads are refused with 503.",
        stability="beta",
        ge=1,
        le=2**50,
    )


@hookimpl
def dialects() -> list[DialectSpec]:
    return [
        DialectSpec(
            name="openai-audio",
            load="fwk_server.openai_audio.dialect:AudioDialect",
            options=AudioOptions,
            summary="OpenAI's HTTP API of sound: transcriptions and translations",
        )
    ]
