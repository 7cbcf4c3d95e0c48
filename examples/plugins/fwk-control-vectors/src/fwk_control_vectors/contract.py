"""The contract of the family, run by the package's tests and by ``fwk plugins test fwk-control-vectors``."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from safetensors.numpy import save_file

from fwk.testing import FeatureSuite


class TestControlVectors(FeatureSuite):
    plugin = "control_vectors"
    options: ClassVar[Mapping[str, Any]] = {"enable_control_vectors": True}
    request: ClassVar[Mapping[str, Any]] = {"control_vector": "north", "control_strength": 4.0}

    def prepare(self, llm: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "north.safetensors"
            save_file({"direction.0": np.linspace(-1.0, 1.0, 64, dtype=np.float32)}, path)
            llm.call_feature("control_vectors", "load", "north", str(path))
