"""Options of servers that share their work: what is missing, idle or impossible is said before anything loads."""

from __future__ import annotations

import asyncio
import contextlib
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from fwk.errors import ConfigError
from fwk.features.declared import check_server
from fwk.interfaces.dialect import GenerateInput
from fwk.interfaces.feature import ServerPartContext
from fwk.interfaces.prefix_cache import PrefixCacheSpec
from fwk.plugins import discover
from fwk.plugins.options import build_config
from fwk.types import SamplingParams
from fwk_kv_transfer.remote_prefill import Heads, KVSource, RemotePrefillOptions, features
from fwk_kv_transfer.remote_prefill.messages import difference
from fwk_kv_transfer.remote_prefill.prefill_servers import RemotePrefill

PREFILL: dict[str, Any] = {"disaggregation_mode": "prefill"}
DECODE: dict[str, Any] = {"disaggregation_mode": "decode", "disaggregation_prefill_servers": ("http://10.0.0.1:8000",)}
NODES = {"nnodes": 2, "dist_init_addr": "10.0.0.1:20000", "dist_token_file": "secret", "tensor_parallel_size": 2}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no mode": (
        {"disaggregation_timeout": 5.0},
        "--disaggregation-timeout belongs to .*, which is off: turn it on with --disaggregation-mode",
    ),
    "the mode that is none": (
        {"disaggregation_mode": "null", "disaggregation_timeout": 5.0},
        "--disaggregation-timeout belongs to .*, which is off: turn it on with --disaggregation-mode",
    ),
    "no mode, a transport's": (
        {"disaggregation_bootstrap_port": 8998},
        "--disaggregation-bootstrap-port belongs to kv_transfer.*, which is not used: add --disaggregation-mode",
    ),
    "not of prefill": (PREFILL | {"num_reserved_decode_tokens": 9}, "--num-reserved-decode-tokens is for a server of"),
    "no secret": (PREFILL | {"disaggregation_token_file": None}, "prefill needs --disaggregation-token-file FILE"),
    "a short secret": (PREFILL | {"disaggregation_token_file": "short"}, "must hold 16 to 4096 bytes, not 4"),
    "no file": (PREFILL | {"disaggregation_token_file": "none"}, "--disaggregation-token-file: cannot read"),
    "retries at none": (
        {"disaggregation_mode": "decode", "disaggregation_max_retries": 3},
        "--disaggregation-max-retries is for a decode server that chooses prefill servers itself",
    ),
    "no URL": (DECODE | {"disaggregation_prefill_servers": ("10.0.0.1:8000",)}, "must be http://HOST:PORT"),
    "a path": (DECODE | {"disaggregation_prefill_servers": ("http://a/v1",)}, "must be http://HOST:PORT"),
    "a user": (DECODE | {"disaggregation_prefill_servers": ("http://me:it@a",)}, "must be http://HOST:PORT"),
    "several engines at one port": (
        PREFILL | {"data_parallel_size": 2, "disaggregation_bootstrap_port": 8998},
        "--disaggregation-bootstrap-port 8998 is not possible with --data-parallel-size",
    ),
    "engines that sleep": (DECODE | {"idle_timeout": 5.0}, "not possible with --idle-timeout"),
    "memory that is given back": (PREFILL | {"enable_memory_saver": True}, "not possible with --enable-memory-saver"),
    "several machines": (PREFILL | NODES, "--nnodes 2 is not possible with"),
    "another server's place": (PREFILL | {"take_over": True}, "not possible with --take-over"),
}
"""Options, and what is said of them."""


def check(folder: Path, given: dict[str, Any], count: int = 1) -> None:
    (folder / "good").write_text("0123456789abcdef")
    (folder / "short").write_text("1234")
    if given.get("disaggregation_mode") not in (None, "null"):
        name = given.get("disaggregation_token_file", "good")
        given = given | {"disaggregation_token_file": name and str(folder / name)}
    plugins = discover()
    check_server([build_config(plugins, {"model": "x"} | given)] * count, plugins)


@pytest.mark.gate(8)
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_told(tmp_path: Path, name: str) -> None:
    given, why = WRONG[name]
    with pytest.raises(ConfigError, match=why):
        check(tmp_path, given)


@pytest.mark.parametrize(("mode", "saves"), [("prefill", False), ("decode", True), ("decode", False)])
def test_a_cache_whose_tiers_would_keep_what_was_fetched_is_refused(mode: str, saves: bool) -> None:
    cache = PrefixCacheSpec(name="mine", load="x:Y", tiers=("host",), saves_evicted=saves)
    run: Any = SimpleNamespace(
        runner="generate", model="x", is_recurrent=False, has_encoder=False, media=(), one_server={},
        chosen={"cache": cache},
    )  # fmt: skip
    [spec] = features()
    options = SimpleNamespace(disaggregation_mode=mode)
    refused = mode == "decode" and not saves
    why = "decode is not possible with --prefix-cache mine: .* give the tiers to the prefill servers"
    with pytest.raises(ConfigError, match=why) if refused else contextlib.nullcontext():
        spec.check_run(run, options)


