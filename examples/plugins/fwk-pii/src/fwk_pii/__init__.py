"""Personal data in prompts and replies is replaced by what it is: [email], [phone], [card], [iban], [ip]."""

from __future__ import annotations

from typing import Literal

from fwk import FeatureSpec, Options, hookimpl, option


class PiiOptions(Options):
    """Options of ``features.pii``."""

    enable_pii_redaction: bool = option(
        False, "Replace personal data in prompts and replies by what it is, as in [email].", stability="beta"
    )
    pii_kinds: tuple[Literal["email", "phone", "card", "iban", "ip"], ...] = option(
        ("email", "phone", "card", "iban", "ip"), "Which kinds are replaced.", stability="beta"
    )
    pii_sides: Literal["both", "prompts", "replies"] = option("both", "Where they are replaced.", stability="beta")


@hookimpl
def features() -> list[FeatureSpec]:
    return [
        FeatureSpec(
            name="pii",
            server="fwk_pii.server:PiiFilter",
            options=PiiOptions,
            enabled_by=("enable_pii_redaction",),
            summary="personal data is replaced in prompts and replies",
        )
    ]
