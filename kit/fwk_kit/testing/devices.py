"""What every device must do."""

from __future__ import annotations

import pytest
import torch

from fwk.interfaces.device import Device, DeviceContext
from fwk.interfaces.graphs import NotCapturable, StepSize
from fwk.plugins import Registered
from fwk.plugins.factory import build
from fwk_kit.testing.served import ServedSuite

DTYPES = ("float32", "bfloat16", "float16")


class DeviceSuite(ServedSuite):
    """What it says of itself is so; where this machine has none, only that it says so in a sentence."""

    family = "devices"
    interface = Device

    def device(self, item: Registered) -> Device:
        """One that is there; skips with its own sentence where it is not."""
        self.skip_where_refused(item)
        return self.unchecked(item)

    def skip_where_refused(self, item: Registered) -> None:
        super().skip_where_refused(item)
        missing = self.unchecked(item).missing()
        if missing is not None:
            pytest.skip(f"--device {item.name}: {missing}")

    def unchecked(self, item: Registered) -> Device:
        """The object, which says what is missing."""
        return build(item, DeviceContext(self.given(item)))

    def exercise(self, item: Registered) -> None:
        self.test_takes_one_for_this_thread(item)

    def test_what_is_missing_is_a_sentence(self, item: Registered) -> None:
        super().skip_where_refused(item)
        device = self.unchecked(item)
        missing = device.missing()
        assert missing is None or len(missing.split()) > 2, missing
        assert device.missing() == missing, "the same question, another answer"

    def test_the_machine_has_its_name(self, item: Registered) -> None:
        """What others declare to need of a device, they need by the name it is chosen by."""
        assert self.device(item).host().device == item.name

    def test_takes_one_for_this_thread(self, item: Registered) -> None:
        device = self.device(item)
        count = device.count()
        assert count is None or count >= 1, "a device that is not missing is there at least once"
        where = device.take(0)
        assert where.type == device.kind
        assert device.take(0) == where
        assert torch.ones(2, device=where).sum().item() == 2
        assert device.is_host == (where.type == "cpu"), "only the host's own tensors need no copy"

    def test_memory_is_what_a_worker_can_have(self, item: Registered) -> None:
        device = self.device(item)
        where = device.take(0)
        memory = device.memory(where, 1)
        assert 0 < memory.free <= memory.total
        if device.count() is None:
            assert device.memory(where, 4).free <= memory.free // 2, "four workers that share it have no more than one"

    def test_defaults_are_such_as_a_run_can_take(self, item: Registered) -> None:
        device = self.device(item)
        for stored in (*DTYPES, "int8"):
            found = device.defaults(stored, 64)
            assert found.dtype in DTYPES
            assert found.why is None or len(found.why.split()) > 2, found.why
            assert found.dtype == stored or found.why or stored == "int8", "another precision, and no reason"
            assert 0 < found.memory_fraction < 1
            assert found.step_tokens >= 64, "a step has room for a token of each sequence"
            assert found.start_tokens is None or 1 <= found.start_tokens <= found.step_tokens

    def test_host_buffers_are_zeros_of_the_host(self, item: Registered) -> None:
        device = self.device(item)
        where = device.take(0)
        one, two = (device.host_buffer((3, 5), torch.int64) for _ in range(2))
        assert (one.device.type, one.dtype, one.shape) == ("cpu", torch.int64, (3, 5))
        one.numpy()[:] = 7
        assert not two.any(), "buffers share their memory, or are not zeros"
        event = device.event()
        event.wait()  # nothing was recorded
        copy = torch.empty_like(one, device=where)
        copy.copy_(one, non_blocking=True)
        event.record()
        event.wait()
        one.fill_(0)
        assert copy.cpu().eq(7).all(), "the event came before the copy was done"

    @torch.inference_mode()
    def test_what_is_captured_is_replayed(self, item: Registered) -> None:
        """On the memory that it was captured with, whose numbers are others by then."""
        device = self.device(item)
        where = device.take(0)
        capture = device.graph_capture()
        if capture is None:
            pytest.skip(f"{item.name} captures no steps: its graph_capture() returns None")
        assert not capture.serves_smaller, "that is for operators to say"
        given = torch.zeros(4, 3, device=where)
        size = StepSize(4, 4, 4, 4)
        graphs = [capture.capture(lambda _, by=by: (given + by, given * by), size) for by in (1.0, 2.0)]
        for start in (1.0, 5.0):
            given.fill_(start)
            for graph, by in zip(graphs, (1.0, 2.0), strict=True):
                hidden, logits = graph.replay(size)
                assert logits is not None
                assert (hidden.cpu() == start + by).all()
                assert (logits.cpu() == start * by).all()
        with pytest.raises(NotCapturable):
            capture.capture(lambda _: (given * given.sum().item(), None), size)

    def test_cache_memory_is_zeros_of_its_own(self, item: Registered) -> None:
        device = self.device(item)
        where = device.take(0)
        sizes = (4096, 1000, 4096)
        memory = device.cache_memory(sizes, where)
        assert [len(piece) for piece in memory.pieces] == list(sizes)
        for piece in memory.pieces:
            assert (piece.device, piece.dtype) == (where, torch.uint8)
            assert piece.data_ptr() % 64 == 0, "kernels load whole cache lines"
            assert not piece.any()
        with memory.scratch([piece[:16] for piece in memory.pieces]):
            memory.pieces[0].fill_(1)
            assert not memory.pieces[1].any(), "pieces overlap"
        left = memory.pieces[0]
        assert left.eq(0).all() or left.eq(1).all(), "half of what was stored is forgotten"
        memory.pieces[2].fill_(3)
        assert memory.pieces[2].eq(3).all(), "memory that forgets outside of a scratch"