def test_several_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not possible with several models"):
        check(tmp_path, PREFILL, count=2)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"disaggregation_mode": "null"},
        PREFILL,
        PREFILL | {"disaggregation_bootstrap_port": 8998, "tensor_parallel_size": 2},
        PREFILL | {"data_parallel_size": 2},
        DECODE | {"num_reserved_decode_tokens": 9, "data_parallel_size": 2, "load_balance_method": "cache_aware"},
        DECODE | {"num_reserved_decode_tokens": 9, "pd_max_retry_count": 3},
        DECODE | {"disaggregation_prefill_servers": ("https://[::1]:80/", "http://host")},
        {"disaggregation_mode": "decode", "num_reserved_decode_tokens": 9},
    ],
    ids=[
        "neither",
        "null",
        "prefill",
        "two ranks",
        "two engines",
        "two that decode",
        "decode",
        "addresses",
        "of a router",
    ],
)
def test_what_is_right_is_taken(tmp_path: Path, given: dict[str, Any]) -> None:
    check(tmp_path, given)


def test_the_first_difference_is_told_with_both_values() -> None:
    ours = [{"a": "1", "b": "2"}]
    assert difference(ours, [{"a": "1", "b": "2"}]) is None
    assert difference(ours, [{"a": "1", "b": "3"}]) == "b differs: 2 here, 3 there"
    assert difference(ours, [{"a": "1"}]) == "b differs: 2 here, none there"
    assert difference(ours, [{"a": "1", "b": "2", "c": "4"}]) == "c differs: none here, 4 there"
    assert difference(ours, ours * 2) is None, "heads are cut anew"
    assert difference(ours, [*ours, {"a": "1", "b": "3"}]) == "b differs: 2 here, 3 there"
    heads = Heads(1, (4,)), Heads(2, (3,))
    assert (
        difference(ours, ours * 2, heads)
        == "K/V heads differ: 3 on each of 2 ranks where prompts are computed, 4 on each of 1 where they are read"
    )


def test_without_the_feature_installed_its_options_and_transports_are_refused() -> None:
    points: list[Any] = [point for point in entry_points(group="fwk") if point.name != "features.remote_prefill"]
    plugins = discover(points=points)
    build_config(plugins, {"model": "x"})
    with pytest.raises(ConfigError, match="unknown option --disaggregation-mode"):
        build_config(plugins, {"model": "x", "disaggregation_mode": "prefill"})
    with pytest.raises(ConfigError, match=r"belongs to kv_transfer.*, and no installed plugin uses a KV transfer"):
        build_config(plugins, {"model": "x", "disaggregation_bootstrap_port": 8998})


def test_what_another_feature_changes_is_computed_here(tmp_path: Path) -> None:
    """The prompt of such a request goes to no other server; nor does a short one."""
    (tmp_path / "good").write_text("0123456789abcdef")
    given = DECODE | {"disaggregation_token_file": str(tmp_path / "good")}
    tools = SimpleNamespace()
    context = ServerPartContext("remote_prefill", "x", tools, no_engine, RemotePrefillOptions(**given), frontend=tools)  # type: ignore[arg-type]
    part = RemotePrefill(context)
    part.source = asked = AsyncMock(return_value=SOURCE)  # type: ignore[method-assign]

    def entered(others: tuple[str, ...] = (), **fields: Any) -> KVSource | None:
        request = part.open(item := GenerateInput([1] * 70, SamplingParams(max_tokens=1), **fields), "")
        assert request is not None
        request.others = others
        return asyncio.run(request.enter(item))  # type: ignore[return-value]

    assert entered(("other",)) is None
    assert asked.await_count == 0
    assert entered(cache_salt="salt") == SOURCE
    assert asked.await_args is not None
    assert asked.await_args.args[1] == "salt"
    without = RemotePrefill(ServerPartContext("remote_prefill", "x", tools, no_engine, RemotePrefillOptions(**given)))  # type: ignore[arg-type]
    assert without.open(GenerateInput([1] * 70, SamplingParams()), "") is None, "fwk.LLM has no server"


SOURCE = KVSource("key", 5.0, Heads(1, (2,)), [[b""]], 3)


async def no_engine(*args: Any) -> Any:
    raise AssertionError(f"no engine is asked: {args}")
