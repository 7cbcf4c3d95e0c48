"""The plugins' classes: a built-in's, of which a method answers otherwise once an order says so."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from fwk.interfaces.dialect import Dialect
from fwk.interfaces.engine_pool import EnginePool
from fwk.interfaces.feature import EnginePart, RequestPart, ServerPart, WorkerPart
from fwk.interfaces.kv_transfer import Transfer
from fwk_wrong import BASES, NAME, base
from fwk_wrong.wire import Other, Told

ORDER = Path(os.environ.get("WRONG_ORDER") or Path(os.environ.get("TMPDIR", "/tmp")) / "order.json")
"""``{"method": "cache.match", "kind": "raises"}``, until it is carried out."""


class Fault(Exception):
    """What a method raises."""

    def __init__(self) -> None:
        super().__init__("a fault of the tests: /srv/secret/weights.bin at 0x7f00deadbeef")


def _raise(answer: Any) -> Any:
    raise Fault


def _exit(answer: Any) -> Any:
    raise SystemExit(3)


def _crash(number: signal.Signals) -> Callable[[Any], Any]:
    return lambda answer: signal.raise_signal(number)


def _filled(number: int) -> Callable[[Any], Any]:
    return lambda answer: answer.clone().fill_(number)


def _with_arrays(prepared: Any, change: Callable[[Any], Any]) -> Any:
    return replace(prepared, arrays=[change(arrays) for arrays in prepared.arrays])


def _ended_with(**figures: Any) -> Callable[[Any], Any]:
    """The ends of transfers, of which a field is otherwise."""
    return lambda ended: [replace(one, **figures) for one in ended]


def _with_matrices(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """An adapter, of which each pair of matrices is otherwise."""
    return lambda weights: replace(weights, modules={name: change(own) for name, own in weights.modules.items()})


KINDS: dict[str, Callable[[Any], Any]] = {
    "raises": _raise,
    "exits": _exit,
    "None": lambda answer: None,
    "float": lambda answer: 1.5,
    "string": lambda answer: "wrong",
    "object": lambda answer: object(),
    "empty": lambda answer: answer[:0],
    "too long": lambda answer: answer.repeat(2, *[1] * (answer.dim() - 1)),
    "wider": lambda answer: answer.repeat(1, 2),
    "dtype": lambda answer: answer.bool(),
    "huge": _filled(10**6),
    "negative": _filled(-7),
    "shorter": lambda answer: answer[:-1],
    "longer": lambda answer: [*answer, *answer],
    "one too many": lambda answer: answer + 1,
    "below zero": lambda answer: -1,
    "nowhere": lambda answer: Path("/srv/nothing/is/here"),
    "a struct of another": lambda answer: Other(),
    "token outside": lambda placed: replace(placed, token_ids=[10**6, *placed.token_ids[1:]]),
    "overlapping": lambda placed: replace(placed, media=[*placed.media, placed.media[0]]),
    "item outside": lambda placed: replace(placed, media=[replace(piece, item=7) for piece in placed.media]),
    "no arrays": lambda prepared: _with_arrays(prepared, lambda arrays: {}),
    "narrow arrays": lambda prepared: _with_arrays(prepared, lambda arrays: {k: x[..., :1] for k, x in arrays.items()}),
    "lists": lambda prepared: _with_arrays(prepared, lambda arrays: {k: x.tolist() for k, x in arrays.items()}),
    "unknown key": lambda ended: [Transfer("of nobody", is_whole=True)],
    "twice": lambda ended: [*ended, *ended],
    "key of a number": _ended_with(key=7),
    "bytes below zero": _ended_with(num_bytes=-1),
    "bytes of None": _ended_with(num_bytes=None),
    "seconds of NaN": _ended_with(seconds=float("nan")),
    "whole of a string": _ended_with(is_whole="yes"),
    "error of a number": _ended_with(error=7),
    "no fingerprint": lambda weights: replace(weights, fingerprint=""),
    "no modules": lambda weights: replace(weights, modules={}),
    "modules of None": lambda weights: replace(weights, modules=None),
    "vectors": _with_matrices(lambda own: replace(own, a=own.a[0])),
    "integers": _with_matrices(lambda own: replace(own, b=own.b.int())),
    "arrays": _with_matrices(lambda own: replace(own, a=own.a.numpy())),
    "two ranks": _with_matrices(lambda own: replace(own, b=own.b[:, :1])),
    "scale of NaN": _with_matrices(lambda own: replace(own, scale=float("nan"))),
    "index of another": lambda layer: replace(layer, index=layer.index + 1),
    "parts of another": lambda layer: replace(layer, parts=()),
    "hangs": lambda answer: time.sleep(3600),
    "SIGSEGV": _crash(signal.SIGSEGV),
    "SIGABRT": _crash(signal.SIGABRT),
    "SIGBUS": _crash(signal.SIGBUS),
}


ENDED = ("twice", "key of", "bytes", "seconds", "whole", "error")
"""What kinds begin with that are for an answer that names something."""


def _ordered(method: str, answer: Any) -> Callable[[Any], Any] | None:
    """What the order makes of the answer of a method, once; None: there is no order for it."""
    if not ORDER.exists():
        return None
    with suppress(OSError, ValueError):
        order = json.loads(ORDER.read_text())
        if order["method"] == method and (not order["kind"].startswith(ENDED) or answer):
            ORDER.unlink()  # another process may have been first
            return KINDS[order["kind"]]
    return None


def spoiled(cls: type[Any], family: str, names: Iterator[str] | None = None) -> type[Any]:
    """The class, whose public methods carry out orders for ``FAMILY.METHOD``."""
    body: dict[str, Any] = {}
    for name in dir(cls) if names is None else names:
        if name.startswith("_"):
            continue
        own = inspect.getattr_static(cls, name)
        if isinstance(own, property) and own.fget is not None:
            body[name] = property(_spoiled(own.fget, f"{family}.{name}"))
        elif inspect.isfunction(own):
            body[name] = _spoiled(own, f"{family}.{name}")
    return type(f"Wrong{cls.__name__}", (cls,), body)


def _spoiled(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(method):

        @wraps(method)
        async def wait(*args: Any, **given: Any) -> Any:
            answer = await method(*args, **given)
            spoil = _ordered(name, answer)
            return answer if spoil is None else spoil(answer)

        return wait

    @wraps(method)
    def call(*args: Any, **given: Any) -> Any:
        answer = method(*args, **given)
        spoil = _ordered(name, answer)
        return answer if spoil is None else spoil(answer)

    return call


def _overridden(cls: type[Any]) -> Iterator[str]:
    """What a class of a built-in does otherwise than its interface, or that has no default, and ``register``."""
    for name in dir(cls):
        owner = next(c for c in cls.__mro__ if name in c.__dict__)
        if not owner.__module__.startswith("fwk.interfaces") or name == "register":
            yield name


def _made(hook: str) -> Any:
    spec = base(hook)
    module, _, name = spec.load.partition(":")
    found = getattr(importlib.import_module(module), name)
    own: Any = spoiled(found, hook, _overridden(found))
    options = spec.options
    if options is None:
        return own

    def begin(self: Any, context: Any) -> None:
        found.__init__(self, replace(context, options=options()))

    return type(own.__name__, (own,), {"__init__": begin})


class WrongDialect(Dialect):
    """Says what it is called."""

    def routes(self, app: FastAPI) -> None:
        async def name() -> dict[str, str]:
            return self.named()

        app.add_api_route("/wrong", name, methods=["GET"])

    def named(self) -> dict[str, str]:
        return {"name": NAME}

    def error_body(self, status: int, message: str, param: str | None, code: str | None) -> dict[str, Any]:
        return {"error": {"message": message}}


class WrongRequestPart(RequestPart):
    async def enter(self, item: Any) -> Told:
        return Told()


class WrongPool(EnginePool):
    """Tells its own numbers, as one of several engines does."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.below[0].on_stats = lambda stats: self.on_stats(self.stats)


