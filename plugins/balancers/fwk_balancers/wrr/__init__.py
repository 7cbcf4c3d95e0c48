"""Replicas take turns, as often as their load lets them: for engines that are not equally fast or equally used."""

from typing import Literal

from pydantic import field_validator

from fwk import LoadBalancerSpec, Options, hookimpl, option


class WeightedOptions(Options):
    """Options of ``load_balancers.wrr``."""

    rank_factor: Literal["kv_cache", "requests"] = option(
        "kv_cache",
        "What weighs an engine: the share of its KV cache that is free, or how few sequences it has.",
    )
    wrr_available_ratio: float = option(
        80.0,
        "Percent of an engine's KV cache in use from which it gets no requests while another one has room.",
        gt=0,
        le=100,
    )

    @field_validator("rank_factor", mode="before")
    @classmethod
    def _by_number(cls, factor: object) -> object:
        """RTP-LLM's numbers of them."""
        return {"0": "kv_cache", "1": "requests"}.get(str(factor), factor)


@hookimpl
def load_balancers() -> list[LoadBalancerSpec]:
    return [
        LoadBalancerSpec(
            name="wrr",
            load="fwk_balancers.wrr.balancer:WeightedRoundRobin",
            options=WeightedOptions,
            switches=("load-balance",),
            summary="weighted round robin: more requests to replicas with more free KV cache, or with fewer sequences",
        )
    ]
