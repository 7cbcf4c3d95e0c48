"""Weights of a running server: what arrives is what its files hold, or one clear error in time."""

from __future__ import annotations

import json
import random
import shutil
import ssl
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import save_file
from tests.helpers.seed_server import (
    KEEP,
    Said,
    SeedFrontend,
    http,
    noted,
    receive,
    scripted_seed,
    seed_of,
)

from fwk.errors import ModelLoadError
from fwk.interfaces.loader import LoaderContext
from fwk_loaders.remote_instance import RemoteInstanceOptions, index
from fwk_loaders.remote_instance.loader import RemoteInstanceLoader
from fwk_loaders.remote_instance.weights import block_digest
from fwk_loaders.safetensors.loader import SafetensorsLoader
from fwk_server.tgi import remote_weights

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "vocab_size": 40,
    "dtype": "float32",
    "rope_scaling": {"type": "linear", "factor": 2.0},
}
BLOCK = remote_weights.BLOCK_BYTES


def some_tensors() -> dict[str, torch.Tensor]:
    """Of every type that is read, of sizes around a block's, of none, of no dimension."""
    torch.manual_seed(0)
    return {
        "a.weight": torch.randn(7, 5),
        "half.weight": torch.randn(BLOCK // 4 + 3, 2).half(),
        "exact.weight": torch.randn(BLOCK // 4),
        "long.weight": torch.randn(3, BLOCK // 8).bfloat16(),
        "empty.weight": torch.empty(0, 4),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "bytes": torch.arange(251, dtype=torch.uint8),
        "small": torch.arange(-5, 5, dtype=torch.int8),
        "ids": torch.arange(9),
        "flags": torch.tensor([True, False]),
        "fp8": torch.randn(16).to(torch.float8_e4m3fn),
    }


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The seed's folder: two files and an index."""
    folder = tmp_path_factory.mktemp("there")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tensors = some_tensors()
    names = sorted(tensors)
    files = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, held in files.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    weight_map = {name: file for file, held in files.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The receiver's folder."""
    folder = tmp_path_factory.mktemp("here")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture(scope="module")
def seed(there: Path) -> Iterator[int]:
    with seed_of(there) as (port, _):
        yield port


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def test_tensors_are_those_of_the_files(seed: int, here: Path, there: Path) -> None:
    mine = receive(here, seed).weights()
    files = SafetensorsLoader(LoaderContext()).open(there).weights()
    assert set(mine.names()) == set(files.names())
    for name in files.names():
        wanted, found = files.raw(name), mine.raw(name)
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        assert bits(found) == bits(wanted), name
    assert mine.stored_sizes() == files.stored_sizes()
    assert mine.layouts("") == files.layouts("")
    with pytest.raises(ModelLoadError, match="'ids' is quantised"):
        mine.tensor("ids", (9,))
    with pytest.raises(ModelLoadError, match=r"'a\.weight' has the shape \(7, 5\)"):
        mine.tensor("a.weight", (5, 7))
    with pytest.raises(ModelLoadError, match=r"seed http://127\.0\.0\.1:\d+ has no tensor 'none'"):
        mine.raw("none")


def test_layouts_are_those_of_the_files(there: Path, tmp_path: Path) -> None:
    """A quantised checkpoint is read in its packed form, by layer."""
    config = CONFIG | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    tensors = {"x.qweight": torch.ones(4, 4, dtype=torch.int32), "y.weight": torch.ones(4)}
    folder = tmp_path / "seed"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    with seed_of(folder) as (port, _):
        weights = receive(folder, port).weights()
        assert weights.layouts("") == ("gptq:4",)
        assert (weights.layouts("x"), weights.layouts("y")) == (("gptq:4",), ("plain",))
        (tmp_path / "config.json").write_text(json.dumps(CONFIG))
        with pytest.raises(ModelLoadError, match=r"serves another model than .*quantization_config is None here"):
            receive(tmp_path, port)


def test_one_connection_serves_many_tensors_and_a_closed_one_is_made_again(here: Path) -> None:
    requests: list[str] = []

    def script(path: str, query: dict[str, str]) -> Said:
        requests.append(query.get("name", ""))
        last = 0.0 if len(requests) == 3 else KEEP  # hangs up after the second tensor, as an idle server does
        return [told() if not query else tensor(query["name"]), last]

    with scripted_seed(script) as server:
        weights = receive(here, server.server_address[1]).weights()
        for _ in range(4):
            assert bits(weights.raw("x")) == X
    assert requests == ["", "x", "x", "x", "x"]


# What a server that is not to be trusted may send.

IDENTITY = "0123456789abcdef" * 2
X = bytes(range(200)) * 3


def told(**changes: Any) -> bytes:
    body = {"version": 1, "identity": IDENTITY, "config": CONFIG, "tensors": {"x": ["U8", [len(X)]]}} | changes
    return http(json.dumps(body).encode())


def blocks(name: str = "x", sizes: tuple[int, ...] = (256, 256, 88), data: bytes = X) -> list[bytes]:
    found, start = [], 0
    for size in sizes:
        block = data[start : start + size]
        found.append(struct.pack("<I", size) + block + block_digest(IDENTITY, name, start, memoryview(block)))
        start += size
    return found


def tensor(name: str) -> bytes:
    return http(b"".join(blocks(name)))


def answers(said: Callable[[], Said | None]) -> Callable[[str, dict[str, str]], Said | None]:
    return lambda path, query: said() if query else [told()]


LIES: dict[str, tuple[Callable[[], Said | None], str]] = {
    "hangs up": (lambda: None, "ended the connection"),
    "half of the headers": (lambda: [b"HTTP/1.1 200 OK\r\nContent-Le"], "ended|HTTP"),
    "no body": (lambda: [b"HTTP/1.1 200 OK\r\n\r\n"], "in the middle of tensor 'x'"),
    "length cut": (lambda: [http(blocks()[0][:2])], "in the middle"),
    "block cut": (lambda: [http(b"".join(blocks())[:300])], "in the middle"),
    "dies in a block": (lambda: [http(b"".join(blocks()))[:400]], "ended|in the middle"),
    "digest cut": (lambda: [http(b"".join(blocks())[:-1])], "in the middle"),
    "one block missing": (lambda: [http(b"".join(blocks()[:2]))], "in the middle"),
    "one bit": (lambda: [http(b"".join(blocks()).replace(b"\x07\x08", b"\x07\x09", 1))], "damaged: a checksum"),
    "blocks exchanged": (lambda: [http(b"".join([blocks()[1], blocks()[0], blocks()[2]]))], "damaged"),
    "a block twice": (lambda: [http(b"".join([blocks()[0], blocks()[0], blocks()[2]]))], "damaged"),
    "another tensor's": (lambda: [tensor("y")], "damaged"),
    "a block too large": (lambda: [http(struct.pack("<I", 2**31) + X)], "more of tensor 'x' than there is"),
    "a block past the end": (lambda: [http(b"".join(blocks(sizes=(601,), data=X + b"a")))], "more of tensor"),
    "more after it": (lambda: [http(b"".join([*blocks(), b"a"]))], "more of tensor"),
    "a reason": (lambda: [http(b"".join([blocks()[0], b"\0\0\0\0the disk is gone"]))], "gave up.*: the disk is gone"),
    "refused": (lambda: [http(b'{"error": "no more"}', "409 Conflict")], r"refuses \(409\): no more"),
    "another shape of error": (lambda: [http(b'{"error": {"message": "no"}}', "500 X")], r"refuses \(500\): no"),
    "garbage in an error": (lambda: [http(b"\xff\x00<html>", "502 Bad Gateway")], r"refuses \(502\)"),
    "wrong key": (lambda: [http(b"{}", "401 Unauthorized")], "refuses the key"),
    "forbidden": (lambda: [http(b"{}", "403 Forbidden")], "refuses the key"),
    "sent on": (lambda: [http(b"", "302 Found", Location="http://127.0.0.1:1/")], r"refuses \(302\)"),
    "no HTTP": (lambda: [b"SSH-2.0-OpenSSH_9.6\r\n"], "HTTP"),
    "a line without end": (lambda: [b"HTTP/1.1 200 OK\r\nX: " + b"a" * 200_000], "HTTP"),
    "headers without end": (lambda: [b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 200], "HTTP"),
    "chunks of no size": (lambda: [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n"], "HTTP|ended"),
    "silent": (lambda: [10.0], "too slow: nothing whole came within 0.5 seconds"),
    "silent after the headers": (lambda: [b"HTTP/1.1 200 OK\r\nContent-Length: 700\r\n\r\n", 10.0], "too slow"),
    "silent in a block": (lambda: [http(b"".join(blocks()))[:300], 10.0], "too slow"),
    "a trickle of headers": (lambda: [b"HTTP/1.1 200 OK\r\n", *([b"a", 0.05] * 100)], "too slow"),
    "a trickle": (lambda: [http(b"".join(blocks()))[:50], *([b"a", 0.05] * 100)], "too slow"),
    "a trickle of going on": (lambda: [b"HTTP/1.1 100 Continue\r\n\r\n", 0.05] * 100, "too slow"),
}


@pytest.mark.gate(10)
@pytest.mark.parametrize("lie", LIES)
def test_a_wrong_answer_is_one_error_in_time(lie: str, here: Path) -> None:
    said, words = LIES[lie]
    with scripted_seed(answers(said)) as server:
        weights = receive(here, server.server_address[1], timeout=0.5).weights()
        began = time.monotonic()
        with pytest.raises(ModelLoadError, match=words) as caught:
            weights.raw("x")
        assert time.monotonic() - began < 4
        assert str(caught.value).startswith(f"the seed http://127.0.0.1:{server.server_address[1]} ")
        assert "\n" not in str(caught.value)


@pytest.mark.sweep
def test_a_slow_seed_that_keeps_to_its_time_is_waited_for(here: Path) -> None:
    """The time is for each block, not for the tensor."""
    head, *rest = [http(b"".join(blocks()))[: -len(b"".join(blocks()))], *blocks()]
    with scripted_seed(answers(lambda: [head, *(piece for block in rest for piece in (block, 0.8))])) as server:
        assert bits(receive(here, server.server_address[1], timeout=1.2).weights().raw("x")) == X


@pytest.mark.parametrize("chance", range(4))
def test_no_flipped_or_lost_byte_passes(chance: int, here: Path) -> None:
    """Every answer that is not the right one, to the byte, is refused; what is not, is the tensor."""
    dice = random.Random(chance)
    whole = tensor("x")
    sent = [whole]
    with scripted_seed(answers(lambda: sent)) as server:
        for _ in range(60):
            broken = bytearray(whole)
            place = dice.randrange(len(broken))
            match dice.randrange(4):
                case 0:
                    broken[place] ^= 1 << dice.randrange(8)
                case 1:
                    del broken[place : place + dice.randrange(1, 40)]
                case 2:
                    broken[place:place] = dice.randbytes(dice.randrange(1, 40))
                case _:
                    broken = broken[:place]
            sent[:] = [bytes(broken)]
            try:
                found = receive(here, server.server_address[1], timeout=2).weights().raw("x")
            except ModelLoadError:
                continue
            assert bits(found) == X, bytes(broken)[:200]


INDEXES: dict[str, tuple[bytes, str]] = {
    "no JSON": (http(b"<html>"), "no JSON"),
    "nested": (http(b"[" * 100_000), "no JSON"),
    "a list": (http(b"[]"), "no JSON object"),
    "another version": (told(version=2), "version '2'"),
    "no identity": (told(identity=None), "no identity"),
    "a path for an identity": (told(identity="../../../../../../etc/passwd"), "no identity"),
    "no tensors": (told(tensors={}), "no tensors"),
    "tensors in a list": (told(tensors=["x"]), "no tensors"),
    "a name too long": (told(tensors={"x" * 1025: ["U8", [1]]}), "tensor"),
    "an unknown type": (told(tensors={"x": ["U9", [1]]}), "the type 'U9'"),
    "a type that is a list": (told(tensors={"x": [["U8"], [1]]}), "the type"),
    "no shape": (told(tensors={"x": ["U8", None]}), "no shape"),
    "a negative shape": (told(tensors={"x": ["U8", [-1, -1]]}), "shape"),
    "a fraction": (told(tensors={"x": ["U8", [1.5]]}), "shape"),
    "true": (told(tensors={"x": ["U8", [True]]}), "shape"),
    "too many dimensions": (told(tensors={"x": ["U8", [1] * 9]}), "no shape"),
    "more than fits": (told(tensors={"x": ["F64", [2**30, 2**30]]}), "shape"),
    "a half byte": (told(tensors={"x": ["F4", [3]]}), "shape"),
    "another architecture": (told(config=CONFIG | {"architectures": ["GPT2LMHeadModel"]}), "architectures is"),
    "another size": (told(config=CONFIG | {"hidden_size": 65}), "hidden_size is 64 here and 65 there"),
    "another scale": (
        told(config=CONFIG | {"rope_scaling": {"type": "linear", "factor": 4.0}}),
        r"rope_scaling\.factor is 2\.0 here and 4\.0 there",
    ),
    "quantised there": (told(config=CONFIG | {"quantization_config": {"bits": 4}}), "quantization_config"),
    "no route": (http(b'{"error": "Not Found"}', "404 Not Found"), "started with --admin-api-key"),
    "wrong key": (http(b"{}", "401 Unauthorized"), "refuses the key"),
}


@pytest.mark.parametrize("lie", INDEXES)
def test_a_wrong_index_is_refused_when_the_model_is_opened(lie: str, here: Path) -> None:
    body, words = INDEXES[lie]
    with (
        scripted_seed(lambda path, query: [body]) as server,
        pytest.raises(ModelLoadError, match=words),
    ):
        receive(here, server.server_address[1], timeout=2)


def test_an_index_without_end_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "MAX_BYTES", 2**20)
    pieces = [b"HTTP/1.1 200 OK\r\n\r\n", *([b" " * 2**19] * 8)]
    with (
        scripted_seed(lambda path, query: pieces) as server,
        pytest.raises(ModelLoadError, match="more than 1 MiB"),
    ):
        receive(here, server.server_address[1], timeout=5)


def test_what_says_nothing_of_the_weights_may_differ(here: Path) -> None:
    other = CONFIG | {"dtype": "bfloat16", "transformers_version": "9", "_name_or_path": "x", "new_default": 1}
    with scripted_seed(lambda path, query: [told(config=other)]) as server:
        assert receive(here, server.server_address[1]).weights_identity() == IDENTITY


def test_nothing_listens(here: Path) -> None:
    with scripted_seed(lambda path, query: None) as server:
        port = server.server_address[1]
    with pytest.raises(ModelLoadError, match="nothing listens there"):
        receive(here, port)
    with pytest.raises(ModelLoadError, match=r"the seed http://no-such-host\.invalid:1 cannot be reached"):
        receive(here, 1, seed_instance_ip="no-such-host.invalid")


def test_https(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a certificate of an authority that is known, and for the name that was given."""
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    words = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([*words.split(), *names, "-out", cert, "-keyout", key], check=True, capture_output=True)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(cert, key)
    with scripted_seed(lambda path, query: [tensor("x") if query else told(), KEEP], tls) as server:
        port = server.server_address[1]
        with pytest.raises(
            ModelLoadError, match=r"https://localhost:\d+ cannot be reached by HTTPS: CERTIFICATE_VERIFY"
        ):
            receive(here, port, seed_instance_ip="https://localhost")
        monkeypatch.setenv("SSL_CERT_FILE", cert)
        assert bits(receive(here, port, seed_instance_ip="https://localhost").weights().raw("x")) == X
        with pytest.raises(ModelLoadError, match="cannot be reached by HTTPS"):
            receive(here, port, seed_instance_ip="https://127.0.0.1")
        with pytest.raises(
            ModelLoadError, match=r"http://localhost:\d+ (ended the connection|does not answer in HTTP)"
        ):
            receive(here, port, seed_instance_ip="localhost")


GOOD_HOSTS = ["10.0.0.1", "seed", "seed-1.example.org", "seed_1", "::1", "[::1]", "https://seed.example.org"]
BAD_HOSTS = [
    "", "a b", "seed:8000", "seed/path", "user@seed", "http://user@seed", "ftp://seed", "https://", "seed\n",
    "seed\r\nX: y", "-seed", "[::1", "a" * 300, "file:///etc/passwd", "seed?x", "s\u00e9\u00e9d",
]  # fmt: skip


@pytest.mark.parametrize("host", GOOD_HOSTS)
def test_addresses(host: str) -> None:
    RemoteInstanceOptions(remote_instance_weight_loader_seed_instance_ip=host)


@pytest.mark.parametrize("host", BAD_HOSTS)
def test_what_is_no_address(host: str) -> None:
    with pytest.raises(ValidationError, match="is no address"):
        RemoteInstanceOptions(remote_instance_weight_loader_seed_instance_ip=host)


def test_the_address_is_needed(here: Path) -> None:
    for options in (None, RemoteInstanceOptions(remote_instance_weight_loader_seed_instance_ip="x")):
        with pytest.raises(ModelLoadError, match="needs the server whose weights it reads: --remote-instance"):
            RemoteInstanceLoader(LoaderContext(options)).open(here)


# The seed's files.


@pytest.fixture
def copy(there: Path, tmp_path: Path) -> Path:
    return shutil.copytree(there, tmp_path / "copy")


def test_changed_files_are_not_given_out(copy: Path, here: Path) -> None:
    """Neither to one that begins, nor to one that is in the middle; and in neither case are paths told."""
    with seed_of(copy) as (port, frontend):
        weights = receive(here, port).weights()
        weights.raw("a.weight")
        path = copy / "two.safetensors"
        content = path.read_bytes()
        with path.open("r+b") as file:  # in place: size and name stay
            file.write(content)
        for ask in (lambda: receive(here, port), lambda: weights.raw("bytes"), lambda: weights.raw("a.weight")):
            with pytest.raises(ModelLoadError, match=r"two\.safetensors is no longer what this server") as caught:
                ask()
            assert str(copy) not in str(caught.value)
        path.unlink()
        with pytest.raises(ModelLoadError, match=r"two\.safetensors is no longer"):
            receive(here, port)
        path.write_bytes(content)
        frontend.served_weights = noted(copy)  # as after /update_weights_from_disk
        assert bits(receive(here, port).weights().raw("bytes")) == bits(some_tensors()["bytes"])
        with pytest.raises(ModelLoadError, match=r"409.*has taken other weights meanwhile"):
            weights.raw("bytes")


def test_identities_are_those_of_files(copy: Path, here: Path, there: Path) -> None:
    def identity(frontend: SeedFrontend, folder: Path) -> str:
        frontend.served_weights = noted(folder)
        return receive(here, port).weights_identity()

    with seed_of(copy) as (port, frontend):
        first = identity(frontend, copy)
        assert identity(frontend, copy) == first, "the same after a restart"
        assert identity(frontend, there) != first
        (copy / "one.safetensors").touch()
        assert identity(frontend, copy) != first
