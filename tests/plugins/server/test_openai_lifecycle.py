"""How requests end: errors before and after the first byte, disconnects, and OpenAI's own client over sockets."""

import asyncio
import contextlib
import json

import pytest
from tests.helpers.lazy import lazy

from fwk.errors import EngineDead, RequestFailed
from fwk.interfaces.dialect import GenerateInput, openai_error
from fwk.types import SamplingParams
from fwk_server._common.chat.outputs import Usage, run
from fwk_server._common.replies import EventStream

openai = lazy("openai")

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
BODIES = {CHAT: {"messages": [{"role": "user", "content": "Hi"}]}, COMPLETIONS: {"prompt": "Hi"}}
ANY_INPUT = GenerateInput([1], SamplingParams())


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("error", "status"), [(EngineDead("the engine stopped"), 503), (RequestFailed("bad"), 500)])
async def test_errors_before_the_first_byte_have_a_status(api, frontend, path, stream, error, status):
    frontend.script = lambda item: [error]
    body = await api.refused(path, BODIES[path] | {"stream": stream}, status=status)
    assert (body["message"], body["type"]) == (str(error), "server_error")


@pytest.mark.parametrize("stream", ["chat_stream", "complete_stream"])
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (EngineDead("the engine stopped"), "the engine stopped"),
        (RequestFailed("bad"), "bad"),
        (ZeroDivisionError("/secret/path"), "internal server error"),
    ],
)
async def test_errors_after_the_first_byte_are_events(api, frontend, fake, stream, error, message):
    frontend.script = lambda item: [*fake.interleaved(fake.deltas_of(item, "ab")[:1]), error]
    *_, last = await getattr(api, stream)()
    assert last["error"]["message"] == message
    assert last["error"]["type"] == "server_error"


@pytest.mark.parametrize("finish", ["error", "abort"])
async def test_a_failed_sequence_fails_its_request(api, frontend, fake, finish):
    def script(item):
        good, bad = fake.deltas_of(item, "abc"), fake.deltas_of(item, "ab", index=1, finish=finish)
        bad[-1].error = "its own fault"
        return fake.interleaved(good, bad)

    frontend.script = script
    assert (await api.refused(CHAT, BODIES[CHAT] | {"n": 2}, status=500))["message"] == "its own fault"
    chunks = await api.chat_stream(n=2)
    assert chunks[-1]["error"]["message"] == "its own fault"
    assert frontend.num_aborted == 2  # what was left of both requests


async def test_an_end_without_a_result_is_an_error(api, frontend, fake):
    frontend.script = lambda item: fake.interleaved(fake.deltas_of(item, "abc")[:2])
    await api.refused(CHAT, BODIES[CHAT], status=500)
    assert "error" in (await api.chat_stream())[-1]


async def test_one_failing_prompt_ends_the_others(api, frontend, fake):
    def script(item):
        if item.prompt_token_ids[-1] == ord("b"):
            return [0.02, RequestFailed("b failed")]
        return [10.0]

    frontend.script = script
    error = await api.refused(COMPLETIONS, {"prompt": ["a", "b", "c"]}, status=500)
    assert error["message"] == "b failed"
    assert frontend.num_aborted == 2


async def until(condition):
    """Wait for ``condition``; the test's own clock is the limit."""
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


async def open_request(base_url, path, body):
    """A request sent over a raw socket; the reply is left unread."""
    host, port = base_url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    writer.write(head.encode() + data)
    await writer.drain()
    return reader, writer


@pytest.mark.gate(4)
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["before a token", "between tokens"])
async def test_a_disconnect_aborts_at_once(base_url, frontend, fake, path, stream, when):
    first = [] if when == "before a token" else fake.interleaved(fake.deltas_of(ANY_INPUT, "ab")[:1])
    frontend.script = lambda item: [*first, 30.0]
    _, writer = await open_request(base_url, path, BODIES[path] | {"stream": stream})
    await until(lambda: frontend.items)
    await asyncio.sleep(0.02)
    assert frontend.num_aborted == 0
    writer.transport.abort()
    start = asyncio.get_running_loop().time()
    await until(lambda: frontend.num_aborted == 1)
    assert asyncio.get_running_loop().time() - start < 10


async def test_a_stream_is_closed_before_its_response_ends():
    """Whatever ends it: the client, an error, or its own end."""

    async def events(steps):
        try:
            for step in steps:
                yield step
        finally:
            closed.append(True)

    async def gone():
        await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    async def present():
        await asyncio.sleep(10)

    async def stuck(message):
        if message["type"] == "http.response.body":
            await asyncio.sleep(10)

    async def broken(message):
        raise OSError("the socket is gone")

    async def fine(message):
        pass

    for receive, send in ((gone, stuck), (present, broken), (present, fine)):
        closed = []
        source = events([b"a", b"b"])  # held here, so that only closing it ends it
        with contextlib.suppress(OSError):
            await EventStream(source, openai_error)({"type": "http"}, receive, send)
        assert closed == [True]


