"""The benchmark of steps on a device that is not there runs, and counts what a step with drafts waits for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks import device_steps
from tests.helpers.interpreted import interpreted

pytestmark = interpreted


@pytest.mark.sweep
def test_steps_with_looked_up_drafts_are_measured(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**device_steps.LLAMA, "num_hidden_layers": 2}))
    row = device_steps.measure(tmp_path, "n-gram drafts", 4, 4, 48, 5.0)
    assert row["waits"] == 1
    assert row["launches"] > 0
    assert 0 <= row["idle"] < 1
