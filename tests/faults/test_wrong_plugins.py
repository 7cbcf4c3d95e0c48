"""Plugins of every family that raise and answer what cannot be used, in a server: who asked is told in whose name.

``docs/testing.md`` has the table of ``CASES``.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fwk.plugins.families import FAMILIES
from tests.helpers.images import encoded, noise, write_config
from tests.helpers.packages import write_metadata
from tests.helpers.rig import TINY, Server, assert_no_leak, install_plugins, until, write_model
from tests.helpers.servers import Start, starting
from tests.helpers.zygote import run_fwk

MIXTURE = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4}
NAME = "'wrong' (fwk-wrong 1.0)"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
KEY = "sk-of-the-administrator"
CHAT = {"messages": [{"role": "user", "content": "Hello"}]}

CHOSEN = {
    "attention_backend", "operator_backend", "moe_runner_backend", "sampling_backend", "prefix_cache", "cache_tiers",
    "schedule_policy", "grammar_backend", "tool_call_parser", "reasoning_parser", "executor", "speculative_algorithm",
    "quantization",
}  # fmt: skip
FLAGS = ("--enable-plugin", "fwk-wrong", "--disable-cuda-graph", "--wrong-observer", "--max-total-tokens", "1024")

OUTCOMES = {
    "request": "the request ends with its name, others continue",
    "step": "the requests that run end with its name, the next are served",
    "start": "the server does not start, and says its name",
    "log": "the request is served, the log has its name",
    "degraded": "requests are served without it, /health and the log have its name",
    "feature": "the feature's requests end with its name, later ones are refused with it",
    "later": "the feature's later requests are refused with its name, and so are those that run",
    "adapter": "the adapter's requests end with its name, those for another are served",
    "kept": "the decode server computes the prompt, the prefill server's log and /health have its name",
    "engine": "the engine ends with its name and another is started",
}
"""What becomes of a wrong answer."""


@dataclass(frozen=True)
class Case:
    """A method of the plugin that answers something else, once."""

    family: str
    method: str
    kind: str
    outcome: str
    body: dict[str, Any]
    hook: str = ""
    number: str = ""  # of an engine's part, which is asked no more once it has failed

    @property
    def order(self) -> str:
        hook = self.hook or FAMILIES[self.family].hook
        return json.dumps({"method": f"{hook}{self.number}.{self.method}", "kind": self.kind})

    @property
    def who(self) -> str:
        return f"{FAMILIES[self.family].noun} {NAME}".replace("wrong'", f"wrong{self.number}'")


def cases(
    family: str, method: str, kinds: str, outcome: str, body: dict[str, Any] | None = None, hook: str = ""
) -> list[Case]:
    return [Case(family, method, kind, outcome, body or {}, hook) for kind in kinds.split(", ")]


_ENGINE_PARTS = count(2)


def engine_cases(method: str, kinds: str, outcome: str = "feature") -> list[Case]:
    made = cases("features", method, kinds, outcome, FEATURE, "engine")
    numbers = [next(_ENGINE_PARTS) for _ in made]
    return [replace(one, number=str(n), body={"wrong_feature": n}) for one, n in zip(made, numbers, strict=True)]


TENSOR = "raises, exits, None, string, empty, too long, wider, dtype"
FEATURE = {"wrong_feature": True}
CALLS = CHAT | {"tools": TOOLS}
BIASED = {"logit_bias": {"5": 1}}
SHOWN = {"_image": True}
ADAPTERS = "no fingerprint, no modules, modules of None, vectors, integers, arrays, two ranks, scale of NaN"
ENDS = "unknown key, twice, bytes below zero, seconds of NaN, whole of a string"
LOADED = {"lora_name": "other", "lora_path": "other"}

CASES = [
    *cases("attention", "forward", TENSOR, "step"),
    *cases("quant", "apply", TENSOR, "step"),
    *cases("operators", "rms_norm", TENSOR, "step"),
    *cases("moe", "apply", TENSOR, "step"),
    *cases("samplers", "sample", "raises, exits, None, string, empty, too long, huge, negative", "step"),
    *cases("logits_processors", "add", "raises, string", "request", BIASED),
    *cases("logits_processors", "apply", TENSOR, "request", BIASED),
    *cases("logits_processors", "remove", "raises", "step", BIASED),
    *cases("grammar", "compile", "raises, None, string", "request", {"regex": "[ab]+%d"}),
    *cases("tool_parsers", "feed", "raises, None, string", "request", CALLS),
    *cases("tool_parsers", "finish", "raises, None", "request", CALLS),
    *cases("reasoning_parsers", "feed", "raises, None, float", "request", CHAT),
    *cases("dialects", "named", "raises", "request", {"_get": "/wrong"}),
    *cases("dialects", "error_body", "raises, None, string", "log", {"_post": "/wrong"}),
    *cases("features", "open", "raises, string", "request", FEATURE, "server"),
    *cases("features", "check", "raises", "request", FEATURE, "server"),
    *cases("features", "trouble", "raises, float", "log", {"_get": "/health"}, "server"),
    *cases("features", "check", "raises, None, string", "request", FEATURE, "request"),
    *cases("features", "enter", "raises, string, float", "request", FEATURE, "request"),
    *cases("features", "output", "raises, None, string", "request", FEATURE, "request"),
    *cases("features", "ended", "raises", "log", FEATURE, "request"),
    *cases("features", "begin", "raises", "request", FEATURE, "worker"),
    *cases("features", "inputs", "raises", "step", FEATURE, "worker"),
    *cases("features", "computed", "raises", "step", FEATURE, "worker"),
    *cases("features", "results", "raises, None, string", "step", FEATURE, "worker"),
    *cases("features", "wants_hidden", "raises, None, string", "step", FEATURE, "worker"),
    *cases("features", "calls_layers", "raises, None", "step", FEATURE, "worker"),
    *cases("features", "next_tokens", "raises, None, float", "step", FEATURE, "worker"),
    *cases("features", "forget", "raises", "log", FEATURE, "worker"),
    *cases("observers", "request_finished", "raises", "log"),
    *cases("cache_tiers", "put", "raises", "degraded"),
    *cases("cache", "insert", "raises", "degraded"),
    *cases("schedulers", "order", "None", "degraded"),
    *cases("speculative", "propose", "None", "degraded"),
    *engine_cases("step", "raises, string, a struct of another"),
    *engine_cases("concerns", "raises, None"),
    *engine_cases("check", "raises"),
    *engine_cases("cache_ids", "raises, string, shorter, longer"),
    *engine_cases("matchable", "raises, None, below zero"),
    *engine_cases("limit", "raises, None, below zero"),
    *engine_cases("cached", "raises, string"),
    *engine_cases("new", "raises, string, a struct of another"),
    *engine_cases("event", "raises, string, a struct of another"),
    *engine_cases("planning", "raises", "later"),
    *engine_cases("finished", "raises", "later"),
    *engine_cases("forget", "raises", "later"),
    *engine_cases("is_busy", "raises, None", "later"),
    *engine_cases("stats", "raises, string, a struct of another", "later"),
    *engine_cases("trouble", "raises, float", "later"),
    *engine_cases("poll", "raises", "later"),
    *engine_cases("arrived", "raises"),
    *engine_cases("lets_through", "raises, None"),
    *engine_cases("started", "raises"),
    *cases("features", "answer", "raises, string", "request", FEATURE, "server"),
    *cases("features", "told", "raises, exits", "request", {"_post": "/wrong/told"}, "worker"),
    *cases("features", "between_steps", "raises", "degraded", FEATURE, "worker"),
    *cases("features", "model_context", "raises", "start", hook="worker"),
    *cases("features", "model_loaded", "raises", "start", hook="worker"),
    *cases("features", "cache_allocated", "raises", "start", hook="worker"),
    *cases("features", "operations", "raises, None", "start", hook="worker"),
    *cases("features", "routes", "raises", "start", hook="server"),
    *cases("features", "engines_ready", "raises", "start", hook="server"),
    *cases("load_balancers", "choose", "raises, None, object", "degraded"),
    *cases("lora_sources", "find", "raises, string", "request", LOADED),
    *cases("engine_pools", "submit", "raises", "request"),
    *cases("engine_pools", "stats", "raises, None", "log"),
    *cases("executors", "load", "raises, exits, None, string", "start"),
    *cases("loaders", "open", "raises, exits, None, string", "start"),
    *cases("devices", "take", "raises, exits, None, string", "start"),
    *cases("multimodal", "place", "raises, None, string, token outside, overlapping, item outside", "request", SHOWN),
    *cases("multimodal", "prepare", "raises, string, lists", "request", SHOWN),
    *cases("multimodal", "prepare", "no arrays, narrow arrays", "step", SHOWN),
    *cases("model_sources", "fetch", "raises, exits, string, nowhere", "start"),
    *cases("lora", "register", "raises, None, string, index of another, parts of another", "start"),
    *cases("lora", "apply", "None, wider, dtype", "start"),
    *cases("lora_sources", "open", "raises, exits, string", "start"),
    *cases("lora_sources", "open", f"raises, string, {ADAPTERS}", "request", {"_at": "load"}),
    *cases("lora", "pack", "raises", "request", {"_at": "load"}),
    *cases("lora", "pack", "None, string", "adapter", {"_at": "load"}),
    *cases("lora", "load", "raises, exits", "request", {"_at": "use"}),
    *cases("lora", "plan", "raises, exits", "step", {"_at": "use"}),
    *cases("lora", "apply", TENSOR, "step", {"_at": "use"}),
    *cases("lora", "clear", "raises", "request", {"_at": "unload"}),
    *cases("kv_transfer", "offer", "raises", "kept"),
    *cases("kv_transfer", "poll", "raises, unknown key, bytes below zero", "kept"),
    *cases("kv_transfer", "receive", "raises, exits", "feature"),
    *cases("kv_transfer", "poll", f"raises, None, string, {ENDS}", "feature"),
    *cases("kv_transfer", "address", "raises, None, string", "start"),
    *cases("expert_placers", "place", "raises, None, shorter", "start"),
    *cases("executors", "launch", "raises", "engine"),
    *cases("executors", "collect", "exits, None", "engine"),
]
SELECTED = {
    "executors": ("--executor", "wrong"),
    "loaders": ("--load-format", "wrong"),
    "devices": ("--device", "wrong"),
    "lora": ("--enable-lora", "--lora-backend", "wrong"),
    "lora_sources": ("--enable-lora", "--lora-paths", "some={}/adapter"),
    "kv_transfer": (
        *("--disaggregation-mode", "prefill", "--disaggregation-token-file", "{}/token"),
        *("--disaggregation-transfer-backend", "wrong"),
    ),
    "expert_placers": (
        *("--tp-size", "2", "--expert-parallel-size", "2"),
        *("--init-expert-location", "{}/counts.json", "--eplb-algorithm", "wrong"),
    ),
}
"""How a plugin is chosen that a server is started for."""

ON = {"multimodal": "seeing", "load_balancers": "spread", "lora_sources": "adapting", "cache": "uncached"}
"""The fixture of the server whose requests use a plugin of a family; ``server`` of the others."""

SWEPT = ("multimodal", "expert_placers", "lora_sources", "loaders", "devices", "load_balancers")
"""Families without a case in the gate: it has their checks without a server, or another start like theirs."""

ONCE = [next(group) for family, group in groupby(CASES, lambda case: case.family) if family not in SWEPT]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("site")
    found = install_plugins(folder)
    write_metadata(folder, "fwk-wrong", {"tests.wrong": "fwk_wrong"})
    return found


@pytest.fixture(scope="module")
def spawn(path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    with starting(write_model(tmp_path_factory.mktemp("model") / "tiny", **MIXTURE), path) as start:
        yield start


@pytest.fixture(scope="module")
def server(spawn: Start) -> Server:
    chosen = [word for name in sorted(CHOSEN) for word in (f"--{name.replace('_', '-')}", "wrong")]
    return spawn(*FLAGS, "--wrong-pool", *chosen)


@pytest.fixture(scope="module")
def seeing(path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with starting(write_config(tmp_path_factory.mktemp("vision")), path) as start:
        yield start(*FLAGS)


@pytest.fixture
def spread(spawn: Start) -> Server:
    """Of its own for each case: a load balancer that has failed is asked no more."""
    return spawn(*FLAGS, "--data-parallel-size", "2", "--load-balance-method", "wrong")


@pytest.fixture
def uncached(spawn: Start) -> Server:
    """Of its own: where the prefix cache has failed, no tier is given anything, in whatever order the tests run."""
    return spawn(*FLAGS, "--prefix-cache", "wrong")


@pytest.fixture(scope="module")
def adapting(spawn: Start, tmp_path_factory: pytest.TempPathFactory) -> Server:
    folder = str(tmp_path_factory.mktemp("adapters"))
    return spawn(*FLAGS, "--enable-lora", "--lora-dirs", folder, "--admin-api-key", KEY)


@pytest.fixture(scope="module")
def adapted(spawn: Start, tmp_path_factory: pytest.TempPathFactory) -> Server:
    folder = tmp_path_factory.mktemp("adapters")
    write_adapter(folder / "one")
    chosen = ("--enable-lora", "--lora-backend", "wrong", "--lora-dirs", str(folder), "--admin-api-key", KEY)
    return spawn(*FLAGS, *chosen)


def write_adapter(folder: Path) -> None:
    """One of rank 4, of the first layer's queries."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 4}))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora"
    sizes = {f"{name}_A.weight": (4, TINY["hidden_size"]), f"{name}_B.weight": (TINY["hidden_size"], 4)}
    save_file({one: torch.ones(size) for one, size in sizes.items()}, folder / "adapter_model.safetensors")


