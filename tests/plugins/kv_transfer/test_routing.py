"""What SGLang's and vLLM's routers say in requests, between a prefill server's part and a decode server's.

Bodies are as sglang-router 0.3.2 and vllm-router 0.1.17 send them; the routers themselves are in
``tests/clients/test_routers.py``. Caught when broken on purpose: a room without the hash of its prompt, a handle whose
signature is not checked, a prompt that is withdrawn while it is computed and kept all the same, K/V of routers kept
without a limit, a decode server that waits for a prompt which has failed, a reply for one rank that two take, a room
that was computed first and is answered with no addresses.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI
from starlette.responses import Response
from tests.helpers.engine_pair import counts, half, with_source

from fwk.errors import FwkError, InvalidRequest
from fwk.interfaces.dialect import GenerateInput, OutputDelta
from fwk.interfaces.feature import Ask, RequestPart, ServerPartContext
from fwk.types import Request, SamplingParams
from fwk_kv_transfer.remote_prefill import Heads, KVSource, RemotePrefillOptions, RoutedFields, prefill_servers
from fwk_kv_transfer.remote_prefill.posting import Answer
from fwk_kv_transfer.remote_prefill.prefill_routes import PrefillRoutes
from fwk_kv_transfer.remote_prefill.prefill_servers import Peer, RemotePrefill
from fwk_kv_transfer.remote_prefill.routed_decode import named_peer
from fwk_kv_transfer.remote_prefill.routing import Routed
from fwk_server._common.body import processor_extra
from fwk_server._common.transfers import transfer_fields, transfer_of

BLOCK = 4
HEADS = Heads(1, (4,))
OTHERS = Heads(2, (2,))
RANK = {"in_common": {"dtype": "float32"}, "heads": msgspec.to_builtins(HEADS), "block_size": BLOCK}


def addresses(readers: Heads) -> list[bytes]:
    """Where the only worker of the prefill server is read by each rank of another."""
    return [msgspec.msgpack.encode(("127.0.0.1", 8998 + n + 10 * (readers != HEADS))) for n in range(readers.num_ranks)]


ROOM = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 8241253960807704648}
ROOMS = {"bootstrap_host": ["127.0.0.1"] * 2, "bootstrap_port": [8998, None], "bootstrap_room": [2**63 - 1, 7]}
ASKED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
TOKENS = list(range(30))


def item(tokens: list[int] = TOKENS, **fields: Any) -> GenerateInput:
    """As a dialect makes it of a body with these fields."""
    extra = processor_extra([RoutedFields], fields)
    return GenerateInput(tokens, SamplingParams(max_tokens=9, min_tokens=9, prompt_logprobs=1, extra=extra))


@dataclass
class Servers:
    """A prefill and a decode server without engines, joined by their routes."""

    prefill: PrefillRoutes
    decode: RemotePrefill
    kept: dict[str, Heads | None] = field(default_factory=dict[str, Heads | None])  # by key: who can read it
    heads: Heads = HEADS  # of the decode server
    withdrawn: list[str] = field(default_factory=list[str])

    async def computes(self, one: GenerateInput, *, waits: asyncio.Event | None = None) -> dict[str, Any] | None:
        """What the prefill server says of a prompt in its reply."""
        part = self.prefill.open(one, "")
        assert part is not None
        changed = await part.check(one)
        assert isinstance(changed, GenerateInput)
        assert (changed.sampling.max_tokens, changed.sampling.min_tokens, changed.sampling.extra) == (1, 0, {})
        assert changed.sampling.prompt_logprobs is None, "the decode server tells of these"
        source = await part.enter(changed)
        if waits is not None:
            await waits.wait()
        if isinstance(source, KVSource):
            self.kept[source.key] = source.heads
        delta, _ = [await part.output(OutputDelta(i, "x", [1], finish_reason="length"), None) for i in range(2)]
        part.ended()
        return transfer_of(delta)

    async def wants(self, one: GenerateInput) -> Any:
        """Where the decode server reads a prompt's K/V."""
        part = self.decode.open(one, "")
        assert isinstance(part, RequestPart)
        changed: Any = await part.check(one)
        assert changed.sampling.extra == {}
        assert changed.sampling.max_tokens == 9
        return await part.enter(changed)


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Servers:
    (tmp_path / "secret").write_text("0123456789abcdef")
    shared: dict[str, Any] = {"disaggregation_token_file": str(tmp_path / "secret"), "disaggregation_timeout": 1.0}

    async def ask(operation: str, *args: Any) -> list[Any]:
        if operation == "withdraw":
            made.withdrawn.append(args[0])
            made.kept.pop(args[0], None)
        if operation == "withdraw" or (operation == "keeps" and args[0] not in made.kept):
            return [None]
        readers = msgspec.convert(args[-1], Heads | None)
        if operation == "keeps" and readers is not None:
            assert made.kept[args[0]] in (None, readers), "who is to read is said once"
            made.kept[args[0]] = readers
        return [[RANK | ({} if readers is None else {"addresses": addresses(readers)})]]

    async def ask_decode(operation: str, *args: Any) -> list[Any]:
        assert (operation, args) == ("about", ())
        return [[RANK | {"heads": msgspec.to_builtins(made.heads)}] * made.heads.num_ranks]

    def context(ask: Ask, **options: Any) -> ServerPartContext:
        tools: Any = SimpleNamespace()
        given = RemotePrefillOptions(**shared, **options)
        return ServerPartContext("remote_prefill", "x", tools, ask, given, frontend=tools)

    urls = ("http://127.0.0.1:8001",)
    made = Servers(
        PrefillRoutes(context(ask, disaggregation_mode="prefill")),
        RemotePrefill(context(ask_decode, disaggregation_mode="decode", disaggregation_prefill_servers=urls)),
    )
    app = FastAPI()
    made.prefill.routes(app)

    @app.exception_handler(FwkError)
    async def refused(request: Any, error: Any) -> Any:
        return Response(status_code=getattr(error, "status", 400))

    async def post(url: str, path: str, headers: dict[str, str], body: bytes, tls: Any) -> Answer:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=url) as client:
            reply = await client.post(path, headers=headers, content=body)
        answer = Answer()
        answer.headers, answer.body, answer.status = dict(reply.headers), reply.content, reply.status_code
        return answer

    monkeypatch.setattr(prefill_servers, "post", post)
    return made


