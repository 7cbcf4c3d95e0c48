"""Paths that people give: what is no regular file, or no folder to write to, is refused at once, everywhere."""

from __future__ import annotations

import argparse
import ast
import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.sources import FILES, ROOT, dotted

from fwk.cli.commands import commands
from fwk.cli.main import main
from fwk.cli.option_parsing import read_config_file
from fwk.config import ServerOptions
from fwk.config.secrets import read_secret
from fwk.errors import FwkError
from fwk.text.model_text import _read as read_template
from fwk_attention.double_sparsity.channels import Channels
from fwk_cache.file.folder import Folder
from fwk_features.weights_cache.worker import trusted
from fwk_files.regular import open_regular, read_regular
from fwk_http.keys import read_keys
from fwk_http.listening import tls_context
from fwk_kit.cli.bench import COMMANDS as BENCHES
from fwk_kit.cli.output import output_file
from fwk_loaders._common import read_json
from fwk_loaders.gguf.loader import GGUFLoader
from fwk_loaders.gguf.reader import GGUFFile
from fwk_loaders.safetensors.mapped import MappedFile
from fwk_loaders.safetensors.stored import MAX_TENSORS, stored_tensors
from fwk_loaders.safetensors.weights import SafetensorsWeights
from fwk_lora._common import peft
from fwk_moe.expert_placement.location import read_location
from fwk_peers.catalogue import read_catalogue
from fwk_process.folders import output_folder
from fwk_sampling.prefix_tree.processor import _read as read_tree
from fwk_speculative._common.corpus import read_corpus
from fwk_tokenizer.infill import infill_template

READERS: dict[str, Callable[[Path], object]] = {
    "--config": lambda path: read_config_file(str(path)),
    "--api-key-file": lambda path: read_keys(ServerOptions(api_key_file=str(path))),
    "--plugin-catalogue": lambda path: read_catalogue(str(path)),
    "a secret": lambda path: read_secret(str(path), "--secret"),
    "--chat-template": lambda path: read_template(str(path)),
    "--completion-template": lambda path: infill_template(str(path), None, None),  # type: ignore[arg-type]
    "--ssl-certfile": lambda path: tls_context(ServerOptions(ssl_certfile=str(path))),
    "--ds-channel-config-path": lambda path: Channels(str(path), "k"),
    "--init-expert-location": lambda path: read_location(str(path)),
    "--tree-decode-config": lambda path: read_tree(str(path)),
    "a corpus": lambda path: read_corpus(str(path), lambda text: [1], 10),
    "config.json": read_json,
    "a GGUF file": GGUFFile,
    "weights, mapped": MappedFile,
    "weights, their header": lambda path: stored_tensors({path: None}),
    "weights": lambda path: SafetensorsWeights(path.parent, {path: None}, {}),
    "an adapter": lambda path: peft._bytes(path, 2**20),
}


@pytest.fixture
def odd(tmp_path: Path) -> Iterator[list[Path]]:
    """A FIFO that has no writer, a socket, an endless device, a folder, a link to itself, and nothing."""
    fifo, listening, loop = tmp_path / "fifo", tmp_path / "socket", tmp_path / "loop"
    os.mkfifo(fifo)
    loop.symlink_to(loop)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(listening))
        yield [fifo, listening, Path("/dev/zero"), tmp_path, loop, tmp_path / "missing"]


@pytest.mark.timeout(20)
def test_nothing_waits_for_what_is_no_file(odd: list[Path]) -> None:
    wrong: list[str] = []
    for name, read in READERS.items():
        for path in odd:
            try:
                read(path)
            except FwkError as error:
                if "\n" in str(error) or path.name not in str(error):
                    wrong.append(f"{name}, {path.name}: {error}")
            except Exception as error:
                wrong.append(f"{name}, {path.name}: {error!r}")
            else:
                wrong.append(f"{name}, {path.name}: accepted")
    assert not wrong, "\n".join(wrong)
    assert GGUFLoader.reads(odd[0]) is not None


WRITERS: dict[str, Callable[[Path], object]] = {
    "--some-dir": lambda path: output_folder(path, "--some-dir"),
    "--weights-cache": trusted,
    "--hicache-storage-dir": lambda path: Folder(path, 2**20),
}


@pytest.mark.timeout(20)
def test_what_is_no_folder_is_not_written_to(odd: list[Path]) -> None:
    fifo, listening, device, folder, loop, missing = odd
    for option, make in WRITERS.items():
        for path in (fifo, listening, device, loop, fifo / "in", loop / "in", Path("/proc/self/in")):
            with pytest.raises(FwkError, match=option) as raised:
                make(path)
            assert str(path) in str(raised.value)
            assert "\n" not in str(raised.value)
        make(folder / option / "deep")
        assert (folder / option / "deep").stat().st_mode & 0o777 == 0o700
    assert output_folder(missing, "--some-dir") == missing
    for odd_name in ("~nobody-of-that-name/x", "a\0b", "x" * 300):
        with pytest.raises(FwkError, match=r"--some-dir .*; name a folder of your own"):
            output_folder(odd_name, "--some-dir")


