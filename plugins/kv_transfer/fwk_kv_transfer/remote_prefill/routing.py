"""What routers say to prefill and decode servers in the fields of a request, and what these say to each other of it.

SGLang's router sends a request to a prefill and to a decode server at once, with the same ``bootstrap_room``: the
decode server asks the prefill server for what is computed under it (``Join``). vLLM's router asks the prefill server
first, for one token, and sends the ``kv_transfer_params`` of its reply to the decode server: these hold a signed
``Handle``. Either way the K/V are of a prompt that both servers have read: a hash of its tokens is part of their name.
"""

from __future__ import annotations

import base64
import hashlib
from array import array
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from fwk.errors import InvalidRequest
from fwk.interfaces.dialect import EmbedInput, GenerateInput
from fwk_kv_transfer.remote_prefill import MAX_ROOMS, Heads, RoutedFields
from fwk_kv_transfer.remote_prefill.messages import Computed, is_signed, sign

JOIN = "/disaggregation/join"
HANDLES = "remote_handles"
MAX_HANDLE_LEN = 2**20

_WHERE = "kv_transfer_params"


@dataclass(frozen=True, slots=True)
class Routed:
    """The fields of one request.

    room: in SGLang's words, empty without one; the first of several, for each prompt has its hash besides. host, port:
    of the prefill server. params: in vLLM's words.
    """

    room: str = ""
    host: str = ""
    port: int = 0
    params: dict[str, Any] | None = None


def routed(item: GenerateInput | EmbedInput, *, is_prefill: bool) -> Routed | None:
    """What a router says in a request; None: nothing. Raises ``InvalidRequest`` for what is not for this server."""
    if not isinstance(item, GenerateInput):
        return None
    extra = item.sampling.extra
    host, port, room = (_first(extra.get(f"bootstrap_{name}")) for name in ("host", "port", "room"))
    params = extra.get(_WHERE)
    if room is None and params is None:
        if host is not None:
            raise InvalidRequest("bootstrap_host needs a bootstrap_room: routers send both", "bootstrap_room")
        return None
    if params is not None and bool(params.get("do_remote_decode")) != is_prefill:
        told = ("with", "decode", "decodes") if not is_prefill else ("without", "prefill", "computes prompts")
        raise InvalidRequest(
            f"kv_transfer_params {told[0]} do_remote_decode are for the other server: this one {told[2]} "
            f"(--disaggregation-mode {told[1]})",
            _WHERE,
        )
    return Routed("" if room is None else str(room), host or "", port or 0, params)


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) else value


def without_fields(item: GenerateInput, **changes: Any) -> GenerateInput:
    """An input as the engine is to see it: without the fields of routers, its sampling changed."""
    extra = {name: value for name, value in item.sampling.extra.items() if name not in RoutedFields.model_fields}
    sampling = msgspec.structs.replace(item.sampling, extra=extra, **changes)
    return replace(item, sampling=sampling)


class Join(msgspec.Struct, frozen=True):
    """Asks for the K/V of a prompt that a router has sent to this server, too; the answer is ``Computed``.

    seconds: how long to wait for it. heads: of the server that asks.
    """

    key: str
    seconds: float
    heads: Heads


class Handle(msgspec.Struct, frozen=True):
    """The K/V of a prompt, for whichever decode server of as many ranks is shown this. prompt: its ``prompt_hash``."""

    prompt: str
    computed: Computed


def port_of(address: bytes) -> int:
    """The port at which a worker waits; 0: its transport names none."""
    try:
        said = msgspec.msgpack.decode(address, type=list[Any])
    except msgspec.DecodeError:
        return 0
    port = said[1] if len(said) > 1 else 0
    return port if isinstance(port, int) and 0 < port < 2**16 else 0


def prompt_hash(item: GenerateInput) -> str:
    """What the K/V of a prompt depend on in a request."""
    digest = hashlib.blake2b(array("I", item.prompt_token_ids).tobytes(), digest_size=12)
    digest.update(msgspec.msgpack.encode([item.cache_salt, item.adapter]))
    return digest.hexdigest()


def room_key(room: str, prompt: str) -> str:
    """What the K/V of a prompt are called that a router has sent to two servers."""
    return f"room-{room}-{prompt}"


def sealed(secret: bytes, handle: Handle) -> str:
    """A handle as text that only who knows the secret can have written."""
    body = msgspec.msgpack.encode(handle)
    return f"{base64.b64encode(body).decode()}.{sign(secret, _WHERE, body, is_answer=True)}"


def handle_of(secret: bytes, params: dict[str, Any], prompt: str) -> Computed | None:
    """Where the K/V of a prompt are, of those that ``kv_transfer_params`` tell of; None: they tell of other prompts.

    Raises ``InvalidRequest`` for what no prefill server with the secret has written.
    """
    texts = params.get(HANDLES)
    if not isinstance(texts, list) or not texts or len(texts) > MAX_ROOMS:
        raise InvalidRequest(
            f"kv_transfer_params must be those of the reply of a prefill server of fwk, which have {HANDLES}", _WHERE
        )
    for text in texts:
        handle = _opened(secret, text)
        if handle.prompt == prompt:
            return handle.computed
    return None


def _opened(secret: bytes, text: Any) -> Handle:
    try:
        if isinstance(text, str) and len(text) <= MAX_HANDLE_LEN:
            said, _, signature = text.partition(".")
            body = base64.b64decode(said, validate=True)
            if is_signed(secret, _WHERE, body, signature, is_answer=True):
                return msgspec.msgpack.decode(body, type=Handle)
    except (ValueError, msgspec.DecodeError):
        pass
    raise InvalidRequest(
        f"{HANDLES} of kv_transfer_params are not of a prefill server with the same secret in "
        "--disaggregation-token-file, or were changed",
        _WHERE,
    )
