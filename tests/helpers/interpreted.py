"""What holds for every plugin whose kernels are Triton's, for CUDA devices or its interpreter."""

from __future__ import annotations

import os

import pytest

from fwk.errors import PluginError
from fwk.interfaces.declaration import Facts, Host
from fwk.plugins import PluginSet, choose, find

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in Triton's interpreter")


def check_never_chosen_by_itself(plugins: PluginSet, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``auto`` leaves the plugin ``triton`` alone, which needs a device it compiles for or the interpreter."""
    declaration = find(plugins, family, "triton").declaration
    for facts in (Facts(), Facts(host=Host("cuda", (9, 0)))):
        chosen = choose(plugins, family, "auto", facts).chosen
        assert chosen is not None
        assert chosen.name != "triton"
        assert declaration.refusal(facts) is None
    assert "compute capability 8.0" in (declaration.refusal(Facts(host=Host("cuda", (7, 5)))) or "")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(PluginError, match="needs a cuda device, or TRITON_INTERPRET=1 to run its kernels in"):
        choose(plugins, family, "triton", Facts())
