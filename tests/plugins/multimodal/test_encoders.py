"""The queue of what waits to be encoded, with processes that are objects: turns, batches, deaths and what is kept."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from fwk.errors import ConfigError, NotServed, RequestFailed
from fwk.interfaces.executor import WorkerRecipe
from fwk.interfaces.multimodal import POSITION_PLANES, Media
from fwk_multimodal.media import MediaOptions
from fwk_multimodal.media.encoders import Encoder, EncoderPool
from fwk_multimodal.media.encoding_messages import Answer, Encode, Start
from fwk_multimodal.media.placing import PayloadFile
from fwk_multimodal.media.rows import gather_rows, read_rows, write_rows


class Process:
    """Answers as ``act`` says, given the numbers of the pieces; None: it ends. ``go`` lets it begin."""

    name = "encoder 0"

    def __init__(
        self, act: Callable[[list[int]], Answer | None], loads: Callable[[], str], go: threading.Event
    ) -> None:
        self._act = act
        self._loads = loads
        self._go = go
        self._is_dead = False
        self.encoded: list[list[int]] = []

    def ask(self, message: msgspec.Struct) -> Answer:
        if isinstance(message, Start):
            return Answer(self._loads())
        assert isinstance(message, Encode)
        self._go.wait(10)
        numbers = [index for _, index, _, _ in message.pieces]
        self.encoded.append(numbers)
        answer = None if self._is_dead else self._act(numbers)
        if answer is None:
            raise EOFError
        for _, index, length, target in message.pieces if not answer.error else ():
            write_rows(target, torch.full((length, 2), float(index)))
        return answer

    def kill(self) -> None:
        self._is_dead = True
        self._go.set()

    def end(self) -> str:
        self.kill()
        return "was killed by SIGKILL"


class Rig:
    """A pool of one process at a time."""

    def __init__(self, **options: Any) -> None:
        self.act: Callable[[list[int]], Answer | None] = lambda numbers: Answer()
        self.loads: Callable[[], str] = lambda: ""
        self.go = threading.Event()
        self.started: list[Process] = []
        given = {"mm_encoder_workers": 1, "mm_encoder_batch_size": 4, **options}
        self.options = MediaOptions(**given)

    def make(self, index: int) -> tuple[Encoder, msgspec.Struct]:
        self.started.append(Process(self.act, self.loads, self.go))
        return self.started[-1], Start(WorkerRecipe("none:none", {}), "media", 0)

    def pool(self) -> EncoderPool:
        return EncoderPool(self.options, self.make, 1, lambda kind, how: RequestFailed(f"{kind} ended: one {how}"))

    @property
    def encoded(self) -> list[list[int]]:
        return [numbers for process in self.started for numbers in process.encoded]

    def run(self, use: Callable[[EncoderPool], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            pool = self.pool()
            running = asyncio.create_task(pool.run())
            try:
                async with asyncio.timeout(10):
                    await use(pool)
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)

        asyncio.run(main())


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.fixture
def payload(tmp_path: Path) -> PayloadFile:
    return PayloadFile(tmp_path / "payload.npz")


def media(*numbers: int, kind: str = "image") -> list[Media]:
    return [Media(bytes([n]) * 32, kind, 10 * n, 3, "", n) for n in numbers]


async def turn() -> None:
    """Let all tasks that can continue do so."""
    for _ in range(20):
        await asyncio.sleep(0)


async def loaded(pool: EncoderPool, rig: Rig) -> None:
    """Its process has a piece in hand already, of number 0, and waits for ``go``."""
    await pool.ready()
    await turn()


def test_requests_take_turns_and_share_a_pass(payload: PayloadFile) -> None:
    """The one that came later has its only piece encoded with the first ones of the other."""
    rig = Rig()

    async def use(pool: EncoderPool) -> None:
        await pool.ready()
        first = asyncio.create_task(pool.encode(media(0), payload))
        await turn()
        many = asyncio.create_task(pool.encode(media(*range(1, 10)), payload))
        await turn()
        one = asyncio.create_task(pool.encode(media(20), payload))
        await turn()
        rig.go.set()
        files = await asyncio.gather(first, many, one)
        assert [len(found) for found in files] == [1, 9, 1]
        for found, numbers in zip(files, ([0], range(1, 10), [20]), strict=True):
            with np.load(found[-1].path) as file:
                assert file["rows.float32"].shape == (3, 8)
                assert file["rows.float32"].view(np.float32)[0, 0] == list(numbers)[-1]

    rig.run(use)
    assert rig.encoded == [[0], [1, 20, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_kinds_are_apart(payload: PayloadFile) -> None:
    rig = Rig()
    rig.go.set()

    async def use(pool: EncoderPool) -> None:
        await pool.ready()
        await asyncio.gather(
            pool.encode(media(1, 2), payload),
            pool.encode(media(5, kind="audio"), payload),
            pool.encode(media(3), payload),
        )

    rig.run(use)
    assert rig.encoded == [[1], [5], [3, 2]]


def test_the_same_content_is_encoded_once_and_kept(payload: PayloadFile) -> None:
    rig = Rig()

    async def use(pool: EncoderPool) -> None:
        await pool.ready()
        both = [asyncio.create_task(pool.encode(media(1, 1, 2), payload)) for _ in range(2)]
        await turn()
        rig.go.set()
        first, second = await asyncio.gather(*both)
        assert first == second
        assert first[0] is first[1]
        assert await pool.encode(media(2), payload) == [first[2]]

    rig.run(use)
    assert rig.encoded == [[1, 2]]


def test_no_more_is_kept_than_may_be(payload: PayloadFile) -> None:
    rig = Rig(mm_encoder_cache_bytes=700)  # of two files
    rig.go.set()

    async def use(pool: EncoderPool) -> None:
        await pool.ready()
        for number in (1, 2, 1, 3, 1, 2):
            [file] = await pool.encode(media(number), payload)
            assert file.path.stat().st_size < 350
            folder = file.path.parent
            del file
        assert len(list(folder.iterdir())) == 2

    rig.run(use)
    assert rig.encoded == [[1], [2], [3], [2]]
    assert list(payload.path.parent.iterdir()) == []


def test_a_piece_that_ends_its_process_fails_alone(payload: PayloadFile) -> None:
    """Those that were encoded with it, or wait, are encoded by the next process."""
    rig = Rig()
    rig.act = lambda numbers: None if 2 in numbers else Answer()

    async def use(pool: EncoderPool) -> None:
        await pool.ready()
        tasks = [asyncio.create_task(pool.encode(media(n), payload)) for n in (1, 2, 3, 4)]
        await turn()
        rig.go.set()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(one, list) for one in found] == [True, False, True, True]
        assert isinstance(found[1], RequestFailed)
        assert str(found[1]) == "image ended: one was killed by SIGKILL"
        assert len(await pool.encode(media(7), payload)) == 1
        assert pool.trouble() is None

    rig.run(use)
    assert rig.encoded.count([2]) == 1
    assert len(rig.started) == 3


def test_what_cannot_be_encoded_fails_alone(payload: PayloadFile) -> None:
    rig = Rig()
    rig.act = lambda numbers: Answer("it is odd") if 3 in numbers else Answer()

    async def use(pool: EncoderPool) -> None:
        await pool.ready()
        tasks = [asyncio.create_task(pool.encode(media(n), payload)) for n in (1, 2, 3, 4)]
        await turn()
        rig.go.set()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(one, list) for one in found] == [True, True, False, True]
        assert str(found[2]) == "encoding failed: it is odd"

    rig.run(use)
    assert len(rig.started) == 1


def test_what_nobody_waits_for_is_not_encoded(tmp_path: Path) -> None:
    rig = Rig()

    async def use(pool: EncoderPool) -> None:
        await pool.ready()
        own = [PayloadFile(tmp_path / f"own{n}") for n in (0, 1)]
        (tmp_path / "own0").touch()
        (tmp_path / "own1").touch()
        first = asyncio.create_task(pool.encode(media(0), own.pop(0)))
        await turn()
        gone = asyncio.create_task(pool.encode(media(1), own.pop(0)))
        both = asyncio.create_task(pool.encode(media(1, 2), PayloadFile(tmp_path / "other")))
        await turn()
        both.cancel()
        gone.cancel()
        await asyncio.gather(gone, both, return_exceptions=True)
        again = asyncio.create_task(pool.encode(media(2), PayloadFile(tmp_path / "other")))
        await turn()
        rig.go.set()
        await asyncio.gather(first, again)
        del first, gone, both, again
        assert not list(tmp_path.glob("own*")), "what they were made of is gone"

    rig.run(use)
    assert rig.encoded == [[0], [2]]


def test_where_none_can_be_started(payload: PayloadFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are told so, and served as soon as one can."""
    rig = Rig()
    whys = iter(["no room", "no room"])
    rig.loads = lambda: next(whys, "")
    rig.go.set()
    pauses: list[float] = []
    resume = asyncio.Event()
    sleep = asyncio.sleep

    async def pause(seconds: float) -> None:
        if seconds:
            pauses.append(seconds)
            await resume.wait()
            resume.clear()
        else:
            await sleep(0)

    monkeypatch.setattr("fwk_multimodal.media.encoders.asyncio.sleep", pause)

    async def use(pool: EncoderPool) -> None:
        with pytest.raises(ConfigError, match="an encoder cannot be used: encoder 0: no room"):
            await pool.ready()
        for _ in range(2):
            with pytest.raises(NotServed, match="nothing encodes this request's media now: encoder 0: no room"):
                await pool.encode(media(1), payload)
            assert pool.trouble() == "encoder 0: no room"
            resume.set()
            while len(rig.started) < 2 or (len(pauses) == 1 and pool.trouble()):
                await sleep(0.001)
        while pool.trouble():
            await sleep(0.001)
        assert len(await pool.encode(media(1), payload)) == 1

    rig.run(use)
    assert pauses == [1.0, 2.0]


