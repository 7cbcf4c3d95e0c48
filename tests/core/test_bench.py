"""`fwk bench`: the loads are what they say, and the figures are those of a server that is known to the millisecond."""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import xml.etree.ElementTree as ElementTree
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from fwk.cli.main import main
from fwk.errors import ConfigError
from fwk_kit.bench import report
from fwk_kit.bench.load import Reply, run, served_model
from fwk_kit.bench.servers import counters, fingerprint, free_port, of_fwk, parse
from fwk_kit.bench.summary import Drafting, Goals, percentile, summarise
from fwk_kit.bench.vllm_result import vllm_result
from fwk_kit.bench.workload import WORDS, WORKLOADS, Maker, Workload, changed

STEP = 0.02


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A token a word."""
    words = {word: index for index, word in enumerate(["?", "a", *WORDS])}
    made = Tokenizer(WordLevel(words, unk_token="?"))
    made.pre_tokenizer = WhitespaceSplit()
    return made


class FakeServer:
    """Answers each completion with one token every ``STEP`` seconds; refuses every ``refuses``-th."""

    def __init__(self, refuses: int = 0) -> None:
        self._refuses = refuses
        self._numbers = itertools.count(1)
        self.bodies: list[dict[str, Any]] = []
        self.under_way = 0
        self.most_under_way = 0

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self._refuses and next(self._numbers) % self._refuses == 0:
            return web.json_response({"error": {"message": "too many"}}, status=429)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(body["max_tokens"]):
            await asyncio.sleep(STEP)
            await response.write(b'data: {"choices": [{"text": "x"}]}\n\n')
        usage = {"prompt_tokens": 5, "completion_tokens": body["max_tokens"]}
        await response.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode())
        self.under_way -= 1
        return response

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake"}]})


@asynccontextmanager
async def serving(
    server: FakeServer, plugins: str | None = None, body: str | None = None, metrics: str | None = None
) -> AsyncIterator[str]:
    """plugins: the fingerprint it tells. body: what /server_info answers instead. metrics: a page of them."""
    app = web.Application()
    if metrics is not None:

        async def page(_: web.Request) -> web.Response:
            return web.Response(text=metrics)

        app.router.add_get("/metrics", page)
    if plugins is not None or body is not None:
        text = json.dumps({"fingerprint": plugins}) if body is None else body

        async def info(_: web.Request) -> web.Response:
            return web.Response(text=text)

        app.router.add_get("/server_info", info)
    app.router.add_post("/v1/completions", server.complete)
    app.router.add_get("/v1/models", server.models)
    runner = web.AppRunner(app)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


def test_prompts_have_the_lengths_they_are_said_to_have(tokenizer: Tokenizer) -> None:
    maker = Maker(tokenizer, "m")
    workload = changed(WORKLOADS["random"], num_requests=20, input_len=40, output_len=30, spread=0.5)
    asked = maker.requests(workload)
    lengths = [len(tokenizer.encode(item.body["prompt"], add_special_tokens=False).ids) for item in asked]
    assert lengths == [item.input_len for item in asked]
    assert 20 <= min(lengths) < max(lengths) <= 40
    assert all(15 <= item.output_len <= 30 and item.body["max_tokens"] == item.output_len for item in asked)


def test_the_same_seed_asks_the_same_and_another_repeat_shares_nothing(tokenizer: Tokenizer) -> None:
    workload = changed(WORKLOADS["shared-prefix"], num_requests=4, prefix_len=64, input_len=16)
    first, again, other = (Maker(tokenizer, "m").requests(workload, repeat) for repeat in (0, 0, 1))
    assert first == again
    prompts = [item.body["prompt"] for item in first]
    assert len(set(prompts)) == 4
    assert len({prompt[:64] for prompt in prompts}) == 1
    assert prompts[0][:32] != other[0].body["prompt"][:32]


def test_poisson_arrivals_have_the_rate_and_its_spread(tokenizer: Tokenizer) -> None:
    workload = Workload("w", num_requests=2000, rate=50.0, input_len=1, output_len=1)
    at = [item.at for item in Maker(tokenizer, "m").requests(workload)]
    gaps = np.diff([0.0, *at])
    assert gaps.min() > 0
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.1)
    assert gaps.std() == pytest.approx(1 / 50, rel=0.15)  # exponential: as large as the mean


@pytest.mark.sweep
def test_conversations_are_long_tailed_with_the_published_means(tokenizer: Tokenizer) -> None:
    workload = changed(WORKLOADS["sharegpt"], num_requests=1500)
    asked = Maker(tokenizer, "m").requests(workload)
    outputs = [item.output_len for item in asked]
    assert statistics.mean(outputs) == pytest.approx(338, rel=0.1)
    assert statistics.median(outputs) < 0.75 * statistics.mean(outputs)


def test_a_dataset_gives_questions_and_lengths(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "sharegpt.json"
    file.write_text(json.dumps([{"conversations": [{"value": "a river"}, {"value": "stone light garden"}]}]))
    asked = Maker(tokenizer, "m").requests(changed(WORKLOADS["random"], num_requests=3), dataset=file)
    assert [item.body["prompt"] for item in asked] == ["a river"] * 3
    assert asked[0].output_len == len(tokenizer.encode("stone light garden", add_special_tokens=False).ids)
    file.write_text("[]")
    with pytest.raises(ConfigError, match="holds no conversation"):
        Maker(tokenizer, "m").requests(WORKLOADS["random"], dataset=file)
    file.write_text('[{"text": "x"}]')
    with pytest.raises(ConfigError, match="not in ShareGPT's form"):
        Maker(tokenizer, "m").requests(WORKLOADS["random"], dataset=file)


async def test_a_closed_loop_keeps_its_concurrency_and_counts_what_came(tokenizer: Tokenizer) -> None:
    workload = Workload("w", num_requests=9, concurrency=3, input_len=5, output_len=4)
    server = FakeServer()
    async with serving(server) as url:
        assert await served_model(url) == "fake"
        replies, seconds = await run(url, workload, Maker(tokenizer, "fake").requests(workload))
    summary = summarise("w", replies, seconds)
    assert (summary.num_failed, summary.output_tokens, summary.input_tokens) == (0, 36, 45)
    assert server.most_under_way == 3
    assert all(body["ignore_eos"] and body["stream"] and body["model"] == "fake" for body in server.bodies)
    # Three waves of four steps; a busy machine may only make it longer.
    assert summary.output_rate <= 36 / (12 * STEP)
    assert summary.ttft["p50"] >= 1e3 * STEP * 0.9
    assert summary.tpot["p50"] >= 1e3 * STEP * 0.9
    assert summary.latency["p50"] >= summary.ttft["p50"] + 3 * summary.tpot["p50"] * 0.9


async def test_an_open_loop_does_not_wait_for_answers(tokenizer: Tokenizer) -> None:
    workload = Workload("w", num_requests=12, concurrency=1, rate=400.0, input_len=5, output_len=10)
    server = FakeServer()
    async with serving(server) as url:
        await run(url, workload, Maker(tokenizer, "fake").requests(workload))
    assert server.most_under_way > 1


async def test_refused_requests_are_counted_and_shown(tokenizer: Tokenizer) -> None:
    workload = Workload("w", num_requests=6, concurrency=2, input_len=5, output_len=2)
    async with serving(FakeServer(refuses=3)) as url:
        replies, seconds = await run(url, workload, Maker(tokenizer, "fake").requests(workload))
    summary = summarise("w", replies, seconds)
    assert (summary.num_failed, summary.output_tokens) == (2, 8)
    assert "429" in (summary.first_error or "")
    assert "2 failed" in report.table(summary)


def test_a_reply_that_broke_off_counts_in_no_other_figure() -> None:
    whole = Reply(ended=0.5, times=[0.1, 0.5], num_input=2, num_output=2)
    broken = Reply(ended=9.0, times=[5.0, 9.0], num_input=2, num_output=2, error="connection reset")
    both, one = summarise("w", [whole, broken], 1.0), summarise("w", [whole], 1.0)
    assert (both.num_failed, both.output_tokens, both.ttft, both.itl) == (1, 2, one.ttft, one.itl)


def test_percentiles_are_numpys() -> None:
    values = list(np.random.default_rng(3).exponential(size=77))
    for p in (0, 37, 50, 99, 100):
        assert percentile(values, p) == pytest.approx(np.percentile(values, p))


def test_goodput_counts_requests_that_meet_every_goal() -> None:
    fast = Reply(sent=0.0, ended=0.5, times=[0.1, 0.2, 0.3], num_output=3)
    slow_first = Reply(sent=0.0, ended=0.5, times=[0.4, 0.45, 0.5], num_output=3)
    slow_rest = Reply(sent=0.0, ended=1.5, times=[0.1, 0.8, 1.5], num_output=3)
    replies = [fast, slow_first, slow_rest]
    assert summarise("w", replies, 2.0, Goals(ttft=200, tpot=200)).goodput == 0.5
    assert summarise("w", replies, 2.0, Goals(ttft=200)).goodput == 1.0
    assert summarise("w", replies, 2.0).goodput is None


def test_ratios_say_how_many_times_better_the_first_is() -> None:
    quick = summarise("w", [Reply(sent=0.0, ended=1.0, times=[0.1, 0.2], num_output=2)], 1.0)
    slow = summarise("w", [Reply(sent=0.0, ended=2.0, times=[0.2, 0.4], num_output=2)], 2.0)
    table = report.comparison({"a": [quick, quick], "b": [slow, slow]})
    rows = {line.split(" | ")[0].strip("| "): line for line in table.splitlines()}
    assert rows["output tokens/s"].endswith("| 2.0 | 1.0 | 2.00 (2.00 to 2.00) |")
    assert rows["TTFT p50 ms"].endswith("| 100.0 | 200.0 | 2.00 (2.00 to 2.00) |")


def test_the_picture_is_svg_and_escapes_names() -> None:
    quick = summarise("w", [Reply(sent=0.0, ended=1.0, times=[0.1, 0.2], num_output=2)], 1.0)
    root = ElementTree.fromstring(report.picture("a < b", {"<x>": [quick], "y": [quick]}))
    assert root.tag.endswith("svg")
    assert "<x>" in [element.text for element in root.iter()]


@pytest.mark.gate(5)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing"], "unknown command of fwk bench 'nothing'; commands: serve, "),
        (["serv"], "did you mean 'serve'?"),
        (["compare", "--server", "a=http://x"], "a comparison needs two"),
        (["compare", "--server", "a=python x", "--server", "b=http://x"], "must say where its port goes"),
        (["compare", "--server", "a=fwk serve --port 3", "--server", "b=http://x"], "must leave --port out"),
        (["serve", "--slo", "ttft=fast"], "--slo takes NAME=MILLISECONDS"),
        (["serve", "--slo", "speed=3"], "--slo knows ttft, tpot, latency"),
        (["serve", "--num-requests", "0"], "--num-requests 0 is too small"),
        (["serve", "--spread", "1.5"], "--spread 1.5 is above 1"),
        (["latency", "--output-len", "1"], "--output-len 1 is too small"),
    ],
)
def test_wrong_words_are_one_line_errors(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) in (1, 2)
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_a_tokenizer_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "serve", "--tokenizer", "/no/such/file"])
    assert ended.value.code == 2
    assert "argument --tokenizer: cannot read '/no/such/file': No such file" in capsys.readouterr().err


def test_a_command_that_does_not_come_up_is_told_with_its_last_words() -> None:
    server = parse("bad=bash -c 'echo the disk is full; exit 3' {port}")
    with pytest.raises(ConfigError, match="server bad ended before it was ready: the disk is full"), server.running(20):
        pass


@pytest.mark.gate(1)
@pytest.mark.parametrize("told", ["0123456789abcdef", None])
async def test_reports_say_which_plugins_a_server_had(tokenizer: Tokenizer, tmp_path: Path, told: str | None) -> None:
    """A server of another kind has no /server_info."""
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    words = ["--tokenizer", str(tmp_path / "tokenizer.json"), "--num-requests", "2", "--output-len", "2"]
    async with serving(FakeServer(), told) as url:
        of_one = ["bench", "serve", "--url", url, "--json", str(tmp_path / "one.json"), *words]
        of_one += ["--vllm-json", str(tmp_path / "vllm.json")]
        assert await asyncio.to_thread(main, of_one) == 0
        of_two = [
            "bench",
            "compare",
            "--server",
            f"a={url}",
            "--server",
            f"b={url}",
            "--json",
            str(tmp_path / "two.json"),
        ]
        assert await asyncio.to_thread(main, [*of_two, *words]) == 0
    assert json.loads((tmp_path / "one.json").read_text())["plugins"] == {"server": told}
    assert json.loads((tmp_path / "two.json").read_text())["plugins"] == {"a": told, "b": told}
    assert json.loads((tmp_path / "vllm.json").read_text())["completed"] == 2


def test_a_run_under_vllms_names() -> None:
    replies = [
        Reply(sent=1.0, ended=1.4, times=[1.1, 1.2, 1.4], num_input=5, num_output=3, text="abc"),
        Reply(sent=1.0, ended=2.0, times=[1.5], num_input=7, num_output=1, text="d"),
        Reply(sent=1.0, error="500: no"),
    ]
    told = vllm_result(Workload("random", concurrency=4), replies, 2.0, Goals(ttft=200), "tiny")
    assert (told["num_prompts"], told["completed"], told["failed"], told["max_concurrency"]) == (3, 2, 1, 4)
    assert (told["request_rate"], told["request_goodput"], told["output_throughput"]) == ("inf", 0.5, 2.0)
    assert (told["ttfts"], told["output_lens"]) == (pytest.approx([0.1, 0.5, 0.0]), [3, 1, 0])
    assert [len(gaps) for gaps in told["itls"]] == [2, 0, 0]
    assert told["errors"] == ["", "", "500: no"]
    assert (told["mean_ttft_ms"], told["mean_tpot_ms"], told["p50_itl_ms"]) == pytest.approx((300, 150, 150))
    assert (told["median_e2el_ms"], told["std_e2el_ms"]) == pytest.approx((700, 300))
    failed = vllm_result(Workload("random", rate=2.0), replies[2:], 2.0, Goals(), None)
    assert (failed["request_rate"], failed["max_concurrency"], failed["p99_ttft_ms"]) == (2.0, None, 0.0)


PAGE = """# TYPE fwk:num_drafts counter
fwk:num_drafts_total{{model_name="a"}} {steps}
fwk:num_drafts_total{{model_name="b"}} 0.0
fwk:num_draft_tokens_total{{model_name="a"}} {drafts}
fwk:num_accepted_draft_tokens_total{{model_name="a"}} {accepted}
fwk:num_accepted_tokens_per_pos_total{{model_name="a",position="0"}} {first}
fwk:num_accepted_tokens_per_pos_total{{model_name="a",position="1"}} {second}
fwk:draft_seconds_total{{model_name="a"}} {drafting}
fwk:verify_seconds_total{{model_name="a"}} 5e-1
fwk:num_requests_running{{model_name="a"}} 1.0
"""


async def test_drafts_are_told_by_the_servers_own_counters() -> None:
    values = {"steps": 4.0, "drafts": 20.0, "accepted": 6.0, "first": 4.0, "second": 2.0, "drafting": 0.25}
    async with serving(FakeServer(), metrics=PAGE.format(**values)) as url:
        before = await asyncio.to_thread(counters, url)
    later = {"steps": 14.0, "drafts": 60.0, "accepted": 21.0, "first": 12.0, "second": 9.0, "drafting": 1.25}
    async with serving(FakeServer(), metrics=PAGE.format(**later)) as url:
        after = await asyncio.to_thread(counters, url, "key")
    found = Drafting.between(before, after)
    assert found == Drafting(40, 2.5, (0.8, 0.7), 1.0, 0.0)
    told = report.table(replace(summarise("w", [Reply(times=[1.0], ended=1.0)], 4.0), drafting=found))
    assert (
        "drafts: 40 verified, 2.50 tokens a step; accepted by place 0.80 0.70; drafting 25%, verifying 0% of the time"
    ) in told
    assert Drafting.between(after, after) is None
    async with serving(FakeServer()) as url:
        assert await asyncio.to_thread(counters, url) == {}


@pytest.mark.parametrize("body", ["[]", "hello", '{"fingerprint": 3}'])
async def test_what_is_no_fingerprint_is_none(body: str) -> None:
    async with serving(FakeServer(), body=body) as url:
        assert await asyncio.to_thread(fingerprint, url, "key") is None


def test_a_server_that_is_gone_is_told(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tokenizer.json"
    tokenizer.save(str(file))
    url = f"http://127.0.0.1:{free_port()}"
    assert main(["bench", "serve", "--url", url, "--tokenizer", str(file)]) == ConfigError.exit_code
    assert "give --model" in capsys.readouterr().err


def test_a_server_that_is_measured_keeps_bytecode() -> None:
    assert of_fwk("a", []).environment["PYTHONDONTWRITEBYTECODE"] == ""
    assert of_fwk("a", [], {"PYTHONPATH": "x", "PYTHONDONTWRITEBYTECODE": "1"}).environment == {
        "PYTHONPATH": "x",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
