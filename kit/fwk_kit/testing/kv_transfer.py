"""What every transport of K/V between servers must do."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from fwk.interfaces.kv_transfer import KVTransfer, KVTransferContext, Transfer
from fwk.plugins import Registered
from fwk_kit.testing.base import PluginSuite
from fwk_kit.testing.serving import ask, metric, serve_tiny

NUM_BLOCKS, LAYERS, SHAPE = 12, 2, (4, 2, 8)
IDENTITY, SECRET = b"i" * 32, b"a secret of the test's own"


class KVTransferSuite(PluginSuite):
    """Two ends in one process: blocks arrive whole, or it is said that they did not."""

    family = "kv_transfer"
    interface = KVTransfer
    seconds = 20.0

    def end(self, item: Registered, fill: float, identity: bytes = IDENTITY) -> tuple[KVTransfer, list[torch.Tensor]]:
        """One side, its caches filled with a number."""
        caches = [torch.full((NUM_BLOCKS, *SHAPE), fill + layer, dtype=torch.bfloat16) for layer in range(LAYERS)]
        return self.make(item, KVTransferContext(caches, SHAPE[0], self.given(item), identity, SECRET)), caches

    def both(self, item: Registered) -> tuple[KVTransfer, list[torch.Tensor], KVTransfer, list[torch.Tensor]]:
        """A sender with numbers of its own in every block, and a receiver."""
        (sender, source), (receiver, target) = self.end(item, 10.0), self.end(item, -1.0)
        for layer, cache in enumerate(source):
            cache.copy_(torch.randn(cache.shape, generator=torch.Generator().manual_seed(layer)))
        return sender, source, receiver, target

    def wait(self, end: KVTransfer, *keys: str) -> dict[str, Transfer]:
        """What became of transfers on one side."""
        found: dict[str, Transfer] = {}
        late = time.monotonic() + self.seconds
        while set(found) != set(keys):
            assert time.monotonic() < late, f"polling never named {set(keys) - set(found)}"
            for transfer in end.poll():
                assert transfer.key not in found, "named twice"
                found[transfer.key] = transfer
            time.sleep(0.01)
        return found

    @property
    def deadline(self) -> float:
        return time.monotonic() + self.seconds

    def test_a_served_request_uses_it(self, item: Registered, tmp_path: Path) -> None:
        """A prompt is computed by one server and continued by another."""
        if self.declaration is not None or not self.served_request:
            super().test_a_served_request_uses_it(item, tmp_path)  # says why not
        self.skip_where_refused(item)
        (tmp_path / "secret").write_bytes(SECRET)
        words = [*self.serve_words(item, tmp_path), "--disaggregation-token-file", str(tmp_path / "secret")]
        with (
            serve_tiny(*words, "--disaggregation-mode", "prefill") as other,
            serve_tiny(*words, "--disaggregation-mode", "decode", "--disaggregation-prefill-servers", other) as url,
        ):
            reply = ask(url, self.served_path, dict(self.served_request))
            assert f"{item.key} {item.package} {item.version}" in ask(url, "/server_info")["plugins"]
            self.check_served(url, reply)

    def check_served(self, url: str, reply: Any) -> None:
        super().check_served(url, reply)
        assert metric(url, "fwk:kv_transfers_total") > 0

    def exercise(self, item: Registered) -> None:
        self.test_blocks_arrive(item)

    def test_blocks_arrive(self, item: Registered) -> None:
        """Those that were asked for, of an offer that has more: the receiver has the others."""
        sender, source, receiver, target = self.both(item)
        sender.offer("k", [9, 1, 3, 4], self.deadline)
        receiver.receive(sender.address(), "k", [1, 2, 3], [7, 2, 5], self.deadline)
        got, sent = self.wait(receiver, "k")["k"], self.wait(sender, "k")["k"]
        assert got.is_whole, got.error
        assert sent.is_whole, sent.error
        assert got.num_bytes == 3 * sum(cache[0].nbytes for cache in source)
        for mine, theirs in zip(target, source, strict=True):
            assert torch.equal(mine[[7, 2, 5]], theirs[[1, 3, 4]])
        for layer, cache in enumerate(target):
            rest = [block for block in range(NUM_BLOCKS) if block not in (7, 2, 5)]
            assert (cache[rest] == -1.0 + layer).all(), "a block nobody asked for was written"
        sender.close()
        receiver.close()

    def test_parts_of_blocks_arrive(self, item: Registered) -> None:
        """Caches may be views of some K/V heads: the sender has more of them than the receiver, or other ones."""
        (sender, source), (receiver, target) = self.end(item, 10.0), self.end(item, -1.0)
        sender.close()
        receiver.close()
        for layer, cache in enumerate(source):
            cache.copy_(torch.randn(cache.shape, generator=torch.Generator().manual_seed(layer)))
        whole = [(cache, 1) for cache in source], [(cache, 0) for cache in target]
        parts = [[cache[:, row, head : head + 1] for cache, head in side for row in range(SHAPE[0])] for side in whole]
        ends = [KVTransferContext(views, SHAPE[0], self.given(item), IDENTITY, SECRET) for views in parts]
        sender, receiver = (self.make(item, end) for end in ends)
        sender.offer("k", [4, 2, 7], self.deadline)
        receiver.receive(sender.address(), "k", [0, 2], [1, 5], self.deadline)
        got, sent = self.wait(receiver, "k")["k"], self.wait(sender, "k")["k"]
        assert got.is_whole, got.error
        assert sent.is_whole, sent.error
        assert got.num_bytes == 2 * sum(cache[0].nbytes for cache in source) // SHAPE[1]
        for layer, (mine, theirs) in enumerate(zip(target, source, strict=True)):
            assert torch.equal(mine[[1, 5], :, 0], theirs[[4, 7], :, 1])
            assert (mine[:, :, 1] == -1.0 + layer).all(), "heads that the other side has not were written"
        sender.close()
        receiver.close()

    def test_several_at_once(self, item: Registered) -> None:
        sender, source, receiver, target = self.both(item)
        keys = [f"k{number}" for number in range(4)]
        for number, key in enumerate(keys):
            sender.offer(key, [number], self.deadline)
        for number, key in enumerate(keys):
            receiver.receive(sender.address(), key, [0], [number + 4], self.deadline)
        assert all(transfer.is_whole for transfer in self.wait(receiver, *keys).values())
        assert all(transfer.is_whole for transfer in self.wait(sender, *keys).values())
        for number in range(4):
            assert torch.equal(target[0][number + 4], source[0][number])
        sender.close()
        receiver.close()

    def test_an_offer_that_is_not_wanted_ends(self, item: Registered) -> None:
        sender, _, receiver, target = self.both(item)
        sender.offer("k", [1, 2], self.deadline)
        receiver.receive(sender.address(), "k", [], [], self.deadline)
        assert self.wait(receiver, "k")["k"].num_bytes == 0
        self.wait(sender, "k")
        assert (target[0] == -1.0).all()
        sender.close()
        receiver.close()

    def test_what_never_comes_is_given_up_at_its_deadline(self, item: Registered) -> None:
        sender, _, receiver, target = self.both(item)
        receiver.receive(sender.address(), "lost", [0], [3], time.monotonic() + 0.3)
        assert not self.wait(receiver, "lost")["lost"].is_whole
        assert (target[0] == -1.0).all()
        sender.close()
        receiver.close()

    def test_what_nobody_reads_is_given_up_at_its_deadline(self, item: Registered) -> None:
        sender, _, receiver, _ = self.both(item)
        sender.offer("late", [3], time.monotonic() + 0.2)
        sender.offer("kept", [3], self.deadline)
        assert not self.wait(sender, "late")["late"].is_whole
        receiver.receive(sender.address(), "kept", [0], [3], self.deadline)
        assert self.wait(receiver, "kept")["kept"].is_whole, "another offer's deadline ended it"
        sender.close()
        receiver.close()

    def test_another_models_blocks_are_not_taken(self, item: Registered) -> None:
        (sender, _), (receiver, target) = self.end(item, 10.0), self.end(item, -1.0, b"j" * 32)
        sender.offer("k", [1], self.deadline)
        receiver.receive(sender.address(), "k", [0], [3], self.deadline)
        found = self.wait(receiver, "k")["k"]
        assert not found.is_whole
        assert found.error
        assert (target[0] == -1.0).all()
        sender.close()
        receiver.close()

    def test_what_is_withdrawn_or_cancelled_ends(self, item: Registered) -> None:
        sender, _, receiver, _ = self.both(item)
        sender.offer("k", [1], self.deadline)
        sender.withdraw("k")
        sender.withdraw("unknown")
        assert not self.wait(sender, "k")["k"].is_whole
        receiver.receive(sender.address(), "k", [0], [3], self.deadline)
        receiver.cancel("k")
        receiver.cancel("unknown")
        assert not self.wait(receiver, "k")["k"].is_whole
        sender.close()
        receiver.close()

    def test_closing_does_not_hang(self, item: Registered) -> None:
        one, _ = self.end(item, 0.0)
        one.offer("mine", [1], time.monotonic() + 60)
        one.receive(one.address(), "never", [0], [1], time.monotonic() + 60)
        started = time.monotonic()
        one.close()
        assert time.monotonic() - started < 5
