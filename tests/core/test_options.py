"""Options: one source for flags, YAML, help and documentation."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Literal, get_args

import pytest
from pydantic import BaseModel, ConfigDict
from tests.helpers.fake_plugins import declare

from fwk import LoadBalancerSpec, Options, PrefixCacheSpec, hookimpl, option
from fwk.cli.common import read_options
from fwk.cli.main import main
from fwk.cli.option_parsing import Parser, help_text
from fwk.config import Config, stability_of
from fwk.config.options import Stability
from fwk.config.wire import from_plain, to_plain
from fwk.errors import ConfigError, EngineDead, ModelLoadError, PluginError
from fwk.plugins import build_config, discover, option_owners
from fwk.plugins.options import flag
from fwk.plugins.selection import plugin_options
from fwk_kit.cli.arguments import page
from fwk_kit.testing.base import installed

ROOT = Path(__file__).parents[2]
LMCACHE = '[[plugin]]\npackage = "fwk-lmcache"\nflags = ["--lmcache-*"]\n'


def read(*argv: str) -> Config:
    parser = Parser("fwk serve", allow_abbrev=False)
    parser.add_argument("bare_model", nargs="?", default=None)
    return read_options(parser, argv)[1]


def test_flags_of_all_three_systems_mean_the_same() -> None:
    for words in (
        ["--max-total-tokens", "640"],
        ["--max_total_token_num=640"],
        ["--max-total-token-num", "640"],
    ):
        assert read(*words).engine.max_total_tokens == 640
    assert read("--disable-radix-cache").engine.prefix_cache == "none"
    assert read("--disable_dynamic_prompt_cache").engine.prefix_cache == "none"
    assert read("--reuse-cache").engine.prefix_cache == "radix"
    assert read("--model_dir", "x").model.model == read("x").model.model == read("--model-path=x").model.model == "x"


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_text("page-size: 32\nmax_running_requests: 7\nlpm-window: 9\nschedule-policy: lpm\n")
    config = read("--config", str(file), "--page-size", "8")
    assert (config.engine.page_size, config.engine.max_running_requests) == (8, 7)
    assert config.plugin_options["schedulers.lpm"] == {"lpm_window": 9}


@pytest.mark.gate(4)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--page-siz", "8"], r"unknown option --page-siz \(did you mean --page-size\?\)"),
        (["--page-size", "zero"], "--page-size: Input should be a valid integer"),
        (["--page-size", "0"], "--page-size: Input should be greater than or equal to 1"),
        (["--dtype", "int3"], "--dtype: Input should be 'auto'"),
        (["--lpm-window", "5"], "--lpm-window belongs to schedulers.lpm, which is not selected"),
        (["--schedule-policy", "lpm", "--lpm-window", "-5"], "--lpm-window: Input should be greater"),
        (["x", "--model", "y"], "two models are given: x and --model y"),
        (["--config", "/no/such/file"], "--config: cannot read"),
    ],
)
def test_wrong_options_are_one_line_errors(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(*words)


@pytest.mark.parametrize("text", ["- a list", "a: [", "unknown-thing: 3"])
def test_wrong_files_are_one_line_errors(tmp_path: Path, text: str) -> None:
    file = tmp_path / "f.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        read("--config", str(file))
    assert "\n" not in str(error.value)


class SameOption(Options):
    page_size: int = option(3, "not ours")


class SameAlias(Options):
    clash: int = option(3, "x", aliases=["tp"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            SameOption,
            r"option --page-size is declared by fwk itself and by 'cache\.clash' from acme 1, which cannot be used",
        ),
        (SameAlias, r"option --tp is declared by fwk itself and by 'cache\.clash' from acme 1"),
    ],
)
def test_a_name_has_one_owner(options: type[Options], message: str) -> None:
    class Plugin:
        @hookimpl
        def prefix_caches(self) -> list[PrefixCacheSpec]:
            return [PrefixCacheSpec(name="clash", load="a:b", options=options)]

    plugins = discover()
    plugins.register(Plugin(), "cache.clash", "acme", "1")
    build_config(plugins, {})
    with pytest.raises(PluginError, match=message):
        build_config(plugins, {"prefix_cache": "clash"})


def test_plugin_options_appear_under_the_plugins_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help-all"])
    text = capsys.readouterr().out
    assert "schedulers.lpm (schedule policy, from fwk):" in text
    assert text.index("schedulers.lpm (") < text.index("--lpm-window", text.index("schedulers.lpm ("))


class Shape(BaseModel):
    model_config = ConfigDict(extra="forbid")

    tile: int = 3
    kind: Literal["a", 4] = "a"


class TypedOptions(Options):
    acme_bits: Literal[2, 4, 8] = option(4, "A number of a few.")
    acme_maybe: Literal[4, 8] | None = option(None, "The same, or nothing.")
    acme_sizes: tuple[Literal["auto", 4], ...] = option((), "Several of a few.")
    acme_shape: Shape = option(Shape(), "Nested.")
    acme_shapes: tuple[Shape, ...] = option((), "Several nested ones.")
    acme_weights: dict[str, int] = option({}, "By name.")
    acme_text: str = option("", "JSON that the plugin reads itself.")


@pytest.mark.parametrize(
    ("name", "given", "wanted"),
    [
        ("acme_bits", "8", 8),
        ("acme_bits", "3", "--acme-bits: Input should be 2, 4 or 8, not '3'"),
        ("acme_maybe", "8", 8),
        ("acme_sizes", ["AUTO", "4"], ("auto", 4)),
        ("acme_shape", '{"tile": 4, "kind": 4}', Shape(tile=4, kind=4)),
        ("acme_shape", {"tile": 4}, Shape(tile=4)),
        ("acme_shape", '{"tiel": 4}', "--acme-shape.tiel: there is no such field (did you mean 'tile'?)"),
        ("acme_shape", {"tile": "x"}, "--acme-shape.tile: Input should be a valid integer"),
        ("acme_shape", '{"tile"', "--acme-shape is not JSON: Expecting ':'"),
        ("acme_shape", '{"a":' * 20_000, "--acme-shape is not JSON: "),
        ("acme_shapes", ['{"tile": 1}'], (Shape(tile=1),)),
        ("acme_shapes", [{}, {"kid": "a"}], "--acme-shapes.1.kid: there is no such field (did you mean 'kind'?)"),
        ("acme_weights", '{"a": 1}', {"a": 1}),
        ("acme_weights", {"a": "x"}, "--acme-weights.a: Input should be a valid integer"),
        ("acme_text", {"a": 1}, '{"a": 1}'),
    ],
)
def test_numbers_of_a_few_and_nested_options_come_by_flag_and_by_yaml(name: str, given: object, wanted: object) -> None:
    module = ModuleType("acme")
    declare(module, "load_balancers", [LoadBalancerSpec(name="acme", load="a:b", options=TypedOptions)])
    plugins = discover()
    plugins.register(module, "load_balancers.acme", "acme", "1")
    options = {"load_balance_method": "acme", "data_parallel_size": 2, name: given}
    if isinstance(wanted, str) and wanted.startswith("--"):
        with pytest.raises(ConfigError, match=re.escape(wanted)):
            build_config(plugins, options)
        return
    config = from_plain(to_plain(build_config(plugins, options)))
    assert getattr(plugin_options(plugins.by_family["load_balancers"]["acme"], config.plugin_options), name) == wanted


def test_config_is_frozen() -> None:
    config = build_config(installed(), {})
    with pytest.raises(ValueError, match="frozen"):
        config.engine.page_size = 3  # type: ignore[misc]


def test_config_survives_the_wire_without_secrets() -> None:
    given = {"page_size": 4, "api_key": "secret", "schedule_policy": "lpm", "lpm_window": 3}
    config = build_config(installed(), given)
    plain = to_plain(config)
    assert "secret" not in repr(plain)
    back = from_plain(plain)
    assert (back.engine, back.model, back.plugin_options) == (config.engine, config.model, config.plugin_options)
    assert back.seed == config.seed


def test_the_page_of_arguments_is_up_to_date() -> None:
    assert (ROOT / "docs/arguments.md").read_text() == page(installed()), "run make docs"


def test_exit_codes_tell_what_went_wrong() -> None:
    """Scripts and service managers know them."""
    assert [kind.exit_code for kind in (ConfigError, ModelLoadError, PluginError, EngineDead)] == [2, 4, 5, 6]


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["srve"]) == 2
    assert "unknown command 'srve'" in capsys.readouterr().err


def test_a_flag_given_twice_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert read("--page-size", "8", "--page_size", "8").engine.page_size == 8
    with pytest.raises(SystemExit):
        read("--kv-cache-dtype", "int8", "--kv-cache-dtype=fp8_e4m3")
    assert capsys.readouterr().err == "fwk serve: error: --kv-cache-dtype is given twice: int8 and fp8_e4m3\n"


def test_every_option_has_a_stability_that_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help-all"])
    text = "".join(capsys.readouterr().out.split())
    rows = {cells[1].strip(" `"): cells[4].strip() for cells in map(cells_of, page(installed()).splitlines()) if cells}
    levels: set[str] = set()
    for owner in option_owners(installed()):
        for name, field in owner.model.model_fields.items():
            assert isinstance(field.json_schema_extra, dict), f"{flag(name)} of {owner.key} is not made by fwk.option"
            level = field.json_schema_extra["stability"]
            assert level in get_args(Stability)
            assert rows[flag(name)] == level
            assert help_text(field).endswith(f"[{level}]")
            assert "".join(help_text(field).replace("%%", "%").split()) in text
            levels.add(str(level))
    assert levels == set(get_args(Stability)), "a tag that nothing has means nothing"


def cells_of(line: str) -> list[str]:
    """Of a table's row in the page of arguments."""
    return re.split(r"(?<!\\)\|", line) if line.startswith("| `--") else []


def test_an_option_that_is_none_of_ours_promises_nothing() -> None:
    class Bare(Options):
        bare: int = 3

    assert stability_of(Bare.model_fields["bare"]) == "experimental"


@pytest.mark.gate(2)
@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        (
            LMCACHE,
            ["--lmcache-url", "x"],
            r"--lmcache-url belongs to fwk-lmcache, which is not installed: pip install fw",
        ),
        (LMCACHE, ["--lmcache_url=x"], "--lmcache-url belongs to fwk-lmcache"),
        (LMCACHE, ["--other"], "unknown option --other"),
        (
            "[[plugin]]\nflags = []",
            ["--other"],
            r"must be TOML with tables \[\[plugin\]\] of package and flags",
        ),
        ("plugin", ["--other"], "--plugin-catalogue: .* must be TOML"),
    ],
)
def test_a_flag_of_a_known_plugin_says_how_to_install_it(
    tmp_path: Path, text: str, words: list[str], message: str
) -> None:
    (tmp_path / "known.toml").write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        read("--plugin-catalogue", str(tmp_path / "known.toml"), *words)
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="--plugin-catalogue: cannot read /no/such"):
        read("--plugin-catalogue", "/no/such", "--other")
