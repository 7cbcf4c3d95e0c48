"""``fwk bench``: measure servers, the engine alone, start-up, and the machine."""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fwk.cli.commands import overview
from fwk.cli.commands import run as run_command
from fwk.cli.common import note, read_options
from fwk.cli.option_parsing import Parser
from fwk.errors import ConfigError
from fwk.interfaces.command import Command
from fwk_kit.cli.output import input_file, output_file
from fwk_process.log import set_up_log

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from fwk_kit.bench.servers import Server
    from fwk_kit.bench.summary import Goals, Summary
    from fwk_kit.bench.workload import Maker, Workload
    from fwk_offline.llm import LLM

COMMANDS = {
    name: Command(summary, f"fwk_kit.cli.bench:{name}")
    for name, summary in {
        "serve": "load on a running OpenAI server: throughput, percentiles, goodput",
        "compare": "several servers, addresses or commits, interleaved, as ratios",
        "startup": "cold start and memory of fwk serve",
        "throughput": "the engine alone, no HTTP: everything at once",
        "latency": "the engine alone, one batch: first token and the ones after",
        "roofline": "this machine's bandwidth and matrix rate, and each phase's share of its bound",
    }.items()
}
END = (
    "'fwk bench COMMAND --help' explains a command. The commands that load servers need aiohttp "
    "(pip install 'fwk[bench]')."
)


