"""What bounds the libraries' caches of prepared kernels."""

from __future__ import annotations

from fwk_process.kernel_caches import NUM_KERNELS, bound_kernel_caches


def test_bounded_unless_the_user_says_otherwise() -> None:
    environment = {"LRU_CACHE_CAPACITY": "7"}
    bound_kernel_caches(environment)
    assert environment == {"LRU_CACHE_CAPACITY": "7", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": NUM_KERNELS}
