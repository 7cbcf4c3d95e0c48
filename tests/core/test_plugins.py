"""Discovery and selection: what is installed, what is broken, what is chosen and why."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest
from tests.helpers.fake_plugins import FakeEntryPoint, declare, plugin

import fwk
from fwk import AttentionBackendSpec, Facts, Host, Needs, SchedulePolicySpec, SpeculativeDecoderSpec, hookimpl
from fwk.config import EngineOptions
from fwk.errors import PluginError, PluginLoadError
from fwk.interfaces.declaration import installed_version
from fwk.plugins import FAMILIES, PluginSet, choose, discover, find, load_object

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def attention(name: str = "acme", **fields: object) -> AttentionBackendSpec:
    return AttentionBackendSpec(name=name, load="acme:Backend", **fields)  # type: ignore[arg-type]


def found(*points: FakeEntryPoint, **settings: object) -> PluginSet:
    return discover(points=points, **settings)  # type: ignore[arg-type]


class ParsedPackage:
    """A package whose metadata is parsed at each look."""

    def __init__(self) -> None:
        self.num_parsed = 0

    @property
    def name(self) -> str:
        self.num_parsed += 1
        return "acme"

    version = name


def test_metadata_is_parsed_once_for_all_plugins_of_a_package() -> None:
    package = ParsedPackage()
    points = [FakeEntryPoint(f"attention.{i}", plugin(attention(f"acme{i}"))) for i in range(5)]
    for point in points:
        point.dist = package  # type: ignore[assignment]
    assert [item.version for item in found(*points).all()] == ["acme"] * 5
    assert package.num_parsed == 2  # name and version


def test_every_public_name_is_there() -> None:
    assert [name for name in fwk.__all__ if not hasattr(fwk, name)] == []
    with pytest.raises(AttributeError, match="module 'fwk' has no attribute 'LLMs'"):
        fwk.LLMs  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("name", ["LLM", "AsyncLLM"])
def test_a_public_name_of_a_package_that_is_not_installed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are there, and this one says what is missing."""
    monkeypatch.setattr(fwk, "entry_points", lambda **_: ())
    monkeypatch.delitem(vars(fwk), name, raising=False)
    with pytest.raises(PluginError, match=f"fwk.{name} is not installed: no package has the entry point '{name}' of"):
        getattr(fwk, name)
    assert fwk.SamplingParams is not None


@pytest.mark.parametrize("group", ["fwk", "fwk.names"])
def test_entry_points_are_those_of_pyproject(group: str) -> None:
    declared = PYPROJECT["project"]["entry-points"][group]
    installed = {p.name: p.value for p in entry_points(group=group) if p.dist and p.dist.name == "fwk"}
    assert installed == declared, "run pip install -e . again"


def test_every_plugin_folder_is_packaged_and_checked() -> None:
    folders = {str(path.relative_to(ROOT)) for path in ROOT.glob("plugins/*/fwk_*") if path.is_dir()}
    packaged = set(PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])
    assert packaged == folders | {
        "core/fwk",
        "deprecated/fwk_deprecated",
        "errors/fwk_errors",
        "files/fwk_files",
        "http/fwk_http",
        "jinja/fwk_jinja",
        "jobs/fwk_jobs",
        "kit/fwk_kit",
        "layers/fwk_layers",
        "native/fwk_native",
        "offline/fwk_offline",
        "peers/fwk_peers",
        "process/fwk_process",
        "stops/fwk_stops",
        "tiles/fwk_tiles",
        "tokenizer/fwk_tokenizer",
    }
    names = {Path(folder).name for folder in folders}
    linter = PYPROJECT["tool"]["importlinter"]
    assert set(linter["root_packages"]) == names | {
        "fwk",
        "fwk_deprecated",
        "fwk_errors",
        "fwk_files",
        "fwk_http",
        "fwk_jinja",
        "fwk_jobs",
        "fwk_kit",
        "fwk_layers",
        "fwk_native",
        "fwk_offline",
        "fwk_peers",
        "fwk_process",
        "fwk_stops",
        "fwk_tiles",
        "fwk_tokenizer",
    }
    by_name = {contract["name"]: contract for contract in linter["contracts"]}
    assert set(by_name["core imports no plugin, no layer and no kit"]["forbidden_modules"]) == names | {
        "fwk_kit",
        "fwk_layers",
        "fwk_offline",
    }
    assert set(by_name["families are independent"]["modules"]) == names
    assert set(by_name["layers keep to the public core"]["forbidden_modules"]) > names
    assert set(by_name["plugins keep to the public core"]["source_modules"]) == names
    assert set(by_name["plugins of a family are independent"]["modules"]) == {f"{name}.*" for name in names}
    assert all((ROOT / folder / "py.typed").is_file() for folder in folders)


