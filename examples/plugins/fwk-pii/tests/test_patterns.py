"""What is found, across pieces of any size, in linear time."""

import random
import time

import pytest
from fwk_pii.patterns import Redactor

ALL = Redactor({"email", "phone", "card", "iban", "ip"})
TEXT = (
    "Write to ann.lee+x@mail.example.co.uk or call +49 (0)170 123-4567, (212) 555-0142, card 4111 1111 1111 1111, "
    "IBAN DE89 3704 0044 0532 0130 00, host 192.168.0.1; version 1.2.3, 2026-11-28, 4111 1111 1111 1112, "
    "pi 3.14159265358979."
)
REDACTED = (
    "Write to [email] or call [phone], [phone], card [card], IBAN [iban], host [ip]; version 1.2.3, 2026-11-28, "
    "4111 1111 1111 1112, pi 3.14159265358979."
)


def streamed(pieces: list[str]) -> str:
    """As the filter sends it."""
    kept = sent = last = ""
    for piece in [*pieces, None]:
        kept += piece or ""
        end = len(kept) if piece is None else ALL.open_end(kept)
        sent += ALL.redact(last + kept[:end])[len(last) :]
        last, kept = (last + kept[:end])[-1:], kept[end:]
    return sent


def test_the_whole_text() -> None:
    assert ALL.redact(TEXT) == REDACTED
    assert (
        Redactor({"ip"}).redact("ann@example.org at 10.0.0.1, not 300.1.1.1")
        == "ann@example.org at [ip], not 300.1.1.1"
    )


@pytest.mark.parametrize("seed", range(100))
def test_pieces_make_no_difference(seed: int) -> None:
    rng, pieces, rest = random.Random(seed), [], TEXT
    while rest:
        size = rng.randint(1, 9)
        pieces.append(rest[:size])
        rest = rest[size:]
    assert streamed(pieces) == REDACTED


@pytest.mark.parametrize("unit", ["a", "1", "a@", "1 ", "a.", "A1", "(-", "@", "1.1.", "+1"])
def test_twice_the_text_takes_twice_the_time(unit: str) -> None:
    def seconds(count: int) -> float:
        text = unit * count
        best = []
        for _ in range(3):
            started = time.thread_time()
            ALL.redact(text)
            best.append(time.thread_time() - started)
        return min(best)

    assert seconds(40_000) < 8 * seconds(10_000) + 0.01, "not linear"
