"""Media between the door and the worker: keys in the prefix cache, files of payloads, what is kept of encoded ones."""

from __future__ import annotations

import gc
import json
import time
import tracemalloc
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fwk
from fwk.errors import ConfigError, FwkError, InvalidRequest, NotServed, PluginError
from fwk.features.declared import check_server
from fwk.features.wire import packed
from fwk.interfaces.feature import EnginePartContext, LoadedModel, ModelBuild, WorkerPartContext
from fwk.interfaces.multimodal import Media
from fwk.plugins import PluginFactory, discover
from fwk.plugins.options import build_config
from fwk.setup.checkpoint import open_model
from fwk.setup.resolve import resolve
from fwk.types import Batch, ModelConfig, NewSequence, Request, SamplingParams, ScheduledSequence
from fwk_kit.testing.serving import TINY
from fwk_multimodal.media import MediaOptions, PromptMedia, features, worker
from fwk_multimodal.media.engine import MediaPrompts, cache_ids
from fwk_multimodal.media.placing import PayloadFolder, media_limits, processor_item
from fwk_multimodal.media.reader import MediaReader
from fwk_multimodal.media.worker import EncoderCache, MediaRows


def media(key: int, start: int, length: int, payload: str = "", index: int = 0) -> Media:
    return Media(bytes([key]) * 32, "image", start, length, payload, index)


def test_placeholders_have_words_of_the_hash() -> None:
    key = bytes(range(1, 33))
    one = Media(key, "image", 2, 10, "", 0)
    ids = cache_ids([5] * 14, [one])
    assert ids[:2] == ids[12:] == [5, 5]
    words = ids[2:12]
    assert len(set(words)) == 8, "eight words of 32 bits are the hash"
    assert words[8:] == words[:2]
    assert all(-(2**31) <= word < 0 for word in words), "no token's id, and as large as one"
    for i in range(32):  # whatever byte differs, the words do
        other = key[:i] + bytes([key[i] ^ 0x10]) + key[i + 1 :]
        assert cache_ids([5] * 14, [Media(other, "image", 2, 10, "", 0)]) != ids


class Workers:
    """What workers are asked to open and to close."""

    def __init__(self, trouble: str = "") -> None:
        self.trouble = trouble
        self.calls: list[tuple[str, list[str]]] = []

    def __call__(self, name: str, paths: list[str]) -> list[Any]:
        self.calls.append((name, paths))
        return ["", self.trouble] if name == "open" else [None, None]


WIRE = features()[0].wire


def prompts(workers: Workers) -> MediaPrompts:
    return MediaPrompts(EnginePartContext("media", workers, WIRE))


def request(name: str, *paths: str) -> Request:
    sent = {"media": packed(PromptMedia([media(i, i, 1, path) for i, path in enumerate(paths)]))}
    return Request(request_id=name, prompt_token_ids=[1] * 9, sampling=SamplingParams(max_tokens=1), features=sent)


def test_payloads_are_open_as_long_as_a_request_reads_them() -> None:
    workers = Workers()
    part = prompts(workers)
    one, two = request("one", "x", "x", "y"), request("two", "x")
    part.check(one)
    part.check(two)
    assert workers.calls == [("open", ["x", "y"])]
    part.left(one)
    assert workers.calls[1:] == [("close", ["y"])]
    part.left(two)
    assert workers.calls[2:] == [("close", ["x"])]


def test_a_payload_that_one_worker_cannot_read_refuses_its_request() -> None:
    workers = Workers("gone")
    with pytest.raises(InvalidRequest, match="gone"):
        prompts(workers).check(request("a", "x"))
    assert workers.calls == [("open", ["x"]), ("close", ["x"])]
    with pytest.raises(InvalidRequest, match="the request's media end behind its prompt"):
        prompts(workers).check(request("a", *"abcdefghij"))