@pytest.mark.parametrize("heads", [HEADS, OTHERS], ids=["one rank", "two ranks"])
@pytest.mark.parametrize("fields", [ROOM, ROOMS], ids=["one", "several"])
async def test_a_room_is_waited_for_and_read_once(servers: Servers, fields: dict[str, Any], heads: Heads) -> None:
    """SGLang's router sends to both at once: the decode server may be first."""
    servers.heads = heads
    may_end = asyncio.Event()
    wanted = asyncio.create_task(servers.wants(item(**fields)))
    computed = asyncio.create_task(servers.computes(item(**fields), waits=may_end))
    await asyncio.sleep(0.05)
    assert not wanted.done()
    may_end.set()
    found = await wanted
    assert await computed is None, "vLLM's field is not SGLang's"
    assert found.key in servers.kept
    assert not servers.withdrawn
    assert str(item(**fields).sampling.extra["bootstrap_room"]).strip("[").startswith(found.key.split("-")[1])
    assert (found.num_blocks, found.addresses, found.heads) == (len(TOKENS) // BLOCK, [addresses(heads)], HEADS)
    assert servers.kept == {found.key: heads}
    assert servers.decode.peers[0].bootstrap_port == 8998
    assert servers.decode.trouble() is None


@pytest.mark.parametrize("heads", [HEADS, OTHERS], ids=["one rank", "two ranks"])
async def test_a_room_that_was_computed_before_is_kept_for_any_ranks(servers: Servers, heads: Heads) -> None:
    servers.heads = heads
    await servers.computes(item(**ROOM))
    assert list(servers.kept.values()) == [None]
    found = await servers.wants(item(**ROOM))
    assert found.addresses == [addresses(heads)]
    assert servers.kept == {found.key: heads}
    servers.kept.clear()
    assert await asyncio.wait_for(servers.wants(item(**ROOM)), 1.0) is None


async def test_a_room_is_of_its_prompt(servers: Servers) -> None:
    """Two prompts of one request; a third that was never sent to the prefill server is computed here."""
    prompts = [TOKENS, TOKENS[:20] + [7] * 9]
    for tokens in prompts:
        await servers.computes(item(tokens, **ROOM))
    first, second = [await servers.wants(item(tokens, **ROOM)) for tokens in prompts]
    assert first.key != second.key
    assert (first.num_blocks, second.num_blocks) == (7, 7)
    started = time.monotonic()
    assert await servers.wants(item([*TOKENS, 5], **ROOM)) is None
    assert time.monotonic() - started < 4.0, "it waits for its time-out, no longer"


async def test_a_prompt_that_fails_is_not_waited_for(servers: Servers) -> None:
    one = item(**ROOM)
    wanted = asyncio.create_task(servers.wants(one))
    part: Any = servers.prefill.open(one, "")
    await part.enter(await part.check(one))
    await asyncio.sleep(0.02)
    part.ended()
    assert await asyncio.wait_for(wanted, 1.0) is None
    assert servers.decode.trouble() is None, "one prompt says nothing of a server"


async def test_a_prompt_that_is_not_kept_is_not_waited_for(servers: Servers) -> None:
    """Its engine had no room, or another feature has changed what its K/V are."""
    one = item(**ROOM)
    part: Any = servers.prefill.open(one, "")
    part.others = ("another",)
    assert await part.enter(await part.check(one)) is None
    assert await asyncio.wait_for(servers.wants(one), 1.0) is None


async def test_a_client_that_leaves_has_nothing_kept(servers: Servers) -> None:
    may_end = asyncio.Event()
    computed = asyncio.create_task(servers.computes(item(**ROOM), waits=may_end))
    wanted = asyncio.create_task(servers.wants(item(**ROOM)))
    await asyncio.sleep(0.05)
    wanted.cancel()
    await asyncio.gather(wanted, return_exceptions=True)
    await asyncio.sleep(0.05)
    num_told = len(servers.withdrawn)
    may_end.set()
    assert await computed is None
    assert len(servers.withdrawn) > num_told, "what was computed after that is not kept"


async def test_a_server_that_is_not_known_is_told(servers: Servers) -> None:
    other = Peer("http://10.0.0.2:8001", None)
    servers.decode.peers.append(other)
    assert await servers.wants(item(**ROOM | {"bootstrap_host": "elsewhere", "bootstrap_port": None})) is None
    assert "none of --disaggregation-prefill-servers" in (servers.decode.trouble() or "")
    await servers.computes(item(**ROOM))
    assert await servers.wants(item(**ROOM)) is not None
    assert servers.decode.trouble() is None


async def test_a_reply_tells_a_decode_server_where_to_read(servers: Servers) -> None:
    """vLLM's router asks the prefill server first; the K/V of several prompts are in one field."""
    prompts = [TOKENS, TOKENS[:20], [1, 2]]
    told = [await servers.computes(item(tokens, kv_transfer_params=ASKED)) for tokens in prompts]
    assert told[0] is not None
    params = transfer_fields(told)["kv_transfer_params"]
    assert params["do_remote_prefill"] is True
    assert params["do_remote_decode"] is False
    assert len(params["remote_handles"]) == 3
    found = [await servers.wants(item(tokens, kv_transfer_params=params)) for tokens in prompts]
    assert [source.num_blocks for source in found] == [7, 5, 0]
    assert {source.key for source in found} == servers.kept.keys()
    assert {source.addresses[0][0] for source in found} == {*addresses(HEADS)}
    assert await servers.wants(item([9] * 30, kv_transfer_params=params)) is None, "of no other prompt"


async def test_a_reply_is_for_servers_with_as_many_ranks(servers: Servers) -> None:
    """The prefill server does not know who reads when it answers: others compute the prompt, and say why."""
    told = await servers.computes(item(kv_transfer_params=ASKED))
    servers.heads = OTHERS
    assert await servers.wants(item(kv_transfer_params=told)) is None
    assert "--tensor-parallel-size is 1, this server's is 2" in (servers.decode.trouble() or "")


async def test_what_no_prefill_server_has_said_is_refused(servers: Servers) -> None:
    told = await servers.computes(item(kv_transfer_params=ASKED))
    assert told is not None
    [handle] = told["remote_handles"]
    body, _, signature = handle.partition(".")
    flipped = "A" if signature[0] != "a" else "b"
    for handles in ([f"{body}.{flipped}{signature[1:]}"], [f"{body[:-4]}AAA=.{signature}"], ["x"], [1], [], None):
        with pytest.raises(InvalidRequest, match="of a prefill server"):
            await servers.wants(item(kv_transfer_params=told | {"remote_handles": handles}))


@pytest.mark.parametrize(
    ("fields", "is_prefill", "why"),
    [
        (
            {"kv_transfer_params": {"do_remote_prefill": True}},
            True,
            "without do_remote_decode are for the other server",
        ),
        ({"kv_transfer_params": ASKED}, False, "with do_remote_decode are for the other server"),
        ({"bootstrap_host": "127.0.0.1"}, True, "bootstrap_host needs a bootstrap_room"),
    ],
)
def test_what_is_for_the_other_server_is_refused(
    servers: Servers, fields: dict[str, Any], is_prefill: bool, why: str
) -> None:
    part = servers.prefill if is_prefill else servers.decode
    with pytest.raises(InvalidRequest, match=why):
        part.check(item(**fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"bootstrap_room": -1},
        {"bootstrap_room": "1"},
        {"bootstrap_room": []},
        {"bootstrap_port": 65536},
        {"bootstrap_host": "x" * 254},
        {"kv_transfer_params": [1]},
        {"kv_transfer_params": dict.fromkeys(map(str, range(65)))},
    ],
    ids=str,
)
def test_fields_of_another_kind_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        item(**fields)