_NUMBERS = count()


def ask(server: Server, body: dict[str, Any], prompt: str) -> Any:
    if "_get" in body:
        return server.get(body["_get"])
    if "_post" in body:
        return server.post({}, body["_post"])
    if "lora_path" in body:
        return server.post(body, "/v1/load_lora_adapter", {"authorization": f"Bearer {KEY}"})
    if "_image" in body:  # which no block holds
        url = f"data:image/png;base64,{base64.b64encode(encoded(noise(next(_NUMBERS)))).decode()}"
        body = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}
    body = {"max_tokens": 8, "temperature": 0} | body
    if "messages" in body:
        return server.post(body, "/v1/chat/completions")
    if "regex" in body:
        body |= {"regex": body["regex"] % next(_NUMBERS)}  # which was not compiled yet
    return server.post({"prompt": prompt * 4} | body)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=f"{case.hook or case.family}.{case.method}-{case.kind}",
            marks=() if case in ONCE else pytest.mark.sweep,
        )
        for case in CASES
        if case.outcome not in ("start", "engine") and "_at" not in case.body and case.family != "kv_transfer"
    ],
)
def test_a_wrong_answer_is_told_in_its_name(request: pytest.FixtureRequest, case: Case) -> None:
    server: Server = request.getfixturevalue(ON.get(case.family, "server"))
    number, start, order = CASES.index(case), len(server.log), server.folder / "order.json"
    order.write_text(case.order)
    prompt = f"Request {number}, which no block holds yet. "
    reply = ask(server, case.body, prompt)
    until(lambda: not order.exists(), 1, "a call of the method")
    assert_no_leak(reply.text)
    if case.outcome in ("request", "step", "feature"):
        assert reply.status_code == 500, reply.text
        assert case.who in reply.text, reply.text
    elif case.outcome != "later":
        until(lambda: case.who in server.log[start:] + reply.text, 3, "its name in the log")
    if case.outcome in ("degraded", "later"):
        until(lambda: case.who in server.get("/health").json().get("reason", ""), 3, "its name in /health")
    again = ask(server, case.body, prompt)
    if case.outcome in ("feature", "later"):
        assert (again.status_code, case.who in again.text) == (500, True), again.text
    else:
        assert again.status_code < 500, again.text
    assert "Traceback" not in server.log[start:]
    until(server.is_idle, 10, "no block held")
    assert server.health() == 200


