"""Starting without collections of garbage."""

import gc

import pytest

from fwk_process.gc import gc_paused


def test_what_is_made_meanwhile_is_never_looked_at():
    before = gc.get_freeze_count()
    try:
        with gc_paused():
            assert not gc.isenabled()
            made = [[] for _ in range(1000)]
        assert gc.isenabled()
        assert gc.get_freeze_count() >= before + len(made)
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("were_made", [True, False])
def test_collections_are_made_as_before_also_after_an_error(were_made: bool):
    (gc.enable if were_made else gc.disable)()
    try:
        with pytest.raises(KeyError), gc_paused():
            raise KeyError
        assert gc.isenabled() == were_made
    finally:
        gc.enable()
        gc.unfreeze()