COMMANDS = (
    ("run-batch", "--url", "x", "-i", __file__, "-o"),
    ("heavy-channels", "--out"),
    ("train-draft", "--out"),
    ("bench", "serve", "--json"),
    ("bench", "serve", "--vllm-json"),
    ("bench", "serve", "--picture"),
    ("bench", "compare", "--json"),
    ("bench", "compare", "--picture"),
    ("bench", "startup", "--json"),
    ("plugins", "freeze", "--output"),
    ("plugins", "bench", "a", "--against", "b", "--output"),
)


@pytest.mark.timeout(20)
def test_commands_refuse_their_outputs_before_they_work(odd: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    fifo, listening, device, folder, loop, _ = odd
    for words in COMMANDS:
        own = [] if words[0] == "train-draft" else [folder, folder / "none" / "x"]
        for path in (fifo, listening, device, loop, *own):
            try:
                code = main([*words, str(path)])
            except SystemExit as ended:
                code = ended.code
            said = capsys.readouterr().err
            assert code == 2, (words, path, said)
            assert words[-1] in said, (words, path, said)
            assert str(path) in said, (words, path, said)
    new, kept = folder / "new", folder / "kept"
    kept.write_text("kept")
    assert output_file(str(new)) == new
    assert output_file(str(kept)) == kept
    assert output_file(os.devnull) == Path(os.devnull)
    assert kept.read_text() == "kept"
    assert not new.exists(), "it is only looked at"


INPUTS = (
    ("run-batch", "--url", "x", "-o", os.devnull, "-i"),
    ("heavy-channels", "--out", os.devnull, "--data"),
    ("train-draft", "--out", "{folder}", "--data"),
    ("bench", "serve", "--tokenizer"),
    ("bench", "compare", "--tokenizer"),
    ("bench", "compare", "--dataset"),
    ("bench", "serve", "--dataset"),
    ("plugins", "new", "samplers", "mine_of_a_test", "--directory"),
    ("plugins", "list", "--plugins-lock"),
    ("generate", "m", "a prompt", "--config"),
)


@pytest.mark.timeout(60)
def test_commands_wait_for_no_input_that_is_no_file(odd: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    fifo, listening, device, folder, loop, missing = odd
    for words in INPUTS:
        own = [] if words[-1] == "--directory" else [folder, missing]
        for path in (fifo, listening, device, loop, *own):
            given = [word.format(folder=folder / "out") for word in words]
            try:
                code = main([*given, str(path)])
            except SystemExit as ended:
                code = ended.code
            said = capsys.readouterr().err
            assert code not in (0, 1), (words, path, said)
            assert words[-1].lstrip("-") in said, (words, path, said)
            assert path.name in said, (words, path, said)
            assert "Traceback" not in said


PATHS = re.compile(
    r"^--(.*-)?(out|output|json|picture|data|dataset|tokenizer|file|dir|directory|folder|path|config|i|o)$"
)


class Asked(Exception):
    """A command has its arguments."""


def test_every_path_that_a_command_takes_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """All arguments of all commands but those of ``fwk serve``, from the commands themselves."""
    tried = {(tuple(word for word in words[:2] if word[0] != "-"), words[-1]) for words in (*COMMANDS, *INPUTS)}
    found: set[tuple[tuple[str, ...], str]] = set()

    def parsed(parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        own = getattr(parser, "own", None)
        for action in parser._actions:
            names = action.option_strings
            if any(map(PATHS.match, names)) and action.nargs != 0 and (not own or action.dest in own):
                found.add((command, next((name for name in names if (command, name) in tried), names[0])))
        raise Asked

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parsed)
    below = {("plugins", name) for name in commands("plugins.")} | {("bench", name) for name in BENCHES}
    for command in [*((name,) for name in commands() if name not in ("plugins", "bench")), *below]:
        with suppress(Asked):
            main(list(command))
    assert {row for row in found if row[1] != "--config"} <= tried, found - tried
    assert len(found) > 10


MAKERS = {
    "files/fwk_files/model_hash.py": "its cache folder",
    "native/fwk_native/": "its cache folder",
    "process/fwk_process/folders.py": "what all others write to",
    "plugins/cache/fwk_cache/file/": "a folder of its own rules, tried above",
    "plugins/loaders/fwk_loaders/wheel/source.py": "below --download-dir; an OSError is told",
}
"""Files of core and plugins that make folders without ``output_folder``: which, and why they may."""


def test_every_place_that_makes_a_folder_is_known() -> None:
    found = {path.relative_to(ROOT).as_posix() for path in FILES if re.search(r"mkdir\(|makedirs\(", path.read_text())}
    unknown = {name for name in found if not name.startswith(tuple(MAKERS))}
    assert not unknown, f"make these through fwk_process.folders.output_folder: {unknown}"
    unused = {name for name in MAKERS if not any(path.startswith(name) for path in found)}
    assert not unused, unused


def test_regular_files_are_read_through_links_and_bounded(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_bytes(b"12345678")
    link.symlink_to(file)
    assert read_regular(link, 8) == b"12345678"
    with pytest.raises(OSError, match="it is larger than"):
        read_regular(file, 7)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="it is a FIFO, not a regular file"):
        open_regular(tmp_path / "fifo")


@pytest.mark.timeout(20)
def test_a_header_of_more_tensors_than_there_are_is_not_read(tmp_path: Path) -> None:
    text = b'{"a":' + b"{" * (MAX_TENSORS + 1)
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(FwkError, match=f"more than {MAX_TENSORS} tensors"):
        stored_tensors({tmp_path / "model.safetensors": None})


OWN = {
    "files/fwk_files/regular.py": "what all others read through",
    "plugins/multimodal/fwk_multimodal/media/reader.py": "its own, which follows no link",
    "process/fwk_process/": "/proc and /sys",
    "native/fwk_native/": "files of the program, and of a cache folder that it made",
    "peers/fwk_peers/arguments.py": "files of the program",
    "core/fwk/worker/loading/model_identity.py": "files of the program",
    "plugins/features/fwk_features/weights_cache/": "files of a cache folder that it made",
    "plugins/quant/fwk_quant/_linear_cpu/packed.py": "files of the program",
    "plugins/server/fwk_server/playground/dialect.py": "files of the program",
    "plugins/devices/": "/sys",
    "plugins/cache/fwk_cache/file/entry.py": "a cache folder, with a flag that waits for nothing",
    "plugins/loaders/fwk_loaders/safetensors/weights.py": "safe_open, after a look at the file",
    "plugins/lora/fwk_lora/_common/peft.py": "/proc",
    "plugins/server/fwk_server/openai/": "files that it wrote",
    "plugins/server/fwk_server/anthropic/batches.py": "files that it wrote",
    "plugins/server/fwk_server/_common/batches.py": "files that it wrote",
    "plugins/server/fwk_server/tgi/remote_weights.py": "weights, with a flag that waits for nothing",
    "plugins/multimodal/fwk_multimodal/media/worker.py": "a folder that the server made",
    "plugins/multimodal/fwk_multimodal/media/rows.py": "a folder that the server made",
    "plugins/multimodal/fwk_multimodal/media/encoder_servers.py": "a folder that the server made",
    "plugins/multimodal/fwk_multimodal/transcription/server.py": "a folder that the server made",
    "plugins/server/fwk_server/openai_audio/files.py": "a folder that the server made",
}
"""Files of core and plugins that open others without ``fwk_files.regular``: which, and why they may."""


MAY_OPEN = re.compile(r"open\(|from_?file|memmap|np\.load|read_(bytes|text)")
"""What no source opens a file without: others are not even parsed."""


def opens(source: str) -> list[int]:
    """Lines of a source that open a file for reading."""
    found: list[int] = []
    for node in ast.walk(ast.parse(source)) if MAY_OPEN.search(source) else ():
        if not isinstance(node, ast.Call):
            continue
        full = dotted(node.func)
        last = node.func.attr if isinstance(node.func, ast.Attribute) else full
        mode = node.args[1 if full in ("open", "io.open") else 0 :][:1] if last == "open" else []
        reads = isinstance(mode[0], ast.Constant) and str(mode[0].value).startswith("r") if mode else False
        plain = full in ("open", "io.open") and len(node.args) == 1
        by_encoding = last == "open" and not mode and any(word.arg == "encoding" for word in node.keywords)
        known = full in ("safe_open", "np.load", "np.fromfile", "np.memmap") or last == "from_file"
        whole = last in ("read_bytes", "read_text") and not node.args
        descriptor = full == "os.open" and not re.search("O_CREAT|O_WRONLY", ast.unparse(node))
        if known or reads or plain or by_encoding or whole or descriptor:
            found.append(node.lineno)
    return found


def test_every_place_that_reads_a_file_is_known() -> None:
    found = {path.relative_to(ROOT).as_posix(): lines for path in FILES if (lines := opens(path.read_text()))}
    unknown = {name: lines for name, lines in found.items() if not name.startswith(tuple(OWN))}
    assert not unknown, f"read these through fwk_files.regular: {unknown}"
    for name in OWN:
        assert name == "files/fwk_files/regular.py" or any(path.startswith(name) for path in found), name
    for source in ('open("x")', 'Path(x).open("rb")', "p.open(encoding='utf-8')", "p.read_text()", "os.open(p, 0)"):
        assert opens(source), source
    assert not opens('p.open("wb")')
