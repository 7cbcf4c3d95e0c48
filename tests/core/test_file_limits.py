"""The limit of open files is raised, as far as the system lets us."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource
from fwk_process.file_limits import allow_more_descriptors
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
allow_more_descriptors()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(("soft", "hard", "expected"), [(256, 2000, "2000 2000"), (300, 300, "300 300")])
def test_the_soft_limit_is_raised_to_the_hard_one(soft: int, hard: int, expected: str) -> None:
    pytest.importorskip("resource")
    program = PROGRAM.format(soft=soft, hard=hard)
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip() == expected
