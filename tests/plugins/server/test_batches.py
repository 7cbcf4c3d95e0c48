"""Files and batches, asked by OpenAI's own Python client and checked against its types."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.helpers.lazy import lazy

from fwk.errors import EngineDead
from fwk.interfaces.dialect import DialectContext
from fwk.interfaces.lifecycle import PluginLifecycle, Stage
from fwk_server._common import batches
from fwk_server.openai import OpenAIOptions
from fwk_server.openai.dialect import OpenAIDialect

openai = lazy("openai")
openai_types = lazy("openai.types")

CHAT = "/v1/chat/completions"


@pytest.fixture
def options(tmp_path: Path) -> OpenAIOptions:
    return OpenAIOptions(files_dir=str(tmp_path), max_files_bytes=10_000, batch_concurrency=2)


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


@pytest.mark.parametrize(
    ("lines", "said", "at"),
    [
        ([""], "no lines", None),
        (["{"], "not JSON", 1),
        (["[]"], "must be a JSON object", 1),
        ([line("a"), line("a")], "twice", 2),
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
        await sdk.files.create(file=("x", b"x" * 10_001), purpose="batch")
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


async def test_nothing_is_left_when_the_server_ends(frontend, options, tmp_path: Path) -> None:
    lifecycle = PluginLifecycle()
    dialect = OpenAIDialect(DialectContext(frontend, options, lifecycle))
    path = dialect._files.new_path()
    path.write_bytes(b"x")
    dialect._files.add(path, "x", "batch", "")
    assert list(tmp_path.iterdir())
    for call in lifecycle.calls[Stage.CLOSE]:
        await call()
    assert not list(tmp_path.iterdir())