ADAPTED = [case for case in CASES if "_at" in case.body]


@pytest.mark.sweep
@pytest.mark.parametrize("case", ADAPTED, ids=lambda case: f"{case.family}.{case.method}-{case.kind}")
def test_a_wrong_answer_for_an_adapter_is_told_in_its_name(adapted: Server, case: Case) -> None:
    """The order is there as the adapter is loaded, as the first request for it comes, or as it is unloaded."""
    order, name = adapted.folder / "order.json", f"a{next(_NUMBERS)}"

    def manage(what: str, **body: str) -> Any:
        return adapted.post({"lora_name": name} | body, f"/v1/{what}_lora_adapter", {"authorization": f"Bearer {KEY}"})

    def use(model: str = name) -> Any:
        return adapted.post({"model": model, "prompt": f"{name}{next(_NUMBERS)}" * 8, "max_tokens": 4})

    at = case.body["_at"]
    steps = {"load": lambda: manage("load", lora_path="one"), "use": use, "unload": lambda: manage("unload")}
    step = steps.pop(at)
    for before in list(steps.values())[: ("load", "use", "unload").index(at)]:
        assert before().status_code == 200
    order.write_text(case.order)
    reply = step()
    until(lambda: not order.exists(), 1, "a call of the method")
    again = use if case.outcome == "adapter" or at == "unload" else step
    if case.outcome == "adapter":
        assert reply.status_code == 200, "what was packed is the plugin's own"
        reply = use()
    assert_no_leak(reply.text)
    assert (reply.status_code, case.who in reply.text) == (500, True), reply.text
    assert again().status_code == {"adapter": 500, "unload": 404}.get(case.outcome if at != "unload" else at, 200)
    assert use("tiny").status_code == 200
    assert "Traceback" not in adapted.log
    until(adapted.is_idle, 10, "no block held")
    assert adapted.health() == 200


