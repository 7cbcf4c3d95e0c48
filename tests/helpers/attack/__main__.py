"""``make attack``: thousands of random combinations of valid values, of which none may end in a 5xx.

The fields are those of /openapi.json, so a new one takes part as soon as it is documented. What contradicts something
else is the client's fault (400); most requests must be served. The seed says which requests are made.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from tests.helpers.attack.values import Schema, value
from tests.helpers.rig import Server, assert_no_leak, install_plugins, write_model

NUM_AT_ONCE = 12
HANG_SECONDS = 60.0
MAX_FIELDS = 9
EXPECTED = {200, 400, 422, 429, 501}
ALWAYS = {"max_tokens", "max_output_tokens", "parameters", "input"}
"""Fields that every request with them has: without a bound, a random model continues to the end of the context."""

MIN_SERVED = 0.8
"""Of the requests of every path: what is refused tries little."""

LEFT_OUT = (
    "/infill",
    "/v1/batches",
    "/api/embed",
    "/v1/embeddings",
    "/classify",
    "/pooling",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
    "/score",
    "/v1/score",
    "/api/copy",
    "/api/create",
    "/api/push",
)
"""What the tiny model is not made for, batches, which begin with a file, and what is the operator's to do."""

FAVOURITES = ("/v1/completions", "/v1/chat/completions", "/completion", "/v1/messages", "/v1/responses")
"""Three times as often: they have the most fields."""

ONE_OF = (
    {"max_tokens", "max_completion_tokens", "n_predict"},
    {"guided_json", "json_schema", "guided_regex", "regex", "guided_choice", "guided_grammar", "ebnf", "grammar",
     "structural_tag", "guided_structural_tag", "structured_outputs", "response_format", "tool_choice"},
    {"min_tokens", "use_beam_search"},
    {"repeat_penalty", "repetition_penalty"},
    {"n_probs", "logprobs"},
    {"request_id", "rid"},
    {"prompt", "messages", "content"},
    {"suffix", "echo"},
)  # fmt: skip
"""Names of one thing, or things that contradict each other: one of each is kept, so that most requests are served."""

NEEDS: dict[str, tuple[str, Any]] = {
    "stream_options": ("stream", True), "top_logprobs": ("logprobs", True), "early_stopping": ("use_beam_search", True),
    "length_penalty": ("use_beam_search", True), "continue_final_message": ("add_generation_prompt", False),
}  # fmt: skip

NOT_OF_BEAMS = {
    *("logit_bias", "bad_words", "allowed_token_ids", "stop_regex", "min_p", "top_k", "top_p", "seed", "min_tokens"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "repeat_penalty", "n", "best_of", "tools"),
    *("stop", "repetition_detection"),
    *ONE_OF[1],
}
BEAMS = {"use_beam_search", "early_stopping", "length_penalty"}
"""A beam search, and what needs one: it has no tools, and nothing that says how tokens are sampled."""

SERVER_ERRORS = ('"server_error"', '"api_error"', '"error_type":"generation"', '"internal_error"')


@dataclass(slots=True)
class Result:
    """What came of all requests: by path and status, and each that may not be."""

    counts: Counter[tuple[str, int]] = field(default_factory=Counter[tuple[str, int]])
    wrong: list[str] = field(default_factory=list[str])

    def table(self) -> str:
        paths = sorted({path for path, _ in self.counts})
        rows = ((path, {s: n for (p, s), n in sorted(self.counts.items()) if p == path}) for path in paths)
        return "\n".join(f"  {path}: {', '.join(f'{n} x {s}' for s, n in row.items())}" for path, row in rows)

    def badly_served(self) -> list[str]:
        """Paths with so few requests that were served."""
        asked, served = Counter[str](), Counter[str]()
        for (path, status), count in self.counts.items():
            asked[path] += count
            served[path] += count * (status == 200)
        return sorted(f"{path}: {served[path]} of {n}" for path, n in asked.items() if served[path] < MIN_SERVED * n)

    def share_of(self, status: int) -> float:
        return sum(n for (_, s), n in self.counts.items() if s == status) / max(1, self.counts.total())