def test_every_installed_plugin_loads_and_its_target_exists() -> None:
    plugins = discover()
    assert plugins.broken == []
    for item in plugins.all():
        if Needs(packages=item.declaration.needs.packages).refusal(Host()) is None:
            assert load_object(item) is not None
        else:  # what it wraps is not here; what it declares must be
            module, _, attribute = item.declaration.load.partition(":")
            spec = find_spec(module)
            assert spec is not None
            assert f"class {attribute}(" in Path(spec.origin or "").read_text()


@pytest.mark.gate(2)
@pytest.mark.parametrize("words", [["--help"], ["plugins", "list"], ["serve", "--help"], ["arguments"]])
def test_light_commands_import_nothing_heavy(words: list[str]) -> None:
    heavy = ("torch", "triton", "flashinfer", "transformers", "tokenizers", "fastapi", "uvicorn", "zmq", "numpy")
    code = (
        "import sys; from fwk.cli.main import main\n"
        f"try: main({words!r})\nexcept SystemExit: pass\n"
        f"print('HEAVY', [m for m in {heavy!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "HEAVY []"


def test_a_plugin_that_is_not_selected_is_never_imported() -> None:
    code = (
        "import sys; from fwk.plugins import discover, choose; from fwk import Facts\n"
        "p = discover(); choose(p, 'cache', 'none', Facts())\n"
        "print([m for m in sys.modules if m.startswith('fwk_') and m.count('.') > 1 and '._common' not in m])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_a_broken_plugin_harms_nobody_else() -> None:
    warnings: list[str] = []
    plugins = found(
        FakeEntryPoint("attention.broken", ImportError("no module named rocket"), "rocketry", "0.3"),
        FakeEntryPoint("attention.leaving", SystemExit(3), "leaver"),
        FakeEntryPoint("attention.good", plugin(attention("good"))),
        warn=warnings.append,
    )
    assert [item.name for item in plugins.family("attention")] == ["good"]
    assert len(warnings) == 2
    assert "plugin 'attention.broken' from rocketry 0.3 failed to import: ImportError" in warnings[0]
    with pytest.raises(PluginLoadError, match="rocket"):
        find(plugins, "attention", "broken")


def test_a_half_loaded_plugin_leaves_nothing_behind() -> None:
    module = plugin(attention("first"), "not a declaration")
    plugins = found(FakeEntryPoint("attention.half", module))
    assert plugins.family("attention") == []
    [broken] = plugins.broken
    assert broken.stage == "declare"
    assert "must return AttentionBackendSpec objects, not str" in broken.error
    assert not plugins.manager.get_plugins()


def undecorated(*declared: object) -> ModuleType:
    module = ModuleType("undecorated")
    module.attention_backends = lambda: list(declared)  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (plugin(attention("x"), attention("x")), "declares attention.x twice"),
        (plugin(attention("auto")), "attention backend 'auto' has a name that means something else to its option"),
        (plugin(SpeculativeDecoderSpec(name="none", load="a:b"), hook="speculative_decoders"), "has a name that means"),
        (plugin(attention("x", rank="high")), "attention backend 'x' has rank='high', which is no int"),
        (plugin(attention("x", needs=None)), "attention backend 'x' has needs=None, which is no Needs"),
        (plugin(attention("x", kernels="a.cpp")), "has kernels='a.cpp', which is no tuple[Path, ...]"),
        (undecorated(attention("x")), "declares nothing: @hookimpl belongs before attention_backends"),
        (ModuleType("empty"), "declares nothing: @hookimpl belongs before a function of it"),
        (plugin(hook="attention_backend"), "unknown hook 'attention_backend' (did you mean 'attention_backends'?)"),
        (plugin(attention("x", api=99)), "written for version 99 of the attention interface"),
        (plugin(SchedulePolicySpec(name="x", load="a:b")), "must return AttentionBackendSpec objects"),
    ],
)
def test_wrong_declarations_say_what_is_wrong(module: ModuleType, message: str) -> None:
    try:
        text = found(FakeEntryPoint("attention.x", module)).broken[0].sentence()
    except PluginError as error:
        text = str(error)
    assert message in text