TRANSFERRED = [case for case in CASES if case.family == "kv_transfer" and case.outcome != "start"]


@pytest.mark.sweep
@pytest.mark.parametrize("case", TRANSFERRED, ids=lambda case: f"{case.outcome}.{case.method}-{case.kind}")
def test_a_wrong_transport_is_told_in_its_name(path: str, tmp_path: Path, case: Case) -> None:
    """In a server of its own that computes prompts, or that has them computed: what has failed is asked no more."""
    (tmp_path / "token").write_text("0123456789abcdef")
    shared = (*FLAGS, "--disaggregation-token-file", str(tmp_path / "token"), "--disaggregation-mode")
    wrong, right = (("--disaggregation-transfer-backend", name) for name in ("wrong", "tcp"))
    with starting(write_model(tmp_path / "tiny"), path) as start:
        keeps = case.outcome == "kept"
        prefill = start(*shared, "prefill", *(wrong if keeps else right))
        peers = ("--disaggregation-prefill-servers", prefill.url, "--disaggregation-min-prompt-tokens", "17")
        decode = start(*shared, "decode", *peers, *(right if keeps else wrong))
        server = prefill if keeps else decode
        wanted = decode.post({"prompt": "Hello", "max_tokens": 4}).status_code
        assert wanted == 200
        order = server.folder / "order.json"
        order.write_text(case.order)
        reply = ask(decode, {}, "A prompt that another server computes. ")
        until(lambda: not order.exists(), 3, "a call of the method")
        assert_no_leak(reply.text)
        until(lambda: case.who in server.log, 3, "its name in the log")
        until(lambda: case.who in server.get("/health").json().get("reason", ""), 3, "its name in /health")
        if keeps:
            assert reply.status_code == 200, reply.text
            assert ask(decode, {}, "Another prompt, computed here. ").status_code == 200
        else:
            assert (reply.status_code, case.who in reply.text) == (500, True), reply.text
            again = ask(decode, {}, "Another prompt. ")
            assert (again.status_code, case.who in again.text) == (500, True), again.text
        assert decode.post({"prompt": "Hello", "max_tokens": 4}).status_code == 200, (
            "too short to be computed elsewhere"
        )
        for one in (prefill, decode):
            assert one.health() == 200
            assert "Traceback" not in one.log


