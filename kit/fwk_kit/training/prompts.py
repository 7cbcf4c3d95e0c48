"""Prompts to train a draft head on when the user has none: many topics in several forms."""

from __future__ import annotations

from itertools import product

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


def built_in() -> list[str]:
    """400 prompts, neighbours in the list unlike each other."""
    pairs = [form.format(topic) for topic, form in product(TOPICS, FORMS)]
    return [pairs[(7 * i) % len(pairs)] for i in range(len(pairs))]
