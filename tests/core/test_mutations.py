"""The list of mutations (``make mutations``): each can be applied to today's sources, and no package is left out."""

from __future__ import annotations

import tomllib

from tests.helpers.mutations import ROOT, read


def test_each_can_be_applied_to_todays_sources() -> None:
    for mutation in read():
        text = (ROOT / mutation.file).read_text(encoding="utf-8")
        assert mutation.applied(text) != text, f"{mutation.id} changes nothing"
        missing = [test for test in mutation.tests if not (ROOT / test.partition("::")[0]).is_file()]
        assert mutation.tests, f"{mutation.id} names no tests"
        assert not missing, f"{mutation.id}: {missing} are not there"
        assert mutation.about, f"{mutation.id} does not say what goes wrong"


def test_no_package_is_left_out() -> None:
    mutations = read()
    assert len(mutations) >= 120
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert [package for package in packages if not any(m.file.startswith(f"{package}/") for m in mutations)] == []
