"""Commands that make environments of packages."""

from __future__ import annotations

import subprocess

INSTALL_SECONDS = 600


def run(command: list[str], *, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command; its output tells why it failed."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS)
    assert not check or done.returncode == 0, f"{command}: {done.stdout[-2000:]} {done.stderr[-3000:]}"
    return done
