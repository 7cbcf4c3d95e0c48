"""The short help, and options from the environment."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fwk.cli.common import read_options
from fwk.cli.main import main
from fwk.cli.option_parsing import Parser
from fwk.config import Config
from fwk.errors import ConfigError

ROOT = Path(__file__).parents[2]


def read(*argv: str) -> Config:
    parser = Parser("fwk serve", allow_abbrev=False)
    parser.add_argument("bare_model", nargs="?", default=None, metavar="MODEL", help="folder or name")
    return read_options(parser, argv)[1]


def test_help_is_short_and_says_where_the_rest_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        read("--help")
    assert ended.value.code == 0
    short = capsys.readouterr().out
    assert len(short.splitlines()) <= 36
    assert max(map(len, short.splitlines())) < 80, "wrapped at words"
    for word in ("MODEL", "--quantization", "--port INT", "--help-all", "FWK_PORT"):
        assert word in short
    with pytest.raises(SystemExit) as ended:
        read("--help-all")
    assert ended.value.code == 0
    whole = capsys.readouterr().out
    assert "--max-body-bytes" in whole
    assert "--lpm-window" in whole


def test_ctrl_c_while_a_command_is_imported_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupting:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "fwk.cli.commands":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "fwk.cli.commands", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    assert main(["version"]) == 130


@pytest.mark.parametrize("words", ["--help", "bench --help", "plugins --help"])
def test_lists_of_commands_wrap_at_words(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert main(words.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) < 60
    assert lines[0].startswith("usage: fwk")


def test_variables_are_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {
        "FWK_PORT": "81",
        "FWK_TP_SIZE": "2",
        "FWK_SERVED_MODEL_NAME": "a b",
        "FWK_CHECK_BLOCKS": "true",
        "FWK_CPU_ISA": "avx2",  # for kernels, no option
    }.items():
        monkeypatch.setenv(name, value)
    config = read()
    assert (config.server.port, config.engine.tensor_parallel_size, config.engine.check_blocks) == (81, 2, True)
    assert config.model.served_model_name == ("a", "b")
    assert read("--port", "82").server.port == 82, "the command line wins"
    assert read("--tensor-parallel-size", "1").engine.tensor_parallel_size == 1, "under another name too"
    file = tmp_path / "options.yaml"
    file.write_text("port: 83")
    assert read("--config", str(file)).server.port == 83, "so does a file"
    monkeypatch.setenv("FWK_CONFIG", str(file))
    assert read().server.port == 83


@pytest.mark.parametrize(("name", "value"), [("FWK_PORT", "x"), ("FWK_DTYPE", "int3")])
def test_a_wrong_variable_is_an_error(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=name.removeprefix("FWK_").lower()):
        read()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("serv", "did you mean 'serve'?"),
        ("xyzzy", "commands: serve, "),
        ("plugins lst", "did you mean 'list'?"),
        ("plugins quantt", "unknown command of fwk plugins 'quantt': did you mean 'why quant'?"),
        ("plugins why quantt", "unknown family 'quantt' (did you mean 'quant'?); families: "),
        ("plugins new quantt x", "unknown family 'quantt' (did you mean 'quant'?); families: "),
    ],
)
def test_an_unknown_command(capsys: Any, words: str, said: str) -> None:
    assert main(words.split()) != 0
    assert said in capsys.readouterr().err


EXTRAS = ("aiohttp", "opentelemetry", "outlines_core", "rich_argparse", "transformers", "triton", "xgrammar")
EVERY_HELP = """
import contextlib, importlib.abc, io, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in sys.argv[1:]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from fwk.cli.commands import commands
from fwk.cli.main import main

lines = [["--help"], ["plugins", "--help"], ["serve", "--help-all"]]
lines += [[name, "--help"] for name in commands() if name not in ("plugins", "version")]
lines += [["plugins", name, "--help"] for name in commands("plugins.")]
for line in lines:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        main(line)
    assert said.getvalue().startswith("usage: fwk"), (line, said.getvalue()[:200])
print(len(lines))
"""


@pytest.mark.sweep
def test_no_help_needs_an_extra() -> None:
    command = [sys.executable, "-c", EVERY_HELP, *EXTRAS]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 18


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown_help(monkeypatch: pytest.MonkeyPatch, *argv: str) -> str:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    with pytest.raises(SystemExit):
        read(*argv)
    return terminal.getvalue()


def test_help_is_coloured_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich_argparse")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    coloured = shown_help(monkeypatch, "--help")
    assert "\x1b[36m--config" in coloured
    assert len(coloured.splitlines()) <= 36
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in shown_help(monkeypatch, "--help")
    assert "\x1b" not in shown_help(monkeypatch, "--help-all")


def test_help_is_plain_elsewhere(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("PYTHON_COLORS", "0")  # argparse's own, from Python 3.14 on
    with pytest.raises(SystemExit):
        read("--help")
    assert "\x1b" not in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "rich_argparse", None)
    assert "--config FILE" in shown_help(monkeypatch, "--help"), "without the package"


@pytest.mark.parametrize(
    ("level", "spelling"),
    [
        ("debug", "file"),
        ("INFO", "flag"),
        ("warn", "variable"),
        ("warning", "file"),
        ("error", "flag"),
        ("fatal", "file"),
    ],
)
def test_what_the_server_says_of_itself_is_of_level_info(
    level: str, spelling: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """However the level is given; what ends the server is an error, and seen at each."""
    from fwk.cli import serve
    from fwk.server import serve as serving

    def say(_configs: object, _plugins: object, progress: Callable[[str], None], _engines: object) -> int:
        progress("ready")
        logging.getLogger("fwk").critical("ended")
        return 0

    file = tmp_path / "options.yaml"
    file.write_text(f"log-level: {level}\n" if spelling == "file" else "{}")
    words = ["--log-level", level] if spelling == "flag" else ["--config", str(file)]
    if spelling == "variable":
        monkeypatch.setenv("FWK_LOG_LEVEL", level)
    monkeypatch.setattr(serving, "serve", say)
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.WARNING)
    assert serve._serve(["M", *words], lambda count: []) == 0
    said = capsys.readouterr().err
    assert ("ready" in said) == (level.lower() in ("debug", "info"))
    assert "ended" in said


@pytest.mark.parametrize("word", ["none", "null"])
def test_a_switch_that_is_neither_on_nor_off_is_an_error(word: str) -> None:
    """The word is no model, and the model after it no argument too many."""
    with pytest.raises(ConfigError, match=f"--check-blocks: .* not '{word}'"):
        read("--check-blocks", word, "MODEL")
