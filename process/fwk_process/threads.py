"""How the threads of a CPU's kernels wait for each other."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager

SPIN_COUNT = "3000"
"""Turns a thread waits by spinning before it sleeps (GNU OpenMP's ``GOMP_SPINCOUNT``).

The library's own 300,000 turns are about a millisecond. When anything else runs on the same cores (the API process is
enough), a step has hundreds of waits of that length, each burning the time slice of the thread that is waited for:
measured on 2 cores alongside one busy process, a decode step of 22 ms took 470 to 1050. With 3,000 turns it takes 90,
and on a quiet machine it is as fast as before; with 1,000, threads fall asleep between operators (27 instead of 22 ms).
"""


def configure_omp_env(environment: MutableMapping[str, str]) -> None:
    """Set the variables before torch is imported; a user's own choice stands.

    Numpy's matrix library gets no threads: nothing here multiplies with it, and its threads spin for 0.1 s each when
    numpy is imported, on the cores that the start needs.
    """
    spin_briefly(environment)
    environment.setdefault("OPENBLAS_NUM_THREADS", "1")


def spin_briefly(environment: MutableMapping[str, str]) -> None:
    """Torch's own threads do not keep the cores from fwk's between two operators.

    With the library's own turns, eight constrained sequences on 2 cores had 0.67 of the speed of free ones, for the
    one operator of torch between two steps; with these 0.88.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


@contextmanager
def half_of_torchs_threads() -> Iterator[None]:
    """Torch's own operators run on half of the threads, at least one.

    They are cut into as many equal parts as there are threads, and a part whose core another process has makes all
    wait for its time slice, 5 ms or more. While a model is loaded the API process imports and reads a tokenizer.
    """
    import torch  # noqa: PLC0415 - this module is imported before torch

    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // 2))
    try:
        yield
    finally:
        torch.set_num_threads(threads)
