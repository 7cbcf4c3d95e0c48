"""Options of servers that share their work: what is missing, idle or impossible is said before anything loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fwk.errors import ConfigError
from fwk.plugins import discover
from fwk.plugins.options import build_config
from fwk.server.peer_messages import difference
from fwk.setup.disaggregation import check_disaggregated_server

PREFILL: dict[str, Any] = {"disaggregation_mode": "prefill"}
DECODE: dict[str, Any] = {"disaggregation_mode": "decode", "disaggregation_prefill_servers": ("http://10.0.0.1:8000",)}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no mode": ({"disaggregation_timeout": 5.0}, "--disaggregation-timeout is for prefill and decode in different"),
    "no mode, a plugin's": ({"disaggregation_bootstrap_port": 8998}, "--disaggregation-bootstrap-port is for prefill"),
    "not of prefill": (PREFILL | {"num_reserved_decode_tokens": 9}, "--num-reserved-decode-tokens is for a server of"),
    "no secret": (PREFILL | {"disaggregation_token_file": None}, "prefill needs --disaggregation-token-file FILE"),
    "a short secret": (PREFILL | {"disaggregation_token_file": "short"}, "must hold 16 to 4096 bytes, not 4"),
    "no file": (PREFILL | {"disaggregation_token_file": "none"}, "--disaggregation-token-file: cannot read"),
    "no servers": (DECODE | {"disaggregation_prefill_servers": ()}, "decode needs --disaggregation-prefill-servers"),
    "no URL": (DECODE | {"disaggregation_prefill_servers": ("10.0.0.1:8000",)}, "must be http://HOST:PORT"),
    "a path": (DECODE | {"disaggregation_prefill_servers": ("http://a/v1",)}, "must be http://HOST:PORT"),
    "a user": (DECODE | {"disaggregation_prefill_servers": ("http://me:it@a",)}, "must be http://HOST:PORT"),
    "several engines": (
        PREFILL | {"data_parallel_size": 2},
        "not possible with --data-parallel-size 2: start a server",
    ),
    "engines that sleep": (DECODE | {"idle_timeout": 5.0}, "not possible with --idle-timeout"),
    "another server's place": (PREFILL | {"take_over": True}, "not possible with --take-over"),
}
"""Options, and what is said of them."""


def check(folder: Path, given: dict[str, Any], count: int = 1) -> None:
    (folder / "good").write_text("0123456789abcdef")
    (folder / "short").write_text("1234")
    if given.get("disaggregation_mode") is not None:
        name = given.get("disaggregation_token_file", "good")
        given = given | {"disaggregation_token_file": name and str(folder / name)}
    check_disaggregated_server([build_config(discover(), {"model": "x"} | given)] * count)


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_told(tmp_path: Path, name: str) -> None:
    given, why = WRONG[name]
    with pytest.raises(ConfigError, match=why):
        check(tmp_path, given)


def test_several_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not possible with several models"):
        check(tmp_path, PREFILL, count=2)


@pytest.mark.parametrize(
    "given",
    [
        {},
        PREFILL,
        PREFILL | {"disaggregation_bootstrap_port": 8998, "tensor_parallel_size": 2},
        DECODE | {"num_reserved_decode_tokens": 9, "pd_max_retry_count": 3},
        DECODE | {"disaggregation_prefill_servers": ("https://[::1]:80/", "http://host")},
    ],
    ids=["neither", "prefill", "two ranks", "decode", "addresses"],
)
def test_what_is_right_is_taken(tmp_path: Path, given: dict[str, Any]) -> None:
    check(tmp_path, given)


def test_the_first_difference_is_told_with_both_values() -> None:
    ours = [{"a": "1", "b": "2"}]
    assert difference(ours, [{"a": "1", "b": "2"}]) is None
    assert difference(ours, [{"a": "1", "b": "3"}]) == "b differs: 2 here, 3 there"
    assert difference(ours, [{"a": "1"}]) == "b differs: 2 here, none there"
    assert difference(ours, [{"a": "1", "b": "2", "c": "4"}]) == "c differs: none here, 4 there"
    assert difference(ours, ours * 2) == "--tensor-parallel-size differs: 1 here, 2 there"
