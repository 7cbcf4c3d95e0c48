"""Servers that encode for another: what it says is what transformers says, while one of them is there."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import httpx
import pytest

from tests.helpers.images import greedy, noise, reference_processor, write_vision
from tests.helpers.lazy import lazy
from tests.helpers.picture_chats import COUNT, ROUTE, body, part, post, said, tokens
from tests.helpers.rig import Server, until

transformers = lazy("transformers")

pytestmark = pytest.mark.sweep

FLAGS = ("--dtype", "float32", "--load-format", "auto")
TEXT = "User:<image> Which?<image><end_of_utterance>\nAssistant:"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision")
    (folder.parent / "secret").write_text("0123456789abcdef")
    (folder.parent / "other").write_text("fedcba9876543210")
    return folder


@pytest.fixture(scope="module")
def reference(folder: Path) -> transformers.PreTrainedModel:
    return write_vision(folder)


def encoder(folder: Path, *flags: str) -> Server:
    secret = str(folder.parent / "secret")
    server = Server(folder, *FLAGS, "--encoder-only", "--encoder-token-file", secret, *flags)
    server.wait_ready()
    return server


def serving(folder: Path, *urls: str, secret: str = "secret") -> Server:
    return Server(folder, *FLAGS, "--encoder-servers", *urls, "--encoder-token-file", str(folder.parent / secret))


@pytest.fixture(scope="module")
def servers(reference: transformers.PreTrainedModel, folder: Path) -> Iterator[tuple[Server, Server, Server]]:
    """Two that encode, and one that serves."""
    with ExitStack() as stack:
        one, other = (stack.enter_context(closing(encoder(folder))) for _ in range(2))
        yield one, other, stack.enter_context(closing(serving(folder, one.url, other.url).start()))


def check(server: Server, reference: transformers.PreTrainedModel, folder: Path, *seeds: int) -> None:
    """Chats with two pictures each, of different sizes, at once."""

    def images(seed: int) -> list[object]:
        return [noise(seed), noise(100 + seed, 20, 50)]

    with ThreadPoolExecutor(len(seeds)) as pool:
        sent = [
            pool.submit(post, server, body(said(part(images(seed)[0]), "Which?", part(images(seed)[1]))))
            for seed in seeds
        ]
    for seed, answer in zip(seeds, sent, strict=True):
        wanted = greedy(reference, reference_processor(folder), TEXT, images(seed), COUNT)[0]  # type: ignore[arg-type]
        assert tokens(answer.result()) == wanted


def test_others_encode_and_nothing_else(
    servers: tuple[Server, Server, Server], reference: transformers.PreTrainedModel, folder: Path
) -> None:
    one, _, server = servers
    check(server, reference, folder, 1, 2, 3, 4)
    check(server, reference, folder, 1, 2)
    assert not [child for child in server.children() if any("encoder_process" in word for word in child.cmdline())]
    assert list(Path(one.folder).glob("fwk-tmp-rows-*/*"))
    assert not one.engines() or all("encoder_process" in " ".join(p.cmdline()) for p in one.engines())
    refused = httpx.post(one.url + ROUTE, json=body(said("Hi.")), timeout=60)
    assert refused.status_code == 503
    assert "this server encodes media for others (--encoder-only) and generates nothing" in refused.text
    unknown = httpx.post(f"{one.url}/encode_media", content=b"x", timeout=60)
    assert unknown.status_code == 401
    assert "is for servers with the same secret in --encoder-token-file" in unknown.text
    assert httpx.post(f"{server.url}/encode_media", content=b"x", timeout=60).status_code == 404


def test_another_is_asked_when_one_is_gone(
    servers: tuple[Server, Server, Server], reference: transformers.PreTrainedModel, folder: Path
) -> None:
    one, other, server = servers
    one.process.kill()
    one.process.wait(10)
    check(server, reference, folder, 11, 12, 13)
    until(lambda: one.url in server.get("/health").text, 20, "health names it")
    other.process.kill()
    other.process.wait(10)
    answer = post(server, body(said(part(noise(20)), "Which?")))
    assert answer.status_code == 503
    message = answer.json()["error"]["message"]
    assert "no encoder server encodes this request's image" in message or "nothing encodes this request's" in message
    plain = post(server, body({"role": "user", "content": "Hi."}))
    assert plain.status_code == 200
    again = post(server, body(said(part(noise(11)), "Which?", part(noise(111, 20, 50)))))
    assert again.status_code == 200, "what was encoded before is kept"


def test_another_secret_or_model_ends_the_start(
    reference: transformers.PreTrainedModel, folder: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    write_vision(other, num_hidden_layers=1)
    with closing(encoder(folder)) as one:
        for model, secret, why in (
            (folder, "other", "it has another secret in --encoder-token-file"),
            (other, "secret", "it serves another model, or other weights"),
        ):
            flags = (*FLAGS, "--encoder-servers", one.url, "--encoder-token-file", str(folder.parent / secret))
            with closing(Server(model, *flags)) as server:
                assert server.process.wait(120) == 2
                assert why in server.log