def test_those_that_wait_at_the_end_are_told(payload: PayloadFile) -> None:
    rig = Rig()
    waiting: list[asyncio.Task[Any]] = []

    async def use(pool: EncoderPool) -> None:
        await pool.ready()
        waiting.extend(asyncio.create_task(pool.encode(media(n), payload)) for n in range(5))
        await turn()

    async def told(pool: EncoderPool) -> None:
        await use(pool)

    async def main() -> None:
        pool = rig.pool()
        running = asyncio.create_task(pool.run())
        await told(pool)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        for error in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(error, NotServed)
            assert str(error) == "the server is stopping"

    asyncio.run(main())


def test_rows_of_any_dtype_and_positions_in_one_payload(tmp_path: Path) -> None:
    made = tmp_path / "made.npz"
    planes = np.arange(9).reshape(3, 3)
    np.savez(made, **{"4.pixel_values": np.ones(9), f"4.{POSITION_PLANES}": planes, "5.pixel_values": np.ones(9)})
    rows = [torch.randn(3, 6).to(dtype) for dtype in (torch.bfloat16, torch.float16)]
    files = [tmp_path / "a.npz", tmp_path / "b.npz"]
    for path, one in zip(files, rows, strict=True):
        write_rows(str(path), one)
    target = tmp_path / "target.npz"
    found = gather_rows(target, [msgspec.structs.replace(one, payload=str(made)) for one in media(4, 5)], files)
    assert [(item.start, item.length, item.payload, item.index) for item in found] == [
        (40, 3, str(target), 0), (50, 3, str(target), 1),
    ]  # fmt: skip
    with np.load(target) as file:
        assert sorted(file.files) == ["0.position_planes", "0.rows.bfloat16", "1.rows.float16"]
        assert np.array_equal(file[f"0.{POSITION_PLANES}"], planes)
        for index, one in enumerate(rows):
            read = read_rows(file, index)
            assert read is not None
            assert torch.equal(read, one)
        assert read_rows(file, 2) is None
