"""A pick from each row of logits, without a sort: one pass over all of it in parallel, then a program a row.

A limit (top-k, top-p) keeps the entries from some cutoff up, and what it keeps grows as the cutoff falls: so the cutoff
is found by bisection over the values there are, each step a pass over the row. Float32 numbers are bisected by their
bits, and each step moves the bounds to the nearest entries, so that a dozen steps are the rule and 32 the most.

Masses are counted in units of 2**-40 of the largest one: integers, so that no order of summation changes a pick.
"""

# A type checker takes scans and sums for tuples:
# pyright: reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl

SETTINGS_FIELDS = tl.constexpr(5)
"""float64 per row: draw, temperature (0: greedy), top_p, min_logit, top_k."""

SPAN = tl.constexpr(28.0)
"""Nats: a logit further below the largest one has no mass in units of 2**-40."""


@triton.jit
def chunk_tops(
    logits,
    stride,
    settings,  # [num_rows, SETTINGS_FIELDS]
    scaled,  # [num_rows, vocab_size] float32: the tempered logits
    tops,  # [num_rows, num_chunks] float32: a chunk's largest; NaN where it has a NaN or +inf
    places,  # [num_rows, num_chunks] int32: the first place of it
    vocab_size,
    SAMPLES: tl.constexpr,  # whether some row is not greedy
    WIDTH: tl.constexpr,
):
    """Temper one chunk of a row and find its largest entry."""
    row, chunk, num_chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    column = chunk * WIDTH + tl.arange(0, WIDTH)
    mask = column < vocab_size
    numbers = tl.load(logits + row * stride + column, mask=mask, other=-float("inf")).to(tl.float32)
    if SAMPLES:
        temperature = tl.load(settings + row * SETTINGS_FIELDS + 1).to(tl.float32)
        if temperature > 0.0:
            if temperature != 1.0:
                numbers = tl.div_rn(numbers, tl.zeros_like(numbers) + temperature)
            tl.store(scaled + row * vocab_size + column, numbers, mask=mask)
    top = tl.max(numbers, 0)
    is_bad = tl.max(((numbers != numbers) | (numbers == float("inf"))).to(tl.int32), 0) > 0
    place = tl.min(tl.where(numbers == top, column, 0x7FFFFFFF), 0)
    tl.store(tops + row * num_chunks + chunk, tl.where(is_bad, float("nan"), top))
    tl.store(places + row * num_chunks + chunk, place)


@triton.jit
def key_of(number):
    """A float32 as an integer that is ordered as the numbers are."""
    bits = (number + 0.0).to(tl.int32, bitcast=True)  # -0.0 becomes 0.0
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def number_of(key):
    """The float32 of a key."""
    bits = key.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def mass_of(numbers, top, lowest):
    """In units of 2**-40 of the largest one's; 0 below ``lowest``."""
    # Half of each, for the difference may be more than float32 reaches.
    nats = tl.maximum(0.5 * numbers - 0.5 * top, -50.0) * 2.0
    mass = (tl.exp(nats) * 1099511627776.0).to(tl.int64)
    return tl.where(numbers >= lowest, mass, 0)


@triton.jit
def total_mass(source, vocab_size, top, lowest, WIDTH: tl.constexpr):
    """Of the entries from ``lowest`` up."""
    total = tl.zeros((WIDTH,), tl.int64)
    for at in range(0, vocab_size, WIDTH):
        column = at + tl.arange(0, WIDTH)
        numbers = tl.load(source + column, mask=column < vocab_size, other=-float("inf"))
        total += mass_of(numbers, top, lowest)
    return tl.sum(total, 0)