@pytest.mark.parametrize("fields", [{"name": "Bad Name"}, {"load": "nocolon"}])
def test_a_declaration_checks_its_own_fields(fields: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="AttentionBackendSpec"):
        AttentionBackendSpec(**{"name": "x", "load": "a:b", **fields})


def test_duplicate_names_name_both_packages() -> None:
    points = [
        FakeEntryPoint("attention.one", plugin(attention("same")), "alpha", "1"),
        FakeEntryPoint("attention.two", plugin(attention("same")), "beta", "2"),
    ]
    warnings: list[str] = []
    plugins = found(*points, warn=warnings.append)
    sentence = (
        "attention backend 'same' is declared by 'attention.one' from alpha 1 and by 'attention.two' from beta 2; "
        "uninstall one of the two packages"
    )
    assert warnings == [sentence]
    with pytest.raises(PluginError, match=re.escape(sentence)):
        choose(plugins, "attention", "same", Facts())
    selection = choose(plugins, "attention", "auto", Facts())
    assert selection.chosen is not None, "what nobody asked for by name ends nothing"


@pytest.mark.parametrize(
    ("owner", "override", "allowed", "winner"),
    [
        ("fwk", False, [], "fwk"),
        ("fwk", True, [], "beta"),
        ("fwk", False, ["attention.same"], "beta"),
        ("alpha", True, [], "alpha"),
        ("alpha", False, ["attention.same"], "alpha"),
        ("alpha", True, ["attention.same"], "beta"),
    ],
)
def test_a_name_is_taken_from_a_built_in_by_either_consent_and_from_a_package_by_both(
    owner: str, override: bool, allowed: list[str], winner: str
) -> None:
    own = FakeEntryPoint("attention.own", plugin(attention("same")), owner, "1")
    other = FakeEntryPoint(
        "attention.two", plugin(attention("same", override=override), attention("more")), "beta", "2"
    )
    plugins = found(other, own, allow_override=allowed)
    assert find(plugins, "attention", "same").package == winner
    assert find(plugins, "attention", "more").package == "beta", "its other declarations stand"
    assert [item.package for item in plugins.overridden] == ([owner] if winner == "beta" else [])
    said = plugins.contested("attention.same")
    assert (said is None) == (winner == "beta")
    if owner == "fwk" and said is not None:
        assert said == (
            "attention backend 'same' is declared by 'attention.own' from fwk 1 and by 'attention.two' from beta 2; "
            "say --allow-override attention.same to use that of beta, whose author can say override=True in its "
            "AttentionBackendSpec instead, or uninstall beta"
        )


def test_a_contested_name_that_an_option_has_unless_said_ends_nothing() -> None:
    taken = plugin(SchedulePolicySpec(name="fcfs", load="a:b"), hook="schedule_policies")
    own = plugin(SchedulePolicySpec(name="fcfs", load="c:d"), hook="schedule_policies")
    points = [FakeEntryPoint("schedulers.fcfs", own, "fwk"), FakeEntryPoint("schedulers.fcfs", taken, "beta")]
    plugins = found(*points)
    assert plugins.contested("schedulers.fcfs") is not None
    default = EngineOptions.model_fields["schedule_policy"].default
    selection = choose(plugins, "schedulers", default, Facts())
    assert selection.chosen is not None
    assert selection.chosen.package == "fwk"