def test_the_cache_gives_up_what_was_used_least_recently() -> None:
    cache = EncoderCache(100)
    rows = [torch.zeros(10), torch.ones(10), torch.ones(5)]  # 40, 40 and 20 bytes
    for name, row in zip((b"a", b"b", b"c"), rows, strict=True):
        cache.put(name, row)
    assert cache.num_bytes == 100
    assert cache.get(b"a") is rows[0]
    cache.put(b"d", torch.ones(3))
    assert (cache.get(b"b"), cache.num_bytes) == (None, 72)
    cache.put(b"e", torch.ones(26))
    assert cache.get(b"e") is None, "what alone is too large is not kept"
    cache.put(b"a", torch.ones(20))
    assert (cache.get(b"a"), cache.num_bytes) == (rows[0], 72)
    both = torch.ones(2, 5)
    cache.put(b"f", both[0])
    kept = cache.get(b"f")
    assert kept is not None
    assert kept.untyped_storage().nbytes() == 20, "what was encoded alongside is not kept with it"
    cache.clear()
    assert (cache.get(b"a"), cache.num_bytes) == (None, 0)


class Model:
    """Encodes an item of n numbers as n rows of two."""

    def __init__(self) -> None:
        self.encoded: list[list[int]] = []

    def encode(self, kind: str, items: Sequence[dict[str, Tensor]]) -> list[Tensor]:
        self.encoded.append([int(item["x"][0]) for item in items])
        return [torch.stack((item["x"], item["x"]), 1).float() for item in items]


def test_rows_are_those_of_the_step(tmp_path: Path) -> None:
    """Two sequences in chunks that cut media; each is encoded when its tokens come, and once."""
    path = str(tmp_path / "payload.npz")
    np.savez(path, allow_pickle=False, **{f"{i}.x": np.arange(100 * i, 100 * i + 4) for i in range(1, 4)})
    model: Any = Model()
    options = MediaOptions(mm_encoder_cache_bytes=1000)
    context = WorkerPartContext("media", torch.device("cpu"), torch.from_numpy, lambda x: x, WIRE, options)
    part = MediaRows(context)
    part.model_loaded(LoadedModel(model, {}))
    assert part.open_payloads([path]) == ""
    Path(path).unlink()  # the client went away

    def sequence(slot: int, computed: int, *found: Media) -> tuple[NewSequence, PromptMedia]:
        return NewSequence(slot, [1] * 20, 20, computed, [], SamplingParams(), 0), PromptMedia(list(found))

    first = sequence(2, 0, media(1, 3, 4, path, 1), media(2, 9, 4, path, 2))
    second = sequence(0, 6, media(1, 2, 4, path, 1), media(3, 7, 4, path, 3))

    def step(new: list[tuple[NewSequence, PromptMedia]], *parts: tuple[int, int]) -> list[tuple[int, float]]:
        for one in new:
            part.begin(*one)
        batch = Batch(1, [], [], [ScheduledSequence(slot, count, False, [], []) for slot, count in parts])
        forward: Any = SimpleNamespace(inserted=None)
        calls = part.calls_layers(batch)
        part.inputs(batch, forward)
        found = forward.inserted
        assert calls == (found is not None)
        return [] if found is None else list(zip(found.rows.tolist(), found.values[:, 0].tolist(), strict=True))

    assert step([first], (2, 5)) == [(3, 100.0), (4, 101.0)]
    assert step([second], (0, 3), (2, 5)) == [(1, 300.0), (2, 301.0), (3, 102.0), (4, 103.0), (7, 200.0)]
    assert step([], (2, 8), (0, 3)) == [(0, 201.0), (1, 202.0), (2, 203.0), (8, 302.0), (9, 303.0)]
    assert step([], (2, 1), (0, 1)) == []
    assert model.encoded == [[100], [300, 200]]
    other: Any = Model()
    part.model_loaded(LoadedModel(other, {}))
    again = sequence(1, 0, media(1, 0, 4, path, 1))
    assert step([again], (1, 2)) == [(0, 100.0), (1, 101.0)]
    assert other.encoded == [[100]], "other weights make other rows"
    part.close_payloads([path])
    assert "cannot be read" in part.open_payloads([path])


