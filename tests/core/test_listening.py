"""Addresses, TLS and keys of a server, as its options want them."""

from __future__ import annotations

import logging
import socket
import ssl
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from fwk.config import Config, ModelOptions, ServerOptions
from fwk.config.wire import to_plain
from fwk.errors import ConfigError, PortTaken
from fwk.plugins import build_config, discover
from fwk.server.app import Reports, build_app
from fwk_http.addresses import address
from fwk_http.admission import AdmissionController
from fwk_http.keys import Keys, read_keys
from fwk_http.listening import allowed_origins, forget, is_public, listen, tls_context, warn_if_open


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("tls")
    files = str(folder / "cert.pem"), str(folder / "key.pem")
    words = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    subprocess.run([*words.split(), "-out", files[0], "-keyout", files[1]], check=True, capture_output=True)
    return files


def test_a_unix_socket_takes_the_place_of_a_dead_one_only(tmp_path: Path) -> None:
    path = str(tmp_path / "fwk.sock")
    first = listen(ServerOptions(uds=path)).socket
    assert address(first, False) == f"unix:{path}"
    with pytest.raises(PortTaken, match="another server listens there"):
        listen(ServerOptions(uds=path))
    first.close()  # as a killed server leaves it
    second = listen(ServerOptions(uds=path)).socket
    forget(ServerOptions(uds=path))
    assert not Path(path).exists()
    second.close()
    Path(path).write_text("mine")
    with pytest.raises(PortTaken, match="is no socket"):
        listen(ServerOptions(uds=path))
    assert Path(path).read_text() == "mine"


@pytest.mark.parametrize(
    ("options", "public"),
    [
        ({}, False), ({"host": "localhost"}, False), ({"host": "127.8.0.1"}, False), ({"host": "::1"}, False),
        ({"host": "0.0.0.0"}, True), ({"host": "::"}, True), ({"host": "server.example.org"}, True),
        ({"host": "0.0.0.0", "uds": "/run/x"}, False),
    ],
)  # fmt: skip
def test_what_other_machines_reach(options: dict[str, Any], public: bool) -> None:
    assert is_public(ServerOptions(**options)) == public


def test_a_public_address_without_a_key_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    config = Config(server=ServerOptions(host="0.0.0.0"))
    warn_if_open(config.server, Keys("key"))
    warn_if_open(config.server, Keys(named={"ann": "key"}))
    warn_if_open(ServerOptions(), Keys())
    assert not caplog.records
    warn_if_open(config.server, Keys(admin="admin"))
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "add --api-key KEY" in caplog.text


def test_an_address_says_how_it_is_reached() -> None:
    with socket.socket() as four:
        four.bind(("127.0.0.1", 0))
        port = four.getsockname()[1]
        assert address(four, False) == f"http://127.0.0.1:{port}"
        assert address(four, True) == f"https://127.0.0.1:{port}"


def test_tls_wants_a_certificate_with_its_key(certificate: tuple[str, str], tmp_path: Path) -> None:
    assert tls_context(ServerOptions()) is None
    context = tls_context(ServerOptions(ssl_certfile=certificate[0], ssl_keyfile=certificate[1]))
    assert context is not None
    assert context.verify_mode is ssl.CERT_NONE
    assert context.minimum_version >= ssl.TLSVersion.TLSv1_2
    strict = {"ssl_certfile": certificate[0], "ssl_keyfile": certificate[1], "ssl_ca_certs": certificate[0]}
    context = tls_context(ServerOptions(**strict))
    assert context is not None
    assert context.verify_mode is ssl.CERT_REQUIRED
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("nothing")
    none, unread = str(tmp_path / "none"), "no certificate with its private key could be read"
    for files, said in (((certificate[0], None), unread), ((str(wrong), None), unread), ((none, None), "No such file")):
        with pytest.raises(ConfigError, match=said):
            tls_context(ServerOptions(ssl_certfile=files[0], ssl_keyfile=files[1]))
    with pytest.raises(ConfigError, match="--ssl-ca-certs"):
        tls_context(ServerOptions(**(strict | {"ssl_ca_certs": str(wrong)})))


def test_an_encrypted_key_needs_its_password(certificate: tuple[str, str], tmp_path: Path) -> None:
    locked = str(tmp_path / "locked.pem")
    words = ["openssl", "pkcs8", "-topk8", "-in", certificate[1], "-out", locked, "-passout", "pass:s3cret"]
    subprocess.run(words, check=True, capture_output=True)
    files = {"ssl_certfile": certificate[0], "ssl_keyfile": locked}
    assert tls_context(ServerOptions(**files, ssl_keyfile_password="s3cret")) is not None
    for wrong in ({}, {"ssl_keyfile_password": "guess"}):
        with pytest.raises(ConfigError, match="--ssl-certfile"):
            tls_context(ServerOptions(**files, **wrong))