class WrongServer(ServerPart):
    def open(self, item: Any, caller: str) -> RequestPart | None:
        number = int(self.context.name.removeprefix(NAME) or 1)
        return SpoiledRequest() if item.sampling.extra.get("wrong_feature") == number else None

    def routes(self, app: FastAPI) -> None:
        async def told() -> list[Any]:
            return await self.context.ask("told")

        if self.context.name == NAME:
            app.add_api_route("/wrong/told", told, methods=["POST"])


class WrongEngine(EnginePart):
    wants_steps = True

    def step(self, sequence: Any, start: int, count: int) -> Told:
        return Told()

    def stats(self) -> Told:
        return Told()


class WrongWorker(WorkerPart):
    def operations(self) -> dict[str, Callable[..., Any]]:
        return {"told": self.told}

    def told(self) -> int:
        return 1

    def computed(self, batch: Any, forward: Any, hidden: Any, logits: Any) -> Any:
        return [s.slot for s in batch.sequences]

    def results(self, made: Any) -> dict[int, Told]:
        return {slot: Told() for slot in made}


SpoiledRequest = spoiled(WrongRequestPart, "request")
_OWN = {
    "engine_pools": lambda: spoiled(WrongPool, "engine_pools"),
    "dialects": lambda: spoiled(WrongDialect, "dialects"),
    "server_part": lambda: spoiled(WrongServer, "server"),
    "engine_part": lambda: spoiled(WrongEngine, "engine"),
    "worker_part": lambda: spoiled(WrongWorker, "worker"),
}


def __getattr__(name: str) -> Any:
    if name in BASES:
        made = _made(name)
    elif name in _OWN:
        made = _OWN[name]()
    elif name.startswith("engine"):
        made = spoiled(WrongEngine, name)
    else:
        raise AttributeError(name)
    globals()[name] = made
    return made
