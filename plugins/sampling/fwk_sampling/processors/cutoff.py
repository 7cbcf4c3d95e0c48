"""The lowest logit that top_k, top_p and min_p keep, found on a CPU without sorting the vocabulary."""

from __future__ import annotations

import numpy as np

_NUM_CLASSES = 1024
"""Classes of token ids, equal modulo this number. Folding a row into the maximum of each class is one pass at memory
speed, and at least m entries of the row reach the m-th largest of these maxima."""

_FEW = 64
_MORE = 512
"""How many of the largest entries to look at first: the former unless top_k asks for more than that."""

_BINS_PER_NAT = 128
_NUM_BINS = 4096
"""Of the histogram that finds a large nucleus; entries more than 32 nats below the largest share the last bin."""


class Cutoff:
    """Finds the cutoffs of rows of ``vocab_size`` logits. Owns the scratch memory for it."""

    def __init__(self, vocab_size: int) -> None:
        self._mass = np.empty(vocab_size, np.float32)

    def lowest_kept(self, row: np.ndarray, top_k: int, top_p: float, min_logit: float) -> np.float32:
        """The cutoff of ``row`` [vocab_size] float32; -inf keeps all of it.

        top_k: 0 is off. top_p: 1 is off. min_logit: ln(min_p), -inf is off.
        """
        top = row.max()
        if not np.isfinite(top):
            return np.float32(-np.inf)
        lowest = np.float32(top + np.float32(min_logit))
        if not top_k and top_p >= 1.0:
            return lowest
        kth = np.float32(-np.inf)
        largest = _largest(row, top_k)
        if top_k:
            if largest is None:
                kth = np.partition(row, len(row) - top_k)[len(row) - top_k]
            else:
                kth = largest[min(top_k, len(largest)) - 1]
                largest = largest[largest >= kth]  # ties with the k-th included: all of them are here
            lowest = max(lowest, kth)
        if top_p >= 1.0:
            return lowest
        if not top_k or largest is None:
            self._weigh(row, top, kth)
        if largest is not None:
            total = None if top_k else float(self._mass.sum())  # numpy sums pairwise: as good as float32 goes
            last = _nucleus_end(largest, top, top_p, total)
            if top_k or last < len(largest) - 1:
                return max(lowest, largest[last])
        return max(lowest, self._large_nucleus(row, top, top_p, kth))

    def other_largest(
        self, row: np.ndarray, lowest: np.float32, top_k: int, top_p: float, min_logit: float
    ) -> np.ndarray:
        """Of equals of the largest entry all but the first, where the limits have room for one: [n] places.

        lowest: what ``lowest_kept`` says.
        """
        top = row.max()
        largest = np.flatnonzero(row == top) if lowest >= top else np.empty(0, np.int64)
        if len(largest) < 2 or top_k == 1 or min_logit >= 0.0:
            return largest[1:]
        if top_p * len(largest) > 1.0:  # one of them is not enough of all
            return largest[:0]
        self._weigh(row, top, np.partition(row, len(row) - top_k)[len(row) - top_k] if top_k else np.float32(-np.inf))
        return largest[1:] if top_p < 1.0 and top_p * float(self._mass.sum()) <= 1.0 else largest[:0]

    def _weigh(self, row: np.ndarray, top: np.float32, kth: np.float32) -> None:
        """Set the scratch to exp(logit - top), and to 0 for entries below ``kth``."""
        np.subtract(row, top, out=self._mass)
        np.exp(self._mass, out=self._mass)
        if kth > -np.inf:
            self._mass *= row >= kth

    def _large_nucleus(self, row: np.ndarray, top: np.float32, top_p: float, kth: np.float32) -> np.float32:
        """Cutoff of top_p by a histogram of the row's mass over its values; only one bin has to be sorted."""
        bins = np.minimum((top - row) * np.float32(_BINS_PER_NAT), np.float32(_NUM_BINS - 1)).astype(np.intp)
        cdf = np.cumsum(np.bincount(bins, weights=self._mass, minlength=_NUM_BINS))
        target = top_p * cdf[-1]
        crossed = int(np.searchsorted(cdf, target))
        values = row[bins == crossed]
        values = values[values >= kth]
        values.sort()
        values = values[::-1]
        before = cdf[crossed - 1] if crossed else 0.0
        return values[_nucleus_end(values, top, target, 1.0, before)]


def _largest(row: np.ndarray, at_least: int) -> np.ndarray | None:
    """A few of the row's largest values in descending order: ``at_least``, or all finite ones if those are fewer.

    They are all entries not below some bound, so with a value, whatever ties with it is there too. None when that
    would be slow.
    """
    if len(row) < 4 * _NUM_CLASSES:
        return np.sort(row)[::-1]
    count = _FEW if at_least <= _FEW else _MORE
    if at_least > count:
        return None
    whole = len(row) // _NUM_CLASSES * _NUM_CLASSES  # a bound from these serves for the few entries after them too
    maxima = row[:whole].reshape(-1, _NUM_CLASSES).max(axis=0)
    maxima.partition(_NUM_CLASSES - count)
    bound = maxima[_NUM_CLASSES - count]
    values = row[row >= bound] if bound > -np.inf else row[row > -np.inf]  # a grammar may leave only a few
    if len(values) > 8 * _MORE:  # a plateau of equal logits
        return None
    values.sort()
    return values[::-1]


def _nucleus_end(values: np.ndarray, top: np.float32, share: float, total: float | None, before: float = 0.0) -> int:
    """Place in ``values`` (descending) of the last one with less than ``share * total`` above it.

    total: mass of everything that counts; None: of ``values``. before: mass above the first of ``values``.
    """
    mass = np.exp(values.astype(np.float64) - float(top))
    cdf = np.cumsum(mass)
    above = cdf - mass + before
    num_kept = int(np.searchsorted(above, share * (cdf[-1] if total is None else total)))
    return max(0, num_kept - 1)
