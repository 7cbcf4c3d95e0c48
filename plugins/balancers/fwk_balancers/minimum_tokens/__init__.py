"""The replica with the fewest tokens under way."""

from fwk import LoadBalancerSpec, Options, hookimpl, option


class MinimumTokensOptions(Options):
    """Options of ``load_balancers.minimum_tokens``."""

    balance_output_tokens: int = option(
        256,
        "Tokens that each sequence is expected to generate, at most its max_tokens; they count as its prompt's do.",
        ge=0,
        le=2**20,
    )


@hookimpl
def load_balancers() -> list[LoadBalancerSpec]:
    return [
        LoadBalancerSpec(
            name="minimum_tokens",
            load="fwk_balancers.minimum_tokens.balancer:MinimumTokens",
            options=MinimumTokensOptions,
            summary="to the replica with the fewest tokens of open requests",
        )
    ]
