"""Slots for adapters: who holds them, who waits, and that nobody waits for ever."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from fwk.engine.core import Engine
from fwk.features.engine import EngineFeatures
from fwk.interfaces.feature import EnginePartContext, Wire
from fwk.types import Request, SamplingParams
from fwk_kit.testing.fake_engine import make_engine, reference
from fwk_lora.feature import Adapted, AdapterPlace, LoRAOptions
from fwk_lora.feature.engine import Adapters, AdapterScheduling

_place = msgspec.msgpack.Decoder(AdapterPlace).decode


class Workers:
    """Answers as workers that can load everything."""

    def __init__(self) -> None:
        self.loaded: set[str] = set()

    def call(self, name: str, *args: Any) -> list[Any]:
        if name == "load":
            self.loaded.add(f"{args[0]}@{args[1]}")
            return [{"key": f"{args[0]}@{args[1]}", "rank": 4}]
        assert name == "unload"
        self.loaded.remove(args[0])
        return [None]


def with_adapters(num_slots: int, names: str, **options: Any) -> tuple[Engine, Workers]:
    workers = Workers()
    engine = make_engine(**options)
    context = EnginePartContext(
        "lora",
        workers.call,
        Wire(request=Adapted, sequence=AdapterPlace),
        LoRAOptions(max_loras_per_batch=num_slots),
        max_running=engine.scheduler.limits.max_running,
    )
    part = AdapterScheduling(context)
    engine.scheduler.parts = engine.scheduler._queue._parts = EngineFeatures([part])
    for name in names:
        part.adapters.load(name, "1")
    return engine, workers


def part_of(engine: Engine) -> AdapterScheduling:
    [part] = engine.scheduler.parts.all
    assert isinstance(part, AdapterScheduling)
    return part


def request(name: str, adapter: str, prompt: list[int], max_tokens: int = 8) -> Request:
    key = f"{adapter}@1" if adapter else ""
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        cache_namespace=key,
        features={"lora": msgspec.Raw(msgspec.msgpack.encode(Adapted(key)))} if key else {},
    )


def run(engine: Engine, outputs: dict[str, list[int]]) -> None:
    for event in engine.step():
        outputs.setdefault(event.request_id, []).extend(event.token_ids)


@pytest.mark.gate(12)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(12))
def test_any_traffic_is_served_with_any_number_of_slots(seed: int, depth: int) -> None:  # noqa: C901 - one script
    """Arrivals, aborts, pre-emption, unloading and loading again; books and placements are checked every step."""
    rng = random.Random(seed)
    num_slots = rng.randint(1, 3)
    engine, workers = with_adapters(
        num_slots, "abcde", num_blocks=rng.choice((14, 64)), max_running=6, step_tokens=24, chunk_tokens=9, depth=depth
    )
    adapters = part_of(engine).adapters
    placed: dict[int, str] = {}
    running: dict[int, str] = {}
    outputs: dict[str, list[int]] = {}
    wanted: dict[str, list[int]] = {}
    aborted: set[str] = set()
    for step in range(400):
        if step < 60 and rng.random() < 0.6:
            name, adapter = f"r{step}", rng.choice(["", "a", "b", "c", "d", "e"])
            if adapter and f"{adapter}@1" not in {info.key for info in adapters.infos()}:
                continue
            prompt = [rng.randrange(97) for _ in range(rng.randint(1, 20))]
            wanted[name] = reference(prompt, 8)
            assert not engine.add(request(name, adapter, prompt))
        if step < 60 and rng.random() < 0.1 and wanted:
            aborted.add(victim := rng.choice(list(wanted)))
            engine.abort(victim)
        if rng.random() < 0.05 and (infos := adapters.infos()):
            adapters.unload(name := rng.choice(infos).name)
            if rng.random() < 0.7:
                adapters.load(name, "1")
        before = len(engine.executor.worker.batches)  # type: ignore[attr-defined]
        run(engine, outputs)
        for batch in engine.executor.worker.batches[before:]:  # type: ignore[attr-defined]
            for slot in batch.freed_slots:
                running.pop(slot, None)
            for new in batch.new:
                if new.features:
                    place = _place(new.features["lora"])
                    running[new.slot] = placed[place.slot] = place.key
                    assert place.key in workers.loaded
                    assert 0 <= place.slot < num_slots
            assert set(running.values()) <= set(placed.values()), "a running sequence lost its adapter's slot"
        if step >= 60 and not engine.has_work:
            break
    assert not engine.has_work, "somebody waits for ever"
    for name, tokens in wanted.items():
        assert name in aborted or outputs[name] == tokens
    adapters.prove((), ())
    assert workers.loaded == {info.key for info in adapters.infos()}


def test_a_busy_adapter_does_not_starve_another() -> None:
    """One slot, and always one more request for the adapter that is in it: the other one's turn comes all the same."""
    engine, _ = with_adapters(1, "ab", max_running=4)
    outputs: dict[str, list[int]] = {}
    for i in range(3):
        engine.add(request(f"a{i}", "a", [i + 1], 8))
    run(engine, outputs)
    engine.add(request("b", "b", [50], 4))
    engine.add(request("plain", "", [60], 2))
    for step in range(40):
        engine.add(request(f"more{step}", "a", [step], 8))
        run(engine, outputs)
        if len(outputs.get("b", ())) == 4:
            break
    assert outputs["b"] == reference([50], 4)
    assert step < 14, "it waited for more than those that were before it"


def test_without_an_adapter_nobody_waits_for_slots() -> None:
    engine, _ = with_adapters(1, "ab", max_running=4)
    outputs: dict[str, list[int]] = {}
    engine.add(request("a", "a", [1], 30))
    run(engine, outputs)
    engine.add(request("b", "b", [50], 4))
    engine.add(request("plain", "", [60], 3))
    for _ in range(4):
        run(engine, outputs)
    assert outputs["plain"] == reference([60], 3)
    assert "b" not in outputs


def test_a_long_queue_is_not_read_to_its_end_every_step() -> None:
    engine, _ = with_adapters(1, "ab", max_running=4)
    engine.add(request("a", "a", [1], 30))
    engine.step()
    for i in range(200):
        engine.add(request(f"b{i}", "b", [i % 97], 1))
    engine.step()
    assert part_of(engine)._num_held == 5


def test_an_idle_adapter_stays_in_its_slot_until_it_is_needed() -> None:
    adapters = Adapters(2, None, Workers().call)
    for name in "abc":
        adapters.load(name, "1")
    places: dict[str, int] = {}
    for name in "ab":
        adapters.enter(f"{name}@1")
        places[name] = adapters.take(f"{name}@1").slot
        adapters.give_back(f"{name}@1")
        adapters.leave(f"{name}@1")
    adapters.enter("a@1")
    assert adapters.take("a@1").slot == places["a"]
    adapters.enter("c@1")
    assert adapters.take("c@1").slot == places["b"], "b's was held longest ago of those nobody holds"
    assert adapters.can_take("a@1")
    assert not adapters.can_take("b@1")
