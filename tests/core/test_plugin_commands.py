"""``fwk plugins list|doctor|freeze|new|test|bench``, and ``--plugins-lock``."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections import defaultdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.helpers.fake_plugins import declare
from tests.helpers.packages import import_path, write_metadata
from tests.helpers.templates import install
from tests.helpers.zygote import run_fwk

from fwk import AttentionBackendSpec
from fwk.cli.main import main
from fwk.errors import ConfigError
from fwk.plugins import FAMILIES, build_config, discover, find
from fwk.plugins.lock import check_lock, frozen
from fwk.setup.checkpoint import open_model
from fwk.setup.resolve import resolve
from fwk_kit.cli import plugin_why
from fwk_kit.cli.plugin_bench import Load, as_json, as_markdown, run
from fwk_kit.cli.plugin_new import create, package, renamed
from fwk_kit.testing.base import installed


def fwk(*words: str, site: Path | None = None, code: int | None = 0) -> str:
    """What a command prints, as a user sees it, with further packages installed in ``site``."""
    places = [str(site)] if site is not None else []
    environment = {**os.environ, "PYTHONPATH": import_path(*places)}
    done = run_fwk(*words, environment=environment)
    assert code is None or done.returncode == code, done.stdout + done.stderr
    return done.stdout or done.stderr


SOURCE = """
from fwk import LoadBalancerSpec, hookimpl

@hookimpl
def load_balancers():
    return [LoadBalancerSpec(name="{name}", load="nowhere:Nothing", override={override}{more})]
"""


def plugin(site: Path, name: str, *, override: bool = False, more: str = "", before: str = "") -> None:
    """A package ``acme-NAME`` with one load balancer."""
    site.mkdir(exist_ok=True)
    (site / f"acme_{name}.py").write_text(before + SOURCE.format(name=name, override=override, more=more))
    write_metadata(site, f"acme-{name}", {f"load_balancers.{name}": f"acme_{name}"})


def test_list_says_what_comes_from_where_and_what_it_costs(tmp_path: Path) -> None:
    plugin(tmp_path, "one")
    plugin(tmp_path, "bad", before="raise OSError('no rocket')\n")
    rows = {row["name"]: row for row in json.loads(fwk("plugins", "list", "--json", site=tmp_path))}
    assert rows["one"] | {"load_ms": 0} == {
        "family": "load_balancers", "name": "one", "package": "acme-one", "version": "1.0", "api": 1, "rank": 0,
        "state": "ok", "touches": [], "load_ms": 0, "options": [], "summary": "",
    }  # fmt: skip
    assert rows["ngram"]["options"][0] == "speculative_num_draft_tokens"
    assert rows["bad"]["state"] == "broken"
    table = fwk("plugins", "list", site=tmp_path)
    assert "acme-one 1.0" in table
    assert "no rocket" in table


@pytest.mark.parametrize(
    ("words", "refused", "reason"),
    [
        (
            ["--with", "--dtype", "bfloat16", "--kv-cache-dtype", "int8"],
            "flashinfer",
            "keeps K/V as auto, fp8_e4m3, not int8",
        ),
        (["--dtype", "float16"], "cpu", "this run in float16"),
        ([], "flashinfer", "this run in float32"),
    ],
)
def test_why_names_the_rule(words: list[str], refused: str, reason: str) -> None:
    told = why("attention", *words)
    assert reason in refusals(told)[refused]
    assert "torch" not in refusals(told)


def here(*words: str, code: int = 0) -> str:
    """What a command prints in this process, where no further package is needed: a fraction of a second each."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as error:
        assert main(words) == code
    return out.getvalue() or error.getvalue()


def why(*words: str) -> dict[str, Any]:
    """What ``fwk plugins why --json`` tells."""
    return json.loads(here("plugins", "why", words[0], "--json", *words[1:]))


def refusals(told: dict[str, Any]) -> dict[str, str]:
    return {c["name"]: c["refusal"] for c in told["candidates"] if c["refusal"] is not None}


