"""Stop strings, found in time linear in the text however long they are and whatever they share."""

from __future__ import annotations

import re
from collections import deque
from functools import lru_cache


class StopMatcher:
    """The Aho-Corasick automaton of a request's stop strings; its sequences share it, each with a state of its own.

    A state is a number; 0 is the start. ``depth[state]``: how many characters at the end of the text so far may begin
    a stop string. After a match the text ends, so states behind one are never left.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.depth = [0]
        self._children: list[dict[str, int]] = [{}]
        self._longest = [""]  # that ends at a state
        for stop in stops:
            self._add(stop)
        self._suffix = [0] * len(self.depth)  # the state of the longest other beginning that the text ends with
        self._link()
        self._next_first = re.compile(f"[{''.join(map(re.escape, self._children[0]))}]").search

    def _add(self, stop: str) -> None:
        state = 0
        for char in stop:
            child = self._children[state].get(char)
            if child is None:
                child = self._children[state][char] = len(self.depth)
                self.depth.append(self.depth[state] + 1)
                self._children.append({})
                self._longest.append("")
            state = child
        self._longest[state] = stop

    def _link(self) -> None:
        """Breadth first: suffixes are shorter, so they are known by then."""
        waiting = deque(self._children[0].values())
        while waiting:
            state = waiting.popleft()
            for char, child in self._children[state].items():
                self._suffix[child] = self._after(self._suffix[state], char)
                waiting.append(child)
            self._longest[state] = self._longest[state] or self._longest[self._suffix[state]]

    def _after(self, state: int, char: str) -> int:
        while state and char not in self._children[state]:
            state = self._suffix[state]
        return self._children[state].get(char, 0)

    def feed(self, state: int, text: str) -> tuple[int, tuple[int, str] | None]:
        """The state after ``text``, and the stop string that begins first of those that end in it, the shortest of
        several: where it begins (negative: before ``text``), and itself.
        """
        found: tuple[int, str] | None = None
        i = 0
        while i < len(text):
            if state == 0:
                first = self._next_first(text, i)
                if first is None:
                    break
                i = first.start()
            state = self._after(state, text[i])
            i += 1
            stop = self._longest[state]
            if stop and (found is None or i - len(stop) < found[0]):
                found = (i - len(stop), stop)
        return state, found


@lru_cache(maxsize=16)
def stop_matcher(stops: tuple[str, ...]) -> StopMatcher:
    """The automaton of these stop strings, at least one; made once for the sequences of a request."""
    return StopMatcher(stops)