@pytest.mark.parametrize("is_fed", [False, True])
def test_a_piece_that_steps_cut_is_encoded_or_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_fed: bool
) -> None:
    """Whatever the cache keeps, a step costs by its own tokens: not all rows of the piece that it ends within."""
    path = str(tmp_path / "payload.npz")
    rows = np.arange(24, dtype=np.float32).reshape(12, 2)
    own = {"1.rows.float32": rows.view(np.uint8)} if is_fed else {"1.x": np.arange(12)}
    np.savez(path, allow_pickle=False, **{name: np.asarray(x) for name, x in own.items()})
    reads: list[int] = []
    read = worker.read_rows
    monkeypatch.setattr(worker, "read_rows", lambda file, index: (reads.append(index), read(file, index))[1])
    model: Any = Model()
    options = MediaOptions(mm_encoder_workers=1) if is_fed else MediaOptions(mm_encoder_cache_bytes=0)
    part = MediaRows(WorkerPartContext("media", torch.device("cpu"), torch.from_numpy, lambda x: x, WIRE, options))
    part.model_loaded(LoadedModel(model, {}))
    assert part.open_payloads([path]) == ""

    def step(slot: int, count: int) -> list[float]:
        forward: Any = SimpleNamespace(inserted=None)
        part.inputs(Batch(1, [], [], [ScheduledSequence(slot, count, False, [], [])]), forward)
        return forward.inserted.values[:, 0].tolist()

    for slot in (0, 1):
        part.begin(NewSequence(slot, [1] * 20, 20, 0, [], SamplingParams(), 0), PromptMedia([media(1, 1, 12, path, 1)]))
        found = [x for count in (3, 4, 1, 8) for x in step(slot, count)]
        assert found == (rows[:, 0].tolist() if is_fed else [float(i) for i in range(12)])
        assert len(reads if is_fed else model.encoded) == slot + 1
    part.begin(NewSequence(2, [1] * 20, 20, 0, [], SamplingParams(), 0), PromptMedia([media(1, 1, 12, path, 1)]))
    step(2, 3)
    part.forget(2)
    assert part._cut == {}


def test_files_live_as_long_as_somebody_holds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = PayloadFolder(max_bytes=10)
    one, two = folder.new(), folder.new()
    assert one.path != two.path
    one.path.write_bytes(bytes(8))
    two.path.write_bytes(bytes(8))
    assert one.path.parent.stat().st_mode & 0o777 == 0o700
    with pytest.raises(NotServed, match=r"the images of other requests take all the room there is \(--mm-payload-byt"):
        folder.new()
    path = one.path
    del one
    gc.collect()
    assert not path.exists()
    folder.new()
    folder.close()
    assert list(tmp_path.iterdir()) == []


def test_limits_by_kind() -> None:
    kinds = frozenset({"image"})

    def limits(text: str) -> dict[str, int]:
        return media_limits(MediaOptions(limit_mm_per_prompt=text), kinds)

    assert limits("{}") == {"image": 16}
    assert limits("image=4") == limits('{"image": 4, "video": 1}') == limits("video=1,image=4") == {"image": 4}
    assert media_limits(MediaOptions(), frozenset()) == {}


def test_a_model_without_a_processor_is_refused_before_it_serves() -> None:
    plugins, kinds = PluginFactory(discover(), {}), frozenset({"image"})
    config = ModelConfig.from_dict({**TINY, "architectures": ["Idefics3ForConditionalGeneration"]}, "")
    item = processor_item(plugins, config, kinds, "tiny")
    assert item is not None
    assert item.name == "idefics3"
    assert processor_item(plugins, config, frozenset(), "tiny") is None
    with pytest.raises(PluginError, match=r"tiny takes image, .*: no installed plugin knows LlamaForCausalLM: install"):
        processor_item(plugins, ModelConfig.from_dict(TINY, ""), kinds, "tiny")


def test_a_missing_package_is_named() -> None:
    plugins = discover()
    config = ModelConfig.from_dict({**TINY, "architectures": ["Idefics3ForConditionalGeneration"]}, "")
    [item] = [item for item in plugins.family("multimodal") if item.name == "idefics3"]
    needs = item.declaration.needs
    object.__setattr__(item.declaration, "needs", type(needs)(packages=("no-such-package>=1",)))
    try:
        with pytest.raises(
            PluginError,
            match=r"idefics3 needs the package no-such-package>=1: pip install .* or serve text alone with "
            r"--enable-multimodal false",
        ):
            processor_item(PluginFactory(plugins, {}), config, frozenset({"image"}), "tiny")
    finally:  # other tests have the same declaration
        object.__setattr__(item.declaration, "needs", needs)


