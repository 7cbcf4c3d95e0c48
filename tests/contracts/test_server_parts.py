"""Pools of engines, load balancers and observers do what their contracts say."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from tests.helpers.ray_cluster import needs_ray

from fwk_kit.testing import EnginePoolSuite, LoadBalancerSuite, ObserverSuite


class TestReplicas(EnginePoolSuite):
    plugin = "replicas"
    options = {"data_parallel_size": 3}


@needs_ray
class TestRayEngines(EnginePoolSuite):
    """Over scripted engines; on a cluster: tests/plugins/pools/test_ray.py."""

    plugin = "ray"
    options = {"data_parallel_backend": "ray"}


class TestOnDemand(EnginePoolSuite):
    plugin = "on_demand"
    options = {"idle_timeout": 60.0}


class TestEncoderOnly(EnginePoolSuite):
    """It has no engine, so nothing can be submitted: what the suite asks of requests is not asked."""

    plugin = "encoder_only"
    options = {"encoder_only": True}
    test_every_event_of_a_request_comes_once = None
    test_a_request_that_has_begun_ends_with_its_engine = None
    test_numbers_are_those_of_all_engines = None
    test_no_more_are_open_than_it_says = None


class TestRoundRobin(LoadBalancerSuite):
    plugin = "round_robin"


class TestShortestQueue(LoadBalancerSuite):
    plugin = "shortest_queue"


class TestWeightedRoundRobin(LoadBalancerSuite):
    plugin = "wrr"


class TestMinimumTokens(LoadBalancerSuite):
    plugin = "minimum_tokens"


class TestCacheAware(LoadBalancerSuite):
    plugin = "cache_aware"


class TestPrometheus(ObserverSuite):
    plugin = "prometheus"


class TestLog(ObserverSuite):
    plugin = "log"


class TestCrashDump(ObserverSuite):
    plugin = "crash_dump"
    options = {"crash_dump_folder": str(Path(tempfile.gettempdir()) / "fwk-crash-dumps")}


class TestProfiler(ObserverSuite):
    plugin = "profiler"
    options = {"profiler_dir": str(Path(tempfile.gettempdir()) / "fwk-profiles")}


class TestTensorDump(ObserverSuite):
    plugin = "tensor_dump"
    options = {"debug_tensor_dump_output_folder": str(Path(tempfile.gettempdir()) / "fwk-dumps")}


class TestExpertDistribution(ObserverSuite):
    plugin = "expert_distribution"
    options = {"expert_distribution_recorder_mode": "stat"}


class TestNvtx(ObserverSuite):
    plugin = "nvtx"
    options = {"enable_nvtx": True}


class TestOtel(ObserverSuite):
    plugin = "otel"
    options = {"otlp_traces_endpoint": "http://127.0.0.1:9/v1/traces"}

    @pytest.fixture(autouse=True)
    def ends_soon(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nobody listens there, and closing waits for those who do."""
        pytest.importorskip("opentelemetry.sdk")
        monkeypatch.setattr("fwk_observability.otel.observer.CLOSE_SECONDS", 0.1)
