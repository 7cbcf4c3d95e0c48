"""Processes that encode: a server with them says what transformers says, also while they die, and ends them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers.images import greedy, noise, reference_processor, write_vision
from tests.helpers.lazy import lazy
from tests.helpers.picture_chats import COUNT, body, part, post, said, tokens
from tests.helpers.rig import Server, is_alive, until
from tests.helpers.vision_models import KINDS, write_seeing
from tests.helpers.vision_models import greedy as seen
from tests.helpers.vision_models import reference_processor as seeing_processor

transformers = lazy("transformers")

FLAGS = ("--dtype", "float32", "--load-format", "auto", "--mm-encoder-workers", "2", "--mm-encoder-batch-size", "3")
PLAIN = "User: Hi.<end_of_utterance>\nAssistant:"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vision")


@pytest.fixture(scope="module")
def reference(folder: Path) -> transformers.PreTrainedModel:
    return write_vision(folder)


@pytest.fixture(scope="module")
def server(reference: transformers.PreTrainedModel, folder: Path) -> Iterator[Server]:
    server = Server(folder, *FLAGS, "--chunked-prefill-size", "16").start()
    yield server
    server.close()


def encoders(server: Server) -> list[psutil.Process]:
    return [child for child in server.children() if any("encoder_process" in word for word in child.cmdline())]


def kept(server: Server, what: str) -> set[Path]:
    """Files of a server's ``rows`` or ``media``."""
    return set(Path(server.folder).glob(f"fwk-tmp-{what}-*/*"))


def chat(i: int) -> tuple[dict[str, Any], str, list[Any]]:
    """A request, the text of it, and its images: of two sizes; every third has none."""
    if i % 3 == 2:
        return body({"role": "user", "content": "Hi."}), PLAIN, []
    images = [noise(i), noise(100 + i, 20, 50)]
    text = "User:<image> Which?<image><end_of_utterance>\nAssistant:"
    return body(said(part(images[0]), "Which?", part(images[1]))), text, images


def check_all(
    server: Server, reference: transformers.PreTrainedModel, folder: Path, numbers: range, meanwhile: Any = None
) -> None:
    """All at once."""
    processor, chats = reference_processor(folder), [chat(i) for i in numbers]
    with ThreadPoolExecutor(len(chats)) as pool:
        sent = [pool.submit(post, server, given) for given, _, _ in chats]
        if meanwhile is not None:
            meanwhile()
        for answer, (_, text, images) in zip(sent, chats, strict=True):
            assert tokens(answer.result()) == greedy(reference, processor, text, images, COUNT)[0]


def test_a_batch_of_images_and_text(server: Server, reference: transformers.PreTrainedModel, folder: Path) -> None:
    """Of several sizes, in chunks; the second time from the prefix cache, and encoded before."""
    rows, media = kept(server, "rows"), kept(server, "media")
    check_all(server, reference, folder, range(6))
    check_all(server, reference, folder, range(6))
    [place] = Path(server.folder).glob("fwk-tmp-rows-*")
    assert place.stat().st_mode & 0o777 == 0o700
    assert len(kept(server, "rows") - rows) == 4 * (3 + 5), "each tile once"
    until(lambda: len(kept(server, "media") - media) == 4 * 2, 10, "pictures are kept once, and payloads are removed")


def test_one_that_dies_under_load_is_replaced(
    server: Server, reference: transformers.PreTrainedModel, folder: Path
) -> None:
    """No request is lost, and the engine lives."""
    before, [engine] = encoders(server), [p for p in server.engines() if p not in encoders(server)]
    assert len(before) == 2

    def kill() -> None:
        before[0].suspend()
        before[0].kill()

    check_all(server, reference, folder, range(10, 16), kill)
    until(lambda: len(encoders(server)) == 2 and before[0] not in encoders(server), 20, "another has been started")
    assert is_alive(engine)
    check_all(server, reference, folder, range(20, 24))
    assert server.health() == 200


@pytest.mark.sweep
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_all_end_with_their_server(
    reference: transformers.PreTrainedModel, folder: Path, number: signal.Signals
) -> None:
    """Also one that hangs with requests, for which the server waits no longer than for others."""
    with closing(Server(folder, *FLAGS, "--shutdown-timeout", "3").start()) as server:
        assert tokens(post(server, chat(0)[0]))
        own = encoders(server)
        before = kept(server, "media")
        with ThreadPoolExecutor(4) as pool:
            for process in own:
                process.suspend()
            for i in range(30, 34):
                pool.submit(post, server, chat(i)[0])
            until(lambda: kept(server, "media") - before, 20, "requests have come")
            server.process.send_signal(number)
            server.wait(60)
            until(lambda: not any(map(is_alive, own)), 20, "all encoders have ended")
        if number == signal.SIGTERM:
            assert not server.leftovers


@pytest.mark.sweep
@pytest.mark.parametrize("name", [*KINDS])
def test_other_encoders(name: str, tmp_path: Path) -> None:
    reference = write_seeing(tmp_path, name)
    kind, images = KINDS[name], [noise(1), noise(2, 40, 24)]
    text = f"user:{kind.marks[0]}What is this? {kind.marks[0]}"
    _, wanted, _ = seen(reference, seeing_processor(tmp_path, name), text, images, COUNT, kind.first)
    with closing(Server(tmp_path, *FLAGS).start()) as server:
        answer = post(server, body(said(part(images[0]), "What is this? ", part(images[1]))))
    assert tokens(answer) == wanted


@pytest.mark.sweep
def test_weights_of_encoders_stay(reference: transformers.PreTrainedModel, folder: Path) -> None:
    with closing(Server(folder, *FLAGS, "--api-key", "user", "--admin-api-key", "boss").start("user")) as server:
        given = {"model_path": str(folder)}
        answer = server.post(given, "/update_weights_from_disk", {"authorization": "Bearer boss"})
        assert answer.status_code == 400, answer.text
        assert "the processes of --mm-encoder-workers keep the weights that they started with" in answer.text