def test_the_server_is_as_it_was(server: Server) -> None:
    server.check_invariants(may_log_errors=True)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=f"{case.family}.{case.method}-{case.kind}",
            marks=() if case in ONCE else pytest.mark.sweep,
        )
        for case in CASES
        if case.outcome == "start"
    ],
)
def test_a_wrong_answer_at_the_start_ends_it_in_its_name(path: str, tmp_path: Path, case: Case) -> None:
    order = tmp_path / "order.json"
    order.write_text(case.order)
    short = tmp_path.parent / "t"  # a socket's path has 107 bytes
    short.mkdir(exist_ok=True)
    environment = os.environ | {"PYTHONPATH": path, "TMPDIR": str(short), "WRONG_ORDER": str(order)}
    chosen = tuple(word.format(tmp_path) for word in SELECTED.get(case.family, ()))
    (tmp_path / "token").write_text("0123456789abcdef")
    (tmp_path / "counts.json").write_text(json.dumps({"logical_count": [[4, 3, 2, 1]] * 2}))
    chosen += () if "--load-format" in chosen else ("--load-format", "dummy")
    chosen += () if "--device" in chosen else ("--device", "cpu")
    words = ("serve", str(write_model(tmp_path / "tiny", **MIXTURE)), "--port", "0", *FLAGS, *chosen)
    done = run_fwk(*words, environment=environment)
    assert not order.exists(), f"it was not asked: {done.stderr[-3000:]}"
    assert done.returncode in (4, 5), done.stderr
    told = [line for line in done.stderr.splitlines() if "fwk: error: " in line]
    assert [case.who in line for line in told] == [True], done.stderr
    assert f" in {case.method}" in told[0] or case.family == "expert_placers", "names the layer in its place"
    assert "Traceback" not in done.stderr


