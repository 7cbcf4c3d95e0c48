"""Two ``fwk serve`` that share their work on loopback say what one says, whatever dies or differs."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from fwk.errors import ConfigError
from fwk_kv_transfer.remote_prefill.heads import Heads
from fwk_kv_transfer.remote_prefill.messages import PREFILL, SIGNATURE, Order, sign
from tests.helpers.adapters import make_adapter, make_base
from tests.helpers.client import Streamed, connect
from tests.helpers.etcd_server import MISSING, EtcdServer, is_missing
from tests.helpers.ports import free_port
from tests.helpers.rig import Server, until, write_model
from tests.helpers.servers import Start
from tests.helpers.transports import transports

pytestmark = [pytest.mark.sweep, pytest.mark.timeout(600)]

SECRET = b"0123456789abcdef"
FLAGS = ("--max-running-requests", "16")
TEXT = "The quick brown fox jumps over the lazy dog. " * 6
HEADS = Heads(1, (2, 2))


class Site:
    """Servers of one deployment."""

    def __init__(self, model: Path, python_path: str, folder: Path) -> None:
        self.model, self._python_path = model, python_path
        self.transport = "tcp"
        self.secret = folder / "secret"
        self.secret.write_bytes(SECRET)
        self.other_secret = folder / "other"
        self.other_secret.write_bytes(b"another secret!!")
        self.servers: list[Server] = []

    def server(self, mode: str, *flags: str) -> Server:
        if "--disaggregation-token-file" not in flags:
            flags = ("--disaggregation-token-file", str(self.secret), *flags)
        flags = flags if "--dtype" in flags else ("--dtype", "float32", *flags)
        given = (*FLAGS, "--disaggregation-mode", mode, "--disaggregation-transfer-backend", self.transport, *flags)
        self.servers.append(Server(self.model, *given, python_path=self._python_path))
        return self.servers[-1]

    def prefill(self, *flags: str) -> Server:
        return self.server("prefill", *flags).start()

    def decode(self, *urls: str, flags: tuple[str, ...] = ()) -> Server:
        named = ("--disaggregation-prefill-servers", *urls, "--disaggregation-min-prompt-tokens", "17", *flags)
        return self.server("decode", *named)


@pytest.fixture
def site(tiny_model: Path, python_path: str, tmp_path: Path) -> Iterator[Site]:
    made = Site(tiny_model, python_path, tmp_path)
    yield made
    for server in made.servers:
        server.close()


@pytest.fixture(scope="module")
def one(spawn: Start) -> Server:
    return spawn("--dtype", "float32", *FLAGS)


def is_whole(server: Server) -> None:
    """Nothing runs, no block is held, nothing is under way."""
    until(server.is_idle, 10, "nothing runs")
    until(server._books_balance, 10, "no block is held")
    until(lambda: not server.metric("fwk:num_kv_fetching") + server.metric("fwk:num_kv_offered"), 10, "no transfers")


BODIES: list[dict[str, Any]] = [
    {"prompt": TEXT, "max_tokens": 12, "temperature": 0},
    {"prompt": TEXT + "!", "max_tokens": 12, "temperature": 0.8, "seed": 5, "n": 3},
    {"prompt": TEXT[5:], "max_tokens": 6, "temperature": 0, "logprobs": 2},
    {"prompt": TEXT[7:], "max_tokens": 6, "temperature": 0, "logprobs": 1, "echo": True},
    {"prompt": [TEXT[9:], TEXT[11:]], "max_tokens": 30, "temperature": 0.9, "seed": 3, "stop": ["a", "e"]},
    {"prompt": "short", "max_tokens": 5, "temperature": 0},
    {"prompt": TEXT[:150], "max_tokens": 5, "temperature": 0, "cache_salt": "mine"},
    {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 6, "temperature": 0},
]


def shown(reply: httpx.Response) -> Any:
    body = reply.json()
    return reply.status_code, body["choices"], body["usage"]


@pytest.mark.parametrize("transport", transports("tcp", "nixl", "mooncake"))
async def test_replies_are_those_of_one_server(site: Site, one: Server, transport: str) -> None:
    site.transport = transport
    prefill = site.prefill()
    decode = site.decode(prefill.url).start()
    assert decode.golden == one.golden
    for _ in range(2):
        for body in BODIES:
            path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
            body = body | ({} if "messages" in body else {"return_token_ids": True})
            body["cache_salt"] = f"{transport}{body.get('cache_salt', '')}"
            assert shown(decode.post(body, path)) == shown(one.post(body, path)), body
    body = {"prompt": "Stream this. " + TEXT, "max_tokens": 20, "n": 2, "seed": 1, "temperature": 0.9}
    async with connect(decode) as client, connect(one) as other:
        streamed, wanted = await client.stream(**body), await other.stream(**body)
    assert (streamed.token_ids, streamed.texts, streamed.reasons) == (wanted.token_ids, wanted.texts, wanted.reasons)
    for server in (prefill, decode):
        is_whole(server)
        assert server.metric("fwk:kv_transfers_total") >= 7
        assert server.metric("fwk:kv_transfer_bytes_total") > 0
        assert server.metric("fwk:kv_transfer_failures_total") == 0
        assert server.health() == 200
        assert server.get("/health").json() == {"status": "ok"}
    decode.check_invariants()


async def begin(server: Server, count: int) -> tuple[list[Streamed], asyncio.Task[Any]]:
    """Requests with long prompts of their own, all at once."""
    streams = [Streamed() for _ in range(count)]

    async def run() -> None:
        async with connect(server) as client:
            bodies = [{"prompt": f"{i} {TEXT * 5}"[:1200], "max_tokens": 8} for i in range(count)]
            await asyncio.gather(*(client.stream(s, **b) for s, b in zip(streams, bodies, strict=True)))

    return streams, asyncio.create_task(run())


@pytest.mark.parametrize("when", ["at once", "while it transfers", "while it computes"])
@pytest.mark.parametrize("transport", transports("tcp", "nixl", "mooncake"))
async def test_a_prefill_server_that_is_killed_costs_computation_only(
    site: Site, one: Server, transport: str, when: str
) -> None:
    site.transport = transport
    prefill = site.prefill()
    decode = site.decode(prefill.url, flags=("--disaggregation-timeout", "20")).start()
    before = decode.metric("fwk:kv_transfers_total")
    if when == "while it computes":
        prefill.signal_engine(signal.SIGSTOP)
    streams, running = await begin(decode, 12)
    if when == "while it transfers":
        await asyncio.to_thread(
            until, lambda: decode.metric("fwk:kv_transfers_total") > before, 20, "a transfer", pause=0.001
        )
    for process in [*prefill.engines(recursive=True), *prefill.children()]:
        process.kill()
    prefill.process.kill()
    await asyncio.wait_for(running, 200)
    wanted, running = await begin(one, 12)
    await asyncio.wait_for(running, 200)
    assert [s.token_ids for s in streams] == [w.token_ids for w in wanted]
    assert all(s.is_done and not s.errors for s in streams)
    is_whole(decode)
    assert decode.get("/health").json()["status"] == "degraded"
    assert prefill.url in decode.get("/health").json()["reason"]
    assert "Traceback" not in decode.log


@pytest.mark.parametrize("transport", transports("tcp", "nixl", "mooncake"))
async def test_a_decode_server_that_is_killed_leaves_nothing_behind(site: Site, transport: str) -> None:
    site.transport = transport
    prefill = site.prefill()
    decode = site.decode(prefill.url, flags=("--disaggregation-timeout", "3")).start()
    _, running = await begin(decode, 12)
    await asyncio.sleep(0.1)
    for process in decode.engines():
        process.kill()
    decode.process.kill()
    await asyncio.gather(running, return_exceptions=True)
    is_whole(prefill)
    prefill.check_invariants()


async def test_clients_that_leave_end_work_on_both_sides(site: Site) -> None:
    prefill = site.prefill()
    decode = site.decode(prefill.url).start()
    prefill.signal_engine(signal.SIGSTOP)
    _, running = await begin(decode, 8)
    await asyncio.sleep(0.5)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    prefill.signal_engine(signal.SIGCONT)
    for server in (prefill, decode):
        is_whole(server)
        server.check_invariants()
    assert "the deadline has passed" not in prefill.log, "what is not wanted is kept no longer"


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--page-size", "32"), "--page-size differs: 32 here, 16 there"),
        (("--dtype", "bfloat16"), "the model's dtype differs: bfloat16 here, float32 there"),
        (("--attention-backend", "torch"), "the plugin of attention differs: torch"),
    ],
    ids=["block size", "dtype", "attention"],
)
def test_servers_that_differ_do_not_share(site: Site, flags: tuple[str, ...], why: str) -> None:
    prefill = site.prefill()
    decode = site.decode(prefill.url, flags=flags)
    assert decode.process.wait(120) == ConfigError.exit_code
    assert f"--disaggregation-prefill-servers {prefill.url} cannot serve this one: {why}" in decode.log
    assert "Traceback" not in decode.log


def test_another_model_is_told(site: Site, tmp_path: Path) -> None:
    prefill = site.prefill()
    site.model = write_model(tmp_path / "changed", rope_theta=20000.0)
    decode = site.decode(prefill.url)
    assert decode.process.wait(120) == ConfigError.exit_code
    assert "the model (what its files hold) differs: " in decode.log


def test_a_server_with_another_secret_is_not_used(site: Site, one: Server) -> None:
    prefill = site.prefill("--disaggregation-token-file", str(site.other_secret))
    decode = site.decode(prefill.url).start()
    assert decode.golden == one.golden
    reason = decode.get("/health").json()["reason"]
    assert "another secret in --disaggregation-token-file" in reason
    assert decode.metric("fwk:kv_transfers_total") == 0


def test_a_server_that_comes_late_is_used_and_one_that_came_back_changed_is_not(site: Site, one: Server) -> None:
    port = free_port()
    decode = site.decode(f"http://127.0.0.1:{port}").start()
    assert decode.golden == one.golden
    assert "cannot be reached (Connection refused): prompts are computed here meanwhile" in decode.log
    assert decode.get("/health").json()["status"] == "degraded"
    prefill = site.prefill("--port", str(port))

    def transfers() -> bool:
        decode.post({"prompt": f"{os.urandom(4).hex()} {TEXT}", "max_tokens": 2})
        return decode.metric("fwk:kv_transfers_total") > 0

    until(transfers, 20, "a prompt computed there", pause=0.5)
    assert decode.get("/health").json()["status"] == "ok"
    assert prefill.stop() == 0
    site.prefill("--port", str(port), "--dtype", "bfloat16")

    def is_refused() -> bool:
        decode.post({"prompt": f"{os.urandom(4).hex()} {TEXT}", "max_tokens": 2})
        return "the model's dtype differs: float32 here, bfloat16 there" in decode.log

    until(is_refused, 20, "the other dtype is noticed", pause=0.5)
    assert "dtype differs" in decode.get("/health").json()["reason"]
    assert decode._golden() == one.golden
    is_whole(decode)


@pytest.mark.parametrize("which", ["prefill", "decode"])
def test_an_engine_that_is_started_again_exchanges_again(site: Site, one: Server, which: str) -> None:
    prefill = site.prefill("--health-monitor", "true")
    decode = site.decode(prefill.url, flags=("--health-monitor", "true")).start()
    server = prefill if which == "prefill" else decode
    server.signal_engine(signal.SIGKILL)
    until(lambda: server.health() == 503, 20, "the engine's death")
    if which == "prefill":
        assert decode._golden() == one.golden
    until(lambda: server.health() == 200, 40, "another engine")
    before = decode.metric("fwk:kv_transfers_total")

    def transfers() -> bool:
        decode.post({"prompt": f"{os.urandom(4).hex()} {TEXT}", "max_tokens": 2})
        return decode.metric("fwk:kv_transfers_total") > before

    until(transfers, 20, "a prompt computed there", pause=0.5)
    for end in (prefill, decode):
        is_whole(end)


def test_two_prefill_servers_take_turns(site: Site) -> None:
    first, second = site.prefill(), site.prefill()
    decode = site.decode(first.url, second.url).start()
    for number in range(6):
        assert decode.post({"prompt": f"{number} {TEXT}", "max_tokens": 2}).status_code == 200
    for server in (first, second):
        until(lambda server=server: server.metric("fwk:kv_transfers_total") >= 3, 10, "every other prompt")
        is_whole(server)


async def test_each_server_may_have_several_engines(site: Site, one: Server) -> None:
    """K/V are read from the engine that computed them; one that is killed is started again, and read anew."""
    flags = ("--data-parallel-size", "2", "--health-monitor", "true")
    prefill = site.prefill(*flags)
    decode = site.decode(prefill.url, flags=flags).start()
    for server in (None, decode, prefill):
        if server is not None:
            server.engines()[0].kill()
            until(lambda server=server: server.get("/health").json()["status"] != "ok", 20, "a death is noticed")
            until(lambda server=server: server.get("/health").json()["status"] == "ok", 60, "another engine")
        before = decode.metric("fwk:kv_transfers_total"), decode.metric("fwk:kv_transfer_failures_total")
        streams, running = await begin(decode, 12)
        await asyncio.wait_for(running, 200)
        wanted, running = await begin(one, 12)
        await asyncio.wait_for(running, 200)
        assert [s.token_ids for s in streams] == [w.token_ids for w in wanted]
        after = decode.metric("fwk:kv_transfers_total"), decode.metric("fwk:kv_transfer_failures_total")
        assert after[1] == before[1]
        assert after[0] > before[0], server
        for end in (prefill, decode):
            is_whole(end)
    assert decode.metric("fwk:kv_transfers_total") >= 12


@pytest.mark.parametrize(("there", "here"), [("1", "2"), ("2", "1")])
@pytest.mark.parametrize("transport", transports("tcp", "nixl", "mooncake"))
async def test_servers_may_have_other_numbers_of_ranks(
    site: Site, one: Server, transport: str, there: str, here: str
) -> None:
    """Heads are cut anew; one rank of the prefill server is killed, and nothing is wrong, lost or kept."""
    site.transport = transport
    prefill = site.prefill("--tensor-parallel-size", there, "--health-monitor", "true")
    flags = ("--tensor-parallel-size", here, "--disaggregation-timeout", "20")
    decode = site.decode(prefill.url, flags=flags).start()
    assert decode.golden == one.golden
    wanted, running = await begin(one, 12)
    await asyncio.wait_for(running, 200)
    for is_killed in (False, True):
        before = decode.metric("fwk:kv_transfers_total")
        decode.post({"prompt": f"{os.urandom(4).hex()} {TEXT}", "max_tokens": 2})
        streams, running = await begin(decode, 12)
        if is_killed:
            prefill.engines(recursive=True)[-1].kill()
        await asyncio.wait_for(running, 200)
        assert [s.token_ids for s in streams] == [w.token_ids for w in wanted]
        assert decode.metric("fwk:kv_transfers_total") > before
        is_whole(decode)
    until(lambda: prefill.health() == 200, 60, "another engine")
    is_whole(prefill)


def test_routed_prompts_are_read_by_other_numbers_of_ranks(site: Site, one: Server) -> None:
    """By SGLang's room, whichever server is asked first; vLLM's reply is for as many ranks, and others are told so."""
    prefill = site.prefill()
    decode = site.decode(prefill.url, flags=("--tensor-parallel-size", "2")).start()
    num_read = decode.metric("fwk:kv_transfers_total")
    for number, (first, second) in enumerate(2 * [(prefill, decode), (decode, prefill)]):
        room = {"bootstrap_host": "127.0.0.1", "bootstrap_room": 2**63 + number}
        body = {"prompt": f"{number} {TEXT}", "max_tokens": 8, "temperature": 0, "return_token_ids": True, **room}
        with ThreadPoolExecutor(2) as pool:
            replies = {first: pool.submit(first.post, body)}
            if number < 2:
                time.sleep(0.5)
            replies[second] = pool.submit(second.post, body)
            found = shown(replies[decode].result(60))
            assert replies[prefill].result(60).status_code == 200
        num_read += 1
        assert found == shown(one.post({name: value for name, value in body.items() if name not in room})), number
        assert decode.metric("fwk:kv_transfers_total") == num_read
    assert decode.get("/health").json() == {"status": "ok"}
    body = {"prompt": f"told {TEXT}", "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    told = prefill.post(body | {"kv_transfer_params": {"do_remote_decode": True}}).json()["kv_transfer_params"]
    assert shown(decode.post(body | {"kv_transfer_params": told})) == shown(one.post(body))
    assert "start both with the same" in decode.get("/health").json()["reason"]
    assert decode.metric("fwk:kv_transfers_total") == num_read
    assert decode.metric("fwk:kv_transfer_failures_total") == 0
    is_whole(decode)


@pytest.mark.parametrize("kind", ["file", pytest.param("etcd", marks=pytest.mark.skipif(is_missing(), reason=MISSING))])
def test_servers_join_and_leave_by_a_registry(
    site: Site, one: Server, tmp_path: Path, request: pytest.FixtureRequest, kind: str
) -> None:
    """A decode server that knows none has one that joins compute; killed ones are gone, and so may the registry be."""
    etcd = EtcdServer() if kind == "etcd" else None
    if etcd is not None:
        request.addfinalizer(etcd.stop)
    registry = etcd.url if etcd else f"file://{tmp_path}"
    flags = ("--disaggregation-registry-lease", "2", "--disaggregation-registry", registry)

    def prefill() -> Server:
        port = str(free_port())
        return site.prefill("--port", port, "--disaggregation-advertise-url", f"http://127.0.0.1:{port}", *flags)

    def computes(server: Server) -> bool:
        before = server.metric("fwk:kv_transfers_total")
        decode.post({"prompt": f"{os.urandom(4).hex()} {TEXT}", "max_tokens": 2})
        return server.metric("fwk:kv_transfers_total") > before

    decode = site.server("decode", "--disaggregation-min-prompt-tokens", "17", *flags).start()
    assert decode.golden == one.golden
    assert "no prefill server is registered" in decode.get("/health").json()["reason"]
    first = prefill()
    until(lambda: computes(first), 20, "the first one computes", pause=0.3)
    assert decode.get("/health").json()["status"] == "ok"
    second = prefill()
    until(lambda: computes(second), 20, "so does the second", pause=0.3)
    for process in [*first.engines(recursive=True), *first.children()]:
        process.kill()
    first.process.kill()
    until(lambda: f"the prefill server {first.url} has left" in decode.log, 20, "the killed one is gone", pause=0.3)
    until(lambda: decode.get("/health").json()["status"] == "ok", 10, "and missed no more", pause=0.3)
    if etcd is not None:
        etcd.stop()
        until(lambda: "registry" in decode.get("/health").json().get("reason", ""), 20, "etcd is missed", pause=0.3)
        until(lambda: computes(second), 10, "what is known stays", pause=0.3)
        etcd.start()
        until(lambda: decode.get("/health").json()["status"] == "ok", 20, "another etcd is told", pause=0.3)
    assert second.stop() == 0
    until(lambda: f"the prefill server {second.url} has left" in decode.log, 20, "it has said so", pause=0.3)
    assert decode._golden() == one.golden
    is_whole(decode)
    assert "Traceback" not in decode.log


def test_prompts_of_adapters_are_computed_where_they_are(site: Site, tmp_path: Path) -> None:
    """One that both have, one that the decode server alone has, and one of another content under the same name."""
    site.model = make_base(tmp_path / "base")
    for name, seed in (("both", 1), ("here", 2), ("mine", 3), ("theirs", 4)):
        make_adapter(site.model, tmp_path / "adapters" / name, seed=seed)
    flags = (
        *("--enable-lora", "--lora-paths", f"both={tmp_path}/adapters/both", "--lora-dirs", f"{tmp_path}/adapters"),
        *("--admin-api-key", "administrator", "--load-format", "safetensors"),
    )
    prefill = site.prefill(*flags)
    decode = site.decode(prefill.url, flags=(*flags, "--disaggregation-timeout", "3")).start()

    def load(server: Server, name: str, path: str) -> None:
        body = {"lora_name": name, "lora_path": path}
        reply = server.post(body, "/v1/load_lora_adapter", {"authorization": "Bearer administrator"})
        assert reply.status_code == 200, reply.text

    load(decode, "here", "here")
    load(decode, "one", "mine")
    load(prefill, "one", "theirs")
    said: set[str] = set()
    for name, transfers, failures in (("both", 1, 0), ("here", 0, 0), ("one", 0, 1), ("both", 1, 0)):
        before = [decode.metric(f"fwk:kv_{what}_total") for what in ("transfers", "transfer_failures")]
        prompt = [(7 * place + len(said)) % 90 + 5 for place in range(100)]
        reply = decode.post({"model": name, "prompt": prompt, "max_tokens": 8, "return_token_ids": True})
        assert reply.status_code == 200, reply.text
        after = [decode.metric(f"fwk:kv_{what}_total") for what in ("transfers", "transfer_failures")]
        assert [now - then for now, then in zip(after, before, strict=True)] == [transfers, failures], name
        said.add(str(reply.json()["choices"][0]["token_ids"]))
    assert decode.get("/health").json() == {"status": "ok"}, "a refused order is no failure of the server"
    for end in (prefill, decode):
        is_whole(end)


def test_orders_of_strangers_are_refused(site: Site) -> None:
    prefill = site.prefill()
    body = msgspec.msgpack.encode(Order("key", [1] * 40, "", 0, 5.0, HEADS))
    good = sign(SECRET, PREFILL, body, is_answer=False)
    wrong = [
        "",
        "0" * 64,
        sign(b"another secret!!", PREFILL, body, is_answer=False),
        sign(SECRET, "/disaggregation/about", body, is_answer=False),
        sign(SECRET, PREFILL, body, is_answer=True),
    ]
    for signature in wrong:
        reply = httpx.post(prefill.url + PREFILL, content=body, headers={SIGNATURE: signature}, timeout=60)
        assert reply.status_code == 401, reply.text
    assert (
        httpx.post(prefill.url + PREFILL, content=body[:-1], headers={SIGNATURE: good}, timeout=60).status_code == 401
    )
    for key, token_ids in (("key", [10_000]), ("", [1]), ("key", [])):
        body = msgspec.msgpack.encode(Order(key, token_ids, "", 0, 5.0, HEADS))
        signature = sign(SECRET, PREFILL, body, is_answer=False)
        reply = httpx.post(prefill.url + PREFILL, content=body, headers={SIGNATURE: signature}, timeout=60)
        assert reply.status_code == 400, reply.text
    is_whole(prefill)