def routes(openapi: Mapping[str, Any]) -> dict[str, Schema]:
    """The schema of the body of every route that takes JSON."""
    found: dict[str, Schema] = {}
    for path, operations in openapi["paths"].items():
        body = operations.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json")
        if body is not None and "{" not in path and not path.startswith(LEFT_OUT):
            found[path] = body["schema"]
    found["/generate"] = found["/generate_stream"]  # one of its two dialects: the union has no schema
    return found


def combination(path: str, schema: Schema, dice: random.Random) -> dict[str, Any]:
    """A body: what is required, and some of the rest."""
    fields: dict[str, Schema] = schema.get("properties", {})
    wanted = {name for name in fields if name in schema.get("required", ()) or name in ALWAYS}
    optional = sorted(set(fields) - wanted)
    wanted |= set(dice.sample(optional, min(len(optional), dice.randint(0, MAX_FIELDS))))
    if path in ("/api/chat", "/api/generate"):
        wanted |= {"model", "messages" if path == "/api/chat" else "prompt", "options"} & set(fields)
    for names in ONE_OF:
        found = sorted(names & wanted)
        wanted -= names - {dice.choice(found)} if found else set()
    if BEAMS & wanted:
        wanted -= NOT_OF_BEAMS
    if "tool_choice" in wanted:
        wanted.add("tools")
    if path == "/tokenize" and not wanted & {"prompt", "messages", "content"}:
        wanted.add("prompt")
    body = {name: value(path, name, fields[name], dice) for name in sorted(wanted)}
    body.update(NEEDS[name] for name in NEEDS if name in body and NEEDS[name][0] in fields)
    if body.get("use_beam_search"):
        body["temperature"] = 0
    if isinstance(body.get("options"), dict):
        body["options"].setdefault("num_predict", 8)
    return body


async def attack(server: Server, count: int, seed: int) -> Result:
    """That many requests, some at once."""
    dice, result = random.Random(seed), Result()
    found = routes(orjson.loads(server.get("/openapi.json").content))
    every = sorted(found.items()) + 2 * [(path, found[path]) for path in FAVOURITES]
    work = iter(
        [(path, combination(path, schema, dice)) for path, schema in (dice.choice(every) for _ in range(count))]
    )
    timeout = aiohttp.ClientTimeout(total=HANG_SECONDS)
    async with aiohttp.ClientSession(server.url, timeout=timeout) as session, asyncio.TaskGroup() as group:
        for _ in range(NUM_AT_ONCE):
            group.create_task(_work(session, work, result))
    return result


async def _work(session: aiohttp.ClientSession, work: Any, result: Result) -> None:
    for path, body in work:
        data = orjson.dumps(body)
        try:
            async with session.post(path, data=data, headers={"content-type": "application/json"}) as reply:
                status, text = reply.status, await reply.text()
            assert_no_leak(text.replace(data.decode(), ""))
        except (aiohttp.ClientError, TimeoutError, AssertionError) as error:
            result.wrong.append(f"{path} {type(error).__name__}: {str(error)[:300]} for {data.decode()[:2000]}")
            continue
        result.counts[path, status] += 1
        if status not in EXPECTED or any(kind in text for kind in SERVER_ERRORS):
            result.wrong.append(f"{path} {status}: {text[-600:]} for {data.decode()[:2000]}")


def main() -> int:
    """Start a server, attack it, look at what is left."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.helpers.attack", description="Other options are the server's."
    )
    parser.add_argument("--requests", type=int, default=8000)
    parser.add_argument("--seed", type=int, default=1)
    args, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="fwk-attack-") as name:
        path = install_plugins(Path(name))
        server = Server(write_model(Path(name) / "tiny"), *flags, python_path=path)
        try:
            result = asyncio.run(attack(server.start(), args.requests, args.seed))
            print(f"{result.counts.total()} replies\n{result.table()}")
            for told in result.wrong:
                print(f"WRONG: {told}")
            for told in result.badly_served():
                print(f"FEW SERVED: {told}")
            server.settle()  # what every route imports and reserves with its first requests is no leak
            server.check_invariants(may_log_errors=True)
            return 1 if result.wrong or result.badly_served() else 0
        finally:
            if server.is_running:
                server.stop()
            server.close()


if __name__ == "__main__":
    sys.exit(main())