def run(argv: Sequence[str]) -> int:
    """Run one of the benchmarks. Raises ``ConfigError`` for one that is unknown."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(
            overview("fwk bench", "Measure servers, the engine alone, start-up and this machine.", COMMANDS, END),
            end="",
        )
        return 0
    return run_command(argv[0], COMMANDS, argv[1:], "command of fwk bench")


def serve(argv: Sequence[str]) -> int:
    """Load one running server."""
    from fwk_kit.bench import report  # noqa: PLC0415 - every command imports what it needs
    from fwk_kit.bench.servers import Server, fingerprint  # noqa: PLC0415

    parser = _parser("serve", "Load a running OpenAI server and print throughput, percentiles and goodput.")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server's address (default: %(default)s)")
    _add_load_flags(parser)
    parser.add_argument(
        "--vllm-json",
        type=output_file,
        help="write the last run here as vllm bench serve --save-result --save-detailed does",
    )
    arguments = parser.parse_args(argv)
    workload, maker, goals = _workload(arguments), _maker(arguments), _goals(arguments)
    server = Server("server", url=arguments.url)
    with server.running() as running:
        _warm_up(running.url, maker, arguments)
        runs = [_measure(running.url, workload, maker, goals, arguments, i) for i in range(arguments.repeat)]
        plugins = fingerprint(running.url, arguments.api_key)
    for summary in runs:
        print(report.table(summary), end="\n\n")
    print(f"plugins: {plugins or 'not told'}")
    _write(arguments, argv, {"server": runs}, {"plugins": {"server": plugins}})
    return 0 if not any(summary.num_failed for summary in runs) else 1


def compare(argv: Sequence[str]) -> int:
    """Several servers, run after run in turn."""
    from fwk_kit.bench import report, servers  # noqa: PLC0415

    parser = _parser(
        "compare",
        "Load several servers in turn, again and again, and print the first one's ratios to the others. Each is "
        "started for its run and stopped after it, unless its address is given.",
    )
    parser.add_argument(
        "--server",
        action="append",
        default=[],
        metavar="NAME=URL|COMMAND",
        help="a running server, or a command that starts one ({port} stands for its port; 'fwk serve ...' needs none)",
    )
    parser.add_argument(
        "--commit",
        action="append",
        default=[],
        metavar="REF",
        help="fwk serve as it is at a commit of the repository in this folder, with --serve-args",
    )
    parser.add_argument("--serve-args", default="", help="arguments of fwk serve for every --commit")
    _add_load_flags(parser)
    arguments = parser.parse_args(argv)
    if len(arguments.server) + len(arguments.commit) < 2:
        raise ConfigError("a comparison needs two of --server and --commit")
    workload, maker, goals = _workload(arguments), _maker(arguments), _goals(arguments)
    with ExitStack() as stack:
        every = [servers.parse(text) for text in arguments.server]
        words = arguments.serve_args.split()
        every += [stack.enter_context(servers.of_commit(ref, ref, words)) for ref in arguments.commit]
        if len({server.name for server in every}) < len(every):
            raise ConfigError("two servers have the same name")
        runs, starts, plugins = _in_turn(every, workload, maker, goals, arguments)
    print(report.comparison(runs))
    print("plugins: " + ", ".join(f"{name} {told or 'not told'}" for name, told in plugins.items()))
    for name, cold in starts.items():
        if cold:
            print(
                f"{name}: cold start {statistics.median(s for s, _ in cold):.2f} s, "
                f"most memory {max(m for _, m in cold) / 2**20:.0f} MiB"
            )
    _write(arguments, argv, runs, {"starts": starts, "plugins": plugins})
    return 0 if not any(summary.num_failed for own in runs.values() for summary in own) else 1


def startup(argv: Sequence[str]) -> int:
    """Cold starts of ``fwk serve``."""
    from fwk_kit.bench import report, servers  # noqa: PLC0415

    parser = _parser("startup", "Start fwk serve, wait until it is healthy, stop it. Its arguments come after --.")
    parser.add_argument("--repeat", type=int, default=3, help="starts (default: %(default)s)")
    parser.add_argument("--json", type=output_file, help="write the figures here")
    parser.add_argument("serve_args", nargs="*", metavar="-- SERVE_ARGS", help="arguments of fwk serve")
    arguments = parser.parse_args(argv)
    server = servers.of_fwk("fwk", arguments.serve_args)
    starts: list[tuple[float, int]] = []
    plugins: str | None = None
    for _ in range(arguments.repeat):
        with server.running() as running:
            time.sleep(1)  # so that memory has been looked at
            plugins = servers.fingerprint(running.url)
        starts.append((running.cold_start or 0.0, running.peak_rss))
        print(f"healthy after {starts[-1][0]:.2f} s, {starts[-1][1] / 2**20:.0f} MiB resident", flush=True)
    print(f"median {statistics.median(seconds for seconds, _ in starts):.2f} s; plugins: {plugins or 'not told'}")
    if arguments.json:
        content = {"starts": starts, "plugins": {server.name: plugins}}
        report.write_json(arguments.json, ["fwk", "bench", "startup", *argv], content)
    return 0


def throughput(argv: Sequence[str]) -> int:
    """The engine alone, as fast as it goes."""
    from fwk.types import SamplingParams  # noqa: PLC0415

    parser = _engine_parser("throughput", "Give the engine all prompts at once and count tokens a second.")
    parser.add_argument("--num-prompts", type=int, default=64)
    llm, arguments = _llm(parser, argv)
    with llm:
        sampling = SamplingParams(max_tokens=arguments.output_len, temperature=0, ignore_eos=True)
        rates: list[float] = []
        for repeat in range(arguments.repeat):
            prompts = _ids(llm, arguments.num_prompts, arguments.input_len, repeat)
            started = time.perf_counter()
            llm.generate(prompts, sampling)
            rates.append(arguments.num_prompts * arguments.output_len / (time.perf_counter() - started))
            print(f"{rates[-1]:.1f} output tokens/s", flush=True)
    print(f"median {statistics.median(rates):.1f} output tokens/s; plugins: {llm.plugins.fingerprint}")
    return 0


def latency(argv: Sequence[str]) -> int:
    """The engine alone, one batch at a time."""
    from fwk.types import SamplingParams  # noqa: PLC0415

    parser = _engine_parser("latency", "Run one batch through the engine: time to the first token, and for each after.")
    parser.add_argument("--batch-size", type=int, default=1)
    llm, arguments = _llm(parser, argv)
    with llm:
        first: list[float] = []
        each: list[float] = []
        for repeat in range(arguments.repeat):
            times: dict[int, float] = {}
            for count in (1, arguments.output_len):
                prompts = _ids(llm, arguments.batch_size, arguments.input_len, 10 * repeat + count)
                started = time.perf_counter()
                llm.generate(prompts, SamplingParams(max_tokens=count, temperature=0, ignore_eos=True))
                times[count] = time.perf_counter() - started
            first.append(1e3 * times[1])
            each.append(1e3 * (times[arguments.output_len] - times[1]) / (arguments.output_len - 1))
            print(f"first token {first[-1]:.1f} ms, each after {each[-1]:.2f} ms", flush=True)
    print(f"median: first token {statistics.median(first):.1f} ms, each after {statistics.median(each):.2f} ms")
    print(f"plugins: {llm.plugins.fingerprint}")
    return 0


def roofline(argv: Sequence[str]) -> int:
    """The machine's bounds and the model's phases."""
    parser = _engine_parser("roofline", "Measure this machine, then say how far each phase is from its bound.")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 32])
    llm, arguments = _llm(parser, argv)
    from fwk_kit.bench import roofline as bounds  # noqa: PLC0415 - torch comes with it

    with llm:
        if not hasattr(llm.engine.executor, "_worker"):
            raise ConfigError("fwk bench roofline looks into the worker: leave --executor and parallel sizes out")
        machine = bounds.measure_machine()
        phases = bounds.measure_phases(
            llm, arguments.input_len, arguments.output_len, tuple(arguments.batch_sizes), 4 * arguments.input_len
        )
    print(bounds.table(machine, phases))
    print(f"plugins: {llm.plugins.fingerprint}")
    return 0


def _parser(name: str, description: str) -> Parser:
    return Parser(f"fwk bench {name}", description=description, allow_abbrev=False)


def _engine_parser(name: str, description: str) -> Parser:
    """For what runs the engine here: every engine option is a flag, too."""
    parser = _parser(name, description)
    parser.add_argument("bare_model", nargs="?", default=None, metavar="MODEL", help="folder, file, hub id or name")
    parser.add_argument("--input-len", type=int, default=128, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--output-len", type=int, default=64, help="tokens of an answer (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=3, help="runs (default: %(default)s)")
    return parser


def _llm(parser: Parser, argv: Sequence[str]) -> tuple[LLM, argparse.Namespace]:
    plugins, config, arguments = read_options(parser, argv)
    for name in ("input_len", "output_len", "repeat", "num_prompts", "batch_size"):
        if getattr(arguments, name, 1) < (2 if name == "output_len" else 1):
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(arguments, name)} is too small")
    set_up_log("warning")
    from fwk import LLM  # noqa: PLC0415 - torch comes with it

    return LLM.from_config(config, plugins, note), arguments


def _ids(llm: LLM, count: int, length: int, salt: int) -> list[str | list[int]]:
    """Prompts that share nothing with each other or with another salt's."""
    vocab = llm.engine.info.vocab_size
    return [
        [((salt * 1009 + number) * 7919 + i * 104729) % (vocab - 10) + 5 for i in range(length)]
        for number in range(count)
    ]


