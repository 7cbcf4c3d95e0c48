"""What every transport of K/V between engines must do."""

from __future__ import annotations

import time

import torch

from fwk.interfaces.kv_transfer import KVTransfer, KVTransferContext
from fwk.plugins import Registered
from fwk_kit.testing.base import PluginSuite

NUM_BLOCKS, LAYERS, SHAPE = 12, 2, (4, 2, 8)


class KVTransferSuite(PluginSuite):
    """Two ends in one process: blocks arrive whole, or it is said that they did not."""

    family = "kv_transfer"
    interface = KVTransfer
    seconds = 20.0

    def end(self, item: Registered, fill: float) -> tuple[KVTransfer, list[torch.Tensor]]:
        """One side, its caches filled with a number."""
        caches = [torch.full((NUM_BLOCKS, *SHAPE), fill + layer) for layer in range(LAYERS)]
        return self.make(item, KVTransferContext(caches, SHAPE[0], self.given(item))), caches

    def wait(self, ends: list[KVTransfer], keys: set[str]) -> dict[str, list[bool]]:
        """What became of the transfers, on both sides."""
        found: dict[str, list[bool]] = {}
        end = time.monotonic() + self.seconds
        while time.monotonic() < end and {k for k, said in found.items() if len(said) == 2} != keys:
            for side in ends:
                for key, arrived in side.poll():
                    found.setdefault(key, []).append(arrived)
            time.sleep(0.01)
        return found

    def exercise(self, item: Registered) -> None:
        self.test_blocks_arrive(item)

    def test_blocks_arrive(self, item: Registered) -> None:
        (sender, source), (receiver, target) = self.end(item, 10.0), self.end(item, -1.0)
        for layer, cache in enumerate(source):
            cache.copy_(torch.randn(cache.shape, generator=torch.Generator().manual_seed(layer)))
        deadline = time.monotonic() + self.seconds
        receiver.receive(sender.address(), "k", [7, 2, 5], deadline)
        sender.send(receiver.address(), "k", [1, 3, 4], deadline)
        assert self.wait([sender, receiver], {"k"}) == {"k": [True, True]}
        for mine, theirs in zip(target, source, strict=True):
            assert torch.equal(mine[[7, 2, 5]], theirs[[1, 3, 4]])
        for layer, cache in enumerate(target):
            rest = [block for block in range(NUM_BLOCKS) if block not in (7, 2, 5)]
            assert (cache[rest] == -1.0 + layer).all(), "a block nobody asked for was written"
        sender.close()
        receiver.close()

    def test_several_at_once(self, item: Registered) -> None:
        (sender, source), (receiver, target) = self.end(item, 10.0), self.end(item, -1.0)
        deadline = time.monotonic() + self.seconds
        for number in range(4):
            sender.send(receiver.address(), f"k{number}", [number], deadline)
            receiver.receive(sender.address(), f"k{number}", [number + 4], deadline)
        found = self.wait([sender, receiver], {f"k{number}" for number in range(4)})
        assert found == {f"k{number}": [True, True] for number in range(4)}
        for number in range(4):
            assert torch.equal(target[0][number + 4], source[0][number])
        sender.close()
        receiver.close()

    def test_what_never_comes_is_given_up_at_its_deadline(self, item: Registered) -> None:
        (sender, _), (receiver, target) = self.end(item, 10.0), self.end(item, -1.0)
        receiver.receive(sender.address(), "lost", [3], time.monotonic() + 0.3)
        end = time.monotonic() + self.seconds
        said: list[tuple[str, bool]] = []
        while not said and time.monotonic() < end:
            said += receiver.poll()
            time.sleep(0.01)
        assert said == [("lost", False)]
        assert (target[0] == -1.0).all()
        sender.close()
        receiver.close()

    def test_closing_does_not_hang(self, item: Registered) -> None:
        one, _ = self.end(item, 0.0)
        one.receive(one.address(), "never", [1], time.monotonic() + 60)
        started = time.monotonic()
        one.close()
        assert time.monotonic() - started < 5