@pytest.mark.sweep
@pytest.mark.parametrize(
    "case", [c for c in CASES if c.outcome == "engine"], ids=lambda case: f"{case.family}.{case.method}-{case.kind}"
)
def test_an_engine_that_ends_is_told_in_its_name(spawn: Start, case: Case) -> None:
    server = spawn(*FLAGS, *SELECTED[case.family], "--health-monitor", "true")
    (server.folder / "order.json").write_text(case.order)
    reply = ask(server, {}, "Hello")
    assert_no_leak(reply.text)
    assert case.who in reply.text
    until(lambda: f"engine dead: {case.who} " in server.log, 3, "its name in the log")
    until(lambda: server.health() == 200, 60, "another engine")
    assert ask(server, {}, "Hello").status_code == 200
    assert "Traceback" not in server.log


@pytest.mark.gate(1)
@pytest.mark.parametrize("name", ["SIGSEGV", "SIGBUS", "SIGABRT", "hangs"])
def test_a_crash_in_native_code_is_told_in_its_name(spawn: Start, name: str) -> None:
    watched = ("--watchdog-timeout", "4", "--ping-timeout", "2") if name == "hangs" else ()
    server = spawn(*FLAGS, *watched, "--attention-backend", "wrong", "--health-monitor", "true")
    (server.folder / "order.json").write_text(json.dumps({"method": "attention_backends.forward", "kind": name}))
    reply = ask(server, {}, "Hello")
    assert_no_leak(reply.text)
    how = "was killed" if watched else f"({name})"
    until(lambda: f"{how} in plugin 'tests.wrong' from fwk-wrong 1.0" in server.log, 3, "its name in the log")
    until(lambda: server.health() == 200, 60, "another engine")
    assert ask(server, {}, "Hello").status_code == 200


def table() -> str:
    """The cases, for docs/testing.md."""
    lines = ["| family | method | answers | what becomes of it |", "|---|---|---|---|"]
    for key, group in groupby(CASES, lambda case: (case.family, case.hook, case.method, case.outcome)):
        family, part, method, outcome = key
        kinds = ", ".join(case.kind for case in group)
        where = f"{family} ({part})" if part else family
        lines.append(f"| {where} | `{method}` | {kinds} | {OUTCOMES[outcome]} |")
    return "\n".join([f"{len(CASES)} cases:", "", *lines])


def test_the_page_has_all_cases() -> None:
    page = Path(__file__).parents[2] / "docs/testing.md"
    assert len(CASES) >= 90
    assert f"<!-- wrong-plugins -->\n{table()}\n<!-- /wrong-plugins -->" in page.read_text(), (
        "python -m tests.faults.test_wrong_plugins"
    )


if __name__ == "__main__":
    print(table())
