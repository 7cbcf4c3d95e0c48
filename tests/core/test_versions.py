"""API versions: what is accepted, adapted and refused; a package of version 1 that nobody may edit."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.fake_plugins import FakeEntryPoint, plugin
from tests.helpers.packages import FIXTURES, digest
from tests.helpers.rig import Server, write_model

import fwk
from fwk import QuantizerSpec, SamplingParams, SchedulePolicySpec
from fwk.plugins import FAMILIES, VERSIONS, Adapter, ApiVersion, PluginSet, discover, find, load_object

V1 = FIXTURES / "v1_acme"
V1_DIGEST = "a0f488a71772b9c1"
STABILITY = Path(__file__).parents[2] / "docs/plugins/stability.md"
ALL_OF_ACME = {
    "attention_backend": "acme",
    "quantization": "acme",
    "schedule_policy": "acme",
    "prefix_cache": "acme",
    "sampling_backend": "acme",
}


def declared(*specs: Any, hook: str = "quantizers", **settings: Any) -> PluginSet:
    return discover(points=[FakeEntryPoint("acme.x", plugin(*specs, hook=hook))], **settings)  # type: ignore[list-item]


@pytest.fixture
def v1(monkeypatch: pytest.MonkeyPatch) -> None:
    """The frozen package, installed."""
    monkeypatch.syspath_prepend(str(V1))


def test_the_package_of_version_1_is_as_it_was_published() -> None:
    assert digest(V1) == V1_DIGEST, "this package stands for those already installed: adapt core, not the package"


def test_every_family_has_a_version_and_every_older_one_an_adapter() -> None:
    assert set(VERSIONS) == set(FAMILIES)
    for known in VERSIONS.values():
        assert all(1 <= version < known.newest for version in known.adapters)
        oldest = min((known.newest, *known.adapters))
        assert set(known.adapters) == set(range(oldest, known.newest))


def test_the_page_names_every_version() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| (.*) \|$", STABILITY.read_text(), re.MULTILINE)
    old = {
        name: ", ".join(f"{version} (until fwk {a.retires})" for version, a in sorted(known.adapters.items())) or "none"
        for name, known in VERSIONS.items()
    }
    assert {name: (int(newest), adapted) for name, newest, adapted in rows} == {
        name: (known.newest, old[name]) for name, known in VERSIONS.items()
    }


def test_what_the_newest_version_gave_up_is_refused_and_so_is_what_the_old_one_lacked() -> None:
    for fields, message in (
        ({"api": 2, "is_lossless": True}, "is_lossless and keeps_plain are of version 1"),
        ({"exact": ("plain",)}, "exact is of version 2 of this interface: say api=2"),
        ({"api": 2, "exact": ("awq",)}, "exact names awq, which it does not read"),
    ):
        with pytest.raises(ValueError, match=message):
            QuantizerSpec(name="x", load="a:b", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("switches", "exact"),
    [
        ({}, ()),
        ({"is_lossless": True}, ("awq:4",)),
        ({"keeps_plain": True}, ("plain",)),
        ({"is_lossless": True, "keeps_plain": True}, ("awq:4", "plain")),
    ],
)
def test_a_quantizer_of_version_1_is_adapted(switches: dict[str, bool], exact: tuple[str, ...]) -> None:
    plugins = declared(QuantizerSpec(name="x", load="a:b", layouts=("awq:4", "plain"), **switches))
    item = find(plugins, "quant", "x")
    assert isinstance(item.declaration, QuantizerSpec)
    assert item.declaration.exact == exact
    assert (item.api, item.declaration.api) == (1, 2)
    assert item.age == (
        "plugin 'acme.x' from acme 1.0 was written for version 1 of the quant interface and is adapted to version 2; "
        "fwk 0.4 will refuse it"
    )


def test_a_quantizer_of_the_newest_version_is_taken_as_it_is() -> None:
    spec = QuantizerSpec(name="x", load="a:b", layouts=("plain",), exact=("plain",), api=2)
    item = find(declared(spec), "quant", "x")
    assert item.declaration is spec
    assert item.age is None


@pytest.mark.parametrize(
    ("api", "sentence"),
    [
        (3, "version 3 of the quant interface, this fwk has version 2: upgrade fwk, or install an older acme"),
        (0, "version 0 of the quant interface, the oldest this fwk takes is 1: install a newer acme"),
    ],
)
def test_a_version_that_cannot_be_adapted_is_refused_in_one_sentence(api: int, sentence: str) -> None:
    plugins = declared(QuantizerSpec(name="x", load="a:b", api=api))
    assert [b.sentence() for b in plugins.broken] == [
        f"plugin 'acme.x' from acme 1.0 failed to declare: TypeError: 'x' was written for {sentence}"
    ]
    assert not plugins.family("quant")


class AddsPriority:
    """What core of the next version could build of a policy of this one."""

    def __init__(self, cls: Any) -> None:
        self.cls = cls


def next_core() -> dict[str, ApiVersion]:
    """Every family one version further: declarations as they were, objects wrapped."""
    return {
        name: ApiVersion(
            known.newest + 1,
            {
                version: Adapter("9", declaration=known.adapters[version].declaration, wrap=AddsPriority)
                if version in known.adapters
                else Adapter("9", wrap=AddsPriority)
                for version in range(1, known.newest + 1)
            },
        )
        for name, known in VERSIONS.items()
    }


@pytest.mark.filterwarnings("default:fwk.interfaces.cache is called:DeprecationWarning")
def test_the_next_core_adapts_declarations_and_objects_alike(v1: None) -> None:
    plugins = discover(
        points=[p for p in entry_points(group="fwk") if p.name.startswith("acme.")], versions=next_core()
    )
    assert plugins.broken == []
    assert len(plugins.all()) == 8
    for item in plugins.all():
        assert item.declaration.api == VERSIONS[item.family].newest + 1
        wrapped = load_object(item)
        assert isinstance(wrapped, AddsPriority)
        assert wrapped.cls.__module__.startswith("acme_v1.")


def test_a_retired_version_is_refused_by_name(v1: None) -> None:
    retired = VERSIONS | {"schedulers": ApiVersion(3, {2: Adapter("9")})}
    plugins = declared(SchedulePolicySpec(name="x", load="a:b"), hook="schedule_policies", versions=retired)
    assert "the oldest this fwk takes is 2: install a newer acme" in plugins.broken[0].sentence()


@pytest.mark.filterwarnings("default:fwk.interfaces.cache is called:DeprecationWarning")
def test_the_package_of_version_1_serves_unchanged(v1: None, tiny_llm: Callable[..., fwk.LLM]) -> None:
    plugins = discover()
    assert plugins.broken == []
    prompts = [[7, 8, 9, 10] * 3, [50, 60, 70]]
    greedy = SamplingParams(max_tokens=8, temperature=0)
    plain = tiny_llm(attention_backend="torch", random_seed=0)
    wanted = [c.token_ids for c in plain.generate(prompts, greedy)]
    options = {"max_total_tokens": 512, "max_running_requests": 4, "check_blocks": True, "random_seed": 0}
    model = {"model": str(plain.opened_path), "load_format": "dummy", "plugins": plugins}
    with fwk.LLM(**model, **options, **ALL_OF_ACME) as llm:  # type: ignore[arg-type]
        chosen = llm.engine.info.chosen
        assert {chosen[family] for family in ("attention", "quant", "schedulers", "cache", "samplers")} == {"acme"}
        assert [c.token_ids for c in llm.generate(prompts, greedy)] == wanted
    banned = wanted[0][0]
    with fwk.LLM(**model, **options, **ALL_OF_ACME, acme_banned_token=banned) as llm:  # type: ignore[arg-type]
        assert all(banned not in c.token_ids for c in llm.generate(prompts, greedy))


@pytest.mark.sweep
def test_its_options_reach_both_processes_of_a_server(tmp_path: Path) -> None:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in ALL_OF_ACME.items()]
    flags += ["--acme-banned-token", "65", "--acme-greeting", "good day", "--enable-plugin=acme-v1"]
    server = Server(write_model(tmp_path / "tiny"), *flags, python_path=str(V1))
    try:
        server.start()
        assert server.get("/acme/greeting").json() == {"greeting": "good day", "model": "tiny"}
        assert server.get("/acme/count").json() >= 1  # the golden request, and what warms up
        assert 65 not in server.golden
        info = server.get("/server_info").json()
        assert "attention.acme acme-v1 1.0" in info["plugins"]
        assert info["plugin_options"]["logits_processors.acme"] == {"acme_banned_token": "65"}
    finally:
        server.close()
