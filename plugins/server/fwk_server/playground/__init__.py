"""A page at / to chat with the served models, and one at /docs of the API: static files, nothing from other hosts.

They talk to the ``openai`` dialect. The files hold nothing of the server's or of clients', so they need no key; the
pages ask for one where the API does.
"""

from fwk import DialectSpec, Options, hookimpl, option


class PlaygroundOptions(Options):
    """Options of ``dialects.playground``."""

    playground: bool = option(
        True,
        "Serve a page at / to chat with the model, and one of the API at /docs.",
        turns={"disable-playground": False},
    )


@hookimpl
def dialects() -> list[DialectSpec]:
    return [
        DialectSpec(
            name="playground",
            load="fwk_server.playground.dialect:PlaygroundDialect",
            options=PlaygroundOptions,
            summary="A page at / to chat with the model, and one of the API at /docs",
        )
    ]
