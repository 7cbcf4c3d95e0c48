"""How many threads compute."""

from __future__ import annotations

import pytest
import torch

from fwk_process.threads import configure_omp_env, half_of_torchs_threads


@pytest.mark.parametrize(("count", "half"), [(1, 1), (2, 1), (5, 2)])
def test_torch_gets_its_threads_back(count: int, half: int) -> None:
    def load() -> None:
        with half_of_torchs_threads():
            assert torch.get_num_threads() == half
            raise ValueError("no such model")

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(count)
        with pytest.raises(ValueError, match="no such model"):
            load()
        assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(before)


def test_a_users_own_threads_stand() -> None:
    environment: dict[str, str] = {}
    configure_omp_env(environment)
    assert environment["OPENBLAS_NUM_THREADS"] == "1"
    environment = {"OPENBLAS_NUM_THREADS": "2", "OMP_WAIT_POLICY": "active"}
    configure_omp_env(environment)
    assert environment == {"OPENBLAS_NUM_THREADS": "2", "OMP_WAIT_POLICY": "active"}