def test_the_folder_for_files_must_be_there() -> None:
    with pytest.raises(ConfigError, match="--allowed-local-media-path /no/such is no folder"):
        MediaReader(MediaOptions(allowed_local_media_path="/no/such"))


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("data:image/png;base64,YWJj", b"abc"),
        ("data:;base64,YWJj", b"abc"),
        ("DATA:image/png;BASE64,YWJj", b"abc"),
        ("data:image/png;base64,YWI%3D", b"ab"),
        ("data:;base64,YWI", b"ab"),
        ("data:;base64,YW\nJj\r\n", b"abc"),
        ("data:;base64,_-__", b"\xff\xef\xff"),
        ("data:;base64,/+//", b"\xff\xef\xff"),
        ("data:text/plain,a%20b", b"a b"),
    ],
)
def test_data_urls(url: str, wanted: bytes) -> None:
    assert MediaReader(MediaOptions()).read(url, "it") == wanted


@pytest.mark.parametrize("unit", ["%", "%41", "A\n", "%0a", "%2B", " "])
@pytest.mark.parametrize("head", ["data:image/png;base64,", "data:,"])
def test_data_urls_of_any_content_cost_little(head: str, unit: str) -> None:
    """Eight million escapes took 4 s, and half a gigabyte."""
    url = head + unit * (2**23 // len(unit))
    tracemalloc.start()
    started = time.thread_time()
    with suppress(InvalidRequest):
        MediaReader(MediaOptions()).read(url, "it")
    took, (_, peak) = time.thread_time() - started, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert took < 1
    assert peak < 50 * 2**20


def test_long_urls_are_refused_before_they_are_decoded() -> None:
    reader = MediaReader(MediaOptions(max_media_bytes=10))
    for url in ("data:," + "a" * 11, "data:," + "a" * 41, "data:;base64," + "YWJj" * 4):
        with pytest.raises(InvalidRequest, match=r"it has more than 10 bytes \(--max-media-bytes\)"):
            reader.read(url, "it")


def test_options_of_encoders_that_can_only_be_wrong(tmp_path: Path) -> None:
    plugins = discover()
    for given, why in (
        ({"mm_encoder_batch_size": 2}, "--mm-encoder-batch-size does nothing without --mm-encoder-workers"),
        ({"visual_gpu_ids": (1,)}, "does nothing without --mm-encoder-workers"),
        ({"mm_encoder_workers": 1, "mm_encoder_devices": (-1,)}, "must be numbers of devices, from 0 on"),
        ({"mm_encoder_workers": 65}, "less than or equal to 64"),
        ({"mm_encoder_workers": 1, "mm_encoder_niceness": 20}, "less than or equal to 19"),
    ):
        with pytest.raises(ConfigError, match=why):
            build_config(plugins, given)
    with pytest.raises(ConfigError, match=r"--mm-encoder-workers is for fwk serve: fwk\.LLM has no server"):
        fwk.LLM("none", mm_encoder_workers=1)
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    config = build_config(plugins, {"model": str(tmp_path), "load_format": "dummy", "mm_encoder_workers": 1})
    with pytest.raises(ConfigError, match=r"--mm-encoder-workers 1: .* takes text alone here, which needs no encoder"):
        resolve(config, open_model(config, plugins, lambda line: None), plugins)
    with pytest.raises(ConfigError, match="--mm-encoder-workers 1 is for a server of one model: this one has 2"):
        check_server([config, config], plugins)
    url, file = {"encoder_servers": ("http://a:1",)}, {"encoder_token_file": "file"}
    for given, why in (
        (
            {**url, "mm_encoder_workers": 1, **file},
            "--mm-encoder-workers 1 and --encoder-servers http://a:1 are not",
        ),
        ({**url, "encoder_only": True, **file}, "are not possible together: media are encoded here or there"),
        (url, "--encoder-servers http://a:1 needs --encoder-token-file FILE"),
        ({"encoder_only": True}, "--encoder-only needs --encoder-token-file FILE"),
        (file, "--encoder-token-file does nothing without --encoder-only or --encoder-servers"),
        ({"encoder_only": True, "data_parallel_size": 2, **file}, "--encoder-only starts no engine: leave out what"),
        ({"encoder_servers": ("a:1",)}, "--encoder-servers a:1: must be http://HOST:PORT or https://HOST:PORT"),
        ({"encoder_servers": ("http://u:p@a:1",)}, "must be http://HOST:PORT"),
    ):
        with pytest.raises(ConfigError, match=why):
            check_server([build_config(plugins, {"model": str(tmp_path), **given})], plugins)
    with pytest.raises(ConfigError, match=r"--encoder-servers is for fwk serve: fwk\.LLM has no server"):
        fwk.LLM("none", encoder_servers=("http://a:1",))


def test_other_weights_are_refused_where_rows_come_from_elsewhere() -> None:
    options = MediaOptions(mm_encoder_workers=1)
    inputs = frozenset({"image"})
    context = WorkerPartContext(
        "media", torch.device("cpu"), torch.from_numpy, lambda x: x, WIRE, options, inputs=inputs
    )
    part, model = MediaRows(context), SimpleNamespace(media=frozenset(), has_encoder=True)
    part.model_context(model, ModelBuild("served"))  # type: ignore[arg-type]
    assert (model.media, model.has_encoder) == (inputs, False)
    part.model_context(model, ModelBuild("encoder"))  # type: ignore[arg-type]
    assert (model.media, model.has_encoder) == (inputs, True)
    part.model_loaded(LoadedModel(Model(), {}))  # type: ignore[arg-type]
    with pytest.raises(FwkError, match="--mm-encoder-workers keep the weights that they started with"):
        part.model_context(model, ModelBuild("served"))  # type: ignore[arg-type]
    part.model_context(model, ModelBuild("draft"))  # type: ignore[arg-type]
    assert model.media == frozenset(), "what drafts reads text"


def test_a_step_encodes_no_more_than_its_budget() -> None:
    """Of all sequences together; the first one asked always gets a piece, and what was seen before is free."""

    def asked(part: MediaPrompts, *windows: tuple[str, int, int]) -> list[int]:
        part.planning()
        return [part.limit(SimpleNamespace(request=requests[name]), *window) for name, *window in windows]  # type: ignore[arg-type]

    def sent(name: str, *pieces: Media) -> Request:
        sent = {"media": packed(PromptMedia(list(pieces)))}
        sampling = SamplingParams(max_tokens=1)
        return Request(request_id=name, prompt_token_ids=[1] * 40, sampling=sampling, features=sent)

    requests = {
        "a": sent("a", media(1, 2, 4), media(2, 8, 4)),
        "b": sent("b", media(3, 2, 4), media(4, 20, 8)),
        "c": sent("c", media(1, 0, 4)),
    }

    def part(**given: Any) -> MediaPrompts:
        made = MediaPrompts(EnginePartContext("media", Workers(), WIRE, MediaOptions(**given), is_host=True))
        for one in requests.values():
            made.check(one)
        return made

    one = part()
    assert asked(one, ("a", 0, 40), ("b", 0, 40), ("c", 0, 4), ("a", 0, 40)) == [8, 2, 4, 8]
    assert asked(one, ("b", 2, 38), ("a", 8, 32)) == [18, 0]
    assert asked(one, ("a", 8, 32), ("b", 20, 20), ("c", 0, 4)) == [32, 0, 4]
    assert asked(one, ("b", 20, 20)) == [20]
    assert asked(part(mm_encoder_step_tokens=8), ("a", 0, 40), ("b", 0, 40), ("c", 0, 4)) == [40, 2, 4]
    assert asked(part(mm_encoder_workers=1), ("a", 0, 40), ("b", 0, 40)) == [40, 40]
    forgetful = part(mm_encoder_cache_bytes=0)
    assert asked(forgetful, ("a", 0, 8)) == [8]
    assert asked(forgetful, ("b", 0, 6), ("c", 0, 4)) == [6, 0]