@pytest.mark.parametrize("num_prompts", [1, 3])
async def test_closing_the_outputs_aborts_at_once(frontend, fake, num_prompts):
    frontend.script = lambda item: [*fake.interleaved(fake.deltas_of(item, "ab")[:1]), 30.0]
    items = [ANY_INPUT] * num_prompts
    steps = run(frontend, items, Usage(items))
    await anext(steps)
    await steps.aclose()
    assert frontend.num_aborted == num_prompts


async def test_a_disconnect_aborts_every_prompt(base_url, frontend):
    frontend.script = lambda item: [30.0]
    _, writer = await open_request(base_url, COMPLETIONS, {"prompt": ["a", "b", "c"], "stream": True})
    await until(lambda: len(frontend.items) == 3)
    writer.close()
    await until(lambda: frontend.num_aborted == 3)


async def test_a_client_that_does_not_read_is_aborted_when_it_goes(base_url, frontend, fake):
    """The stream is stuck in a send, not in the engine."""
    big = fake.deltas_of(ANY_INPUT, "ab")[0]
    big.text = "x" * 100_000
    frontend.script = lambda item: [[big]] * 1_000
    _, writer = await open_request(base_url, CHAT, BODIES[CHAT] | {"stream": True})
    await until(lambda: frontend.items)
    await asyncio.sleep(0.2)
    assert frontend.num_finished == 0
    writer.transport.abort()
    await until(lambda: frontend.num_aborted == 1)


async def test_a_body_cut_short_starts_nothing(base_url, frontend):
    host, port = base_url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n")
    writer.write(b'content-length: 1000\r\n\r\n{"prompt": "Hi"')
    await writer.drain()
    await asyncio.sleep(0.05)
    writer.transport.abort()
    await asyncio.sleep(0.05)
    assert frontend.items == []


async def test_events_arrive_one_by_one(base_url, frontend, fake):
    frontend.script = lambda item: [*fake.interleaved(fake.deltas_of(item, "ab")[:1]), 30.0]
    reader, writer = await open_request(base_url, CHAT, BODIES[CHAT] | {"stream": True})
    async with asyncio.timeout(5):
        received = b""
        while b'"content":"a"' not in received:
            received += await reader.read(65536)
    headers = received.partition(b"\r\n\r\n")[0].lower()
    assert b"cache-control: no-cache" in headers
    assert b"x-accel-buffering: no" in headers
    writer.transport.abort()
    await until(lambda: frontend.num_aborted == 1)


@pytest.fixture
async def sdk(base_url):
    async with openai.AsyncOpenAI(
        base_url=f"{base_url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


async def test_the_sdk_reads_everything(sdk):
    message = {"role": "user", "content": "Hi"}
    reply = await sdk.chat.completions.create(model="tiny", messages=[message], logprobs=True, top_logprobs=1)
    assert reply.choices[0].message.content == "Grüße 0 🙂!"
    assert reply.choices[0].stop_reason is None
    stream = await sdk.chat.completions.create(
        model="tiny", messages=[message], n=2, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].usage.total_tokens == chunks[-1].usage.prompt_tokens + 30
    completion = await sdk.completions.create(model="tiny", prompt=["a", "b"], n=2, logprobs=1, max_tokens=64)
    assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
    assert [model.id async for model in await sdk.models.list()] == ["tiny"]
    assert (await sdk.models.retrieve("tiny")).id == "tiny"


async def test_the_sdk_streams_completions(base_url):
    # Not strict: a null finish_reason before the last chunk is OpenAI's own practice, but not in its types.
    async with openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none") as sdk:
        stream = await sdk.completions.create(model="tiny", prompt="Hi", stream=True, max_tokens=64)
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Grüße 0 🙂!"
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop"


async def test_the_sdk_raises_the_right_errors(sdk, frontend):
    message = {"role": "user", "content": "Hi"}
    with pytest.raises(openai.BadRequestError) as wrong:
        await sdk.chat.completions.create(model="tiny", messages=[message], temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as unknown:
        await sdk.chat.completions.create(model="other", messages=[message])
    assert unknown.value.code == "model_not_found"
    frontend.script = lambda item: [EngineDead("gone")]
    with pytest.raises(openai.InternalServerError):
        await sdk.chat.completions.create(model="tiny", messages=[message])


async def test_the_sdk_raises_an_error_in_a_stream(sdk, frontend, fake):
    frontend.script = lambda item: [*fake.interleaved(fake.deltas_of(item, "ab")[:1]), EngineDead("gone")]
    stream = await sdk.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hi"}], stream=True)
    with pytest.raises(openai.APIError, match="gone"):
        [chunk async for chunk in stream]
