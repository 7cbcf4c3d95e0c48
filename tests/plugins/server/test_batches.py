"""Files and batches, asked by OpenAI's own Python client and checked against its types."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.helpers.keeping_server import KeepingServer
from tests.helpers.lazy import lazy

from fwk.errors import EngineDead, PluginLoadError
from fwk.interfaces.dialect import DialectContext
from fwk.interfaces.lifecycle import PluginLifecycle, Stage
from fwk_server._common import batches, records
from fwk_server.openai import OpenAIOptions
from fwk_server.openai.dialect import OpenAIDialect

openai = lazy("openai")
openai_types = lazy("openai.types")

CHAT = "/v1/chat/completions"


@pytest.fixture
def options() -> OpenAIOptions:
    return OpenAIOptions(max_files_bytes=20_000, batch_concurrency=2)


@pytest.fixture
def dialect(frontend, options) -> OpenAIDialect:
    return OpenAIDialect(DialectContext(frontend, options))


def line(name: str, url: str = CHAT, **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": name}], "max_tokens": 8} | fields
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


async def upload(sdk, *lines: dict[str, Any] | str) -> openai_types.FileObject:
    text = "\n".join(item if isinstance(item, str) else json.dumps(item) for item in lines)
    return await sdk.files.create(file=("in.jsonl", text.encode()), purpose="batch")


async def run(sdk, *lines: dict[str, Any] | str, endpoint: str = CHAT) -> openai_types.Batch:
    file = await upload(sdk, *lines)
    batch = await sdk.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")
    return await ended(sdk, batch.id)


async def ended(sdk, name: str) -> openai_types.Batch:
    async with asyncio.timeout(10):
        while True:
            batch = await sdk.batches.retrieve(name)
            if batch.status in ("completed", "failed", "cancelled"):
                return openai_types.Batch.model_validate(batch.model_dump(), strict=True)
            await asyncio.sleep(0.01)


async def lines_of(sdk, name: str | None) -> dict[str, Any]:
    content = (await sdk.files.content(name)).text
    return {found["custom_id"]: found for found in map(json.loads, content.splitlines())}


async def test_files(sdk) -> None:
    file = await upload(sdk, line("a"))
    openai_types.FileObject.model_validate(file.model_dump(by_alias=True), strict=True)
    assert (file.filename, file.purpose, file.status) == ("in.jsonl", "batch", "processed")
    assert json.loads((await sdk.files.content(file.id)).text) == line("a")
    other = await upload(sdk, line("b"))
    assert [found.id async for found in sdk.files.list(limit=1)] == [other.id, file.id], "the newest first, in pages"
    assert [one.id async for one in sdk.files.list(limit=1, order="asc", purpose="batch")] == [file.id, other.id]
    assert [one.id async for one in sdk.files.list(purpose="user_data")] == []
    assert (await sdk.files.retrieve(file.id)).bytes == file.bytes
    for client, name in ((sdk, "file-none"), (sdk.with_options(api_key="sk-other"), file.id)):
        with pytest.raises(openai.NotFoundError, match="there is no file"):
            await client.files.retrieve(name)
    await sdk.files.delete(file.id)
    with pytest.raises(openai.NotFoundError):
        await sdk.files.content(file.id)


async def test_a_batch(sdk, frontend) -> None:
    batch = await run(sdk, *(line(f"q{i}") for i in range(5)), line("wrong", temperature=-7, n=0))
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 6, "completed": 5, "failed": 1}
    good, bad = await lines_of(sdk, batch.output_file_id), await lines_of(sdk, batch.error_file_id)
    assert set(good) == {f"q{i}" for i in range(5)}
    for found in good.values():
        assert found["response"]["status_code"] == 200
        openai.types.chat.ChatCompletion.model_validate(found["response"]["body"], strict=True)
    assert bad["wrong"]["response"]["status_code"] == 400
    assert bad["wrong"]["response"]["body"]["error"]["param"]
    assert [found.id async for found in sdk.batches.list()] == [batch.id]
    with pytest.raises(openai.NotFoundError):
        await sdk.with_options(api_key="sk-other").batches.retrieve(batch.id)


async def test_a_line_that_no_request_can_hold_fails_alone(sdk) -> None:
    def wrong(name: str, members: str) -> str:
        return json.dumps(line(name)).replace('"body": {', f'"body": {{{members}, ', 1)

    deep = {f"{depth} deep": wrong(f"{depth} deep", f'"x": {"[" * depth}{"]" * depth}') for depth in (200, 260, 1000)}
    batch = await run(sdk, line("a"), *deep.values(), wrong("twice", '"temperature": 1, "temperature": 2'), line("b"))
    assert batch.status == "completed"
    good, bad = await lines_of(sdk, batch.output_file_id), await lines_of(sdk, batch.error_file_id)
    assert set(good) == {"a", "b"}
    told = {name: found["response"]["body"]["error"]["message"] for name, found in bad.items()}
    assert all("nested more than 128 levels deep" in told.pop(name) for name in deep)
    assert told == {"twice": "the key 'temperature' is given twice"}


async def test_a_batch_that_cannot_go_on_says_so(sdk, monkeypatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(batches._Results, "write", full)
    batch = await run(sdk, line("a"))
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert "OSError" in str(batch.errors.data[0].message)


async def test_completions_too(sdk) -> None:
    batch = await run(sdk, line("a", "/v1/completions", prompt="x"), endpoint="/v1/completions")
    assert (await lines_of(sdk, batch.output_file_id))["a"]["response"]["body"]["object"] == "text_completion"


@pytest.mark.sweep
async def test_what_the_server_cannot_take_now_is_tried_again(sdk, frontend, monkeypatch) -> None:
    monkeypatch.setattr(batches, "PATIENCE", (0.01,) * 4)
    check, failures = frontend.check, [EngineDead("the engine is started again")] * 3

    def fails(item):
        if failures:
            raise failures.pop()
        return check(item)

    frontend.check = fails
    batch = await run(sdk, line("a"))
    assert batch.request_counts is not None
    assert (batch.request_counts.completed, failures) == (1, [])
    failures += [EngineDead("it stays dead")] * 9
    batch = await run(sdk, line("b"))
    assert (await lines_of(sdk, batch.error_file_id))["b"]["response"]["status_code"] == 503


async def test_cancelling_keeps_what_there_is(sdk, frontend) -> None:
    generate, go = frontend.generate, asyncio.Event()

    async def waits(item):
        if len(frontend.items) > 2:
            await go.wait()
        async for deltas in generate(item):
            yield deltas

    frontend.generate = waits
    file = await upload(sdk, *(line(f"q{i}") for i in range(8)))
    batch = await sdk.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    async with asyncio.timeout(10):
        while not (found := await sdk.batches.retrieve(batch.id)).request_counts.completed:
            await asyncio.sleep(0.01)
    assert found.status == "in_progress"
    stopped = await sdk.batches.cancel(batch.id)
    assert stopped.status == "cancelled"
    assert stopped.request_counts is not None
    assert 0 < stopped.request_counts.completed < 8
    assert len(await lines_of(sdk, stopped.output_file_id)) == stopped.request_counts.completed
    assert (await sdk.batches.cancel(batch.id)).status == "cancelled", "once more changes nothing"


@pytest.mark.gate(3)
@pytest.mark.parametrize(
    ("lines", "said", "at"),
    [
        ([""], "no lines", None),
        (["{"], "not JSON", 1),
        (["[]"], "must be a JSON object", 1),
        ([line("a") | {"method": "GET"}], "method must be POST", 1),
        ([line("a", "/v1/embeddings")], "url must be /v1/chat/completions", 1),
        ([line("a") | {"body": 3}], "body must be an object", 1),
        ([line("a", stream=True)], "not streamed", 1),
        ([line("a") | {"custom_id": 3}], "custom_id must be a string", 1),
    ],
)
async def test_files_that_are_no_batch(sdk, frontend, lines, said, at) -> None:
    batch = await run(sdk, *lines)
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data is not None
    [error] = batch.errors.data
    assert said in (error.message or "")
    assert error.line == at
    assert not frontend.items


async def test_what_is_refused(sdk, base_url) -> None:
    with pytest.raises(openai.BadRequestError, match="purpose must be batch"):
        await sdk.files.create(file=("x", b"x"), purpose="assistants")
    with pytest.raises(openai.BadRequestError, match="--max-files-bytes"):
        await sdk.files.create(file=("x", b"x" * 20_001), purpose="batch")
    file = await upload(sdk, line("a"))
    with pytest.raises(openai.BadRequestError, match="endpoint"):
        await sdk.batches.create(input_file_id=file.id, endpoint="/v1/responses", completion_window="24h")
    with pytest.raises(openai.BadRequestError, match="completion_window"):
        await sdk.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="1h")
    with pytest.raises(openai.NotFoundError, match="there is no file"):
        await sdk.batches.create(input_file_id="file-none", endpoint=CHAT, completion_window="24h")
    async with httpx.AsyncClient(base_url=base_url) as http:
        assert (await http.post("/v1/files", json={})).status_code == 415
        assert (await http.post("/v1/files", data={"purpose": "batch"}, files={})).status_code in (400, 415)
        assert (await http.get("/v1/files?limit=0")).status_code == 400
        assert (await http.get("/v1/files?order=up")).json()["error"]["param"] == "order"


async def test_a_bad_line_fails_alone(sdk) -> None:
    twice = json.dumps(line("twice")).replace('"method"', '"custom_id": "x", "method"', 1)
    lines = [line("a"), "{", line("a"), line("b", stream=True), twice, line("c")]
    batch = await run(sdk, *lines)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 6, "completed": 2, "failed": 4}
    assert batch.errors is not None
    assert batch.errors.data is not None
    said = {error.line: error.message or "" for error in batch.errors.data}
    words = {2: "not JSON", 3: "'a' is there twice", 4: "not streamed", 5: "the key 'custom_id' is given twice"}
    assert said.keys() == words.keys()
    assert all(words[number] in said[number] for number in said)
    content = (await sdk.files.content(batch.error_file_id)).text.splitlines()
    assert [json.loads(told)["error"]["message"] for told in content] == list(said.values())
    assert set(await lines_of(sdk, batch.output_file_id)) == {"a", "c"}


@pytest.mark.sweep
async def test_results_without_room_end_a_batch(sdk, dialect) -> None:
    file = await upload(sdk, *(line(f"q{i}") for i in range(9)))
    dialect._files.take(20_000 - file.bytes - 2_000)
    batch = await sdk.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    found = await ended(sdk, batch.id)
    assert found.status == "failed"
    assert found.errors is not None
    assert "--max-files-bytes" in str(found.errors.data)
    assert 0 < len(await lines_of(sdk, found.output_file_id)) < 9, "what was answered stays"


FORM = (
    b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
)


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (FORM + b"x" * 100, "last boundary"),
        (b"nonsense", "cannot be read"),
        (FORM + b"x\r\n" + FORM[FORM.index(b"--b", 3) :] + b"x\r\n--b--\r\n", "given twice"),
        (FORM.replace(b"batch", b"b" * 2_000) + b"x\r\n--b--\r\n", "1024 characters"),
        (FORM.replace(b"purpose", b"other") + b"x\r\n--b--\r\n", "purpose must be batch"),
        (FORM + b"x" * 30_000 + b"\r\n--b--\r\n", "--max-files-bytes"),
        (b"--b\r\nx: " + b"y" * 4_200 + b"\r\n" + FORM[5:] + b"x\r\n--b--\r\n", "header"),
        (b"--b\r\n" + b"x: y\r\n" * 2_000 + FORM[5:] + b"x\r\n--b--\r\n", "header"),
    ],
)
async def test_forms_that_are_none_leave_nothing(client, dialect, form: bytes, said: str) -> None:
    headers = {"content-type": "multipart/form-data; boundary=b"}
    refused = await client.post("/v1/files", content=form, headers=headers)
    assert (refused.status_code, said in refused.text) == (400, True), refused.text
    assert not list(dialect._files.records.folder.iterdir())
    assert dialect._files._num_bytes == 0


def served(frontend, folder: Path) -> KeepingServer:
    options = OpenAIOptions(files_dir=str(folder), max_files_bytes=100_000, batch_concurrency=2)
    return KeepingServer(OpenAIDialect, frontend, options)


async def test_what_a_dead_server_kept_goes_on(frontend, tmp_path: Path) -> None:
    generate, go = frontend.generate, asyncio.Event()

    async def waits(item):
        if len(frontend.items) > 3:
            await go.wait()
        async for deltas in generate(item):
            yield deltas

    frontend.generate = waits
    first = served(frontend, tmp_path)
    http = await first.start()
    kept = (await http.post(CHAT, json=line("kept")["body"] | {"store": True, "metadata": {"a": "b"}})).json()
    data = "\n".join(json.dumps(line(f"q{i}")) for i in range(8)) + "\n{"
    file = (await http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", data)})).json()
    asked = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
    batch = (await http.post("/v1/batches", json=asked)).json()
    at = f"/v1/batches/{batch['id']}"
    async with asyncio.timeout(10):
        while (await http.get(at)).json()["request_counts"]["completed"] < 2:
            await asyncio.sleep(0.01)
    second = served(frontend, tmp_path)
    waiting = await second.start()
    assert (await waiting.get(at)).status_code == 503, "another server has the folder"
    await first.die()
    [output] = tmp_path.glob("*/batch_*_output")
    with output.open("ab") as torn:
        torn.write(b'{"id": "batch_req_7_')
    (output.parent / "left").write_bytes(b"half an upload")
    go.set()
    await asyncio.sleep(records.SECONDS + 0.2)
    async with asyncio.timeout(10):
        while (found := (await waiting.get(at)).json())["status"] != "completed":
            await asyncio.sleep(0.01)
    assert (found["created_at"], found["expires_at"]) == (batch["created_at"], batch["expires_at"])
    assert found["request_counts"] == {"total": 9, "completed": 8, "failed": 1}
    answered = (await waiting.get(f"/v1/files/{found['output_file_id']}/content")).text.splitlines()
    assert sorted(json.loads(told)["custom_id"] for told in answered) == [f"q{i}" for i in range(8)], "each once"
    assert (await waiting.get(f"{CHAT}/{kept['id']}")).json()["metadata"] == {"a": "b"}
    sizes = [stored["bytes"] for stored in (await waiting.get("/v1/files")).json()["data"]]
    assert (len(sizes), second.dialect._files._num_bytes) == (3, sum(sizes))
    assert not (output.parent / "left").exists()
    await second.lifecycles.end()
    third = served(frontend, tmp_path)
    assert (await (await third.start()).get(at)).json() == found, "one that has ended is told as it was"
    await third.lifecycles.end()


async def test_nothing_is_kept_before_the_engines_serve(frontend, tmp_path: Path) -> None:
    """What is accepted then would be taken over as what an earlier server kept, and run twice."""
    server = served(frontend, tmp_path)
    await server.begin()
    data = json.dumps(line("q"))
    form: dict[str, Any] = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", data)}}
    early = await server.http.post("/v1/files", **form)
    assert (early.status_code, early.headers["retry-after"]) == (503, "1")
    assert "starting" in early.text
    await server.lifecycles.ready()
    file = (await server.http.post("/v1/files", **form)).json()
    asked = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
    assert (await server.http.post("/v1/batches", json=asked)).status_code == 200
    await server.lifecycles.end()


@pytest.mark.sweep
async def test_an_expired_batch_does_not_go_on(frontend, tmp_path: Path, monkeypatch) -> None:
    generate = frontend.generate
    frontend.generate = lambda item: _never()
    first = served(frontend, tmp_path)
    http = await first.start()
    files = {"file": ("in.jsonl", json.dumps(line("a")))}
    file = (await http.post("/v1/files", data={"purpose": "batch"}, files=files)).json()
    monkeypatch.setattr(batches, "SECONDS", 1)
    asked = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
    batch = (await http.post("/v1/batches", json=asked)).json()
    await asyncio.sleep(0.1)
    await first.die()
    await asyncio.sleep(1)
    frontend.generate = generate
    second = served(frontend, tmp_path)
    http = await second.start()
    await asyncio.sleep(0.2)
    assert (await http.get(f"/v1/batches/{batch['id']}")).json()["status"] == "expired"
    await second.lifecycles.end()


async def _never() -> AsyncIterator[Any]:
    await asyncio.Event().wait()
    yield []


async def test_a_folder_that_cannot_be_read_stops_the_start(frontend, tmp_path: Path) -> None:
    server = served(frontend, tmp_path)
    [folder] = tmp_path.iterdir()
    (folder / "records.sqlite").write_bytes(b"no database" * 1000)
    with pytest.raises(PluginLoadError, match="--files-dir"):
        await server.start()


async def test_nothing_is_left_when_the_server_ends(frontend, options) -> None:
    lifecycle = PluginLifecycle()
    dialect = OpenAIDialect(DialectContext(frontend, options, lifecycle))
    path = dialect._files.new_path()
    path.write_bytes(b"x")
    dialect._files.add(path, "x", "batch", "")
    for call in lifecycle.calls[Stage.CLOSE]:
        await call()
    assert not path.parent.exists()
