"""The tests' own starter of servers outlives what ends it."""

import os
import signal

import pytest
from tests.helpers.zygote import AT_FIRST, Zygote


@pytest.mark.sweep
def test_a_zygote_that_was_killed_is_followed_by_another_and_told(tmp_path) -> None:
    zygote = Zygote(AT_FIRST)
    try:
        with open(tmp_path / "log", "w+") as log:
            assert zygote.start(["fwk", "--version"], os.environ, log.fileno(), output=log.fileno()).wait(60) == 0
            os.kill(zygote._process.pid, signal.SIGKILL)
            with pytest.warns(UserWarning, match="the zygote ended with -9"):
                again = zygote.start(["fwk", "--version"], os.environ, log.fileno(), output=log.fileno())
            assert again.wait(60) == 0
            log.seek(0)
            assert len(log.read().split()) == 2
    finally:
        zygote.close()
