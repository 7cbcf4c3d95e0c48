"""What running sequences hold of the K/V memory: blocks of their own, and a locked path of the prefix cache."""

from __future__ import annotations

from collections.abc import Iterable

from fwk.engine.blocks import BlockAllocator
from fwk.engine.plan import Limits
from fwk.engine.reserved_blocks import Reservations
from fwk.engine.sequence import Sequence
from fwk.engine.state_checkpoints import StateCheckpoints
from fwk.engine.window_blocks import WindowBlocks, WindowCache
from fwk.interfaces.prefix_cache import PrefixCache, PrefixMatch
from fwk.types import BlockSaves


class KVBlockManager:
    """Moves blocks between the allocator, the sequences and the prefix cache; whom they go to is not its business."""

    def __init__(self, limits: Limits, num_blocks: int, cache: PrefixCache) -> None:
        self._block_size = limits.block_size
        self._num_lookahead = limits.num_lookahead
        self._max_step_tokens = limits.max_step_tokens
        self._cache = cache
        self._num_state_places = limits.num_state_places or 0
        self._states: StateCheckpoints | None = None
        if limits.num_state_places is not None:
            self._states = StateCheckpoints(limits.num_state_places, limits.block_size, limits.state_interval)
        forget_state = None if self._states is None else self._states.forget
        groups, window = limits.num_window_groups, limits.window
        self._windows = WindowCache(cache, groups, window, limits.block_size, forget_state)
        self.allocator = BlockAllocator(num_blocks, self._windows)
        self.reservations = Reservations(self.allocator, cache, limits.block_size, self.match, self.drop)
        self.num_tables = 1 + limits.num_window_groups
        """Block tables of a sequence: it grows by as many blocks at a time."""
        self._duplicate_blocks: list[int] = []  # in use by the step being planned, by none after it

    @property
    def num_blocks(self) -> int:
        """All there are."""
        return self.allocator.num_blocks

    @property
    def num_free(self) -> int:
        """Free blocks: those without an owner."""
        return self.allocator.num_free

    @property
    def num_cached(self) -> int:
        """Blocks of the prefix cache that no sequence holds."""
        return self._windows.num_evictable_blocks

    @property
    def num_available(self) -> int:
        """Blocks that ``extend`` could give a sequence now."""
        return self.allocator.num_available

    @property
    def max_sequence_tokens(self) -> int:
        """Tokens of the longest sequence that fits when it is alone.

        Of window groups it holds a window, a step's tokens, and what alignment to blocks adds.
        """
        groups = self._windows.num_groups
        held = -(-(self._windows.window + self._max_step_tokens + self._num_lookahead) // self._block_size) + 1
        spare = self.num_blocks - groups * held
        most = spare if spare >= held else self.num_blocks // self.num_tables
        return (most if groups else self.num_blocks) * self._block_size

    def match(self, sequence: Sequence) -> PrefixMatch:
        """What the cache holds of a sequence's tokens, up to where all layers can continue from it."""
        namespace, most = sequence.request.cache_namespace, sequence.num_matchable_tokens
        token_ids = sequence.cache_token_ids
        match = self._cache.match(namespace, token_ids, most)
        for part in (self._windows if self._windows.num_groups else None, self._states):
            usable = len(match.block_ids) if part is None else part.num_usable(match.block_ids)
            if usable < len(match.block_ids):
                match = self._cache.match(namespace, token_ids, usable * self._block_size)
        return match

    def num_missing(self, sequence: Sequence, num_tokens: int, num_held: int) -> int:
        """Blocks for ``num_tokens`` tokens, and the drafts after them, where ``num_held`` of each table are there.

        No sequence drafts past the last token it may have.
        """
        end = min(num_tokens + self._num_lookahead, sequence.num_prompt_tokens + sequence.max_tokens)
        return max(0, -(-max(num_tokens, end) // self._block_size) - num_held) * self.num_tables

    def lock(self, sequence: Sequence, match: PrefixMatch) -> None:
        """Keep the matched blocks until ``begin`` and ``release``, or ``unlock``."""
        self._cache.lock(match.node)
        if self._windows.num_groups:
            sequence.window_blocks = self._windows.take(match.block_ids)
            sequence.num_window_trimmed = self._windows.first_needed(match.num_tokens)

    def unlock(self, sequence: Sequence, match: PrefixMatch) -> None:
        """Nothing came of it."""
        self._cache.unlock(match.node, is_used=False)
        self._give_back_windows(sequence, 0, is_end=True)
        sequence.window_blocks = []

    def begin(self, sequence: Sequence, match: PrefixMatch, num_kept: int, num_running: int) -> None:
        """Give a sequence the locked match, and what tiers bring back of the tokens after it.

        A tier never decides whether a sequence starts: unless all of its tokens fit, ``num_kept`` blocks for its first
        chunk are left, and always one for each running sequence to grow. What does not come back is computed.
        """
        sequence.node = match.node
        sequence.blocks = list(match.block_ids)
        sequence.is_owned = [False] * len(match.block_ids)
        sequence.num_computed_tokens = match.num_tokens
        if self._states is not None and match.block_ids:
            sequence.state_source = self._states.use(match.block_ids[-1])
        self._restore(sequence, num_kept, num_running)
        sequence.num_shared_blocks = len(sequence.blocks)

    def _restore(self, sequence: Sequence, num_kept: int, num_running: int) -> None:
        if not all(part.restorable(sequence) for part in sequence.parts):
            return
        room = self.num_available - num_running
        whole = self.num_missing(sequence, len(sequence.token_ids), len(sequence.blocks))
        spare = whole if whole <= room else room - num_kept
        start = sequence.num_computed_tokens
        end = min(sequence.num_matchable_tokens, start + spare * self._block_size)
        token_ids = sequence.cache_token_ids
        wanted = self._cache.restorable(sequence.node, token_ids[start : max(start, end)])
        if not wanted:
            return
        blocks = self.allocator.allocate(wanted)
        tokens = token_ids[start : start + wanted * self._block_size]
        sequence.node, taken = self._cache.restore(sequence.node, tokens, blocks)
        sequence.blocks.extend(blocks[: len(taken)])
        sequence.is_owned.extend(not was_taken for was_taken in taken)
        sequence.num_computed_tokens += len(taken) * self._block_size
        self.allocator.free(blocks[len(taken) :])

    def extend(self, sequence: Sequence, count: int) -> list[int]:
        """Give a sequence ``count`` blocks of its own; raises ``OutOfBlocks`` with nothing given."""
        blocks = self.allocator.allocate(count)
        if self._windows.num_groups:
            size = self._windows.num_groups
            count //= self.num_tables
            blocks, rest = blocks[:count], blocks[count:]
            sequence.window_blocks += [WindowBlocks(rest[i : i + size]) for i in range(0, len(rest), size)]
        sequence.blocks.extend(blocks)
        sequence.is_owned.extend([True] * count)
        return blocks

    def window_ids(self, sequence: Sequence, count: int) -> list[list[int]]:
        """For the workers: of the last ``count`` blocks, those of the window groups; none for those behind a window."""
        start = len(sequence.window_blocks) - count
        return [[] if blocks is None else blocks.ids for blocks in sequence.window_blocks[max(start, 0) :]]

    def trim(self, sequence: Sequence) -> None:
        """Take back what no token after those computed sees: launched steps read it before any later one writes it."""
        if self._windows.num_groups:
            known = min(sequence.num_computed_tokens, len(sequence.token_ids))  # drafts in flight may be rejected
            end = self._windows.first_needed(known)
            self._give_back_windows(sequence, end, is_end=False)

    def _give_back_windows(self, sequence: Sequence, end: int, *, is_end: bool) -> None:
        """Those before ``end``; all of them where the sequence ends, or does not begin."""
        end = len(sequence.window_blocks) if is_end else end
        for i in range(sequence.num_window_trimmed, end):
            blocks = sequence.window_blocks[i]
            if blocks is not None:
                self.allocator.free(self._windows.give_back(blocks, is_end=is_end))
                sequence.window_blocks[i] = None
        sequence.num_window_trimmed = 0 if is_end else max(end, sequence.num_window_trimmed)

    def cut_chunk(self, sequence: Sequence, num_computed: int, num_new: int) -> int:
        """Tokens of a prompt to compute at once, no more than ``num_new``."""
        if self._states is None:
            return num_new
        return self._states.cut(num_computed, num_new, sequence.num_prompt_tokens)

    def save_state(self, sequence: Sequence) -> int:
        """Where the step being planned is to keep the sequence's state as it leaves it; -1: nowhere."""
        if self._states is None or sequence.state_saved is not None:
            return -1
        place = self._states.take(sequence.num_computed_tokens, sequence.num_prompt_tokens)
        if place is None:
            return -1
        sequence.state_saved = sequence.num_computed_tokens // self._block_size - 1, place
        return place

    def share(self, sequence: Sequence, num_drafts: int) -> None:
        """Offer the blocks that are full once the step being planned has run to the prefix cache.

        Done when a step is planned, not when it has run: sequences of the same step share a prefix, for all K/V of a
        batch are stored before any are read. Should the step fail, the engine is dead and its cache with it.

        Where the cache has the content already, its block is used from the next step on, so no sequence holds both.
        """
        if self._states is not None and num_drafts:
            num_drafts += 1  # all of the step may be taken back
        known = min(sequence.num_computed_tokens - num_drafts, len(sequence.token_ids))
        start, end = sequence.num_shared_blocks, known // self._block_size
        if end <= start:
            return
        tokens = sequence.cache_token_ids[start * self._block_size : end * self._block_size]
        sequence.node, taken = self._cache.insert(sequence.node, tokens, sequence.blocks[start:end])
        sequence.num_shared_blocks = end
        for i, was_taken in enumerate(taken, start):
            sequence.is_owned[i] = not was_taken
        if not all(taken):
            self._replace(sequence, start, end)
        if self._states is not None and sequence.state_saved is not None and sequence.state_saved[0] < end:
            (block, place), sequence.state_saved = sequence.state_saved, None
            if sequence.is_owned[block]:  # a prefix cache that keeps nothing
                self._states.give_back(place)
            else:
                self._states.keep(sequence.blocks[block], place)
        if self._windows.num_groups:
            for block, is_own, windowed in zip(
                sequence.blocks[start:end], sequence.is_owned[start:end], sequence.window_blocks[start:end], strict=True
            ):
                if windowed is not None and not is_own:
                    self._windows.keep(block, windowed)

    def _replace(self, sequence: Sequence, start: int, end: int) -> None:
        namespace, length = sequence.request.cache_namespace, end * self._block_size
        cached = self._cache.match(namespace, sequence.cache_token_ids, length).block_ids
        for i in range(start, min(end, len(cached))):
            if sequence.is_owned[i]:
                self._duplicate_blocks.append(sequence.blocks[i])
                sequence.blocks[i], sequence.is_owned[i] = cached[i], False
                sequence.replaced_blocks.append((i, cached[i]))

    def quiet_until(self, sequence: Sequence) -> int:
        """With fewer tokens computed than this, a sequence's next one needs no block and completes none to share."""
        if self._windows.num_groups or self._states is not None or sequence.replaced_blocks:
            return 0
        held = len(sequence.blocks) * self._block_size - self._num_lookahead
        return min(held, (sequence.num_shared_blocks + 1) * self._block_size - 1)

    def free_duplicate_blocks(self) -> None:
        """The step that was being planned is launched: what it alone uses may go to the next one."""
        self.allocator.free(self._duplicate_blocks)
        self._duplicate_blocks.clear()
        if self._states is not None:
            self._states.commit()

    def release(self, sequence: Sequence) -> None:
        """Take everything back from a sequence."""
        self._give_back_windows(sequence, 0, is_end=True)
        self.allocator.free(sequence.owned_blocks)
        self._cache.unlock(sequence.node)
        sequence.blocks, sequence.window_blocks, sequence.is_owned, sequence.node = [], [], [], None
        sequence.replaced_blocks = []
        sequence.num_shared_blocks = 0
        sequence.state_source = -1
        if sequence.state_saved is not None:
            assert self._states is not None
            self._states.give_back(sequence.state_saved[1])
            sequence.state_saved = None

    def drop(self) -> None:
        """Forget what the prefix cache holds and no sequence uses: its K/V are those of other weights."""
        self.free_duplicate_blocks()
        self.allocator.free(self._windows.drop())
        if self._states is not None:
            self._states.commit()

    def take_saves(self) -> BlockSaves | None:
        """Copies that the next batch must make of blocks the cache has given up."""
        return self._cache.take_saves()

    def shared_by(self, running: Iterable[Sequence]) -> list[int] | None:
        """The prefix cache's blocks that sequences have; None: more are locked, for some that do not run."""
        if self.reservations.num_locks:
            return None
        return [block for one in running for block, is_own in zip(one.blocks, one.is_owned, strict=True) if not is_own]

    def check(self, running: Iterable[Sequence]) -> None:
        """Prove that every block has one owner and every sequence the blocks of what it has computed."""
        sequences = list(running)
        owned = [block for sequence in sequences for block in sequence.owned_blocks]
        self.allocator.check(self._duplicate_blocks + owned + self.reservations.block_ids)
        if self._states is not None:
            num_saving = sum(sequence.state_saved is not None for sequence in sequences)
            self._states.check(self._num_state_places, num_saving)
        for sequence in sequences:
            if len(sequence.blocks) * self._block_size < sequence.num_computed_tokens:
                raise AssertionError(f"sequence {sequence.key} has computed more tokens than its blocks hold")
            if self._windows.num_groups and not all(sequence.window_blocks[sequence.num_window_trimmed :]):
                raise AssertionError(f"sequence {sequence.key} lacks blocks of its window")
