"""Prompts to learn of a model from: a user's file, or many topics in several forms."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from itertools import product

from fwk.errors import ConfigError
from fwk_files.regular import read_text

TOPICS = (
    "the water cycle", "photosynthesis", "black holes", "the French Revolution", "vaccines", "compound interest",
    "baking bread", "learning the guitar", "time zones", "recycling plastic", "the stock market", "volcanoes",
    "ancient Egypt", "electric cars", "sleep", "coffee", "how airplanes fly", "honey bees", "chess", "solar panels",
    "the Roman Empire", "public speaking", "growing tomatoes", "the human heart", "databases", "sorting algorithms",
    "HTTP requests", "unit tests", "the moon", "earthquakes", "job interviews", "first aid", "whales", "inflation",
    "learning a language", "the printing press", "gravity", "healthy breakfasts", "hiking safely", "renewable energy",
)  # fmt: skip
FORMS = (
    "Explain {} to a beginner.",
    "Write a short story about {}.",
    "List five facts about {}.",
    "What are common mistakes people make about {}?",
    "Give step by step advice on {}.",
    "Write an e-mail to a friend about {}.",
    "Summarise the history of {} in one paragraph.",
    "Write questions and answers for a quiz about {}.",
    "Compare {} with something similar.",
    "Return a JSON object that describes {}.",
)

MAX_DATA_BYTES = 2**30


def built_in() -> list[str]:
    """400 prompts, neighbours in the list unlike each other."""
    pairs = [form.format(topic) for topic, form in product(TOPICS, FORMS)]
    return [pairs[(7 * i) % len(pairs)] for i in range(len(pairs))]


def add_data_argument(parser: ArgumentParser) -> None:
    """``--data``, for ``prompts_of``."""
    parser.add_argument(
        "--data",
        metavar="FILE",
        help='a prompt a line, or JSON lines with "prompt" or "messages"; default: 400 of ours',
    )


def prompts_of(data: str | None) -> list[str | list[dict[str, str]]]:
    """Conversations, and texts to complete: those of the file, or ours. Raises ``ConfigError`` naming the line."""
    return _read(data) if data else [_question(text) for text in built_in()]


def _question(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _read(path: str) -> list[str | list[dict[str, str]]]:
    found: list[str | list[dict[str, str]]] = []
    try:
        lines = read_text(path, MAX_DATA_BYTES).splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--data {path}: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if not line.startswith("{"):
            found.append(_question(line))
            continue
        try:
            value = json.loads(line)
            found.append(value["messages"] if "messages" in value else str(value["prompt"]))
        except (ValueError, KeyError):
            raise ConfigError(f'--data {path}, line {number}: JSON with "prompt" or "messages" is wanted') from None
    if not found:
        raise ConfigError(f"--data {path} holds no prompts")
    return found