def test_one_module_with_two_hooks_and_two_entry_points_declares_both_once() -> None:
    module = plugin(attention("mine"))
    declare(module, "schedule_policies", [SchedulePolicySpec(name="mine", load="a:b")])
    warnings: list[str] = []
    points = [FakeEntryPoint(name, module) for name in ("attention.mine", "schedulers.mine", "acme.again")]
    plugins = found(*points, warn=warnings.append)
    assert warnings == []
    assert [item.plugin for item in plugins.all()] == ["attention.mine", "schedulers.mine"]


def wrong_arguments() -> ModuleType:
    module = plugin(attention("x"))

    @hookimpl
    def attention_backends(config: object) -> list[object]:
        return []

    module.attention_backends = attention_backends  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize(
    ("points", "said"),
    [
        ([("attention.x", plugin(attention("x"))), ("attention.x", plugin(attention("y")))], None),
        ([("attention.x", wrong_arguments())], "failed to declare: PluginValidationError: "),
        ([("attention.x", ImportError("a\nb" * 900))], "failed to import: ImportError: a ba ba b"),
    ],
)
def test_what_is_wrong_is_one_short_line(points: list[tuple[str, object]], said: str | None) -> None:
    warnings: list[str] = []
    plugins = found(*(FakeEntryPoint(*point) for point in points), warn=warnings.append)
    assert len(plugins.all()) + len(warnings) == len(points)
    assert (said is None) == (warnings == [])
    for line in warnings:
        assert said is not None
        assert said in line
        assert "\n" not in line
        assert "module" not in line, "no registry"
        assert len(line) < 700


def test_an_entry_point_that_names_no_module_is_told_with_its_package() -> None:
    point = FakeEntryPoint("attention.x", plugin(attention("x")))
    point.value = "not a module!"
    [broken] = found(point).broken
    assert broken.sentence() == (
        "plugin 'attention.x' from acme 1.0 failed to import: ValueError: its entry point 'not a module!' names no "
        "module: mend its metadata, or uninstall it"
    )


class Damaged:
    """Metadata without a name, as each Python reads it."""

    version = None

    @property
    def name(self) -> str:
        raise KeyError("Name")


def test_damaged_metadata_end_nothing() -> None:
    point = FakeEntryPoint("attention.x", plugin(attention("x")))
    point.dist = Damaged()  # type: ignore[assignment]
    assert [item.package for item in found(point).all()] == ["?"]


def test_the_fingerprint_tells_sets_apart() -> None:
    one = found(FakeEntryPoint("attention.x", plugin(attention("x")), version="1"))
    same = found(FakeEntryPoint("attention.x", plugin(attention("x")), version="1"))
    newer = found(FakeEntryPoint("attention.x", plugin(attention("x")), version="2"))
    assert one.fingerprint == same.fingerprint != newer.fingerprint


def choosable() -> PluginSet:
    specs = [
        attention("best", rank=50, needs=Needs(device="cuda")),
        attention("good", rank=20, dtypes=("float32",)),
        attention("plain", rank=0),
        attention("windowless", rank=60, features=frozenset(), head_sizes=(64,)),
    ]
    return found(FakeEntryPoint("attention.acme", plugin(*specs)))


def test_auto_takes_the_best_that_is_possible_and_says_why_not_the_others() -> None:
    selection = choose(choosable(), "attention", "auto", Facts(head_size=80, dtype="bfloat16"))
    assert selection.chosen is not None
    assert selection.chosen.name == "plain"
    assert selection.reasons() == [
        "attention backend 'windowless' was not taken: it has kernels for head sizes 64, this model's is 80",
        "attention backend 'best' was not taken: it needs a cuda device, this run uses cpu",
        "attention backend 'good' was not taken: it computes in float32, this run in bfloat16",
    ]
    on_gpu = choose(choosable(), "attention", "auto", Facts(host=Host("cuda"), head_size=80))
    assert on_gpu.chosen is not None
    assert on_gpu.chosen.name == "best"


class Unanswering(AttentionBackendSpec):
    """Its own code fails where it is asked for ``fails``."""

    fails: ClassVar[str] = ""

    def refusal(self, facts: Facts) -> str | None:
        return 5 if self.fails == "refusal" else super().refusal(facts)  # type: ignore[return-value]

    def is_meant_for(self, facts: Facts) -> bool:
        raise SystemExit(3)

    def facts_with(self, facts: Facts, options: object) -> Facts:
        raise ZeroDivisionError