def _add_load_flags(parser: Parser) -> None:
    from fwk_kit.bench.workload import WORKLOADS  # noqa: PLC0415

    parser.add_argument(
        "--workload",
        default="random",
        choices=list(WORKLOADS),
        metavar="NAME",
        help=f"one of {', '.join(WORKLOADS)}; default: %(default)s",
    )
    parser.add_argument("--num-requests", type=int)
    parser.add_argument("--concurrency", type=int, help="requests under way at most (closed loop)")
    parser.add_argument("--request-rate", type=float, help="requests a second, arriving as a Poisson process instead")
    parser.add_argument("--input-len", type=int, help="tokens of a prompt's own part")
    parser.add_argument("--output-len", type=int)
    parser.add_argument("--prefix-len", type=int, help="tokens all prompts begin with")
    parser.add_argument("--spread", type=float, help="shortest length as a share of the given one, 0 to 1")
    parser.add_argument("--dataset", type=input_file, help="a ShareGPT JSON file to take questions and lengths from")
    parser.add_argument("--slo", nargs="+", default=[], metavar="NAME=MS", help="goals: ttft=200 tpot=50 latency=5000")
    parser.add_argument("--repeat", type=int, default=1, help="runs, with other prompts each (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="name the server knows the model by (default: what /v1/models says first)")
    parser.add_argument(
        "--tokenizer", type=input_file, help="tokenizer.json of the model (default: the default model's)"
    )
    parser.add_argument("--api-key")
    parser.add_argument("--no-ignore-eos", action="store_true", help="for servers that refuse ignore_eos")
    parser.add_argument("--json", type=output_file, help="write the figures here")
    parser.add_argument("--picture", type=output_file, help="write an SVG picture here")


def _workload(arguments: argparse.Namespace) -> Workload:
    from fwk_kit.bench.workload import WORKLOADS, changed  # noqa: PLC0415

    given = {name: getattr(arguments, name) for name in ("num_requests", "concurrency", "input_len", "output_len")}
    given |= {"prefix_len": arguments.prefix_len, "spread": arguments.spread, "rate": arguments.request_rate}
    for name, value in given.items():
        if value is not None and value <= (-1 if name == "prefix_len" else 0):
            raise ConfigError(f"--{name.replace('_', '-')} {value} is too small")
    if arguments.spread is not None and arguments.spread > 1:
        raise ConfigError(f"--spread {arguments.spread} is above 1")
    return changed(WORKLOADS[arguments.workload], **given)


def _goals(arguments: argparse.Namespace) -> Goals:
    from fwk_kit.bench.summary import Goals  # noqa: PLC0415

    goals: dict[str, float] = {}
    for text in arguments.slo:
        name, _, value = text.partition("=")
        try:
            goals[name] = float(value)
        except ValueError:
            raise ConfigError(f"--slo takes NAME=MILLISECONDS, not {text!r}") from None
        if name not in Goals.__slots__:
            raise ConfigError(f"--slo knows {', '.join(Goals.__slots__)}, not {name!r}")
    return Goals(**goals)


def _maker(arguments: argparse.Namespace) -> Maker:
    from fwk_kit.bench.workload import Maker  # noqa: PLC0415

    return Maker(_tokenizer(arguments), arguments.model or "", arguments.seed, not arguments.no_ignore_eos)


def _tokenizer(arguments: argparse.Namespace) -> Tokenizer:
    from tokenizers import Tokenizer  # noqa: PLC0415

    if arguments.tokenizer is not None:
        try:
            return Tokenizer.from_file(str(arguments.tokenizer))
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(f"--tokenizer {arguments.tokenizer} cannot be read: {error}") from None
    from fwk.plugins import build_config, discover  # noqa: PLC0415
    from fwk.setup.checkpoint import open_model  # noqa: PLC0415

    plugins = discover()
    return open_model(build_config(plugins, {}), plugins, note).checkpoint.tokenizer()


def _warm_up(url: str, maker: Maker, arguments: argparse.Namespace) -> None:
    """A few short requests, and the model's name where none was given."""
    from fwk_kit.bench.load import run as load  # noqa: PLC0415
    from fwk_kit.bench.load import served_model  # noqa: PLC0415
    from fwk_kit.bench.workload import Workload  # noqa: PLC0415

    maker.model = arguments.model or asyncio.run(served_model(url, arguments.api_key))
    workload = Workload("warm-up", num_requests=2, concurrency=2, input_len=32, output_len=8)
    replies, _ = asyncio.run(load(url, workload, maker.requests(workload), arguments.api_key))
    failed = next((reply.error for reply in replies if reply.error is not None), None)
    if failed is not None:
        raise ConfigError(f"the server at {url} does not answer as it should: {failed}")


def _measure(
    url: str, workload: Workload, maker: Maker, goals: Goals, arguments: argparse.Namespace, repeat: int
) -> Summary:
    from fwk_kit.bench.load import run as load  # noqa: PLC0415
    from fwk_kit.bench.servers import counters  # noqa: PLC0415
    from fwk_kit.bench.summary import Drafting, summarise  # noqa: PLC0415

    asked = maker.requests(workload, repeat, arguments.dataset)
    before = counters(url, arguments.api_key)
    replies, seconds = asyncio.run(load(url, workload, asked, arguments.api_key))
    found = summarise(workload.name, replies, seconds, goals)
    if (path := getattr(arguments, "vllm_json", None)) is not None:
        from fwk_kit.bench.vllm_result import vllm_result  # noqa: PLC0415

        told = vllm_result(workload, replies, seconds, goals, asked[0].body.get("model"))
        path.write_text(json.dumps(told) + "\n", encoding="utf-8")
    return replace(found, drafting=Drafting.between(before, counters(url, arguments.api_key)))


def _in_turn(
    every: list[Server], workload: Workload, maker: Maker, goals: Goals, arguments: argparse.Namespace
) -> tuple[dict[str, list[Summary]], dict[str, list[tuple[float, int]]], dict[str, str | None]]:
    """Each repeat runs every server once, so that what the machine does meanwhile hits all alike.

    Returns, by server: its runs; cold starts and most memory; the fingerprint of its plugins.
    """
    from fwk_kit.bench.servers import fingerprint  # noqa: PLC0415

    runs: dict[str, list[Summary]] = {server.name: [] for server in every}
    starts: dict[str, list[tuple[float, int]]] = {server.name: [] for server in every}
    plugins: dict[str, str | None] = {}
    for repeat in range(arguments.repeat):
        for server in every:
            with server.running() as running:
                _warm_up(running.url, maker, arguments)
                runs[server.name].append(_measure(running.url, workload, maker, goals, arguments, repeat))
                plugins[server.name] = fingerprint(running.url, arguments.api_key)
            if running.cold_start is not None:
                starts[server.name].append((running.cold_start, running.peak_rss))
            print(f"{server.name}, run {repeat + 1}: {runs[server.name][-1].output_rate:.1f} tokens/s", flush=True)
    return runs, starts, plugins


def _write(
    arguments: argparse.Namespace,
    argv: Sequence[str],
    runs: dict[str, list[Summary]],
    more: dict[str, Any] | None = None,
) -> None:
    from fwk_kit.bench import report  # noqa: PLC0415

    if arguments.json is not None:
        plain = {name: [summary.plain() for summary in own] for name, own in runs.items()}
        report.write_json(arguments.json, ["fwk", "bench", *argv], {"runs": plain, **(more or {})})
    if arguments.picture is not None:
        arguments.picture.write_text(report.picture(arguments.workload, runs), encoding="utf-8")
