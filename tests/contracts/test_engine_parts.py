"""Experts, adapters, drafts, caches and executors do what their contracts say."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import save_file
from tests.helpers.interpreted import interpreted
from tests.helpers.lmcache_server import LMCacheImitation
from tests.helpers.ray_cluster import local_ray, needs_ray
from tests.helpers.redis_server import RedisServer
from tests.helpers.transports import missing

from fwk.plugins import Registered
from fwk_kit.testing import (
    CacheTierSuite,
    DeviceSuite,
    ExecutorSuite,
    ExpertPlacerSuite,
    FeatureSuite,
    KVTransferSuite,
    LoRABackendSuite,
    LoRASourceSuite,
    MoERunnerSuite,
    PrefixCacheSuite,
    SpeculativeDecoderSuite,
)


class TestDeepSeekPlacement(ExpertPlacerSuite):
    plugin = "deepseek"


class TestRemotePrefill(FeatureSuite):
    """Off, as ``fwk.LLM`` has it: servers that share their work are in tests/e2e/test_disaggregation.py."""

    plugin = "remote_prefill"


class TestExpertPlacement(FeatureSuite):
    plugin = "expert_placement"
    options = {"eplb_algorithm": "auto"}  # which turns it on, and moves nothing


class TestJumpForward(FeatureSuite):
    plugin = "jump_forward"


class TestTcpTransfer(KVTransferSuite):
    plugin = "tcp"


@pytest.mark.skipif(missing("nixl") is not None, reason=missing("nixl") or "")
class TestNixlTransfer(KVTransferSuite):
    plugin = "nixl"


@pytest.mark.skipif(missing("mooncake") is not None, reason=missing("mooncake") or "")
class TestMooncakeTransfer(KVTransferSuite):
    plugin = "mooncake"


class TestTorchExperts(MoERunnerSuite):
    plugin = "torch"


class TestCpuExperts(MoERunnerSuite):
    plugin = "cpu"


@interpreted
class TestTritonExperts(MoERunnerSuite):
    plugin = "triton"

    @pytest.mark.sweep
    def test_serves_a_tiny_model(self, item: Registered) -> None:
        super().test_serves_a_tiny_model(item)

    @pytest.mark.sweep
    def test_a_token_gets_the_same_beside_others(self, item: Registered) -> None:
        """A short one is in tests/plugins/moe/test_triton.py."""
        super().test_a_token_gets_the_same_beside_others(item)


class TestTorchLoRA(LoRABackendSuite):
    plugin = "torch"


@interpreted
class TestTritonLoRA(LoRABackendSuite):
    plugin = "triton"


def write_adapter(folder: Path, a: torch.Tensor, b: torch.Tensor) -> None:
    """An adapter of rank 4 for one matrix, as PEFT saves it."""
    folder.mkdir(parents=True)
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    save_file({f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}, folder / "adapter_model.safetensors")


class TestAdapters(FeatureSuite):
    plugin = "lora"
    options: ClassVar[Mapping[str, Any]] = {"enable_lora": True}
    fields: ClassVar[Mapping[str, Any]] = {"adapter": "mine"}

    def prepare(self, llm: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            random = torch.Generator().manual_seed(1)
            a, b = (torch.randn(size, generator=random) for size in ((4, 64), (64, 4)))
            write_adapter(Path(folder) / "mine", a, b)
            llm.load_adapter("mine", str(Path(folder) / "mine"))


class TestLocalAdapters(LoRASourceSuite):
    plugin = "local"

    def prepare(self, folder: Path) -> tuple[dict[str, object], str]:
        write_adapter(folder / "place" / "mine", torch.ones(4, 16), torch.ones(16, 4))
        return {"lora_dirs": (str(folder / "place"),)}, "mine"


class TestNgram(SpeculativeDecoderSuite):
    plugin = "ngram"


class TestNgramTrees(SpeculativeDecoderSuite):
    plugin = "ngram"
    options = {"speculative_ngram_max_bfs_breadth": 3}


class TestSuffix(SpeculativeDecoderSuite):
    plugin = "suffix"


class TestRadix(PrefixCacheSuite):
    plugin = "radix"


class TestRadixByFrequency(PrefixCacheSuite):
    plugin = "radix"
    options = {"radix_eviction_policy": "lfu"}


class TestNone(PrefixCacheSuite):
    plugin = "none"


class TestHierarchical(PrefixCacheSuite):
    plugin = "hierarchical"


class TestHost(CacheTierSuite):
    plugin = "host"


class TestFile(CacheTierSuite):
    plugin = "file"

    @pytest.fixture(autouse=True)
    def folder(self) -> Iterator[None]:
        with tempfile.TemporaryDirectory() as folder:
            self.place = folder
            yield

    def tier_options(self) -> dict[str, object]:
        # In a process of its own the suite has no fixtures.
        return {"hicache_storage_dir": getattr(self, "place", None) or tempfile.mkdtemp()}

    def selected(self, item: Any) -> dict[str, Any]:
        return {**super().selected(item), **self.tier_options()}


class TestCpuDevice(DeviceSuite):
    plugin = "cpu"


class TestCudaDevice(DeviceSuite):
    plugin = "cuda"


class TestRocmDevice(DeviceSuite):
    plugin = "rocm"


class TestXpuDevice(DeviceSuite):
    plugin = "xpu"


class TestMpsDevice(DeviceSuite):
    plugin = "mps"


class RemoteTierSuite(CacheTierSuite):
    """With a server of each test's own."""

    server: Any

    @pytest.fixture(autouse=True)
    def place(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        server = self.server()
        monkeypatch.setenv("TEST_TIER_URL", server.url)  # for the suite in a process of its own, too
        yield
        server.close()

    def tier_options(self) -> dict[str, object]:
        name = f"hicache_{self.plugin}"
        return {f"{name}_url": os.environ["TEST_TIER_URL"], f"{name}_timeout": 10.0}

    def selected(self, item: Any) -> dict[str, Any]:
        return {**super().selected(item), **self.tier_options()}


class TestRedis(RemoteTierSuite):
    plugin = "redis"
    server = RedisServer


class TestLMCache(RemoteTierSuite):
    """With a server that imitates LMCache's; the real one is in tests/clients/test_lmcache.py."""

    plugin = "lmcache"
    server = LMCacheImitation


class TestHierarchicalWithLMCache(PrefixCacheSuite):
    """``--enable-lmcache``; no server is there."""

    plugin = "lmcache"


class TestInProcess(ExecutorSuite):
    plugin = "inprocess"


class TestThreaded(ExecutorSuite):
    plugin = "threaded"


class TestProcesses(ExecutorSuite):
    """Two ranks of a model are in tests/e2e/test_tensor_parallel.py."""

    plugin = "processes"
    serve_with = {"tensor_parallel_size": 2}

    @pytest.mark.sweep
    def test_serves_a_tiny_model(self, item: Registered) -> None:
        super().test_serves_a_tiny_model(item)

    @pytest.mark.sweep
    def test_two_engines_do_not_share(self, item: Registered) -> None:
        super().test_two_engines_do_not_share(item)


@needs_ray
@pytest.mark.sweep
class TestRay(ExecutorSuite):
    """With a Ray that the process has already; one that it starts is in tests/plugins/executors/test_ray.py."""

    plugin = "ray"
    serve_with = {"tensor_parallel_size": 2}

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def cluster(cls) -> Iterator[None]:
        with local_ray():
            yield