def test_why_says_what_another_familys_choice_refuses(tiny_folder: Path) -> None:
    """With a model and without, in words that the server uses too."""
    plugins = discover()
    module = ModuleType("acme")
    declare(module, "attention_backends", [AttentionBackendSpec(name="poor", load="a:b", rank=99)])
    plugins.register(module, "attention.poor", "acme", "1")
    trees = {"load_format": "dummy", "speculative_algorithm": "ngram", "speculative_ngram_max_bfs_breadth": 3}
    asked = "it lacks tree_mask, which speculative decoder 'ngram' asks for"
    for model in ("", str(tiny_folder)):
        answer = plugin_why.why(plugins, "attention", build_config(plugins, {"model": model, **trees}))
        assert {row.name: row.refusal for row in answer.candidates}["poor"] == asked
        assert (answer.requested, answer.error) == ("auto", None)
        assert answer.chosen in ("cpu", "torch")
        assert f"refused: {asked}" in plugin_why.as_text(answer)
        assert f"auto would take {answer.chosen} " in plugin_why.as_text(answer)
    config = build_config(plugins, {"model": str(tiny_folder), **trees})
    setup = resolve(config, open_model(config, plugins, print), plugins)
    assert setup.refused["attention"]["poor"] == asked
    assert setup.reasons == (f"attention backend 'poor' was not taken: {asked}",)
    named = build_config(plugins, {"model": "", "attention_backend": "poor", **trees})
    answer = plugin_why.why(plugins, "attention", named)
    assert (answer.requested, answer.chosen) == ("poor", None)
    assert answer.error is not None
    assert "for tree_mask, which it lacks" in answer.error
    assert f"this run cannot start: {answer.error}" in plugin_why.as_text(answer)


@pytest.mark.gate(3)
@pytest.mark.parametrize(
    ("family", "name", "words"),
    [
        ("executors", "inprocess", "it runs one worker, but --tensor-parallel-size is 2"),
        ("reasoning_parsers", "qwen3", "it reads </think>, which the chat template does not have"),
        ("moe", None, ""),
        ("logits_processors", None, ""),
        ("load_balancers", None, ""),
    ],
)
def test_why_answers_for_every_kind_of_family(tiny_folder: Path, family: str, name: str | None, words: str) -> None:
    told = why(family, "--model", str(tiny_folder), "--with", "--load-format", "dummy", "--tensor-parallel-size", "2")
    found = refusals(told)
    assert (words in found.get(name, "")) if name else not found


def test_why_refuses_options_nobody_has() -> None:
    words = ["--with", "--kv-cash-dtype", "x"]
    assert "unknown option --kv-cash-dtype" in here("plugins", "why", "attention", *words, code=2)
    assert "unknown family 'attentoin'" in here("plugins", "why", "attentoin", code=2)
    assert "unknown attention backend 'trch' (did you mean 'torch'?)" in here(
        "plugins", "why", "attention", "--with", "--attention-backend", "trch", code=5
    )


@pytest.mark.sweep
def test_doctor_finds_nothing_wrong_here() -> None:
    told = json.loads(here("plugins", "doctor", "--json"))
    assert [finding for finding in told["findings"] if finding["level"] != "note"] == []


BUSY = "import time\nend = time.thread_time() + 0.05\nwhile time.thread_time() < end:\n    pass\n"


