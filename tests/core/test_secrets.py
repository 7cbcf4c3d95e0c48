"""Secrets stay out of what is shown: errors about options, the log, representations."""

from __future__ import annotations

import logging
import sys

import pytest

from fwk.cli.option_parsing import Parser, add_option_flags
from fwk.config import Config, Options, ServerOptions, option
from fwk.config.secrets import without_secrets
from fwk.config.wire import to_plain
from fwk.errors import ConfigError
from fwk.plugins import build_config, discover
from fwk_process.hiding import HIDDEN, HidingFormatter, hide

KEY = "sk-the-secret-of-the-tests"


class Store(Options):
    """Options of a plugin that talks to a store."""

    store_password: str | None = option(None, "Password.", is_secret=True)
    store_url: str = option("", "Address.")
    store_urls: tuple[str, ...] = option((), "Addresses.")


def test_shown_options_hide_them() -> None:
    values = {
        "store_password": KEY,
        "store_url": f"redis://user:{KEY}@host:6379/0",
        "store_urls": (f"https://:{KEY}@a/x", "https://b/@x"),
    }
    assert without_secrets(Store, values) == {
        "store_password": HIDDEN,
        "store_url": f"redis://{HIDDEN}@host:6379/0",
        "store_urls": [f"https://{HIDDEN}@a/x", "https://b/@x"],
    }
    assert without_secrets(Store, {"store_password": None}) == {"store_password": None}
    assert KEY not in repr(Store(store_password=KEY))


def test_a_configuration_hides_the_key() -> None:
    config = Config(server=ServerOptions(api_key=KEY, admin_api_key=f"{KEY}-of-the-administrator"))
    assert KEY not in repr(config)
    assert KEY not in repr(to_plain(config))
    assert KEY not in repr(without_secrets(ServerOptions, config.server.model_dump()))


@pytest.mark.parametrize("wrong", ["", f"{KEY} ", f"{KEY}\n", f"\u00e9{KEY}", KEY * 100])
def test_a_wrong_key_is_refused_and_not_repeated(wrong: str) -> None:
    """An empty key would leave the door open; what no header carries would close it for ever."""
    with pytest.raises(ConfigError, match="--api-key") as error:
        build_config(discover(), {"api-key": wrong})
    assert KEY not in str(error.value)


def test_one_key_for_all_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--admin-api-key: .*must be another key than --api-key") as error:
        build_config(discover(), {"api-key": KEY, "admin-api-key": KEY})
    assert KEY not in str(error.value)


def test_two_keys_are_not_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser("fwk serve")
    add_option_flags(parser, discover())
    with pytest.raises(SystemExit):
        parser.parse_args(["--api-key", KEY, "--api-key", f"{KEY}2"])
    told = capsys.readouterr().err
    assert "--api-key is given twice" in told
    assert KEY not in told


def test_the_log_hides_them_in_arguments_and_tracebacks() -> None:
    formatter = HidingFormatter("%(message)s", [KEY, None, ""])
    try:
        raise ValueError(f"no such header: Bearer {KEY}")
    except ValueError:
        record = logging.LogRecord("fwk", logging.ERROR, "f", 1, "failed with %s", (KEY,), sys.exc_info())
    text = formatter.format(record)
    assert KEY not in text
    assert text.startswith(f"failed with {HIDDEN}")
    assert f"no such header: Bearer {HIDDEN}" in text


def test_a_short_secret_is_hidden_where_it_stands_alone() -> None:
    """Cut out of every word, it would be told by the gaps, and the rest could not be read."""
    assert hide("Bearer a, at /a: an answer", ["a"]) == f"Bearer {HIDDEN}, at /{HIDDEN}: an answer"
    assert hide("keys=k3y! k3yed", ["k3y!"]) == f"keys={HIDDEN} k3yed"