class Refusing(Unanswering):
    fails = "refusal"


def test_one_whose_own_code_fails_when_it_is_asked_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    declared = [Unanswering(name="mine", load="a:b"), Refusing(name="best", load="a:b", rank=90), attention("plain")]
    found(FakeEntryPoint("attention.acme", plugin(*declared)))
    plugins = found(FakeEntryPoint("attention.acme", plugin(*declared)))  # as each command and process does
    selection = choose(plugins, "attention", "auto", Facts())
    assert selection.reasons() == [
        "attention backend 'best' was not taken: it answered a int, no str | None, in refusal",
    ]
    mine = find(plugins, "attention", "mine").declaration
    assert (mine.is_meant_for(Facts()), mine.facts_with(Facts(), None)) == (True, Facts())
    assert [record.message.partition(":")[0] for record in caplog.records if "'mine'" in record.message] == [
        "attention backend 'mine' (acme 1.0) raised SystemExit in is_meant_for",
        "attention backend 'mine' (acme 1.0) raised ZeroDivisionError in facts_with",
    ]


@pytest.mark.parametrize(
    ("name", "facts", "message"),
    [
        ("bst", Facts(), r"unknown attention backend 'bst' \(did you mean 'best'\?\); installed: best, good"),
        ("best", Facts(), "cannot be used: it needs a cuda device"),
        ("plain", Facts(features=frozenset({"sliding_window"})), "lacks sliding_window"),
        ("plain", Facts(kv_dtype="fp8_e4m3"), "keeps K/V as auto, not fp8_e4m3"),
    ],
)
def test_a_refusal_has_a_sentence(name: str, facts: Facts, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        choose(choosable(), "attention", name, facts)


def test_needs_name_the_remedy() -> None:
    assert Needs(packages=("no-such-package>=2",)).refusal(Host()) == (
        "needs the package no-such-package>=2: pip install 'no-such-package>=2'"
    )
    assert "is installed: pip install" in (Needs(packages=("pluggy>=999",)).refusal(Host()) or "")
    assert Needs(packages=("pluggy>=1",)).refusal(Host()) is None
    assert "compute capability 9.0" in (Needs(compute_capability=(9, 0)).refusal(Host("cuda", (8, 0))) or "")
    assert "avx512_bf16" in (Needs(cpu_flags=("avx512_bf16",)).refusal(Host()) or "")


def test_the_version_of_a_package_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def version(package: str) -> str:
        asked.append(package)
        return "2.0"

    installed_version.cache_clear()
    monkeypatch.setattr("importlib.metadata.version", version)
    assert Needs(packages=("made-up-for-this-test>=1",)).refusal(Host()) is None
    assert "but 2.0 is installed" in (Needs(packages=("made-up-for-this-test>=3",)).refusal(Host()) or "")
    assert asked == ["made-up-for-this-test"]


def test_none_possible_says_all_the_reasons() -> None:
    with pytest.raises(PluginError, match=r"no attention backend can serve this run: .*best.*good"):
        choose(choosable(), "attention", "auto", Facts(kv_dtype="int8"))


def test_without_a_built_in_the_error_says_what_is_gone() -> None:
    plugins = discover(points=[p for p in entry_points(group="fwk") if not p.name.startswith("schedulers.")])
    with pytest.raises(PluginError, match="unknown schedule policy 'fcfs'; installed: none"):
        choose(plugins, "schedulers", "fcfs", Facts())


def test_load_errors_name_plugin_package_and_cause() -> None:
    item = found(FakeEntryPoint("attention.x", plugin(attention("x")), "acme", "7")).family("attention")[0]
    with pytest.raises(PluginLoadError, match=r"'attention.x' from acme 7 failed to import acme:Backend"):
        load_object(item)


def test_each_family_has_its_own_name_and_hook() -> None:
    assert len({family.hook for family in FAMILIES.values()}) == len(FAMILIES) == 28