def test_doctor_finds_what_is_wrong(tmp_path: Path) -> None:
    plugin(tmp_path, "bad", before="raise OSError('no rocket')\n")
    plugin(tmp_path, "over", override=True)
    plugin(tmp_path, "slow", before=BUSY + "def schedule_policies(): return []\n")
    plugin(tmp_path, "number", before="Class = 5\n")
    file = tmp_path / "acme_number.py"
    file.write_text(file.read_text().replace("nowhere:Nothing", "acme_number:Class"))
    plugin(tmp_path, "needy", more=', needs=Needs(packages=("rocket>=3",))', before="from fwk import Needs\n")
    plugin(tmp_path, "twice")
    write_metadata(tmp_path, "acme-twice", {}, version="2.0")
    write_metadata(tmp_path, "acme-gone", {"load_balancers.gone": "acme_gone"})
    words = ["plugins", "doctor", "--json", "--allow-override", "cache.radix"]
    found = json.loads(fwk(*words, site=tmp_path, code=1))["findings"]
    told: defaultdict[tuple[str, str], str] = defaultdict(str)
    for finding in found:
        told[finding["level"], finding["subject"]] += finding["message"]  # on a busy machine others are slow too
    assert "no rocket" in told["error", "load_balancers.bad"]
    assert "acme_gone is gone: pip install acme-gone again" in told["error", "load_balancers.gone"] or (
        "failed to import" in told["error", "load_balancers.gone"]
    )
    assert "is installed in versions 1.0 and 2.0" in told["error", "acme-twice"]
    assert "there is no other" in told["note", "load_balancers.over"]
    assert "leave it out" in told["warning", "cache.radix"]
    assert "pip install 'rocket>=3'" in told["note", "load_balancers.needy"]
    assert "ms to declare" in told["note", "load_balancers.slow"]
    assert told["error", "load_balancers.slow"] == (
        "plugin 'load_balancers.slow' from acme-slow 1.0 failed to import nowhere:Nothing: "
        "ModuleNotFoundError: No module named 'nowhere'"
    )
    assert told["warning", "load_balancers.slow of acme-slow"] == (
        "its function schedule_policies lacks @hookimpl, and so declares nothing"
    )
    assert told["error", "load_balancers.number"] == (
        "plugin 'load_balancers.number' from acme-number 1.0: acme_number:Class makes nothing: it is of type int"
    )
    assert ("error", "load_balancers.needy") not in told, "serve would not import it"
    assert fwk("plugins", "doctor", site=tmp_path, code=1).splitlines()[-1].endswith("other findings")


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        ("round_robin", "", "'round_robin' is declared by 'load_balancers.round_robin' from fwk"),
        ("round_robin", ", api=99", "was written for version 99 of the load_balancers interface"),
    ],
)
def test_a_built_in_is_not_tested_in_place_of_a_package_of_its_name(
    tmp_path: Path, name: str, more: str, said: str
) -> None:
    (tmp_path / "acme.py").write_text(SOURCE.format(name=name, override=False, more=more))
    write_metadata(tmp_path, "acme", {"acme.all": "acme"})
    for asked in (name, f"load_balancers.{name}", "acme"):
        told = fwk("plugins", "test", asked, site=tmp_path, code=2)
        assert said in told.splitlines()[-1]
    assert fwk("--version", site=tmp_path).endswith("0.1.0\n"), "needs neither"


@pytest.mark.sweep
def test_doctor_compares_with_a_server(tmp_path: Path) -> None:
    assert "cannot be asked" in here("plugins", "doctor", "--url", "http://127.0.0.1:9", code=1)
    assert "must begin with http" in here("plugins", "doctor", "--url", "ftp://x", code=2)


def test_processes_that_disagree_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fwk_kit.cli.plugin_doctor import doctor

    plugin(tmp_path, "hidden")
    monkeypatch.syspath_prepend(str(tmp_path))  # in this process only
    found = [finding for finding in doctor() if finding.subject == "processes"]
    assert len(found) == 1
    assert "sees the set" in found[0].message


def test_a_lock_is_kept(tmp_path: Path) -> None:
    plugins, path = installed(), tmp_path / "plugins.lock"
    here("plugins", "freeze", "--output", str(path))
    check_lock(str(path), plugins)
    assert build_config(plugins, {"plugins_lock": str(path)}).plugins.plugins_lock == str(path)
    assert json.loads(path.read_text()) == frozen(plugins) == json.loads(here("plugins", "freeze", "--json"))


@pytest.mark.gate(2)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows.pop("cache.none"), "cache.none (fwk) is not in the file"),
        (lambda rows: rows.update({"cache.gone": rows["cache.none"]}), "cache.gone (fwk) is missing"),
        (lambda rows: rows["cache.none"].update(version="0.0.1"), "cache.none has version 0.1.0 instead of 0.0.1"),
        (lambda rows: rows["cache.none"].update(load="a:B"), "instead of a:B"),
    ],
)
def test_a_lock_that_differs_is_refused(change: Any, message: str, tmp_path: Path) -> None:
    locked = frozen(installed())
    change(locked["plugins"])
    (tmp_path / "lock").write_text(json.dumps(locked))
    with pytest.raises(ConfigError) as caught:
        build_config(installed(), {"plugins_lock": str(tmp_path / "lock")})
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"plugins": 3}'])
def test_what_is_no_lock_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "lock").write_text(text)
    with pytest.raises(ConfigError, match=r"not a file that|is not in the file"):
        check_lock(str(tmp_path / "lock"), installed())


