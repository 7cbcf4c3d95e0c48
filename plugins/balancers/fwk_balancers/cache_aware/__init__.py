"""The replica whose prefix cache has most of the prompt, unless it is behind the others."""

from fwk import LoadBalancerSpec, Options, hookimpl, option


class CacheAwareOptions(Options):
    """Options of ``load_balancers.cache_aware``; the first three as SGLang's and vLLM's routers have them."""

    cache_threshold: float = option(
        0.3,
        "Share of a prompt that a replica must have in its prefix cache to be preferred for it.",
        gt=0,
        le=1,
    )
    balance_abs_threshold: int = option(
        16,
        "Open sequences that a replica may have more than the one with the fewest, and still be preferred.",
        ge=0,
        le=2**20,
    )
    balance_rel_threshold: float = option(
        1.5,
        "How many times the fewest open sequences it may have; it is behind when it has more by both bounds.",
        ge=1,
        le=1000,
    )
    max_tree_size: int = option(
        2**20,
        "Prompt tokens remembered for each replica; about what its KV cache holds is best.",
        ge=1024,
        le=2**28,
    )


@hookimpl
def load_balancers() -> list[LoadBalancerSpec]:
    return [
        LoadBalancerSpec(
            name="cache_aware",
            load="fwk_balancers.cache_aware.balancer:CacheAware",
            options=CacheAwareOptions,
            summary="to the replica that has the longest prefix of the prompt, unless it is behind the others",
        )
    ]
