"""What holds for every plugin whose kernels are Triton's, for CUDA devices or its interpreter."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fwk.errors import PluginError
from fwk.interfaces.declaration import Facts, Host
from fwk.plugins import PluginSet, choose, find

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in Triton's interpreter")


def patch_once_a_launch() -> None:
    """Triton's interpreter patches its whole language at each call of a device function: a third of its time.

    Within a launch each of the two modules, ``tl`` and ``tl.core``, is patched once.
    """
    from triton import language
    from triton.runtime import interpreter

    real, patched = interpreter._patch_lang, set[int]()

    def patch(fn: Any) -> Any:
        wanted = {id(value) for value in fn.__globals__.values() if value is language or value is language.core}
        if patched and wanted <= patched:
            return SimpleNamespace(restore=lambda: None)
        is_launch = not patched
        patched.update(wanted)
        scope = real(fn)
        restore = scope.restore
        if is_launch:
            scope.restore = lambda: (patched.clear(), restore())
        return scope

    interpreter._patch_lang = patch


def convert_arrays_of_one() -> None:
    """Triton before 3.9 makes its tensors of one number indices by ``int(array)``, which numpy 2.4 and newer refuse."""
    from triton.runtime import interpreter

    real = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        real(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda x: int(x.handle.data.item()))

    interpreter._patch_lang_tensor = patch


def remember_types() -> None:
    """Triton's interpreter makes type and shape of each intermediate anew, of strings and tuples: half its time.

    Those of the numbers' types, which live as long as Triton does, are made once.
    """
    from triton.language import core
    from triton.runtime import interpreter

    real_block, real_tensor, real_np = core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype
    blocks: dict[tuple[int, tuple[int, ...]], dict[str, Any]] = {}
    numpy_types: dict[int, Any] = {}
    shapes: dict[int, tuple[Any, Any, Any]] = {}

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        if type(element_ty) is not core.dtype or not all(type(size) is int for size in shape):
            return real_block(self, element_ty, shape)
        key = id(element_ty), tuple(shape)
        if (known := blocks.get(key)) is None:
            real_block(self, element_ty, shape)
            known = blocks[key] = dict(self.__dict__)
        self.__dict__.update(known)
        return None

    def tensor(self: Any, handle: Any, kind: Any) -> None:
        key = id(kind.shape) if kind.is_block() else 0
        known = shapes.get(key)
        if known is None or (key and known[0] is not kind.shape):
            real_tensor(self, handle, kind)
            shapes[key] = kind.shape if key else None, self.numel, self.shape
            return
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        _, self.numel, self.shape = known

    def numpy_type(kind: Any) -> Any:
        scalar = kind.element_ty if isinstance(kind, core.block_type) else kind
        if type(scalar) is not core.dtype:
            return real_np(kind)
        found = numpy_types.get(id(scalar))
        if found is None:
            found = numpy_types[id(scalar)] = real_np(kind)
        return found

    core.block_type.__init__, core.tensor.__init__ = block, tensor
    interpreter._get_np_dtype = numpy_type


def check_never_chosen_by_itself(plugins: PluginSet, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``auto`` leaves the plugin ``triton`` alone, which needs a device it compiles for or the interpreter."""
    declaration = find(plugins, family, "triton").declaration
    for facts in (Facts(), Facts(host=Host("cuda", (9, 0)))):
        chosen = choose(plugins, family, "auto", facts).chosen
        assert chosen is not None
        assert chosen.name != "triton"
        assert declaration.refusal(facts) is None
    assert "compute capability 8.0" in (declaration.refusal(Facts(host=Host("cuda", (7, 5)))) or "")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(PluginError, match="needs a cuda device, or TRITON_INTERPRET=1 to run its kernels in"):
        choose(plugins, family, "triton", Facts())


@pytest.fixture
def same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of a tile's product has the same bits at any place of the tile, as a device's tiles give it.

    The interpreter multiplies by numpy, of which some libraries (OpenBLAS for AVX2) add up the last rows of a matrix in
    another order than those before. Where numpy does so, it multiplies row by row.
    """
    product = np.matmul
    x = np.random.default_rng(0).standard_normal((2, 16, 64)).astype(np.float32)
    if np.array_equal(product(x[0, ::-1], x[1].T)[::-1], product(x[0], x[1].T)):
        return

    def by_row(a: Any, b: Any, **settings: Any) -> Any:
        rows = [product(a[..., i : i + 1, :], b, **settings) for i in range(a.shape[-2])]
        return np.concatenate(rows, axis=-2)

    monkeypatch.setattr(np, "matmul", by_row)
