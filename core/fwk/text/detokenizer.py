"""A sequence's text as its tokens come, and the search for stop strings in it."""

from __future__ import annotations

from tokenizers import Tokenizer

from fwk.types import SamplingParams, TokenEvent
from fwk_stops.patterns import Threads, stop_patterns
from fwk_stops.repetition import FOUND, RepetitionSearch
from fwk_stops.strings import stop_matcher
from fwk_tokenizer.streams import text_stream
from fwk_tokenizer.vocabulary import Vocabulary


class SequenceText:
    """The text of one sequence as it grows: detokenised, searched for stop strings.

    Text that may be the beginning of a stop string is held back until it is decided. Without a tokenizer the text stays
    empty, and tokens are counted.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocabulary: Vocabulary | None, sampling: SamplingParams) -> None:
        tokenizer = None if sampling.max_tokens == 0 else tokenizer  # of an input that nothing follows
        self._stream = text_stream(tokenizer, vocabulary, sampling.skip_special_tokens)
        self._stops = stop_matcher(tuple(sampling.stop)) if sampling.stop else None
        self._state = 0  # of the search for them
        self._patterns = stop_patterns(tuple(sampling.stop_regex)) if sampling.stop_regex else None
        self._threads: Threads = {}  # of the search for those
        self._searches = bool(sampling.stop or sampling.stop_regex)
        wanted = sampling.repetition_detection
        self._repetition = RepetitionSearch(wanted) if wanted is not None else None
        self._keep_stop = sampling.include_stop_str_in_output
        self._min_tokens = sampling.min_tokens
        self._held = ""
        self.num_tokens = 0
        self.stop_string: str | None = None

    def feed(self, event: TokenEvent) -> tuple[str, int]:
        """Take in an event. Returns the new text, and how many of the event's tokens belong to the output.

        After a stop string was found (``stop_string``), the tokens behind it do not belong to it.
        """
        tokens = event.token_ids
        ends_with_stop = event.finish_reason == "stop" and not event.is_complete
        hides_last = ends_with_stop and not self._keep_stop  # the stop token itself is no text
        out = ""
        for i, token in enumerate(tokens):
            self.num_tokens += 1
            fresh = "" if hides_last and i == len(tokens) - 1 else self._stream.feed(token)
            out += self._search(fresh) if self._searches else fresh
            if self._repetition is not None and self._repetition.feed(token) and self.num_tokens >= self._min_tokens:
                self.stop_string = self.stop_string or FOUND
                out, self._held = out + self._held, ""
            if self.stop_string is not None:
                return out, i + 1
        if event.finish_reason is not None:
            rest = self._stream.end()
            out += self._search(rest) if self._searches else rest
            out += self._held
            self._held = ""
        return out, len(tokens)

    def _search(self, fresh: str) -> str:
        """What may be given out of the held text and ``fresh``; sets ``stop_string`` when one is complete."""
        text = self._held + fresh
        if self.num_tokens < self._min_tokens:
            self._held, self._state, self._threads = "", 0, {}
            return text
        keep, ends = len(text), list[tuple[int, int, str]]()  # where one begins and ends, and what it is called
        if self._stops is not None:
            self._state, found = self._stops.feed(self._state, fresh)
            keep -= self._stops.depth[self._state]
            if found is not None:
                ends.append((found[0], found[0] + len(found[1]), found[1]))
        if self._patterns is not None:
            self._threads, match = self._patterns.feed(self._threads, fresh)
            keep = min([keep, *(len(text) + begin for begin in self._threads.values())])
            if match is not None:
                ends.append(match)
        if ends:
            begin, end, self.stop_string = min(ends)
            keep = len(self._held) + (end if self._keep_stop else begin)
        self._held = "" if ends else text[keep:]
        return text[:keep]
