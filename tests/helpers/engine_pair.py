"""Two engines in this process that share their work as two servers do: one computes prompts, the other decodes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

import fwk
from fwk.engine.core import Engine
from fwk.plugins import discover
from fwk.plugins.options import build_config
from fwk.types import Request, SamplingParams, TokenEvent
from fwk_kv_transfer.remote_prefill import OF_DECODE, Heads, KVSource, TransferCounts

SECRET = "0123456789abcdef"
SECONDS = 60.0


def half(model: str, mode: str, folder: Path, **options: Any) -> fwk.LLM:
    """One of the two, as an ``LLM``: what a user of ``LLM`` is refused, for there is no server to share the work."""
    secret = folder / "secret"
    secret.write_text(SECRET)
    given = {**options, "model": model, "disaggregation_mode": mode, "disaggregation_token_file": str(secret)}
    if mode == "prefill":
        given = {name: value for name, value in given.items() if name not in OF_DECODE}
    else:
        given = {"disaggregation_prefill_servers": ("http://127.0.0.1:1",), "num_reserved_decode_tokens": 0, **given}
    llm = fwk.LLM.__new__(fwk.LLM)
    plugins = discover()
    llm._load(build_config(plugins, given), plugins, lambda line: None)
    return llm


def with_source(request: Request, source: KVSource) -> Request:
    """A request as the server part sends it: its prompt's K/V are elsewhere, or for another server."""
    raw = msgspec.Raw(msgspec.msgpack.encode(source))
    return msgspec.structs.replace(request, features={**request.features, "remote_prefill": raw})


def counts(engine: Engine) -> TransferCounts:
    """What an engine has transferred."""
    return TransferCounts(**engine.stats().features["remote_prefill"])  # type: ignore[arg-type]


def heads_of(engine: Engine) -> Heads:
    """How an engine's ranks share K/V heads."""
    [heads] = {msgspec.convert(rank["heads"], Heads) for rank in engine.call_feature("remote_prefill", "about", [])}
    return heads


class Pair:
    """A request given to ``ask`` is computed by the one engine and continued by the other."""

    def __init__(self, prefill: Engine, decode: Engine) -> None:
        self.prefill = prefill
        self.decode = decode
        self.add = decode.add
        self.keys_there: dict[str, str] = {}  # of adapters here, and of those of the same name there
        self._keys = itertools.count()

    def compute(self, request: Request, seconds: float = SECONDS) -> KVSource:
        """Have the prompt computed, and offered."""
        key = f"key-{next(self._keys)}"
        order = Request(
            request_id=f"prefill-{key}",
            prompt_token_ids=request.prompt_token_ids,
            sampling=SamplingParams(max_tokens=1, temperature=0.0),
            cache_namespace=self._there(request.cache_namespace.encode()).decode(),
            features={name: msgspec.Raw(self._there(bytes(raw))) for name, raw in request.features.items()},
        )
        events = self.prefill.add(with_source(order, self.order(key, seconds)))
        while not events or events[-1].finish_reason is None:
            events = self.prefill.step()
        assert events[-1].error is None, events[-1].error
        num_blocks = len(request.prompt_token_ids) // self.decode.info.block_size
        return self.source(key, seconds, self.addresses(), num_blocks)

    def order(self, key: str, seconds: float = SECONDS) -> KVSource:
        """What the prefill engine is to keep for the other one."""
        return KVSource(key, seconds, heads_of(self.decode))

    def source(self, key: str, seconds: float, addresses: list[list[bytes]], num_blocks: int) -> KVSource:
        """Where the decode engine is to read."""
        return KVSource(key, seconds, heads_of(self.prefill), addresses, num_blocks)

    def _there(self, said: bytes) -> bytes:
        """What the other server's features would have made of a request."""
        for ours, theirs in self.keys_there.items():
            said = said.replace(ours.encode(), theirs.encode())
        return said

    def addresses(self) -> list[list[bytes]]:
        """Where the prefill engine's K/V are read, by rank and by rank that reads."""
        readers = msgspec.to_builtins(heads_of(self.decode))
        found = self.prefill.call_feature("remote_prefill", "about", [readers])
        assert not any("error" in about for about in found), found
        return [about["addresses"] for about in found]

    def ask(self, request: Request, seconds: float = SECONDS) -> list[TokenEvent]:
        """Compute the prompt there, and add the request here; alone here what a feature but LoRA has a part in."""
        if set(request.features) - {"lora"}:
            return self.add(request)
        source = self.compute(request, seconds)
        return self.add(with_source(request, source))

    def settle(self, what: Callable[[], bool] | None = None) -> list[TokenEvent]:
        """Step both until nothing is to be done; the decoding engine's events."""
        events: list[TokenEvent] = []
        while (self.prefill.has_work or self.decode.has_work) and not (what is not None and what()):
            self.prefill.step()
            events += self.decode.step()
        return events

    def check(self) -> None:
        """No block is held any more, and each has one owner."""
        for engine in (self.prefill, self.decode):
            stats = engine.stats()
            assert (stats.num_running, stats.num_waiting, stats.num_held_blocks) == (0, 0, 0), stats
            assert (counts(engine).num_kv_fetching, counts(engine).num_kv_offered) == (0, 0)
            engine.scheduler.check()


@contextmanager
def split(
    model: str, folder: Path, of_prefill: dict[str, Any] | None = None, **options: Any
) -> Iterator[tuple[fwk.LLM, Pair]]:
    """An ``LLM`` whose prompts another engine computes, and the two engines. of_prefill: options of the other one."""
    with (
        half(model, "prefill", folder, **options | (of_prefill or {})) as prefill,
        half(model, "decode", folder, **options) as llm,
    ):
        pair = Pair(prefill.engine, llm.engine)
        llm.engine.add = pair.ask  # type: ignore[method-assign]
        yield llm, pair
        pair.settle()
        pair.check()