@triton.jit
def cutoff(source, vocab_size, top, first, share, lowest, WEIGHS: tl.constexpr, WIDTH: tl.constexpr):
    """The largest entry from which up the entries count ``share``, at least 1: each one, or if WEIGHS its mass.

    first: a bound that is tried first. All entries count at least ``share``.
    """
    low, high = key_of(lowest), key_of(top) + 1
    middle = key_of(first)
    while high - low > 1:
        middle = tl.where((middle > low) & (middle < high), middle, low + (high - low) // 2)
        pivot = number_of(middle)
        counted = tl.zeros((WIDTH,), tl.int64)
        least = tl.full((WIDTH,), float("inf"), tl.float32)
        most = tl.full((WIDTH,), -float("inf"), tl.float32)
        for at in range(0, vocab_size, WIDTH):
            column = at + tl.arange(0, WIDTH)
            numbers = tl.load(source + column, mask=column < vocab_size, other=-float("inf"))
            is_above = numbers >= pivot
            if WEIGHS:
                counted += mass_of(numbers, top, pivot)
            else:
                counted += is_above.to(tl.int64)
            least = tl.minimum(least, tl.where(is_above, numbers, float("inf")))
            most = tl.maximum(most, tl.where(is_above, -float("inf"), numbers))
        reaches = tl.sum(counted, 0).to(tl.float64) >= share
        low = tl.where(reaches, key_of(tl.min(least, 0)), low)
        high = tl.where(reaches, high, tl.maximum(key_of(tl.max(most, 0)), low) + 1)
        middle = low  # from now on the one between them
    return number_of(low)


@triton.jit
def place_of_draw(source, vocab_size, top, lowest, target, WIDTH: tl.constexpr):
    """The first place at which the mass of the entries up to it exceeds ``target``, which is below the total."""
    at = target * 0
    below = target * 0
    mass = mass_of(
        tl.load(source + tl.arange(0, WIDTH), mask=tl.arange(0, WIDTH) < vocab_size, other=-float("inf")), top, lowest
    )
    total = tl.sum(mass, 0)
    while below + total <= target:
        below += total
        at += WIDTH
        column = at + tl.arange(0, WIDTH)
        mass = mass_of(tl.load(source + column, mask=column < vocab_size, other=-float("inf")), top, lowest)
        total = tl.sum(mass, 0)
    is_over = below + tl.cumsum(mass, 0) > target
    return at + tl.min(tl.where(is_over, tl.arange(0, WIDTH), WIDTH), 0)


@triton.jit
def pick_rows(
    settings,
    scaled,
    tops,
    places,
    picked,  # [num_rows] int64
    vocab_size,
    num_chunks,
    SAMPLES: tl.constexpr,
    CHUNKS: tl.constexpr,  # num_chunks as a power of two
    WIDTH: tl.constexpr,
):
    """One row's token, or -1 where it has a NaN, +inf or nothing finite."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    is_chunk = chunk < num_chunks
    of_each = tl.load(tops + row * num_chunks + chunk, mask=is_chunk, other=-float("inf"))
    is_bad = tl.max((of_each != of_each).to(tl.int32), 0) > 0
    top = tl.max(tl.where(of_each != of_each, -float("inf"), of_each), 0)
    first = tl.load(places + row * num_chunks + chunk, mask=is_chunk & (of_each == top), other=0x7FFFFFFF)
    token = tl.min(first.to(tl.int64), 0)
    is_usable = (top > -float("inf")) & (is_bad == 0)
    if SAMPLES:
        of_row = settings + row * SETTINGS_FIELDS
        if (tl.load(of_row + 1) > 0.0) & is_usable:
            source = scaled + row * vocab_size
            top_p, top_k = tl.load(of_row + 2), tl.load(of_row + 4)
            lowest = top * 0.0 - float("inf")
            is_one = (top_k == 1.0) | (tl.load(of_row + 3) >= 0.0)  # there is room for the first of the largest
            if top_k > 0.0:
                lowest = cutoff(source, vocab_size, top, top - SPAN, top_k, lowest, False, WIDTH)
            if top_p < 1.0:
                share = tl.maximum(top_p * total_mass(source, vocab_size, top, lowest, WIDTH).to(tl.float64), 1.0)
                is_one = is_one | (share <= 1099511627776.0)
                lowest = cutoff(source, vocab_size, top, top - 2.0, share, tl.maximum(lowest, top - SPAN), True, WIDTH)
            lowest = tl.maximum(lowest, top + tl.load(of_row + 3).to(tl.float32))
            total = total_mass(source, vocab_size, top, lowest, WIDTH)
            target = tl.minimum((tl.load(of_row) * total.to(tl.float64)).to(tl.int64), total - 1)
            token = tl.where(is_one, token, place_of_draw(source, vocab_size, top, lowest, target, WIDTH))
    tl.store(picked + row, tl.where(is_usable, token, -1))


@triton.jit
def mask_rows(
    logits,
    stride,
    rows,  # [num_masks] int64
    masks,  # [num_masks, num_words] int32: a bit for each token that is allowed
    vocab_size,
    num_words,
    WIDTH: tl.constexpr,
):
    """Set what one mask does not allow to -inf, WIDTH entries of its row."""
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    nth = tl.program_id(0).to(tl.int64)
    word = tl.load(masks + nth * num_words + column // 32, mask=column < vocab_size, other=-1)
    is_forbidden = ((word >> (column % 32)) & 1) == 0
    target = logits + tl.load(rows + nth) * stride + column
    lowest = tl.full((WIDTH,), -float("inf"), tl.float32).to(logits.dtype.element_ty)
    tl.store(target, lowest, mask=is_forbidden & (column < vocab_size))
