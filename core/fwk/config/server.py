"""Core's options about the server."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import ValidationInfo, field_validator

from fwk.config.options import Options, option
from fwk_http.keys import KEY_PATTERN


class ServerOptions(Options):
    """The HTTP side."""

    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(8000, "Port to listen on; 0 takes a free one.", ge=0, le=65535)
    uds: str | None = option(None, "Path of a unix socket to listen on, instead of --host and --port.", min_length=1)
    ssl_certfile: str | None = option(None, "Serve HTTPS with this certificate (PEM, with its chain).")
    ssl_keyfile: str | None = option(
        None, "Private key of --ssl-certfile, where it is in a file of its own.", needs="ssl_certfile"
    )
    ssl_keyfile_password: str | None = option(
        None, "Password of the private key.", is_secret=True, needs="ssl_certfile", min_length=1
    )
    ssl_ca_certs: str | None = option(
        None, "Let in only clients with a certificate of one of these authorities (PEM).", needs="ssl_certfile"
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        "Web pages of these origins (https://chat.example.org, or * for all) may use the server from a browser "
        "(default: on a loopback --host those of http://localhost and 127.0.0.1, of any port).",
    )
    api_key: str | None = option(
        None,
        "Key that clients must send as 'Authorization: Bearer KEY'.",
        is_secret=True,
        min_length=1,
        max_length=1024,
        pattern=KEY_PATTERN,  # an empty one would leave the door open
    )
    api_key_file: str | None = option(
        None, "File of more such keys: a line 'NAME KEY' for each holder, whose name is in the log of requests."
    )
    admin_api_key: str | None = option(
        None,
        "Key of the server's administrator. With it come the routes for administrators (changing plugins, ...), "
        "which take this key and no other; without it they do not exist.",
        is_secret=True,
        min_length=1,
        max_length=1024,
        pattern=KEY_PATTERN,
    )
    tool_call_parser: str = option(
        "auto",
        "Parser of the model's tool calls; auto: the one whose marks are in the chat template, else one that reads "
        "plain JSON calls; none: only calls that tool_choice forces are read.",
    )
    reasoning_parser: str = option(
        "auto",
        "Parser that splits thinking from the answer; auto: the one whose marks are in the chat template, "
        "none: thinking stays in the text.",
    )
    tokenizer_worker_num: int = option(
        2, "Threads that tokenise and render prompts, outside of the event loop and Python's lock.", ge=1, le=64
    )
    stream_interval: int = option(
        1,
        "Tokens gathered for an event of a stream, after the first: more means fewer events and less work for server "
        "and client.",
        ge=1,
        le=1024,
    )
    log_level: Literal["debug", "info", "warning", "error"] = option("info", "Least level of what the log shows.")
    log_format: Literal["text", "json"] = option(
        "text", "Lines of the log: text for people, or a JSON object each for programs.", stability="beta"
    )
    shutdown_timeout: float = option(
        5.0,
        "Seconds that requests under way may take after SIGTERM until they end with an error; a second one ends all "
        "at once.",
        ge=0,
        le=86400,
    )
    take_over: bool = option(
        False,
        "Take the listening socket of the server that runs at this address, once this one serves: no connection is "
        "refused meanwhile, and the old one finishes what it has and ends. Without one there, listen as usual.",
        stability="experimental",
    )
    health_monitor: bool = option(
        True,
        "Restart an engine that died or hangs; the server gives up after five deaths within a minute. Without it, "
        "/health says 503 until the server is started again.",
        stability="beta",
    )
    spare_engines: int = option(
        1,
        "1: the process that engines are forked from waits for one to die (25 MB that it does not share with them); 0, "
        "and without --health-monitor: it ends, and an engine in another's place begins with its imports.",
        stability="beta",
        ge=0,
        le=1,
    )
    watchdog_timeout: float = option(
        300.0,
        "Seconds a step may take, and the engine's loop may not answer, until it counts as hung and is ended.",
        gt=0,
        le=86400,
    )
    ping_timeout: float = option(
        20.0, "Seconds without an answer from the engine's loop until /health reports 503.", gt=0, le=3600
    )
    max_queued_requests: int = option(
        4096,
        "Sequences that may wait beyond --max-running-requests, for each engine; more requests are refused (429).",
        ge=0,
        le=2**20,
    )
    concurrency_limit: int | None = option(
        None,
        "POST requests answered at once, over all routes; more are refused with 429 (default: as many as may run or "
        "wait in all engines).",
        ge=1,
        le=2**20,
    )
    concurrency_with_block: bool = option(
        False,
        "Let requests above --concurrency-limit wait, --max-queued-requests of them at most, instead of refusing them.",
        needs="concurrency_limit",
    )
    queue_timeout: float | None = option(
        None,
        "Seconds a request may wait for its first token until it is given up with 503 (default: no limit).",
        gt=0,
        le=86400,
    )
    request_timeout: float | None = option(
        None, "Seconds a request may take altogether until it is ended with 504 (default: no limit).", gt=0, le=86400
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "Names the Host header may hold ('*': any, '*.example.org': what ends so); others are refused with 421 "
        "(default: any; without --api-key on a loopback --host: localhost, IP addresses and the machine's own names).",
    )
    read_timeout: float = option(
        60.0, "Seconds a client may take to send a whole request until it is cut off with 408.", gt=0, le=86400
    )
    write_timeout: float = option(
        60.0,
        "Seconds a client may take to make room in the full buffer of its reply (64 KB) until it is cut off.",
        gt=0,
        le=86400,
    )
    max_body_bytes: int = option(8 * 2**20, "Largest request body, in bytes.", ge=1024, le=2**31)

    @field_validator("allowed_origins")
    @classmethod
    def _are_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if origin != "*" and not re.fullmatch(r"https?://[A-Za-z0-9.\-\[\]:]+", origin):
                raise ValueError(f"{origin!r} is no origin: one is * or scheme://host[:port], without a path")
        return origins

    @field_validator("admin_api_key")
    @classmethod
    def _is_another(cls, key: str | None, info: ValidationInfo) -> str | None:
        if key is not None and key == info.data.get("api_key"):
            raise ValueError("must be another key than --api-key: else all users are administrators")
        return key