@pytest.mark.parametrize("family", FAMILIES)
def test_new_writes_a_package_of_every_family(family: str, tmp_path: Path) -> None:
    folder = create(installed(), family, "two_words", tmp_path)
    assert folder.name == "fwk-two-words"
    paths = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert {"pyproject.toml", "README.md", ".github/workflows/test.yml", "tests/test_contract.py"} <= paths
    for path in folder.rglob("*.py"):
        text = path.read_text()
        compile(text, str(path), "exec")
        assert "mine" not in text.replace("determine", "").lower(), path
    project = (folder / "pyproject.toml").read_text()
    assert f'"{family}.two_words" = "fwk_two_words"' in project


def test_new_refuses(tmp_path: Path) -> None:
    for family, name, message in [
        ("nonsense", "x", "unknown family"),
        ("attention", "Not-A-Name", "not a name for a plugin"),
        ("attention", "torch", "is there already, from"),
        ("attention", "quant", "would hide it"),
    ]:
        with pytest.raises(ConfigError, match=message):
            create(installed(), family, name, tmp_path)
    create(installed(), "attention_backends", "fine", tmp_path)
    with pytest.raises(ConfigError, match="is there already: choose another name, or another folder"):
        create(installed(), "attention", "fine", tmp_path)


def test_names_are_changed_as_words() -> None:
    assert renamed("determine mine MineX --mine-x fwk-mine fwk_mine TestMine mine_x", "a_b") == (
        "determine a_b ABX --a-b-x fwk-a-b fwk_a_b TestAB a_b_x"
    )


@pytest.mark.sweep
def test_test_runs_the_contract(tmp_path: Path) -> None:
    install(tmp_path, "load_balancers", "right")
    install(
        tmp_path, "load_balancers", "wrong", ("return min(replicas, key=lambda replica: replica.num_open)", "return 3")
    )
    site = tmp_path / "site"
    [told] = json.loads(fwk("plugins", "test", "right", "--json", site=site))
    assert (told["plugin"], told["package"], told["failed"]) == ("load_balancers.right", "fwk-right 0.1.0", {})
    assert told["passed"] >= 8
    last = fwk("plugins", "test", "right", site=site).splitlines()[-1]
    assert last == f"{told['passed']} promises checked, {len(told['skipped'])} not" + (
        f", because {'; '.join(sorted(set(told['skipped'].values())))}" if told["skipped"] else ""
    )
    [told] = json.loads(fwk("plugins", "test", "load_balancers.wrong", "--json", site=site, code=1))
    assert "test_chooses_one_of_those_it_is_given_and_changes_none" in told["failed"]
    assert "no installed plugin or package is named 'radxi' (did you mean 'radix'?)" in here(
        "plugins", "test", "radxi", code=2
    )


@pytest.mark.sweep
def test_bench_compares_and_reports() -> None:
    plugins = installed()
    report = run(plugins, find(plugins, "cache", "none"), "radix", None, Load(2, 24, 4, 2))
    assert report.equal_tokens == 1.0
    assert report.max_logprob_error < 1e-4
    assert report.plugin.tokens_per_second > 0
    assert json.loads(as_json(report))["fingerprint"] == plugins.fingerprint
    assert "| tokens a second, 2 requests together |" in as_markdown(report)
    with pytest.raises(ConfigError, match="has no part in an engine's steps"):
        run(plugins, find(plugins, "dialects", "tgi"), "openai", None, Load())


def test_packages_of_templates_hold_no_word_of_the_frame() -> None:
    for family in FAMILIES:
        for path, text in package(installed(), family).items():
            for word in ("SUMMARY", "VERSION", "FAMILY", "INTERFACE", "NOUN"):
                assert word not in text, (path, word)