def test_the_server_that_a_router_means_is_found() -> None:
    one, two, three = peers = [
        Peer(f"http://10.0.0.{n}:80", None, bootstrap_port=port) for n, port in enumerate([1, 1, 2])
    ]
    assert named_peer(peers, Routed("1", "10.0.0.0", 1)) is one
    assert named_peer(peers, Routed("1", "10.0.0.1", 9)) is two, "by its host"
    assert named_peer(peers, Routed("1", "a-name", 2)) is three, "by its port"
    assert named_peer(peers, Routed("1", "a-name", 1)) is None, "which two have"
    assert named_peer(peers[:1], Routed("1", "a-name", 0)) is one, "there is no other"
    same = [Peer("http://[::1]:80", None, bootstrap_port=5), Peer("http://[::1]:81", None, bootstrap_port=6)]
    assert named_peer(same, Routed("1", "[::1]", 6)) is same[1]
    assert named_peer([], Routed("1", "a", 1)) is None


def test_half_of_the_kv_cache_is_kept_for_routers(tiny_folder: Path, tmp_path: Path) -> None:
    """Any client that sends a prompt to a prefill server has its K/V kept: others must find room, too."""
    options: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "page_size": 4, "max_total_tokens": 256}
    with half(str(tiny_folder), "prefill", tmp_path, **options, check_blocks=True, device="cpu") as llm:
        engine = llm.engine

        def compute(number: int, seconds: float = 60.0) -> None:
            tokens = [number * 10 + i % 7 for i in range(41)]
            request = Request(
                request_id=f"r{number}",
                prompt_token_ids=tokens,
                sampling=SamplingParams(max_tokens=1, temperature=0.0),
            )
            engine.add(with_source(request, KVSource(f"key-{number}", seconds, None, is_limited=True)))
            while engine.stats().num_running + engine.stats().num_waiting:
                engine.step()

        for number in range(1, 6):
            compute(number)
        assert counts(engine).num_kv_offered == 3, "of 64 blocks 32, by ten"
        assert engine.call_feature("remote_prefill", "keeps", ["key-4", None]) is None
        for number in range(1, 4):
            engine.call_feature("remote_prefill", "withdraw", [f"key-{number}"])
        while engine.has_work:
            engine.step()
        compute(6)
        assert counts(engine).num_kv_offered == 1
        engine.call_feature("remote_prefill", "withdraw", ["key-6"])
        while engine.has_work:
            engine.step()
        assert engine.stats().num_held_blocks == 0
