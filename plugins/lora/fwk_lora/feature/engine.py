"""The part in the engine: adapters by name and by key, and which running sequence holds which slot of the workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from fwk.errors import ConfigError, InvalidRequest
from fwk.interfaces.feature import EnginePart, EnginePartContext, FeatureSequence
from fwk.interfaces.lora import AdapterInfo
from fwk.types import Request
from fwk_lora.feature import NAME, Adapted, AdapterPlace, LoRAOptions

Call = Callable[..., list[Any]]


@dataclass(slots=True)
class _Adapter:
    """One loaded adapter. It is *retired* once its name is gone; its weights go with the last of its sequences."""

    info: AdapterInfo
    num_open: int = 0  # sequences waiting or running
    num_running: int = 0
    slot: int | None = None
    is_retired: bool = False


class Adapters:
    """Loads and unloads adapters, and gives each running sequence's adapter a slot of the workers.

    A slot is held while any sequence on its adapter runs; after that the adapter stays in it until another needs
    the place, least recently held first. Pre-empted sequences hold none, so with nothing running every slot is to be
    had: whoever is first in the queue can always start.
    """

    def __init__(self, num_slots: int, max_loaded: int | None, call: Call) -> None:
        self._call = call
        self._max_loaded = max_loaded
        self._by_name: dict[str, _Adapter] = {}
        self._by_key: dict[str, _Adapter] = {}
        self._free = list(range(num_slots - 1, -1, -1))
        self._idle: dict[str, _Adapter] = {}  # in slots without a holder, least recently used first
        self._num_slots = num_slots

    # Coming and going of adapters.

    def infos(self) -> list[AdapterInfo]:
        """What requests can ask for now."""
        return [adapter.info for adapter in self._by_name.values()]

    def load(self, name: str, path: str) -> AdapterInfo:
        """Read an adapter into every worker. Raises ``InvalidRequest`` with nothing changed."""
        if NAME.fullmatch(name) is None:
            raise InvalidRequest("lora_name must be 1 to 128 letters, digits and _ . / @ + -", "lora_name")
        if name in self._by_name:
            raise InvalidRequest(f"a LoRA adapter {name!r} is loaded already; unload it first", "lora_name")
        if self._max_loaded is not None and len(self._by_key) >= self._max_loaded:
            raise InvalidRequest(
                f"{len(self._by_key)} LoRA adapters are loaded, as many as --max-loaded-loras allows; unload one first",
                "lora_name",
            )
        info = self._load(name, path)
        adapter = self._by_key.setdefault(info.key, _Adapter(info))  # it may be there still, retired
        adapter.is_retired = False
        self._by_name[name] = adapter
        return info

    def _load(self, name: str, path: str) -> AdapterInfo:
        answers = [cast(dict[str, Any], answer) for answer in self._call("load", name, path)]
        keys = {str(answer["key"]) for answer in answers if "key" in answer}
        errors = [str(answer["error"]) for answer in answers if "error" in answer]
        if len(keys) > 1:
            errors.append("its files changed while they were read")
        if errors:
            for key in keys - set(self._by_key):
                self._call("unload", key)
            raise InvalidRequest(f"LoRA adapter {name!r} cannot be loaded: {errors[0]}", "lora_path")
        return AdapterInfo(name, keys.pop(), path, int(answers[0]["rank"]))

    def unload(self, name: str) -> AdapterInfo:
        """Take the name away. Sequences under way finish; the weights are freed with the last of them."""
        if name not in self._by_name:
            raise InvalidRequest(f"no LoRA adapter {name!r} is loaded", "lora_name")
        adapter = self._by_name.pop(name)
        adapter.is_retired = True
        self._forget_if_done(adapter)
        return adapter.info

    def _forget_if_done(self, adapter: _Adapter) -> None:
        if not adapter.is_retired or adapter.num_open:
            return
        del self._by_key[adapter.info.key]
        if adapter.slot is not None:
            del self._idle[adapter.info.key]
            self._free.append(adapter.slot)
        self._call("unload", adapter.info.key)

    # Coming and going of sequences, each by the key of its adapter.

    def enter(self, key: str) -> None:
        """A sequence arrives: ``check`` has let its request pass."""
        self._by_key[key].num_open += 1

    def check(self, key: str) -> None:
        """Raise ``InvalidRequest`` when the adapter is not there any more."""
        adapter = self._by_key.get(key)
        if adapter is None or adapter.is_retired:
            raise InvalidRequest(f"the LoRA adapter {key.rpartition('@')[0]!r} is not loaded", "model")

    def leave(self, key: str) -> None:
        """A sequence has ended; if it ran, its slot was given back before."""
        adapter = self._by_key[key]
        adapter.num_open -= 1
        self._forget_if_done(adapter)

    def can_take(self, key: str) -> bool:
        """Whether ``take`` would find a slot."""
        return self._by_key[key].slot is not None or bool(self._free or self._idle)

    def take(self, key: str) -> AdapterPlace:
        """A sequence starts to run: its adapter's place. ``can_take`` was asked."""
        adapter = self._by_key[key]
        if adapter.slot is None:
            adapter.slot = self._free.pop() if self._free else self._evict()
        else:
            self._idle.pop(key, None)
        adapter.num_running += 1
        return AdapterPlace(adapter.slot, key)

    def give_back(self, key: str) -> None:
        """A sequence runs no more: it ended or was pre-empted."""
        adapter = self._by_key[key]
        adapter.num_running -= 1
        if not adapter.num_running:
            self._idle[key] = adapter

    def _evict(self) -> int:
        key = next(iter(self._idle))
        adapter = self._idle.pop(key)
        assert adapter.slot is not None
        slot, adapter.slot = adapter.slot, None
        return slot

    def prove(self, running: Iterable[str], waiting: Iterable[str]) -> None:
        """Raise ``AssertionError`` unless the books balance; the arguments are the keys of the sequences there are."""
        held = Counter(running)
        open_ = held + Counter(waiting)
        for key, adapter in self._by_key.items():
            if (adapter.num_running, adapter.num_open) != (held[key], open_[key]):
                raise AssertionError(f"adapter {key} has other sequences than its books say")
            if (adapter.slot is None or key in self._idle) != (held[key] == 0):
                raise AssertionError(f"adapter {key} is not in the place its sequences need")
        slots = self._free + [a.slot for a in self._by_key.values() if a.slot is not None]
        if sorted(slots) != list(range(self._num_slots)):
            raise AssertionError("adapter slots do not balance")


