"""``fwk plugins test NAME``: the contract of its family, run on an installed plugin."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from fwk.errors import ConfigError
from fwk.plugins import PluginSet, Registered
from fwk.plugins.families import closest

CONTRACTS = "fwk.contracts"
"""Entry points, named like the plugin's, of modules with a subclass of its family's suite."""


@dataclass(slots=True)
class ContractResult:
    """What became of one plugin's contract. ``failed`` and ``skipped``: by test, the first line of the reason."""

    plugin: str
    package: str
    contract: str
    passed: int = 0
    failed: dict[str, str] = field(default_factory=dict[str, str])
    skipped: dict[str, str] = field(default_factory=dict[str, str])


def named(plugins: PluginSet, name: str) -> list[Registered]:
    """The plugins of that name, ``family.name`` or package.

    Raises ``ConfigError``, for a broken one too: another package's of the same name is not the one that was meant.
    """
    for broken in plugins.broken:
        if broken.is_called(name):
            raise ConfigError(broken.sentence())
    found = [item for item in plugins.all() if name in (item.name, item.key, item.package)]
    if found:
        return found
    hint = closest(name, {word for item in plugins.all() for word in (item.name, item.key, item.package)})
    raise ConfigError(f"no installed plugin or package is named {name!r}{hint}: see 'fwk plugins list'")


def test(item: Registered, quiet: bool) -> ContractResult:
    """Run the contract in a process of its own."""
    if find_spec("pytest") is None:
        raise ConfigError("fwk plugins test needs pytest: pip install 'fwk[testing]'")
    own = next((point.value for point in entry_points(group=CONTRACTS) if point.name == item.key), None)
    result = ContractResult(item.key, f"{item.package} {item.version}", own or f"fwk_kit.testing, family {item.family}")
    with tempfile.TemporaryDirectory(prefix="fwk-test-") as folder:
        place = Path(folder)
        (place / "test_contract.py").write_text(_module(item, own))
        (place / "pytest.ini").write_text("[pytest]\n")
        words = ["-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider", "--junitxml", str(place / "report.xml"), folder]
        done = subprocess.run([sys.executable, *words], cwd=folder, capture_output=quiet, text=True, check=False)
        if not (place / "report.xml").is_file():
            raise ConfigError(
                f"the contract of {item.key} could not be run: {(done.stderr or done.stdout or '')[-500:]}"
            )
        _read(place / "report.xml", result)
    if not result.passed and not result.failed:
        raise ConfigError(f"the contract of {item.key} ({result.contract}) has no test: name its class Test...")
    return result


def _module(item: Registered, own: str | None) -> str:
    if own is not None:
        return f"from {own.partition(':')[0]} import *\n"
    return (
        "from fwk_kit.testing import suite_of\n\n\n"
        f"class TestContract(suite_of({item.family!r})):\n    plugin = {item.name!r}\n"
    )


def _read(path: Path, result: ContractResult) -> None:
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        name = case.get("name", "?")
        bad = next((child for kind in ("failure", "error") for child in case.findall(kind)), None)
        skipped = case.find("skipped")
        if bad is not None:
            result.failed[name] = (bad.get("message") or "failed").partition("\n")[0]
        elif skipped is not None:
            result.skipped[name] = (skipped.get("message") or "").partition("\n")[0]
        else:
            result.passed += 1


def told(result: ContractResult) -> str:
    """One line, and one for each reason of a failure or a skip."""
    counts = f"{result.passed} passed, {len(result.failed)} failed, {len(result.skipped)} skipped"
    lines = [f"{result.plugin} ({result.package}), contract {result.contract}: {counts}"]
    lines += [f"  failed {name}: {why}" for name, why in result.failed.items()]
    reasons = sorted({why for why in result.skipped.values()})
    lines += [f"  skipped {sum(why == reason for why in result.skipped.values())}: {reason}" for reason in reasons]
    return "\n".join(lines)


def summary(results: Sequence[ContractResult]) -> str:
    """One line for all of them: promises that were checked, those that were not, and what keeps them from it."""
    checked = sum(result.passed + len(result.failed) for result in results)
    reasons = [reason for result in results for reason in result.skipped.values()]
    line = f"{checked} {'promise' if checked == 1 else 'promises'} checked, {len(reasons)} not"
    return f"{line}, because {'; '.join(sorted(set(reasons)))}" if reasons else line
