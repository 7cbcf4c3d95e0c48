"""Prefill servers that join and leave: a folder of files, and a real etcd.

Caught when broken on purpose: entries without a good signature, a file that nothing renews taken for a living server,
servers dropped while the registry cannot be read, a lease that etcd has forgotten not granted anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.helpers.etcd_server import MISSING, EtcdServer, is_missing

from fwk.errors import ConfigError
from fwk.interfaces.feature import ServerPartContext
from fwk_kv_transfer.remote_prefill import RemotePrefillOptions
from fwk_kv_transfer.remote_prefill.prefill_servers import RemotePrefill
from fwk_kv_transfer.remote_prefill.registry import (
    MAX_ENTRIES,
    Entry,
    Registration,
    Registry,
    RegistryError,
    open_registry,
    read_entry,
)

SECRET = b"0123456789abcdef"
NAMES = [f"{number:032x}" for number in range(4)]
KINDS = ["file", pytest.param("etcd", marks=[pytest.mark.skipif(is_missing(), reason=MISSING)])]


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdServer]:
    server = EtcdServer()
    yield server
    server.stop()


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return f"file://{tmp_path}"
    return f"{request.getfixturevalue('etcd').url}/{tmp_path.name}"


async def urls(registry: Registry, secret: bytes = SECRET) -> list[str]:
    return sorted(found for entry in await registry.entries() if (found := read_entry(secret, entry)) is not None)


def entry(number: int, renewed: int = 1, secret: bytes = SECRET) -> bytes:
    return msgspec.json.encode(Entry(f"http://10.0.0.{number}:8000", 1.0, renewed).signed(secret))


async def until(what: Any, seconds: float = 10.0) -> None:
    end = asyncio.get_running_loop().time() + seconds
    while not await what():
        assert asyncio.get_running_loop().time() < end, "it has not come to that"
        await asyncio.sleep(0.05)


async def test_entries_come_stay_and_go(url: str) -> None:
    one, reader = open_registry(url), open_registry(url)
    assert await reader.entries() == []
    await one.put(NAMES[0], entry(0), 1.0)
    await one.put(NAMES[1], entry(1), 1.0)
    await one.put(NAMES[2], entry(2, secret=b"another secret!!"), 1.0)
    assert await urls(reader) == ["http://10.0.0.0:8000", "http://10.0.0.1:8000"], "and none of another secret"
    for renewed in range(2, 10):
        await one.put(NAMES[0], entry(0, renewed), 1.0)
        await asyncio.sleep(0.3)
        await reader.entries()
    end = 8 if url.startswith("etcd") else 2  # etcd's shortest lease is of some seconds
    for renewed in range(10, 10 + end * 3):
        await one.put(NAMES[0], entry(0, renewed), 1.0)
        await asyncio.sleep(0.3)
        if await urls(reader) == ["http://10.0.0.0:8000"]:
            break
    assert await urls(reader) == ["http://10.0.0.0:8000"], "what is renewed stays, what is not goes"
    await one.remove(NAMES[0])
    await one.remove(NAMES[3])
    assert await urls(reader) == []


@pytest.mark.skipif(is_missing(), reason=MISSING)
async def test_an_etcd_that_was_killed_and_knows_nothing_is_told_again() -> None:
    server = EtcdServer()
    try:
        registry = open_registry(f"etcd://127.0.0.1:1,127.0.0.1:{server.port}")
        await registry.put(NAMES[0], entry(0), 5.0)
        assert await urls(registry) == ["http://10.0.0.0:8000"], "the member that answers is asked"
        server.stop()
        with pytest.raises(RegistryError, match="cannot be reached"):
            await registry.put(NAMES[0], entry(0), 5.0)
        server.start()

        async def is_there() -> bool:
            with contextlib.suppress(RegistryError):
                await registry.put(NAMES[0], entry(0), 5.0)
            with contextlib.suppress(RegistryError):
                return await urls(registry) == ["http://10.0.0.0:8000"]
            return False

        await until(is_there)
    finally:
        server.stop()


async def test_files_that_are_none_and_those_left_behind(tmp_path: Path) -> None:
    registry = open_registry(f"file://{tmp_path}")
    await registry.put(NAMES[0], entry(0), 1.0)
    (tmp_path / f"{NAMES[1]}.json").write_bytes(b"{" * 100_000)
    (tmp_path / f"{NAMES[2]}.json").mkdir()
    (tmp_path / f"{NAMES[3]}.json").symlink_to("/etc/passwd")
    (tmp_path / "notes.txt").write_text("mine")
    assert await urls(registry) == ["http://10.0.0.0:8000"]
    for _, since in registry._seen.values():  # type: ignore[attr-defined]
        assert since > 0
    registry._seen = {name: (data, since - 11) for name, (data, since) in registry._seen.items()}  # type: ignore[attr-defined]
    assert await urls(registry) == []
    assert sorted(os.listdir(tmp_path)) == [f"{NAMES[1]}.json", f"{NAMES[2]}.json", f"{NAMES[3]}.json", "notes.txt"]
    for number in range(MAX_ENTRIES + 5):
        (tmp_path / f"{number:032x}.json").is_dir() or (tmp_path / f"{number + 9:032x}.json").write_bytes(entry(7))
    assert len(await registry.entries()) <= MAX_ENTRIES


def options(tmp_path: Path, mode: str, url: str, **given: Any) -> RemotePrefillOptions:
    (tmp_path / "secret").write_bytes(SECRET)
    return RemotePrefillOptions(
        disaggregation_mode=mode,  # type: ignore[arg-type]
        disaggregation_token_file=str(tmp_path / "secret"),
        disaggregation_registry=url,
        disaggregation_registry_lease=2.0,
        **given,
    )


@contextlib.asynccontextmanager
async def decoder(tmp_path: Path, url: str, *servers: str) -> AsyncIterator[Any]:
    tools: Any = SimpleNamespace()
    given = options(tmp_path, "decode", url, disaggregation_prefill_servers=servers)
    part: Any = RemotePrefill(ServerPartContext("remote_prefill", "x", tools, tools, given, frontend=tools))
    part._common, part._are_engines_ready = [], True

    async def not_tried(peer: Any) -> None:
        """Nothing listens at these addresses."""

    part._try_peer = not_tried
    work = asyncio.ensure_future(part._follow_registry())
    yield part
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)


async def test_servers_join_and_leave_and_stay_while_the_registry_is_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    folder = tmp_path / "servers"
    folder.mkdir()
    url = f"file://{folder}"
    prefill = Registration(
        options(tmp_path, "prefill", url, disaggregation_advertise_url="http://10.0.0.1:8000/"), SECRET
    )
    async with decoder(tmp_path, url, "http://10.0.0.9:8000") as part:
        assert [peer.url for peer in part._in_turn()] == ["http://10.0.0.9:8000"]
        await prefill.begin()
        work = asyncio.ensure_future(prefill.run())

        async def both() -> bool:
            return {peer.url for peer in part._in_turn()} == {"http://10.0.0.1:8000", "http://10.0.0.9:8000"}

        async def one() -> bool:
            return not await both() and len(part._in_turn()) == 1

        await until(both)
        folder.rename(tmp_path / "away")
        await until(lambda: asyncio.sleep(0, part.trouble() is not None and prefill.trouble() is not None))
        assert "cannot be used (No such file or directory)" in (part.trouble() or "")
        await asyncio.sleep(1.5)
        assert await both(), "servers that are known stay"
        (tmp_path / "away").rename(folder)
        await until(lambda: asyncio.sleep(0, (part.trouble(), prefill.trouble()) == (None, None)))
        await asyncio.sleep(2.2)
        assert await both(), "it is renewed"
        await prefill.end()
        await until(one)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
    said = [record.message for record in caplog.records]
    assert [line for line in said if "joined" in line or " left" in line] == [
        "the prefill server http://10.0.0.1:8000 has joined",
        "the prefill server http://10.0.0.1:8000 has left",
    ]
    assert len([line for line in said if "known so far are kept" in line]) == 1
    assert len([line for line in said if "not registered until" in line]) == 1


async def test_without_any_server_prompts_are_computed_here(tmp_path: Path) -> None:
    async with decoder(tmp_path, f"file://{tmp_path}") as part:
        assert part._in_turn() == []
        assert part.trouble() == "no prefill server is registered: prompts are computed here"
        assert await part.source([1] * 1000, "", 0) is None


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no such kind": ({"disaggregation_registry": "redis://a:1"}, "must be file:///FOLDER or etcd://HOST:PORT"),
    "a relative folder": ({"disaggregation_registry": "file://folder"}, "must be file:///FOLDER"),
    "no port": ({"disaggregation_registry": "etcd://a"}, "etcd://HOST:PORT"),
    "no address": ({"disaggregation_registry": "etcd://a:1"}, "needs --disaggregation-advertise-url"),
    "no registry": ({"disaggregation_advertise_url": "http://a:1"}, "with a --disaggregation-registry"),
    "no URL": (
        {"disaggregation_registry": "etcd://a:1", "disaggregation_advertise_url": "a:1"},
        "--disaggregation-advertise-url a:1: must be http://HOST:PORT",
    ),
    "a lease of none": ({"disaggregation_registry_lease": 5.0}, "is for a --disaggregation-registry"),
    "of decode": (
        {
            "disaggregation_mode": "decode",
            "disaggregation_registry": "etcd://a:1",
            "disaggregation_advertise_url": "http://a:1",
        },
        "is for a server of --disaggregation-mode prefill",
    ),
}


PREFILL = {"disaggregation_mode": "prefill", "disaggregation_token_file": "x"}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_told(name: str) -> None:
    given, why = WRONG[name]
    with pytest.raises(ValueError, match=why):
        RemotePrefillOptions.model_validate(PREFILL | given)


def test_a_folder_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no folder that this server can write to"):
        open_registry(f"file://{tmp_path}/none").check()
    open_registry(f"file://{tmp_path}").check()
