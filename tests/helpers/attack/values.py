"""Valid values: by a field's name where its schema does not say enough, else by its schema."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

Schema = Mapping[str, Any]

VOCAB = 512
"""Ids of the tiny model."""

MAX_TOKENS, MAX_N = 24, 4
"""Larger ones are valid, too, and make the same requests take longer."""

TEXTS = ("", " ", "x", "Hello, world", "été", "日本語", "👩‍👩‍👧", "\u202eabc", "a\x00b", "<300>", "word " * 50)
JSON_SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    {"enum": ["a", 1, None]},
    {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "number"}]},
    {"type": "object"},
    {},
)
REGEXES = ("[ab]{2}", "[0-9]+", "(yes|no)", ".*", "é+", r"\d{1,3}\.\d")
LARK = ('start: "a"+', 'start: "yes" | "no"', "start: /[a-z]{1,5}/")
GBNF = ('root ::= "a"+', 'root ::= [0-9]{1,4} | "no"')
TOOLS: tuple[dict[str, Any], ...] = (
    {"type": "function", "function": {"name": "f", "parameters": JSON_SCHEMAS[0]}},
    {"type": "function", "function": {"name": "g", "description": "a tool"}},
)
ANTHROPIC_TOOLS: tuple[dict[str, Any], ...] = (
    {"name": "f", "input_schema": JSON_SCHEMAS[0]},
    {"name": "g", "input_schema": {"type": "object"}},
)
RESPONSE_TOOLS = ({"type": "function", "name": "f", "parameters": JSON_SCHEMAS[0]},)
TAG: dict[str, Any] = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": JSON_SCHEMAS[0], "end": "</f>"}],
    "triggers": ["<f>"],
}

Make = Callable[[random.Random], Any]


def text(dice: random.Random) -> str:
    return dice.choice(TEXTS)


def prompt(dice: random.Random) -> str:
    return dice.choice(TEXTS[2:])


def ids(dice: random.Random, most: int = 20) -> list[int]:
    return [dice.randrange(VOCAB) for _ in range(dice.randint(1, most))]


def _prompts(dice: random.Random) -> Any:
    return dice.choice([prompt(dice), ids(dice), [prompt(dice) for _ in range(dice.randint(1, 3))], [ids(dice)]])


def _messages(dice: random.Random) -> list[dict[str, Any]]:
    talk: list[dict[str, Any]] = [{"role": "system", "content": prompt(dice)}] if dice.random() < 0.3 else []
    for _ in range(dice.randint(0, 2)):
        talk += [{"role": "user", "content": text(dice)}, {"role": "assistant", "content": prompt(dice)}]
    if dice.random() < 0.2:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
        talk += [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
        talk.append({"role": "tool", "tool_call_id": "c", "content": text(dice)})
    parts = [{"type": "text", "text": prompt(dice)}]
    return [*talk, {"role": "user", "content": dice.choice([prompt(dice), parts])}]


def _plain_messages(dice: random.Random) -> list[dict[str, Any]]:
    return [{"role": "user", "content": prompt(dice)}]


def _structured(dice: random.Random) -> dict[str, Any]:
    return dice.choice(
        [
            {"json": dice.choice(JSON_SCHEMAS)},
            {"regex": dice.choice(REGEXES)},
            {"choice": ["yes", "no", "é"]},
            {"grammar": dice.choice(LARK)},
            {"json_object": True},
            {"structural_tag": TAG},
        ]
    )


def _response_format(dice: random.Random) -> dict[str, Any]:
    named = {"type": "json_schema", "json_schema": {"name": "a", "schema": dice.choice(JSON_SCHEMAS)}}
    return dice.choice([{"type": "text"}, {"type": "json_object"}, named, TAG])


def _tool_choice(dice: random.Random) -> Any:
    return dice.choice(["none", "auto", "required", {"type": "function", "function": {"name": "f"}}])


def _options(dice: random.Random) -> dict[str, Any]:
    every = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "seed": 3, "num_predict": 8, "stop": ["e"], "min_p": 0.1}
    return {name: every[name] for name in dice.sample(sorted(every), dice.randint(0, 4))}


def _some(*values: Any) -> Make:
    return lambda dice: dice.choice(values)


def _several(*values: Any) -> Make:
    return lambda dice: [dice.choice(values) for _ in range(dice.randint(1, 3))]


def _below(most: int, least: int = 1) -> Make:
    return lambda dice: dice.randint(least, most)


NAMED: dict[str, Make] = {
    "model": _some("tiny"),
    "top_p": lambda dice: dice.choice([1.0, 1e-6, dice.uniform(0.01, 0.99)]),
    "think": _some(True, False, "low"),
    "adapter_id": _some(None),
    "truncate_prompt_tokens": _some(-1, 1, 5),
    "lora_path": _some(None),
    "prompt": _prompts,
    "messages": _messages,
    "inputs": prompt,
    "content": prompt,
    "input_prefix": text,
    "input_suffix": text,
    "suffix": text,
    "tokens": ids,
    "stop": lambda dice: dice.choice(["e", ["a", "<300>"], ["é" * 40, "x"], "日本"]),
    "stop_sequences": _several("e", "a" * 30, "é"),
    "stop_regex": lambda dice: dice.choice([dice.choice(REGEXES), list(REGEXES[:2])]),
    "stop_token_ids": ids,
    "allowed_token_ids": lambda dice: ids(dice, 200),
    "bad_words": _several("a", "the", "é", "<300>"),
    "logit_bias": lambda dice: {str(i): dice.uniform(-100, 100) for i in ids(dice)},
    "response_format": _response_format,
    "structured_outputs": _structured,
    "guided_json": _some(*JSON_SCHEMAS),
    "json_schema": _some(*JSON_SCHEMAS),
    "guided_regex": _some(*REGEXES),
    "regex": _some(*REGEXES),
    "guided_choice": _some(["yes", "no"], ["é"]),
    "guided_grammar": _some(*LARK),
    "ebnf": _some(*GBNF),
    "grammar": _some(*GBNF),
    "structural_tag": _some(TAG),
    "guided_structural_tag": _some(TAG),
    "tools": lambda dice: list(TOOLS[: dice.randint(1, 2)]),
    "tool_choice": _tool_choice,
    "format": _some("json", JSON_SCHEMAS[0]),
    "output_format": _some({"type": "json_schema", "schema": JSON_SCHEMAS[0]}),
    "return_hidden_states": _some(False),
    "options": _options,
    "samplers": _several("top_k", "top_p", "min_p", "temperature"),
    "chat_template_kwargs": _some({}, {"enable_thinking": True}, {"name": "x"}),
    "service_tier": _some("auto", "default", "flex", "priority"),
    "thinking": _some({"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024}),
    "reasoning": _some({"effort": "low"}, {}),
    "text": _some({"format": {"type": "text"}}, {"format": {"type": "json_object"}}),
    "stream_options": _some({"include_usage": True}, {"include_usage": False}),
    "max_tokens": _below(MAX_TOKENS),
    "max_completion_tokens": _below(MAX_TOKENS),
    "max_output_tokens": _below(MAX_TOKENS),
    "max_new_tokens": _below(MAX_TOKENS),
    "n_predict": _below(MAX_TOKENS),
    "min_tokens": _below(8, 0),
    "n": _below(MAX_N),
    "best_of": _below(MAX_N),
    "deadline": _some(60.0),
    "t_max_predict_ms": _some(0, 60_000),
    "background": _some(False),
    "previous_response_id": _some(None),
    "conversation": _some(None),
    "input_extra": _several({"filename": "a.py", "text": "x = 1"}),
    "response_fields": _several("content", "timings"),
}
AT: dict[tuple[str, str], Make] = {
    ("/v1/messages", "messages"): _plain_messages,
    ("/v1/messages/count_tokens", "messages"): _plain_messages,
    ("/v1/messages", "tools"): lambda dice: list(ANTHROPIC_TOOLS),
    ("/v1/messages/count_tokens", "tools"): lambda dice: list(ANTHROPIC_TOOLS),
    ("/v1/messages", "tool_choice"): _some({"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "f"}),
    ("/v1/messages/count_tokens", "tool_choice"): _some({"type": "auto"}, {"type": "none"}),
    ("/v1/messages", "service_tier"): _some("auto", "standard_only"),
    **{
        (path, name): make
        for path in ("/v1/responses", "/v1/responses/input_tokens", "/v1/responses/compact")
        for name, make in {
            "tools": lambda dice: list(RESPONSE_TOOLS),
            "tool_choice": _some("none", "auto", "required", {"type": "function", "name": "f"}),
            "input": _some("Hello", [{"role": "user", "content": "Hi"}]),
            "truncation": _some("disabled"),
        }.items()
    },
    ("/v1/conversations", "items"): _some([], [{"role": "user", "content": "Hi"}]),
    ("/v1/messages/batches", "requests"): lambda dice: [
        {"custom_id": f"r{i}", "params": {"model": "tiny", "max_tokens": 2, "messages": _plain_messages(dice)}}
        for i in range(dice.randint(1, 3))
    ],
    ("/v1/messages", "system"): prompt,
    ("/v1/messages/count_tokens", "system"): prompt,
    ("/api/chat", "messages"): _plain_messages,
    **{(path, "stream_options"): _some(None) for path in ("/completion", "/completions")},
    ("/api/generate", "suffix"): _some(None),
    ("/v1/completions", "suffix"): _some(None),
    ("/api/generate", "prompt"): prompt,
    ("/infill", "prompt"): prompt,
    ("/tokenize", "prompt"): prompt,
    ("nested", "stop"): _several("e", "é" * 40),
    ("nested", "typical_p"): lambda dice: dice.uniform(0.01, 0.99),
    ("nested", "top_k"): _below(50),
    ("nested", "truncate"): _below(20),
    ("nested", "temperature"): lambda dice: dice.uniform(0.01, 2),
    ("nested", "best_of"): _some(1),
    ("nested", "top_p"): lambda dice: dice.uniform(0.01, 0.99),
    ("nested", "grammar"): lambda dice: dice.choice(
        [{"type": "regex", "value": dice.choice(REGEXES)}, {"type": "json", "value": dice.choice(JSON_SCHEMAS)}]
    ),
}


def value(path: str, name: str, schema: Schema, dice: random.Random) -> Any:
    """A valid value of a field."""
    make = AT.get((path, name)) or NAMED.get(name)
    return make(dice) if make is not None else by_schema(schema, dice)


def by_schema(schema: Schema, dice: random.Random) -> Any:
    """What the schema alone says is valid; long texts and lists are left to checks of limits."""
    if "anyOf" in schema:
        return by_schema(dice.choice(schema["anyOf"]), dice)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return dice.choice(schema["enum"])
    kind = schema.get("type")
    if kind == "boolean":
        return dice.random() < 0.5
    if kind in ("integer", "number"):
        return _number(schema, dice, is_integer=kind == "integer")
    if kind == "string":
        return dice.choice(["", "x", "user-1"])[: schema.get("maxLength", 100)] or "x" * schema.get("minLength", 0)
    if kind == "array":
        least = schema.get("minItems", 0)
        return [by_schema(schema.get("items", {}), dice) for _ in range(dice.randint(least, max(least, 3)))]
    if kind == "object":
        fields: dict[str, Schema] = schema.get("properties", {})
        required = schema.get("required", ())
        return {
            name: value("nested", name, s, dice)
            for name, s in fields.items()
            if name in required or dice.random() < 0.4
        }
    return None


def _number(schema: Schema, dice: random.Random, *, is_integer: bool) -> int | float:
    """Bounds themselves often, else something near the lower one, as clients send."""
    low = schema.get("minimum", schema.get("exclusiveMinimum", 0))
    high = schema.get("maximum", low + 100)
    if is_integer:
        low, high = int(low), min(int(high), 2**63 - 1)
        return dice.choice([low, high, dice.randint(low, high), max(low, min(high, dice.randint(-1, 20)))])
    if "exclusiveMinimum" in schema:
        low += 1e-3
    return dice.choice([low, high, dice.uniform(low, high), max(low, min(high, round(dice.random(), 2)))])
