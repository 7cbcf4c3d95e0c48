"""A request as the engine gets it, and the small things it answers with."""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from fwk.errors import InvalidRequest
from fwk.types.sampling import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]

Task = str
"""What a model is served for: ``generate``, ``embed``, or another word that a model plugin declares."""

Features = dict[str, msgspec.Raw]
"""What parts of features (``fwk.interfaces.feature``) send one another, in msgpack, by the feature's name."""


MAX_NAME = 256
MAX_DEADLINE = 86_400.0


class Service(msgspec.Struct, frozen=True, omit_defaults=True):
    """Who asks and what they expect: hints that a schedule policy may go by; the others take no notice.

    tenant: whose key the request came with, as ``tenant_of`` makes it of the key; empty without one.
    session: the client's name of a conversation. Names of different tenants have nothing to do with one another.
    tier: the service level that was asked for.
    deadline: seconds after arrival by which the first token is wanted.
    """

    tenant: str = ""
    session: str = ""
    tier: str = ""
    deadline: float | None = None

    def check(self) -> None:
        """Raise ``InvalidRequest`` naming the first field that is too long or out of range."""
        for name, text in (("session_id", self.session), ("service_tier", self.tier)):
            if len(text) > MAX_NAME or not text.isprintable():
                raise InvalidRequest(f"{name} must have at most {MAX_NAME} printable characters", name)
        if self.deadline is not None and not 0 < self.deadline <= MAX_DEADLINE:
            raise InvalidRequest(f"deadline must be above 0 and at most {MAX_DEADLINE:g} seconds", "deadline")


def tenant_of(key: str) -> str:
    """What stands for an API key where requests are told apart by it: a hash, so that the key stays secret."""
    return hashlib.sha256(key.encode()).hexdigest()[:16] if key else ""


class Request(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """What the caller asked, already tokenised and checked.

    ``request_id`` is ours (unique in the engine's life); the client's own id is only a label in the API process.
    ``sampling.max_tokens`` is set; 0 is for a request that generates nothing: its sequence ends when its prompt is
    computed, and its last event brings what the model made of it. ``cache_namespace`` separates K/V that must not be
    shared: it holds whatever changes K/V or must stay private.

    - ``prompt_token_ids``: at least one.
    - ``sampling``: how tokens are chosen, and when it stops.
    - ``n``: sequences.
    - ``priority``: for schedule policies; higher is more urgent unless the policy says otherwise.
    - ``service``: who asks, and what they expect.
    - ``num_encoder_tokens``: set by the engine: of the prompt, which an encoder reads; 0: none does
    - ``features``: what server parts send engine parts (``Wire.request``).
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    n: int = 1
    priority: int = 0
    service: Service = Service()
    cache_namespace: str = ""
    num_encoder_tokens: int = 0
    features: Features = {}


def cache_namespace(cache_salt: str, features: str = "") -> str:
    """What separates a request's K/V: its salt, and what its features say (``RequestPart.namespace``).

    No two pairs make the same: what a feature says holds no NUL.
    """
    return f"{features}\0{cache_salt}" if features or cache_salt else ""


class TokenLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """Log-probability of one token, and of the most likely ones at its place (most likely first).

    - ``token_id``: the chosen one.
    - ``logprob``: of it, a natural logarithm.
    - ``rank``: its place among all, 1 for the most likely.
    - ``top``: (token id, log-probability).
    """

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]] = []
