"""The same picture again is neither decoded nor encoded: what was made of it is kept by content, within bytes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.helpers.encoded_apart import encoded_apart
from tests.helpers.images import IMAGE_ID, encoded, noise, write_vision

import fwk
from fwk import SamplingParams
from fwk.errors import InvalidRequest
from fwk.interfaces.multimodal import MediaItem
from fwk.server.helper import HelperJobs
from fwk_jobs.client import Work, current_work
from fwk_jobs.pool import WaitingPool
from fwk_models.idefics3.model import Idefics3
from fwk_multimodal.idefics3.processor import Idefics3Processor
from fwk_multimodal.media.placing import ItemShape, JobItem, MediaJob, PayloadFile
from fwk_multimodal.media.prepared import Prepared, PreparedItems
from fwk_multimodal.media.server import MediaRequests

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)
OPTIONS: dict[str, Any] = {"attention_backend": "torch", "max_total_tokens": 1024, "check_blocks": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision")
    write_vision(folder)
    return folder


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many items were decoded, and how many pieces encoded."""
    found = {"decoded": 0, "encoded": 0}
    prepare, encode = Idefics3Processor.prepare, Idefics3.encode

    def prepared(self: Any, item: MediaItem) -> Any:
        found["decoded"] += 1
        return prepare(self, item)

    def made(self: Any, kind: str, items: Any) -> Any:
        found["encoded"] += len(items)
        return encode(self, kind, items)

    monkeypatch.setattr(Idefics3Processor, "prepare", prepared)
    monkeypatch.setattr(Idefics3, "encode", made)
    return found


def image(seed: int) -> MediaItem:
    return MediaItem("image", encoded(noise(seed)), "it")


def ask(llm: fwk.LLM, first: int, *seeds: int) -> list[int]:
    """What follows on a prompt that begins with a token that no other does: no K/V is there."""
    prompt = [first, *[IMAGE_ID] * len(seeds), 5]
    return llm.generate([prompt], GREEDY, media=[[image(seed) for seed in seeds]])[0].token_ids


def tiles_of(*seeds: int) -> int:
    return 5 * len(seeds)  # in two rows of two, and the whole


def test_a_picture_is_decoded_and_encoded_once(model: Path, counted: dict[str, int]) -> None:
    with fwk.LLM(str(model), **OPTIONS) as llm:
        first = ask(llm, 10, 1)
        assert counted == {"decoded": 1, "encoded": tiles_of(1)}
        assert ask(llm, 10, 1) == first
        ask(llm, 11, 1)
        assert counted == {"decoded": 1, "encoded": tiles_of(1)}, "in another prompt"
        both = ask(llm, 12, 2, 1, 2)
        assert counted == {"decoded": 2, "encoded": tiles_of(1, 2)}, "twice in one prompt, and behind another"
        assert ask(llm, 13, 1, 2) != both
        assert counted == {"decoded": 2, "encoded": tiles_of(1, 2)}
    with fwk.LLM(str(model), mm_processor_cache_bytes=0, mm_encoder_cache_bytes=0, **OPTIONS) as llm:
        assert ask(llm, 10, 1) == first
        assert ask(llm, 12, 2, 1, 2) == both
        ask(llm, 11, 1)
    assert counted == {"decoded": 2 + 4, "encoded": tiles_of(1, 2) + tiles_of(1, 2, 1, 2, 1)}


def test_encoded_apart_a_picture_is_decoded_once(model: Path, tmp_path: Path, counted: dict[str, int]) -> None:
    with encoded_apart(model, tmp_path, **OPTIONS) as (llm, _):
        first = ask(llm, 10, 1)
        assert ask(llm, 10, 1) == first
        ask(llm, 11, 1, 2)
    assert counted["decoded"] == 2


class Jobs(HelperJobs):
    """Runs jobs as the server's helper would, some at once. held: they wait until it is set."""

    def __init__(self) -> None:  # no process
        self.jobs: list[MediaJob] = []
        self.held = threading.Event()
        self.held.set()
        self.begun = threading.Semaphore(0)
        self.refused: set[bytes] = set()

    def run(self, body: bytes, what: str, *, cpu_seconds: float, max_bytes: int) -> bytes:
        job = msgspec.msgpack.decode(body, type=MediaJob)
        self.jobs.append(job)
        new = {item.digest: ItemShape([1], []) for item in job.items if item.data is not None}
        for item in job.items:
            if item.data is not None:
                self.begun.release()
                with self.waiting():
                    assert self.held.wait(10)
                if item.data in self.refused:
                    raise InvalidRequest(f"{item.name} is wrong", item.name)
                Path(item.path).write_bytes(bytes(100))
            else:
                assert item.shape is None or Path(item.path).stat().st_size == 100
        return msgspec.msgpack.encode(([], [], new))

    @property
    def decoded(self) -> list[bytes]:
        return sorted(item.data for job in self.jobs for item in job.items if item.data is not None)


