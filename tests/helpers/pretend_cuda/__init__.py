"""A device that is not there: its tensors hold their numbers on the CPU, and what a GPU would do late is done late.

``pretended()`` puts it on; ``JOURNAL`` has what was launched, copied and waited for. It shows what a stream would
show, and is no measure of speed: a copy from pinned memory is under way until an event after it has come, a copy to
the host's memory arrives only then, and everything else counts as launched at once.
"""

from tests.helpers.pretend_cuda.device import pretended
from tests.helpers.pretend_cuda.graphs import triton_kernels
from tests.helpers.pretend_cuda.journal import Journal
from tests.helpers.pretend_cuda.stand_in import flashinfer_stand_in
from tests.helpers.pretend_cuda.steps import EXACT, Steps, serving
from tests.helpers.pretend_cuda.tensors import JOURNAL

__all__ = ["EXACT", "JOURNAL", "Journal", "Steps", "flashinfer_stand_in", "pretended", "serving", "triton_kernels"]
