"""The LoRA adapters of an engine: by name, by key, and who of the running sequences holds which slot of the workers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

from fwk.config import Config
from fwk.engine.gate import Gate
from fwk.engine.sequence import Sequence
from fwk.errors import ConfigError, InvalidRequest
from fwk.types import AdapterInfo, AdapterPlace

Call = Callable[..., list[Any]]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./@+-]{0,127}")


def adapter_paths(config: Config) -> dict[str, str]:
    """``--lora-paths`` as name -> folder. Raises ``ConfigError``."""
    paths: dict[str, str] = {}
    for item in config.engine.lora_paths:
        name, equals, path = item.partition("=")
        if not equals or not path or _NAME.fullmatch(name) is None:
            raise ConfigError(f"--lora-paths: {item!r} is not NAME=FOLDER (a name has no spaces and no colon)")
        if name in paths:
            raise ConfigError(f"--lora-paths: the name {name!r} is given twice")
        paths[name] = path
    most = config.engine.max_loaded_loras
    if most is not None and len(paths) > most:
        raise ConfigError(f"--lora-paths names {len(paths)} adapters, but --max-loaded-loras is {most}")
    return paths


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

    def __init__(self, num_slots: int = 0, max_loaded: int | None = None, call: Call | None = None) -> None:
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

    def key_of(self, name: str) -> str:
        """The key of the adapter that has the name now; empty for the empty name."""
        if not name:
            return ""
        if name not in self._by_name:
            raise InvalidRequest(f"no LoRA adapter {name!r} is loaded", "adapter")
        return self._by_name[name].info.key

    def load(self, name: str, path: str) -> AdapterInfo:
        """Read an adapter into every worker. Raises ``InvalidRequest`` with nothing changed."""
        if self._call is None:
            raise InvalidRequest("this engine serves no LoRA adapters; start it with --enable-lora", "lora_name")
        if _NAME.fullmatch(name) is None:
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
        assert self._call is not None
        answers = [cast(dict[str, Any], answer) for answer in self._call("load_adapter", name, path)]
        keys = {str(answer["key"]) for answer in answers if "key" in answer}
        errors = [str(answer["error"]) for answer in answers if "error" in answer]
        if len(keys) > 1:
            errors.append("its files changed while they were read")
        if errors:
            for key in keys - set(self._by_key):
                self._call("unload_adapter", key)
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
        assert self._call is not None
        self._call("unload_adapter", adapter.info.key)

    # Coming and going of sequences. ``key`` is a request's adapter; an empty one is no adapter and costs nothing.

    def enter(self, key: str, count: int) -> None:
        """``count`` sequences arrive. Raises ``InvalidRequest`` when their adapter is not there any more."""
        if not key:
            return
        adapter = self._by_key.get(key)
        if adapter is None or adapter.is_retired:
            raise InvalidRequest(f"the LoRA adapter {key.rpartition('@')[0]!r} is not loaded", "model")
        adapter.num_open += count

    def leave(self, key: str) -> None:
        """A sequence has ended; if it ran, its slot was given back before."""
        if key:
            adapter = self._by_key[key]
            adapter.num_open -= 1
            self._forget_if_done(adapter)

    def can_take(self, key: str) -> bool:
        """Whether ``take`` would find a slot."""
        return not key or self._by_key[key].slot is not None or bool(self._free or self._idle)

    def take(self, key: str) -> AdapterPlace | None:
        """A sequence starts to run: its adapter's place, None without one. ``can_take`` was asked."""
        if not key:
            return None
        adapter = self._by_key[key]
        if adapter.slot is None:
            adapter.slot = self._free.pop() if self._free else self._evict()
        else:
            self._idle.pop(key, None)
        adapter.num_running += 1
        return AdapterPlace(adapter.slot, key)

    def give_back(self, key: str) -> None:
        """A sequence runs no more: it ended or was pre-empted."""
        if key:
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

    def check(self, running: Iterable[str], waiting: Iterable[str]) -> None:
        """Prove the books; the arguments are the keys of the sequences there are."""
        held = Counter(key for key in running if key)
        open_ = held + Counter(key for key in waiting if key)
        for key, adapter in self._by_key.items():
            if (adapter.num_running, adapter.num_open) != (held[key], open_[key]):
                raise AssertionError(f"adapter {key} has other sequences than its books say")
            if (adapter.slot is None or key in self._idle) != (held[key] == 0):
                raise AssertionError(f"adapter {key} is not in the place its sequences need")
        slots = self._free + [a.slot for a in self._by_key.values() if a.slot is not None]
        if sorted(slots) != list(range(self._num_slots)):
            raise AssertionError("adapter slots do not balance")


class AdapterGate(Gate):
    """Holds sequences back until there is a slot for their adapter.

    Once a sequence must wait for a slot, no sequence with an adapter starts before it, not even one whose adapter is
    in a slot: that would hold slots for ever that the first one needs. Those without an adapter pass.
    """

    def __init__(self, adapters: Adapters, patience: int) -> None:
        self._adapters = adapters
        self._patience = patience
        self._num_held = 0  # in the step being planned

    def poll(self) -> None:
        self._num_held = 0

    def lets_through(self, sequence: Sequence) -> bool:
        key = sequence.request.adapter
        if not key or (not self._num_held and self._adapters.can_take(key)):
            return True
        self._num_held += 1
        return False

    @property
    def is_full(self) -> bool:
        """So many had to wait that the rest of the queue is not worth reading in this step."""
        return self._num_held > self._patience
