"""Two engines in this process, one for prompts and one that decodes, over real sockets: tokens, blocks and failures.

Caught when broken on purpose: blocks freed when a fetch is cancelled instead of when it has ended, a prompt's blocks
not held or never let go, a failed transfer's blocks given to the prefix cache, wrong places or all of them asked for,
fetched tokens counted as cached, a fetch that lets its sequence start at once, no room kept for what runs, a prefill
server that is not told that its blocks are not wanted, a fetch that ends with the first of several choices.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import torch
from tests.helpers.adapters import make_adapter, make_base
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.engine_pair import Pair, counts, half, split, with_source
from tests.helpers.selection import seeds

import fwk
from fwk import SamplingParams
from fwk.engine.kv_block_manager import KVBlockManager
from fwk.errors import ConfigError, InvalidRequest, PluginFault
from fwk.interfaces.feature import WorkerPartContext
from fwk.interfaces.kv_transfer import Transfer
from fwk.interfaces.lora import AdapterInfo
from fwk.types import Request, TokenEvent
from fwk_attention.torch_sdpa import backend
from fwk_kv_transfer._common import signed
from fwk_kv_transfer._common.wire import Wire
from fwk_kv_transfer.remote_prefill import Heads, KVSource, engine
from fwk_kv_transfer.remote_prefill.worker import KVExchange

PAGE = 4
OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "dtype": "float32",
    "page_size": PAGE,
    "max_total_tokens": 512,
    "max_running_requests": 8,
    "chunked_prefill_size": 16,
    "check_blocks": True,
    "device": "cpu",
}
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 37 + i * i * 11 + i) % 200 + 10 for i in range(length)]


Both = tuple[fwk.LLM, Pair]


@pytest.fixture(scope="module")
def alone(tiny_folder: Path) -> Iterator[fwk.LLM]:
    with fwk.LLM(str(tiny_folder), **OPTIONS) as llm:
        yield llm


@pytest.fixture
def both(tiny_folder: Path, tmp_path: Path) -> Iterator[Both]:
    with split(str(tiny_folder), tmp_path, **OPTIONS) as made:
        yield made


def same(done: list[Any], other: list[Any]) -> bool:
    shown = [
        [(x.token_ids, x.text, x.finish_reason, x.cached_tokens, x.logprobs) for x in each] for each in (done, other)
    ]
    return shown[0] == shown[1]


SAMPLINGS = {
    "greedy": GREEDY,
    "seeded": SamplingParams(max_tokens=8, temperature=1.0, top_p=0.9, seed=7, ignore_eos=True),
    "log-probabilities": SamplingParams(max_tokens=4, temperature=0.0, logprobs=3, ignore_eos=True),
    "of the prompt": SamplingParams(max_tokens=4, temperature=0.0, prompt_logprobs=1, ignore_eos=True),
}


@pytest.mark.gate(2)
@pytest.mark.parametrize("name", SAMPLINGS)
def test_tokens_are_those_of_one_engine(both: Both, tiny_folder: Path, name: str) -> None:
    """So are log-probabilities, and the numbers of cached tokens; a second time, with what both have kept."""
    prompts = [prompt(1, 50), prompt(2, 7), prompt(3, 33), prompt(1, 50)[:40] + prompt(4, 5), prompt(5, 3)]
    llm, _ = both
    with fwk.LLM(str(tiny_folder), **OPTIONS) as alone:
        for _ in range(2):
            for one in prompts:  # one after the other: at once, two that are fetched would not know of each other
                assert same(llm.generate([one], SAMPLINGS[name]), alone.generate([one], SAMPLINGS[name])), one
    stats = counts(llm.engine)
    assert stats.kv_transfer_failures == 0
    assert (stats.kv_transfers == 0) == (name == "of the prompt"), "all of such a prompt is computed here"


@pytest.mark.sweep
def test_several_at_once_and_several_choices(both: Both, alone: fwk.LLM) -> None:
    prompts = [prompt(10 + i, 20 + 3 * i) for i in range(6)]
    sampling = SamplingParams(max_tokens=8, temperature=1.0, seed=3, ignore_eos=True)
    llm, _ = both
    for n in (1, 3):
        found, wanted = ([x.token_ids for x in one.generate(prompts, sampling, n=n)] for one in (llm, alone))
        assert found == wanted
    [usage] = {x.cached_tokens for x in llm.generate(prompt(99, 30), GREEDY, n=1)}
    assert usage == 0, "what was fetched was not cached"


def test_blocks_that_are_here_are_not_sent(both: Both) -> None:
    llm, pair = both
    first, second = prompt(1, 41), prompt(1, 41)[:24] + prompt(2, 17)
    llm.generate(first, GREEDY)
    size, rest = divmod(counts(llm.engine).kv_transfer_bytes, 10)
    assert size > 0
    assert rest == 0
    llm.generate(second, GREEDY)
    assert counts(llm.engine).kv_transfer_bytes == (10 + 4) * size, "six of ten blocks were here"
    llm.generate(first, GREEDY)
    assert counts(llm.engine).kv_transfers == 2, "nothing was missing"
    pair.settle()
    assert counts(pair.prefill).num_kv_offered == 0, "the other side was told"
    assert counts(pair.prefill).kv_transfers == 2


def request(tokens: list[int], name: str = "a", source: KVSource | None = None, **fields: Any) -> Request:
    made = Request(request_id=name, prompt_token_ids=tokens, sampling=fields.pop("sampling", GREEDY), **fields)
    return made if source is None else with_source(made, source)


def tokens_of(events: list[TokenEvent], name: str = "a") -> list[int]:
    return [token for event in events if event.request_id == name for token in event.token_ids]


def deaf() -> tuple[socket.socket, bytes]:
    """A place where connections are taken, and nothing is ever said."""
    listener = socket.create_server(("127.0.0.1", 0))
    return listener, msgspec.msgpack.encode(listener.getsockname()[:2])


@pytest.mark.sweep
def test_others_decode_while_one_is_fetched(both: Both, alone: fwk.LLM) -> None:
    _, pair = both
    long = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    listener, address = deaf()
    with listener:
        pair.add(request(prompt(1, 20), "waits", source=pair.source("never", 600.0, [[address]], 5)))
        pair.add(request(prompt(2, 20), "runs", sampling=long))
        events: list[TokenEvent] = []
        while len(tokens_of(events, "runs")) < 30:
            events += pair.decode.step()
            assert counts(pair.decode).num_kv_fetching == 1
        assert tokens_of(events, "waits") == []
        pair.decode.abort("waits")
    pair.settle()
    pair.check()
    assert tokens_of(events, "runs") == alone.generate(prompt(2, 20), long)[0].token_ids


def test_workers_are_asked_as_seldom_as_wanted(tiny_folder: Path, tmp_path: Path, alone: fwk.LLM) -> None:
    with split(str(tiny_folder), tmp_path, **OPTIONS, disaggregation_decode_polling_interval=8) as (llm, pair):
        assert llm.generate(prompt(1, 30), GREEDY)[0].token_ids == alone.generate(prompt(1, 30), GREEDY)[0].token_ids
        [part] = [part for part in pair.decode.scheduler.parts.all if part.name == "remote_prefill"]
        polls = 0
        call = part._call  # type: ignore[attr-defined]

        def counted(name: str, *args: Any) -> list[Any]:
            nonlocal polls
            polls += name == "poll"
            return call(name, *args)

        part._call = counted  # type: ignore[attr-defined]
        listener, address = deaf()
        with listener:
            pair.add(request(prompt(2, 20), "waits", source=pair.source("never", 600.0, [[address]], 5)))
            pair.add(request(prompt(3, 20), "runs", sampling=SamplingParams(max_tokens=40, temperature=0.0)))
            for _ in range(40):
                pair.decode.step()
            assert 4 <= polls <= 5
            pair.decode.abort("waits")
        pair.settle()


@pytest.mark.parametrize("index", [0, None])
def test_a_client_that_leaves_frees_its_blocks_once_nothing_writes_them(
    both: Both, index: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "DECLINE_SECONDS", 0.1)
    _, pair = both
    listener, address = deaf()
    with listener:
        pair.add(request(prompt(1, 20), n=2, source=pair.source("never", 600.0, [[address]], 5)))
        pair.decode.step()
        held = pair.decode.stats().num_held_blocks
        assert held == 4, "blocks of the prompt but its last tokens, once for both"
        pair.decode.abort("a", index)
        assert pair.decode.stats().num_held_blocks == held, "a thread still writes there"
        if index is not None:
            for _ in range(50):
                pair.decode.step()
                assert counts(pair.decode).num_kv_fetching == 1, "the other choice still waits"
            pair.decode.abort("a", 1)
        pair.settle()
    pair.check()


def test_a_client_that_leaves_before_its_turn(both: Both) -> None:
    """Nothing was reserved; the prefill server learns that it need not keep anything."""
    _, pair = both
    pair.ask(request(prompt(1, 20)))
    assert counts(pair.prefill).num_kv_offered == 1
    assert pair.prefill.stats().num_held_blocks == 5
    pair.decode.abort("a")
    pair.settle()
    pair.check()


def test_a_client_that_leaves_before_the_other_side_has_heard_of_its_fetch(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fetch is called off before it has a connection; the prefill server learns of that all the same."""
    _, pair = both
    go, connect = threading.Event(), signed.SignedTransfer._connect

    def late(self: Any, *args: Any) -> Any:
        assert go.wait(10)
        return connect(self, *args)

    monkeypatch.setattr(signed.SignedTransfer, "_connect", late)
    pair.ask(request(prompt(1, 20)))
    pair.decode.step()
    assert counts(pair.decode).num_kv_fetching == 1
    pair.decode.abort("a")
    go.set()
    limit = time.monotonic() + 30
    pair.settle(lambda: time.monotonic() > limit)
    pair.check()