def test_a_key_file_names_holders(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# who may\nann  key-of-ann\n\nbob@example.org key-of-bob\n")
    keys = read_keys(ServerOptions(api_key="k", admin_api_key="a", api_key_file=str(file)))
    assert keys.named == {"ann": "key-of-ann", "bob@example.org": "key-of-bob"}
    assert keys.for_users == ["k", "key-of-ann", "key-of-bob"]
    assert set(keys.secrets) == {"k", "a", "key-of-ann", "key-of-bob"}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "must hold 1 to"), ("# none\n", "must hold 1 to"), ("alone", "line 1: must be 'NAME KEY'"),
        ("a k3y\nb k3y", "line 2: the key is in the file"), ("a k3y\na other", "line 2: the name is in the file"),
        ("a k3y more", "two words"), ("-a k3y", "begins with a letter"), ("a k3\u00e9", "printable ASCII"),
    ],
)  # fmt: skip
def test_a_wrong_key_file_is_one_sentence_without_its_keys(text: str, why: str, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        read_keys(ServerOptions(api_key_file=str(file)))
    assert why in str(error.value)
    assert "k3" not in str(error.value)


def test_the_administrators_key_is_nobody_elses(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("ann admin")
    with pytest.raises(ConfigError, match="would be an administrator"):
        read_keys(ServerOptions(admin_api_key="admin", api_key_file=str(file)))
    with pytest.raises(ConfigError, match="cannot read"):
        read_keys(ServerOptions(api_key_file=str(tmp_path / "none")))


def test_no_secret_leaves_for_the_engine() -> None:
    secrets = {"api_key": "s1", "admin_api_key": "s2", "ssl_keyfile_password": "s3", "ssl_certfile": "c"}
    plain = to_plain(Config(server=ServerOptions(**secrets)))["server"]
    assert not {"api_key", "admin_api_key", "ssl_keyfile_password"} & plain.keys()


def test_origins_are_origins() -> None:
    assert build_config(discover(), {"allowed_origins": ['["*"]']}).server.allowed_origins == ("*",)
    ok = ("https://a.example.org", "http://localhost:3000")
    assert ServerOptions(allowed_origins=ok).allowed_origins == ok
    for wrong in ("a.example.org", "https://a.example.org/path", "ftp://x"):
        with pytest.raises(ValidationError, match="is no origin"):
            ServerOptions(allowed_origins=(wrong,))


def test_names_are_one_or_several() -> None:
    assert ModelOptions(served_model_name="a").served_model_name == ("a",)
    assert ModelOptions(served_model_name=["a", "b"]).served_model_name == ("a", "b")
    for wrong in (["a", "a"], [""]):
        with pytest.raises(ValidationError):
            ModelOptions(served_model_name=wrong)


def client(**options: Any) -> httpx.AsyncClient:
    app = build_app(
        [], [], reports=Reports(lambda: None, lambda: None, dict), keys=Keys("key", named={"ann": "ann-key"}),
        max_body_bytes=1024, admission=AdmissionController(ServerOptions(), 4), **options,
    )  # fmt: skip
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


async def test_pages_of_allowed_origins_read_replies_and_refusals() -> None:
    origin = {"origin": "https://a.example.org"}
    asked = origin | {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    async with client(allowed_origins=("https://a.example.org",)) as http:
        ahead = await http.options("/v1/chat/completions", headers=asked)
        assert (ahead.status_code, ahead.headers["access-control-allow-origin"]) == (200, "https://a.example.org")
        refused = await http.get("/server_info", headers=origin)
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://a.example.org")
        other = await http.get("/health", headers={"origin": "https://b.example.org"})
        assert "access-control-allow-origin" not in other.headers
    async with client() as http:
        assert (await http.options("/v1/chat/completions", headers=asked)).status_code == 401
        assert "access-control-allow-origin" not in (await http.get("/health", headers=origin)).headers


async def test_pages_of_this_machine_may_read_replies_on_loopback() -> None:
    assert allowed_origins(ServerOptions(host="0.0.0.0")) == ()
    assert allowed_origins(ServerOptions(allowed_origins=("https://a.example.org",))) == ("https://a.example.org",)
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "anthropic-beta, x-api-key"}
    async with client(allowed_origins=allowed_origins(ServerOptions())) as http:
        for origin in ("http://localhost:3000", "http://127.0.0.1:8501", "https://localhost", "http://[::1]:1"):
            ahead = await http.options("/v1/messages", headers=asked | {"origin": origin})
            assert (ahead.status_code, ahead.headers["access-control-allow-origin"]) == (200, origin)
        for origin in ("http://localhost.evil.example", "http://evil.example:80", "null", "http://localhost:3000.evil"):
            reply = await http.get("/health", headers={"origin": origin})
            assert "access-control-allow-origin" not in reply.headers, origin


async def test_each_named_key_opens() -> None:
    async with client() as http:
        for key, status in (("key", 200), ("ann-key", 200), ("ann", 401), ("", 401)):
            reply = await http.get("/server_info", headers={"authorization": f"Bearer {key}"})
            assert reply.status_code == status, key
