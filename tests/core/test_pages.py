"""Memory in huge pages."""

from __future__ import annotations

import sys

import pytest

from fwk import pages


@pytest.mark.skipif(sys.platform != "linux", reason="as Linux tells of pages")
def test_the_system_is_asked_for_huge_pages() -> None:
    piece = pages.zeros(5)
    assert piece.tolist() == [0] * 5
    assert piece.data_ptr() % pages.HUGE == 0
    with open("/proc/self/smaps", encoding="ascii") as file:
        lines = iter(file.read().splitlines())
    flags, is_ours = "", False
    for line in lines:
        first, _, rest = line.partition(" ")
        if "-" in first and rest:
            start, end = (int(x, 16) for x in first.split("-"))
            is_ours = start <= piece.data_ptr() < end
        elif first == "VmFlags:" and is_ours:
            flags = rest
    assert "hg" in flags.split()
