"""A page at / to chat with the served model: static files that load nothing from other hosts.

It talks to the ``openai`` dialect. The files hold nothing of the server's or of clients', so they need no key; the page
asks for one where the API does.
"""

from fwk import DialectSpec, Options, hookimpl, option


class PlaygroundOptions(Options):
    """Options of ``dialects.playground``."""

    playground: bool = option(True, "Serve a page at / to chat with the model.", turns={"disable-playground": False})


@hookimpl
def dialects() -> list[DialectSpec]:
    return [
        DialectSpec(
            name="playground",
            load="fwk_server.playground.dialect:PlaygroundDialect",
            options=PlaygroundOptions,
            summary="A page at / to chat with the model",
        )
    ]