@pytest.mark.gate(1)
@pytest.mark.parametrize("how", ["gone", "silent", "unknown"])
def test_a_prompt_that_does_not_come_is_computed(both: Both, alone: fwk.LLM, how: str) -> None:
    _, pair = both
    listener, address = deaf()
    if how == "gone":
        listener.close()
    if how == "unknown":
        [[address]] = pair.addresses()
    pair.add(request(prompt(1, 30), source=pair.source("lost", 0.3, [[address]], 7)))
    events = pair.settle()
    assert tokens_of(events) == alone.generate(prompt(1, 30), GREEDY)[0].token_ids
    assert counts(pair.decode).kv_transfer_failures == 1
    assert events[0].cached_tokens == 0
    assert "did not come from the prefill server" in pair.decode.stats().troubles[0]
    listener.close()
    pair.ask(request(prompt(2, 30), "b"))
    pair.settle()
    assert not pair.decode.stats().troubles


def test_damaged_blocks_are_computed(
    tiny_folder: Path, tmp_path: Path, alone: fwk.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first piece arrives; the second was changed after it had been signed."""
    monkeypatch.setattr(signed, "PIECE_BYTES", 1)
    pieces = 0
    send = Wire._send

    def changed(self: Wire, data: Any) -> None:
        nonlocal pieces
        if len(data) > 500:
            pieces += 1
            data = bytearray(data)
            data[7] ^= pieces > 1
        send(self, data)

    monkeypatch.setattr(Wire, "_send", changed)
    with split(str(tiny_folder), tmp_path, **OPTIONS) as (_, pair):
        pair.ask(request(prompt(1, 30)))
        events = pair.settle()
        stats = counts(pair.decode)
    assert pieces >= 2
    assert tokens_of(events) == alone.generate(prompt(1, 30), GREEDY)[0].token_ids
    assert (stats.kv_transfers, stats.kv_transfer_failures) == (0, 1)


def test_an_offer_ends_at_its_deadline(both: Both) -> None:
    _, pair = both
    source = pair.compute(request(prompt(1, 30)), seconds=0.2)
    assert pair.prefill.stats().num_held_blocks == 7
    end = time.monotonic() + 20
    while pair.prefill.has_work and time.monotonic() < end:
        pair.prefill.step()
    pair.check()
    pair.add(request(prompt(1, 30), source=source))
    assert len(tokens_of(pair.settle())) == 6


@pytest.mark.parametrize("num_steps", range(4))
def test_an_order_withdrawn_at_any_step_leaves_no_offer(both: Both, num_steps: int) -> None:
    """Its client left: the engine hears of the request's end, then of the offer's, while a step computes it or not."""
    _, pair = both
    order = request(prompt(1, 12), "left", sampling=SamplingParams(max_tokens=1, temperature=0.0))
    pair.prefill.add(with_source(order, pair.order("left", 600.0)))
    for _ in range(num_steps):
        pair.prefill.step()
    pair.prefill.abort("left")
    pair.prefill.call_feature("remote_prefill", "withdraw", ["left"])
    for _ in range(4):
        pair.prefill.step()
    pair.check()


def test_held_blocks_are_not_evicted(both: Both) -> None:
    """Others that need all of the KV cache leave what is offered as it is; then it is read."""
    _, pair = both
    source = pair.compute(request(prompt(1, 100)))
    for seed in range(2, 8):
        order = request(prompt(seed, 380), f"other {seed}", sampling=SamplingParams(max_tokens=1, temperature=0.0))
        assert pair.prefill.add(order) == []
        while pair.prefill.scheduler.knows(order.request_id):
            pair.prefill.step()
        assert pair.prefill.stats().num_held_blocks == 25
    pair.add(request(prompt(1, 100), source=source))
    pair.settle()
    assert counts(pair.decode).kv_transfers == 1
    pair.check()


def test_a_fetch_waits_for_room_and_never_for_ever(tiny_folder: Path, tmp_path: Path, alone: fwk.LLM) -> None:
    """Half of the KV cache is kept free for what runs; and a prompt that fits only alone is fetched in the end."""
    options = OPTIONS | {"max_total_tokens": 128}
    with split(str(tiny_folder), tmp_path, **options, num_reserved_decode_tokens=40) as (_, pair):
        long = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
        pair.add(request(prompt(2, 10), "runs", sampling=long))
        events = pair.decode.step()
        pair.ask(request(prompt(1, 100)))
        while len(tokens_of(events, "runs")) < 60:
            events += pair.decode.step()
            is_fetching = counts(pair.decode).num_kv_fetching
            assert not pair.decode.stats().num_running or not is_fetching, "there is no room"
        events += pair.settle()
        assert tokens_of(events) == alone.generate(prompt(1, 100), GREEDY)[0].token_ids
        assert counts(pair.decode).kv_transfers == 1


@pytest.mark.sweep
def test_without_room_at_all_prompts_are_computed(tiny_folder: Path, tmp_path: Path, alone: fwk.LLM) -> None:
    """Many at once, in a KV cache for about two: pre-empted ones come back, and none waits for another's blocks."""
    options = OPTIONS | {"max_total_tokens": 128}
    prompts = [prompt(30 + i, 50) for i in range(8)]
    long = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    with split(str(tiny_folder), tmp_path, {"max_total_tokens": 1024}, **options) as (llm, _):
        found = llm.generate(prompts, long)
    assert [x.token_ids for x in found] == [x.token_ids for x in alone.generate(prompts, long)]


@pytest.mark.gate(1)
@pytest.mark.parametrize("seed", seeds(40))
def test_books_balance_whatever_happens(tiny_folder: Path, tmp_path: Path, alone: fwk.LLM, seed: int) -> None:
    """Requests of shared prefixes come and go, K/V come, are late or lost, in a KV cache that is too small for all.

    Each engine proves its books in every step; what ends by itself has the tokens of one engine.
    """
    random = Random(seed)
    options = OPTIONS | {"max_total_tokens": 160, "num_reserved_decode_tokens": random.choice([0, 8])}
    listener, address = deaf()
    wanted: dict[str, list[int]] = {}
    events: list[TokenEvent] = []
    with listener, split(str(tiny_folder), tmp_path, {"max_total_tokens": 2048}, **options) as (_, pair):
        for number in range(24):
            tokens = prompt(random.randrange(2), 40)[: random.randrange(41)] + prompt(number, random.randrange(1, 40))
            one = request(tokens, f"r{number}", n=random.choice([1, 1, 3]))
            match random.randrange(5):
                case 0:
                    pair.add(with_source(one, pair.source("x" + one.request_id, 0.05, [[address]], 4)))
                case 1:
                    source = msgspec.structs.replace(pair.compute(one, 0.02), key="unknown" + one.request_id)
                    pair.add(with_source(one, source))
                case 2:
                    pair.ask(one, seconds=0.02)
                case _:
                    pair.ask(one)
            wanted[one.request_id] = tokens
            for _ in range(random.randrange(12)):
                events += pair.decode.step()
                pair.prefill.step()
            if random.random() < 0.3:
                name = random.choice(list(wanted))
                events += pair.decode.abort(name, random.choice([None, 0]))
        events += pair.settle()
        ended = {event.request_id for event in events if event.finish_reason == "length"}
        broken = {event.request_id for event in events if event.finish_reason not in (None, "length")}
        assert all(event.error is None for event in events)
        for name in ended - broken:
            found = [token for e in events if (e.request_id, e.index) == (name, 0) for token in e.token_ids]
            assert found == alone.generate(wanted[name], GREEDY)[0].token_ids, name
        assert ended - broken, "some end by themselves"


@pytest.mark.sweep
def test_ranks_fetch_from_ranks(tiny_folder: Path, tmp_path: Path, alone: fwk.LLM) -> None:
    options = OPTIONS | {"tensor_parallel_size": 2, "executor": "processes"}
    with split(str(tiny_folder), tmp_path, **options) as (llm, pair):
        wanted = [x.token_ids for x in alone.generate([prompt(1, 30), prompt(2, 20)], GREEDY)]
        assert [x.token_ids for x in llm.generate([prompt(1, 30), prompt(2, 20)], GREEDY)] == wanted
        assert counts(pair.decode).kv_transfers == 2


@pytest.mark.sweep
def test_the_weights_stay(both: Both) -> None:
    llm, _ = both
    with pytest.raises(InvalidRequest, match="K/V go from one server to another"):
        llm.update_weights("other")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no prefix cache": ({"prefix_cache": "none"}, "needs a prefix cache .* 'none' keeps nothing"),
    "transport": ({"disaggregation_transfer_backend": "ascend"}, "ascend: this transport has no plugin here"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused(tiny_folder: Path, tmp_path: Path, name: str) -> None:
    options, why = REFUSED[name]
    with pytest.raises(fwk.errors.FwkError, match=why):
        half(str(tiny_folder), "prefill", tmp_path, **OPTIONS | options)


def test_adapters_are_computed_there_if_they_are_the_same(tmp_path: Path) -> None:
    """Of two adapters one is loaded here and there, the other has the same name there and other weights."""
    model = tmp_path / "model"
    make_base(model)
    base, options = str(model), OPTIONS | {"enable_lora": True, "lora_backend": "torch", "load_format": "auto"}
    paths = {seed: str(make_adapter(model, tmp_path / str(seed), seed=seed)) for seed in (1, 2, 3)}
    names = {"same": 1, "other": 2, None: None}
    prompts = [prompt(1, 30)] * 3
    with fwk.LLM(base, **options) as alone, split(base, tmp_path, **options) as (llm, pair):
        for name, here, there in (("same", 1, 1), ("other", 2, 3)):
            alone.load_adapter(name, paths[here])
            info = llm.load_adapter(name, paths[here])
            found = pair.prefill.call_feature("lora", "load", [name, paths[there]])
            pair.keys_there[info.key] = msgspec.convert(found, AdapterInfo).key
        wanted = [alone.generate([p], GREEDY, adapter=name)[0] for p, name in zip(prompts, names, strict=True)]
        assert len({tuple(x.token_ids) for x in wanted}) == 3, "they change what is said"
        for expected, name in zip(wanted, names, strict=True):
            llm.engine.add = lambda request: pair.ask(request, 2.0)  # type: ignore[method-assign]
            before = counts(pair.decode)
            failures, transfers = before.kv_transfer_failures, before.kv_transfers
            assert llm.generate([prompts[0]], GREEDY, adapter=name)[0].token_ids == expected.token_ids, name
            after = counts(pair.decode)
            assert after.kv_transfer_failures - failures == (name == "other"), name
            assert after.kv_transfers - transfers == (name != "other"), name


TIERS = {"prefix_cache": "hierarchical", "hicache_ratio": 8}


def test_prefill_servers_may_have_tiers(tiny_folder: Path, tmp_path: Path, alone: fwk.LLM) -> None:
    """A prompt that was evicted there and comes back from a tier is offered as one that was computed."""
    options = OPTIONS | {"max_total_tokens": 128}
    prompts = [prompt(seed, 60) for seed in range(1, 5)]
    wanted = [x.token_ids for x in alone.generate(prompts, GREEDY)]
    with split(str(tiny_folder), tmp_path, of_prefill=TIERS, **options) as (_, pair):
        for number in range(3):
            for seed, tokens in enumerate(wanted):
                pair.ask(request(prompts[seed], f"{number} {seed}"))
                assert tokens_of(pair.settle(), f"{number} {seed}") == tokens
            pair.check()
        stats = pair.prefill.stats()
        assert stats.restored_prompt_tokens > 60, "what was evicted came from the tier"
        assert counts(pair.decode).kv_transfers == 12
        assert counts(pair.decode).kv_transfer_failures == 0


@pytest.mark.parametrize("policy", ["write_back", pytest.param("write_through", marks=pytest.mark.sweep)])
def test_decode_servers_may_have_tiers(tiny_folder: Path, tmp_path: Path, alone: fwk.LLM, policy: str) -> None:
    """K/V that come fill blocks of others: these are in the tier as they were, and so are fetched ones, later."""
    options = OPTIONS | {"max_total_tokens": 128}
    prompts = [prompt(seed, 60) for seed in range(1, 7)]
    wanted = [x.token_ids for x in alone.generate(prompts, GREEDY)]
    of_prefill = {"max_total_tokens": 2048, "prefix_cache": "radix"}
    tiers = TIERS | {"hicache_write_policy": policy}
    with (
        half(str(tiny_folder), "prefill", tmp_path, **options | of_prefill) as prefill,
        half(str(tiny_folder), "decode", tmp_path, **options | tiers) as decode,
    ):
        pair = Pair(prefill.engine, decode.engine)
        for number in range(4):
            for seed, tokens in enumerate(wanted):
                one = request(prompts[seed], f"{number} {seed}")
                pair.ask(one) if (number + seed) % 2 else pair.add(one)
                assert tokens_of(pair.settle(), f"{number} {seed}") == tokens, (number, seed)
            pair.check()
        assert pair.decode.stats().restored_prompt_tokens > 200, "what was evicted came from the tier"
        assert counts(pair.decode).kv_transfers >= 11
        assert counts(pair.decode).kv_transfer_failures == 0


def test_an_llm_does_not_share_its_work(tiny_folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    for mode in ("prefill", "decode"):
        given = {"disaggregation_mode": mode, "disaggregation_token_file": str(secret)}
        if mode == "decode":
            given["disaggregation_prefill_servers"] = ("http://127.0.0.1:1",)  # type: ignore[assignment]
        with pytest.raises(ConfigError, match=f"--disaggregation-mode {mode} is for fwk serve"):
            fwk.LLM(str(tiny_folder), **OPTIONS, **given)


def test_a_reservation_without_room_changes_nothing(tiny_folder: Path, tmp_path: Path) -> None:
    with half(str(tiny_folder), "decode", tmp_path, **OPTIONS) as llm:
        blocks: KVBlockManager = llm.engine.scheduler._kv_blocks
        before = blocks.num_available
        llm.engine.add(request(prompt(1, 20)))
        [sequence] = list(llm.engine.scheduler._queue.waiting)
        for count, num_spare in ((before + 1, 0), (before, 1)):
            reserved = blocks.reservations.reserve(blocks.match(sequence), sequence.token_ids, count, num_spare)
            assert reserved is None
        assert blocks.num_available == before
        llm.engine.abort("a")
        llm.engine.scheduler.check()


class Strange:
    """A transport that tells of transfers of nobody."""

    def offer(self, key: str, block_ids: list[int], deadline: float) -> None:
        self.ended = [Transfer(key, is_whole=True)]

    def poll(self) -> list[Transfer]:
        return self.ended


def test_a_transfer_that_is_not_under_way_is_told_in_the_name_of_its_transport() -> None:
    """One that has ended twice, too: the blocks are others' then."""
    exchange = KVExchange(WorkerPartContext("remote_prefill", torch.device("cpu"), torch.from_numpy, lambda x: x))
    exchange._transports = {Heads(1, (2,)): {0: Strange()}}  # type: ignore[dict-item]
    exchange.offer("one", [1], 1.0, [1, [2]])
    assert exchange.poll() == [("one", True, 0, 0.0, "")]
    with pytest.raises(PluginFault, match=r"^Strange answered the end of 'one' in poll, which is not under way$"):
        exchange.poll()


def ranks(count: int) -> dict[str, Any]:
    return {"tensor_parallel_size": count, "executor": "processes" if count > 1 else "inprocess"}


KEPT: dict[str, dict[str, Any]] = {
    "rows": {"attention_backend": "torch"},
    "tiles": {"attention_backend": "cpu", "page_size": 16},
    "int8": {"attention_backend": "torch", "kv_cache_dtype": "int8"},
    "latent": {"attention_backend": "torch"},
    "int8 tiles": {"attention_backend": "cpu", "kv_cache_dtype": "int8", "page_size": 16},
}


@pytest.mark.gate(1)
@pytest.mark.parametrize(
    ("there", "here", "kept"),
    [
        (1, 2, "rows"),
        pytest.param(2, 1, "tiles", marks=pytest.mark.sweep),
        pytest.param(2, 1, "int8", marks=pytest.mark.sweep),
        pytest.param(1, 2, "int8 tiles", marks=pytest.mark.sweep),
        pytest.param(1, 4, "rows", marks=pytest.mark.sweep),
        pytest.param(4, 2, "tiles", marks=pytest.mark.sweep),
        pytest.param(1, 2, "latent", marks=pytest.mark.sweep),
        pytest.param(2, 1, "latent", marks=pytest.mark.sweep),
    ],
)
def test_heads_are_cut_for_other_numbers_of_ranks(
    tiny_folder: Path, tmp_path: Path, there: int, here: int, kept: str
) -> None:
    """Tokens are one rank's, and blocks come back on both sides. The tiny model has two K/V heads."""
    options, model = OPTIONS | KEPT[kept], tiny_folder
    if kept == "latent":
        make_checkpoint(model := tmp_path / "model", "deepseek_v2")
        options |= {"load_format": "auto"}
    prompts = [prompt(1, 50), prompt(2, 37), prompt(1, 32) + prompt(3, 20)]
    with fwk.LLM(str(model), **options) as alone:
        wanted = [x.token_ids for x in alone.generate(prompts, GREEDY)]
    with split(str(model), tmp_path, of_prefill=ranks(there), **options | ranks(here)) as (llm, pair):
        assert [llm.generate([one], GREEDY)[0].token_ids for one in prompts] == wanted
        pair.settle()
        for stats in (counts(pair.decode), counts(pair.prefill)):
            assert (stats.kv_transfers, stats.kv_transfer_failures) == (3, 0)


def test_an_engine_tells_where_it_keeps_an_order_for_ranks_that_ask(both: Both) -> None:
    """Of several engines the one that keeps the blocks answers, with an address for each rank that is to read."""
    _, pair = both
    source = pair.compute(request(prompt(1, 30)))
    for readers in ([1, [2, 2]], [2, [1, 1]]):
        [about] = pair.prefill.call_feature("remote_prefill", "keeps", [source.key, readers])
        [again] = pair.prefill.call_feature("remote_prefill", "about", [readers])
        assert about["addresses"] == again["addresses"]
        assert len(about["addresses"]) == readers[0]
        assert len({*about["addresses"]}) == readers[0]
        assert pair.prefill.call_feature("remote_prefill", "keeps", ["another", readers]) is None
    pair.add(request(prompt(1, 30), source=source))
    pair.settle()


def test_heads_that_a_backend_does_not_tell_apart_need_the_same_number_of_ranks(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers are then compared by it; else by one head's blocks, which are the same for any number of ranks."""
    word, layout = "--tensor-parallel-size", "the layout of K/V"
    found: list[dict[str, str]] = []
    form = backend.block_format
    for is_told in (True, False):
        if not is_told:
            monkeypatch.setattr(backend, "block_format", lambda *given: replace(form(*given), head_dim=None))
        with half(str(tiny_folder), "prefill", tmp_path, **OPTIONS | KEPT["rows"]) as llm:
            [about] = llm.engine.call_feature("remote_prefill", "about", [])
            found.append(about["in_common"])
            assert list(about["heads"][1]) == ([2, 2] if is_told else [0, 0])
    assert word not in found[0]
    assert found[1][word] == "1"
    assert "num_kv_heads=1" in found[0][layout]
    assert "num_kv_heads=2" in found[1][layout]
