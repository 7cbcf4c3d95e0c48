"""The base of every options model, core's and plugins'."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

Stability = Literal["stable", "beta", "experimental"]


class Options(BaseModel):
    """A frozen set of typed options. A field ``num_draft_tokens`` is the flag ``--num-draft-tokens``.

    Flags share one flat namespace (SGLang's names where it has one), so a plugin gives its fields names that say
    whose they are.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


def option(
    default: Any,
    description: str,
    *,
    aliases: Sequence[str] = (),
    turns: Mapping[str, Any] | None = None,
    needs: str | None = None,
    is_secret: bool = False,
    stability: Stability = "stable",
    **constraints: Any,
) -> Any:
    """Declare one option.

    ``aliases`` are other flags with the same value (LightLLM's and RTP-LLM's names). ``turns`` are flags without a
    value that set this option to a constant: ``turns={"disable-radix-cache": "none"}``. ``needs`` names the switch
    of the same model without which giving this option is an error: it would do nothing. The value of an option that
    ``is_secret`` is never shown: not at /server_info, in the log, or in an error. ``stability`` is shown with the
    help, and what it promises is in docs/plugins/stability.md. ``constraints`` are pydantic's (``ge``, ``le``, ...).
    """
    extra: dict[str, Any] = {
        "aliases": list(aliases),
        "turns": dict(turns or {}),
        "needs": needs,
        "secret": is_secret,
        "stability": stability,
    }
    return Field(default, description=description, json_schema_extra=extra, repr=not is_secret, **constraints)


def _extra(field: FieldInfo) -> Mapping[str, Any]:
    extra = field.json_schema_extra
    return cast(Mapping[str, Any], extra) if isinstance(extra, dict) else {}


def aliases_of(field: FieldInfo) -> list[str]:
    """Other names of the option's flag."""
    return list(_extra(field).get("aliases", []))


def turned_by(field: FieldInfo) -> dict[str, Any]:
    """Flags that set the option to a constant, with that constant."""
    return dict(_extra(field).get("turns", {}))


def needs_of(field: FieldInfo) -> str | None:
    """The switch without which giving the option is an error."""
    return _extra(field).get("needs")


def is_secret(field: FieldInfo) -> bool:
    """Whether nobody may be shown the option's value."""
    return bool(_extra(field).get("secret"))


def stability_of(field: FieldInfo) -> Stability:
    """How far the option may change between releases; one that was not made by ``option`` promises nothing."""
    return _extra(field).get("stability", "experimental")