class AdapterScheduling(EnginePart):
    """Holds sequences back until there is a slot for their adapter.

    Once a sequence must wait for a slot, no sequence with an adapter starts before it, not even one whose adapter is
    in a slot: that would hold slots for ever that the first one needs. Those without an adapter pass.
    """

    def __init__(self, context: EnginePartContext) -> None:
        """Loads the adapters of ``--lora-paths``. Raises ``ConfigError``."""
        super().__init__(context)
        options: LoRAOptions = context.options
        self.adapters = Adapters(options.max_loras_per_batch, options.max_loaded_loras, context.call)
        self._patience = context.max_running
        self._num_held = 0  # in the step being planned
        self._keys: dict[tuple[str, int], str] = {}  # by sequence
        for name, path in options.paths.items():
            try:
                self.adapters.load(name, path)
            except InvalidRequest as error:
                raise ConfigError(f"--lora-paths {name}={path}: {error}") from None

    def operations(self) -> Mapping[str, Callable[..., Any]]:
        return {
            "load": lambda name, path: _plain(self.adapters.load(name, path)),
            "unload": lambda name: _plain(self.adapters.unload(name)),
            "adapters": lambda: list(map(_plain, self.adapters.infos())),
        }

    def check(self, request: Request) -> None:
        self.adapters.check(self._key(request))

    def _key(self, request: Request) -> str:
        asked: Adapted = self.asked(request)
        return asked.key

    # Whether a sequence may start.

    def poll(self) -> None:
        self._num_held = 0

    def lets_through(self, sequence: FeatureSequence) -> bool:
        if not self._num_held and self.adapters.can_take(self._keys[sequence.key]):
            return True
        self._num_held += 1
        return False

    @property
    def is_full(self) -> bool:
        """So many had to wait that the rest of the queue is not worth reading in this step."""
        return self._num_held > self._patience

    # What becomes of it.

    def arrived(self, sequence: FeatureSequence) -> None:
        if sequence.key not in self._keys:  # else it was pre-empted
            self._keys[sequence.key] = key = self._key(sequence.request)
            self.adapters.enter(key)

    def new(self, sequence: FeatureSequence) -> AdapterPlace:
        return self.adapters.take(self._keys[sequence.key])

    def preempted(self, sequence: FeatureSequence) -> None:
        self.adapters.give_back(self._keys[sequence.key])

    def finished(self, sequence: FeatureSequence) -> None:
        key = self._keys.pop(sequence.key)
        if sequence.is_running:
            self.adapters.give_back(key)
        self.adapters.leave(key)

    def prove(self, running: Collection[FeatureSequence], waiting: Collection[FeatureSequence]) -> None:
        self.adapters.prove(*([self._keys[s.key] for s in some if s.key in self._keys] for some in (running, waiting)))


def _plain(info: AdapterInfo) -> list[Any]:
    """As it is sent."""
    return [info.name, info.key, info.path, info.rank]