@pytest.fixture
def served(model: Path) -> Iterator[tuple[MediaRequests, Jobs]]:
    """The part in the server, with jobs that are counted."""
    with fwk.LLM(str(model), mm_processor_cache_bytes=250, **OPTIONS) as llm:
        part = llm._parts.service(MediaRequests)
        assert part is not None
        jobs: Any = Jobs()
        object.__setattr__(part.context, "jobs", jobs)
        yield part, jobs


def place(part: MediaRequests, *contents: bytes) -> Any:
    return part.place([1, 2], [MediaItem("image", content, "it") for content in contents])


def test_no_more_is_kept_than_may_be(served: tuple[MediaRequests, Jobs]) -> None:
    part, jobs = served
    for content in (b"a", b"b", b"a", b"c"):
        place(part, content)
    assert jobs.decoded == [b"a", b"b", b"c"]
    held = place(part, b"a")
    place(part, b"b")
    assert jobs.decoded == [b"a", b"b", b"b", b"c"], "what was used least recently went first"
    place(part, b"d")
    [file] = [file for file in held.payload if file.path.exists()]
    place(part, b"e")
    assert file.path.exists(), "a request that runs has its file"
    path = file.path
    del held, file
    assert not path.exists()
    assert len(list(path.parent.iterdir())) == 2


def test_requests_that_come_at_once_decode_a_picture_once(served: tuple[MediaRequests, Jobs]) -> None:
    """Each decodes what none does yet, and waits for the rest."""
    part, jobs = served
    jobs.held.clear()
    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(place, part, b"a")
        jobs.begun.acquire()
        others = [pool.submit(place, part, b"a") for _ in range(4)]
        crossing = pool.submit(place, part, b"b", b"a")
        jobs.begun.acquire()
        jobs.held.set()
        for one in (first, crossing, *others):
            one.result(10)
    assert jobs.decoded == [b"a", b"b"]


def test_those_that_wait_take_no_turn_from_the_one_that_decodes(served: tuple[MediaRequests, Jobs]) -> None:
    """Threads of requests compute in turns, here one at a time; one that waits for a job gives its turn away."""
    part, jobs = served
    jobs.held.clear()
    turns, started = WaitingPool(1, "requests"), threading.Semaphore(0)

    def request() -> None:
        current_work.set(Work(turns))
        started.release()
        place(part, b"a")

    running = [turns.submit(request) for _ in range(4)]
    assert all(started.acquire(timeout=10) for _ in running)
    jobs.held.set()
    for one in running:
        one.result(10)
    assert jobs.decoded == [b"a"]
    turns.shutdown()


def test_one_that_is_refused_does_not_fail_others(served: tuple[MediaRequests, Jobs]) -> None:
    part, jobs = served
    jobs.refused = {b"wrong"}
    jobs.held.clear()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(place, part, b"wrong", b"a")
        jobs.begun.acquire()
        second = pool.submit(place, part, b"a")
        jobs.held.set()
        with pytest.raises(InvalidRequest, match="it is wrong"):
            first.result(10)
        second.result(10)
    with pytest.raises(InvalidRequest, match="it is wrong"):
        place(part, b"wrong")
    assert part._prepared._preparing == {}


def test_an_item_that_alone_is_too_large_is_not_kept(tmp_path: Path) -> None:
    kept = PreparedItems(10)
    _, own, _ = kept.claim([b"a"])
    found = Prepared(ItemShape([1], []), PayloadFile(tmp_path / "a"), 11)
    kept.publish(b"a", found)
    assert own[b"a"].wait() is found, "those that wait have it"
    assert kept.claim([b"a"])[0] == {}


def test_a_job_of_known_items_brings_no_bytes() -> None:
    item = JobItem("image", "it", b"digest", "path", None, ItemShape([3], [1, 2]))
    sent = msgspec.msgpack.encode(MediaJob([1], [item], ""))
    assert msgspec.msgpack.decode(sent, type=MediaJob).items == [item]
