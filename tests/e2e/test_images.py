"""Images over HTTP: a real server, its helper process and its engine, against transformers in float32."""

from __future__ import annotations

import base64
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.images import encoded, greedy, noise, reference_processor, write_vision
from tests.helpers.lazy import lazy
from tests.helpers.picture_chats import COUNT, ROUTE, body, part, post, said, tokens, url_of
from tests.helpers.rig import Server, until, write_model
from tests.helpers.vision_models import KINDS, write_seeing
from tests.helpers.vision_models import greedy as seen
from tests.helpers.vision_models import reference_processor as seeing_processor

transformers = lazy("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vision")


@pytest.fixture(scope="module")
def reference(folder: Path) -> transformers.PreTrainedModel:
    return write_vision(folder)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the server may read, next to a file that it may not."""
    root = tmp_path_factory.mktemp("files")
    (root / "open").mkdir()
    (root / "open/one.png").write_bytes(encoded(noise(1)))
    (root / "secret.png").write_bytes(encoded(noise(2)))
    (root / "open/link.png").symlink_to(root / "secret.png")
    os.mkfifo(root / "open/pipe.png")
    return root / "open"


@pytest.fixture(scope="module")
def server(reference: transformers.PreTrainedModel, folder: Path, pictures: Path) -> Iterator[Server]:
    limits = ("--limit-mm-per-prompt", "image=3", "--max-image-pixels", "4000", "--max-media-bytes", "60000")
    files = ("--allowed-local-media-path", str(pictures))
    server = Server(folder, "--dtype", "float32", "--load-format", "auto", *limits, *files).start()
    yield server
    server.close()


def test_several_images_in_several_turns(server: Server, reference: transformers.PreTrainedModel, folder: Path) -> None:
    images = [noise(1), noise(2, 20, 50), noise(3)]
    chat = [
        {"role": "system", "content": "Be brief."},
        said(part(images[0]), "A?"),
        {"role": "assistant", "content": "B."},
        said("C:", part(images[1]), part(images[2])),
    ]
    answer = post(server, body(*chat, logprobs=True))
    text = (
        "System: Be brief.<end_of_utterance>\nUser:<image> A?<end_of_utterance>\nAssistant: B.<end_of_utterance>\n"
        "User: C:<image><image><end_of_utterance>\nAssistant:"
    )
    processor = reference_processor(folder)
    wanted, scores = greedy(reference, processor, text, images, COUNT)
    assert tokens(answer) == wanted
    found = [entry["logprob"] for entry in answer.json()["choices"][0]["logprobs"]["content"]]
    assert found == pytest.approx(scores, abs=1e-3)
    ids = processor(text=text, images=images, add_special_tokens=False)["input_ids"][0]
    assert answer.json()["prompt_token_ids"] == list(ids)
    assert answer.json()["usage"]["prompt_tokens"] == len(ids)
    told = post(server, {"model": "tiny", "messages": chat}, "/tokenize").json()
    assert told["tokens"] == list(ids)
    last = [{"type": "input_text", "text": "C:"}]  # as the other API has them, where a URL is a string
    last += [{"type": "input_image", "image_url": shown["image_url"]["url"]} for shown in chat[3]["content"][1:]]
    chat[3] = {"role": "user", "content": last}
    told = post(server, {"model": "tiny", "messages": chat}, "/tokenize").json()
    assert told["tokens"] == list(ids)
    with httpx.Client(base_url=server.url) as client:
        assert "vision" in client.get("/v1/models").json()["data"][0]["capabilities"]
        assert "vision" in client.post("/api/show", json={"model": "tiny"}).json()["capabilities"]
        assert client.get("/props").json()["modalities"] == {"vision": True, "audio": False}


@pytest.mark.sweep
def test_many_clients_with_images_of_their_own(
    server: Server, reference: transformers.PreTrainedModel, folder: Path
) -> None:
    """Each gets what its own image says, and the second time from the cache."""
    processor = reference_processor(folder)
    text = "User:<image> Which?<end_of_utterance>\nAssistant:"
    wanted = [greedy(reference, processor, text, [noise(i)], COUNT)[0] for i in range(6)]
    with ThreadPoolExecutor(6) as pool:
        first = list(pool.map(lambda i: post(server, body(said(part(noise(i)), "Which?"))), range(6)))
        again = list(pool.map(lambda i: post(server, body(said(part(noise(i)), "Which?"), stream=False)), range(6)))
    assert [tokens(answer) for answer in first] == wanted
    assert [tokens(answer) for answer in again] == wanted
    assert all(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 40 for answer in again)


def test_beams_and_samples_of_an_image(server: Server) -> None:
    question = said(part(noise(1)), "Which?")
    beams = post(server, body(question, use_beam_search=True, n=2, best_of=2))
    assert beams.status_code == 200, beams.text
    several = post(server, body(question, n=3, temperature=1, seed=1))
    assert len({tuple(choice["token_ids"]) for choice in several.json()["choices"]}) == 3


def test_text_alone_and_text_that_looks_like_an_image(
    server: Server, reference: transformers.PreTrainedModel, folder: Path
) -> None:
    """A client's text is no mark of an image. Contents that are a text are in the prompt, in whatever form."""
    text = "System: Be brief.<end_of_utterance>\nUser: Hi.<end_of_utterance>\nAssistant:"
    plain = post(server, body({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."}))
    assert tokens(plain) == greedy(reference, reference_processor(folder), text, [], COUNT)[0]
    answer = post(server, body({"role": "user", "content": "Say <image> twice"}))
    assert answer.status_code == 200, answer.text
    one = post(server, body(said(part(noise(1)), "Not <image> this")))
    assert one.status_code == 200, one.text


def test_files_below_the_folder(server: Server, pictures: Path) -> None:
    by_file = post(server, body(said(part(f"file://{pictures}/one.png"), "A?")))
    assert tokens(by_file) == tokens(post(server, body(said(part(noise(1)), "A?"))))
    for name in ("../secret.png", "link.png", "none.png", "pipe.png", "", "%00", "a" * 300):
        refused = post(server, body(said(part(f"file://{pictures}/{name}"))))
        assert refused.status_code == 400
        assert "names no file below the folder that this server reads from" in refused.text
        assert str(pictures) not in refused.text
    assert "names no file below" in post(server, body(said(part("file://elsewhere/etc/passwd")))).text


AT = r"messages[0].content[1].image_url"
WRONG: dict[str, tuple[Any, str]] = {
    "not base64": ("data:image/png;base64,ab*d", f"{AT}: what follows the comma of its data: URL is not base64"),
    "no comma": ("data:image/png;base64", f"{AT} is no data: URL: there is no comma"),
    "text": (url_of(b"text"), f"{AT} is no PNG, JPEG, WebP or GIF image"),
    "damaged": (url_of(encoded(noise(1))[:500]), f"{AT}: the PNG image is damaged or cut short"),
    "pixels": (url_of(encoded(noise(1, 100, 41))), "of 100 x 41 pixels has more than the 4000"),
    "bytes": (url_of(bytes(60_001)), f"{AT} has more than 60000 bytes (--max-media-bytes)"),
    "elsewhere": ("https://example.org/a.png", f"{AT} is no data: URL: this server fetches nothing"),
    "no text": (7, f"{AT}.url must be a URL"),
    "empty": ("", f"{AT} is no data: URL"),
}


@pytest.mark.parametrize(("url", "message"), WRONG.values(), ids=WRONG)
def test_what_is_no_image_is_refused(server: Server, url: Any, message: str) -> None:
    refused = post(server, body(said("A", part(url))))
    assert refused.status_code == 400, refused.text
    assert message in refused.json()["error"]["message"]


def test_other_refusals(server: Server) -> None:
    image = part(noise(1, 8, 8))
    many = post(server, body(said(*[image] * 4)))
    assert "this server takes at most 3 images in a prompt (--limit-mm-per-prompt)" in many.text
    sound = post(server, body(said({"type": "input_audio", "input_audio": {"data": ""}})))
    assert "reads text and images (image_url), not 'input_audio'" in sound.text
    system = post(server, body({"role": "system", "content": [image]}, said("A")))
    assert "media belong to messages of the user, not of role 'system'" in system.text
    cut = post(server, body(said(image), truncate_prompt_tokens=10))
    assert "truncate_prompt_tokens would cut media off" in cut.text
    long = post(server, body(said(*[part(noise(1))] * 3, "a" * 400)))
    assert "tokens; this server takes at most" in long.text
    assert {r.status_code for r in (many, sound, system, cut, long)} == {400}


def test_payloads_are_gone_when_their_requests_are(server: Server) -> None:
    """Also of those whose clients went away, and of refused ones; what was made of a picture is kept once."""
    folders = list(Path(server.folder).glob("fwk-tmp-media-*"))
    assert len(folders) == 1
    assert folders[0].stat().st_mode & 0o777 == 0o700
    before = len(list(folders[0].iterdir()))
    given = body(said(part(noise(50)), "A?"), stream=True, max_tokens=300)
    for _ in range(3):
        with httpx.stream("POST", server.url + ROUTE, json=given, timeout=60) as answer:
            next(answer.iter_lines())
    assert post(server, body(said(part(noise(51)), part(url_of(b"text"))))).status_code == 400
    until(lambda: len(list(folders[0].iterdir())) <= before + 1, 10, "payloads are removed")


@pytest.mark.sweep
def test_a_request_that_waits_survives_the_engine(reference: transformers.PreTrainedModel, folder: Path) -> None:
    """Another engine is given the request of a dead one, whose payload is still there."""
    flags = ("--dtype", "float32", "--load-format", "auto", "--health-monitor", "true", "--data-parallel-size", "2")
    server = Server(folder, *flags, "--load-balance-method", "round_robin").start()
    text = "User:<image> Which?<end_of_utterance>\nAssistant:"
    wanted = greedy(reference, reference_processor(folder), text, [noise(1)], COUNT)[0]
    try:
        server.signal_engine(signal.SIGSTOP)
        with ThreadPoolExecutor(2) as pool:
            both = [pool.submit(post, server, body(said(part(noise(1)), "Which?"))) for _ in range(2)]
            until(lambda: any(one.done() for one in both), 10, "the engine that runs has answered")
            assert not all(one.done() for one in both)
            server.signal_engine(signal.SIGKILL)
            assert [tokens(one.result()) for one in both] == [wanted, wanted]
    finally:
        server.close()


@pytest.mark.sweep
def test_a_model_of_text_refuses_images(tmp_path: Path) -> None:
    server = Server(write_model(tmp_path / "tiny")).start()
    try:
        refused = post(server, body(said(part(noise(1)))))
    finally:
        server.close()
    assert refused.status_code == 400
    assert "messages[0].content[0]: this server's model reads text only, not 'image_url'" in refused.text


def test_other_dialects_of_chat(server: Server) -> None:
    """Ollama's images and Anthropic's blocks are those of OpenAI's parts."""
    data = base64.b64encode(encoded(noise(1))).decode()
    wanted = post(server, body(said(part(noise(1)), "A?"))).json()["choices"][0]["message"]["content"]
    options = {"num_predict": COUNT, "temperature": 0}
    message = {"role": "user", "content": "A?", "images": [data]}
    settings = {"model": "tiny", "stream": False, "options": options}
    chat = post(server, {**settings, "messages": [message]}, "/api/chat")
    assert chat.status_code == 200, chat.text
    single = post(server, {**settings, "prompt": "A?", "images": [data]}, "/api/generate")
    assert wanted.startswith(chat.json()["message"]["content"])
    assert single.json()["response"] == chat.json()["message"]["content"]
    assert chat.json()["prompt_eval_count"] > 60
    source = {"type": "base64", "media_type": "image/png", "data": data}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": "A?"}]
    given = {"model": "tiny", "max_tokens": COUNT, "temperature": 0, "messages": [{"role": "user", "content": blocks}]}
    answer = post(server, given, "/v1/messages")
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat.json()["prompt_eval_count"]
    assert answer.json()["content"][0]["text"] == chat.json()["message"]["content"]
    late = [{"type": "text", "text": "A?"}, {"type": "image", "source": source}, {"type": "text", "text": "B?"}]
    counted = post(server, {**given, "messages": [{"role": "user", "content": late}]}, "/v1/messages/count_tokens")
    told = post(server, {"model": "tiny", "messages": [said("A?", part(noise(1)), "B?")]}, "/tokenize")
    assert counted.json()["input_tokens"] == told.json()["count"]
    file = {"type": "input_file", "filename": "a.png", "file_data": data}
    shown = {"type": "input_image", "image_url": url_of(encoded(noise(1)))}
    asked = [{"model": "tiny", "input": [{"role": "user", "content": [p, shown]}]} for p in (file, shown)]
    first, second = (post(server, one, "/v1/responses/input_tokens").json()["input_tokens"] for one in asked)
    assert first == second > 100
    wrong = base64.b64encode(b"no image").decode()
    block = {"type": "image", "source": {**source, "data": wrong}}
    for route, refused, where in (
        ("/api/chat", {**settings, "messages": [message | {"images": [data, wrong]}]}, "messages[0].images[1]"),
        ("/api/generate", {**settings, "prompt": "A?", "images": [wrong]}, "images[0]"),
        (
            "/v1/messages",
            {**given, "messages": [{"role": "user", "content": [*blocks, block]}]},
            "messages[0].content[2].source.data",
        ),
        (
            "/v1/responses",
            {"model": "tiny", "input": [{"role": "user", "content": [file | {"file_data": wrong}]}]},
            "input[0].content[0].file_data",
        ),
    ):
        told = post(server, refused, route)
        assert told.status_code == 400, told.text
        assert f"{where} is no PNG, JPEG, WebP or GIF image" in told.text
    for refused in (
        post(server, {**settings, "messages": [message | {"images": [7]}]}, "/api/chat"),
        post(server, {**given, "messages": [{"role": "user", "content": [{"type": "image"}]}]}, "/v1/messages"),
        post(server, {**settings, "messages": [message | {"images": ["bad"]}]}, "/api/chat"),
        post(server, {**settings, "prompt": "A?", "raw": True, "images": [data]}, "/api/generate"),
    ):
        assert refused.status_code == 400, refused.text


@pytest.mark.sweep
@pytest.mark.parametrize("name", list(KINDS))
def test_every_kind_of_encoder(name: str, tmp_path: Path) -> None:
    reference = write_seeing(tmp_path, name)
    kind, images = KINDS[name], [noise(1), noise(2, 40, 24)]
    text = f"user:{kind.marks[0]}What is this? {kind.marks[0]}"
    _, wanted, _ = seen(reference, seeing_processor(tmp_path, name), text, images, COUNT, kind.first)
    with closing(Server(tmp_path, "--dtype", "float32", "--load-format", "auto").start()) as server:
        answer = post(server, body(said(part(images[0]), "What is this? ", part(images[1]))))
    assert tokens(answer) == wanted
