"""Whether a forced call says what the question says: 50 questions by 5 seeds, judged against a plain schema.

    fwk serve --port 8000 &
    python -m benchmarks.tool_arguments [--url http://127.0.0.1:8000] [--seeds 5] [--every 1]

Each question has one right set of arguments. It is asked with the function's schema as ``response_format`` and no word
of the function (*plain*), the same with other seeds (*again*: what chance alone changes), and as a forced call of the
function. Strings count as right that hold the wanted one and at most 8 characters more; numbers when they are equal.
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from typing import Any

CITIES = "Paris,Tokyo,London,Berlin,Madrid,Rome,Cairo,Chicago,Boston,Oslo,Sydney,Lima,Dublin,Vienna,Mumbai"
PEOPLE = "Ada Lovelace,Alan Turing,Marie Curie,Albert Einstein,Isaac Newton,Grace Hopper,Nikola Tesla,Charles Darwin"
SUMS = ((2, 3), (10, 5), (7, 8), (12, 30), (1, 1), (100, 250), (9, 4), (6, 6))
SEARCHES = "cats,red shoes,pasta recipes,solar panels,python tutorials,cheap flights,jazz music"
Function = dict[str, Any]
Question = tuple[Function, str, dict[str, Any]]


def function(name: str, description: str, /, **kinds: str) -> Function:
    properties = {key: {"type": kind} for key, kind in kinds.items()}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"name": name, "description": description, "parameters": parameters}


def questions() -> list[Question]:
    """Function, question and right arguments."""
    weather = function("get_weather", "Get the current weather of a city.", city="string")
    person = function("find_person", "Find a person by name.", name="string")
    add = function("add", "Add two numbers.", a="integer", b="integer")
    search = function("search", "Search the web.", query="string")
    timer = function("set_timer", "Set a timer.", minutes="integer")
    stock = function("get_stock_price", "Get the price of a stock.", symbol="string")
    found: list[Question] = [(weather, f"What is the weather in {city}?", {"city": city}) for city in CITIES.split(",")]
    found += [(person, f"Who is {name}?", {"name": name}) for name in (*PEOPLE.split(","), "Galileo", "Aristotle")]
    found += [(add, f"What is {a} plus {b}?", {"a": a, "b": b}) for a, b in SUMS]
    found += [(search, f"Search for {query}.", {"query": query}) for query in SEARCHES.split(",")]
    found += [(timer, f"Set a timer for {n} minutes.", {"minutes": n}) for n in (5, 10, 20, 3, 45)]
    names = ("AAPL", "MSFT", "GOOG", "TSLA", "NVDA")
    return found + [(stock, f"What is the stock price of {name}?", {"symbol": name}) for name in names]


def is_right(given: Any, wanted: dict[str, Any]) -> bool:
    def same(got: Any, value: Any) -> bool:
        if not isinstance(value, str):
            return got == value
        return isinstance(got, str) and value.lower() in got.lower() and len(got) <= len(value) + 8

    return isinstance(given, dict) and all(same(given.get(key), value) for key, value in wanted.items())


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        return json.load(reply)["choices"][0]["message"]


def read(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def ask(url: str, asked: Function, question: str, seed: int, *, is_call: bool) -> tuple[Any, int]:
    """The arguments, and how many calls there are."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": question}], "seed": seed, "max_tokens": 200}
    if not is_call:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": asked["parameters"]}}
        return read(post(url, body | {"response_format": form})["content"]), 1
    tools = [{"type": "function", "function": asked}]
    calls = post(url, body | {"tools": tools, "tool_choice": "required"}).get("tool_calls") or []
    return read(calls[0]["function"]["arguments"]) if calls else None, len(calls)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--every", type=int, default=1, help="ask each nth question alone")
    given = parser.parse_args()
    right: dict[str, set[tuple[str, int]]] = {"plain": set(), "again": set(), "call": set()}
    wrong: list[str] = []
    several = total = 0
    for asked, question, wanted in questions()[:: given.every]:
        for seed in range(given.seeds):
            total += 1
            for kind, one in (("plain", seed), ("again", seed + given.seeds), ("call", seed)):
                found, count = ask(given.url, asked, question, one, is_call=kind == "call")
                several += kind == "call" and count != 1
                if is_right(found, wanted):
                    right[kind].add((question, seed))
                elif kind == "call":
                    wrong.append(f"{question} (seed {seed}): {json.dumps(found, ensure_ascii=False)}")
    print("| asked | right | right where plain is |\n| --- | --- | --- |")
    for kind, found in right.items():
        print(f"| {kind} | {len(found)} of {total} | {len(found & right['plain'])} of {len(right['plain'])} |")
    print(
        f"\nRequests with another number of calls than one: {several}.\n\n" + "\n".join(f"- {line}" for line in wrong)
    )


if __name__ == "__main__":
    main()
