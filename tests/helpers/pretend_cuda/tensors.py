"""Tensors that say they are elsewhere, and the operators on them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from tests.helpers.pretend_cuda.journal import Journal, here

KIND = "privateuseone"
DEVICE = torch.device(KIND, 0)
JOURNAL = Journal()
PINNED: dict[int, Tensor] = {}
"""Host memory that copies need not wait for, by address; kept, so that no address comes again."""

NODES: list[Callable[[], None]] | None = None
"""While a graph is captured: what was launched."""

aten = torch.ops.aten


class WhileCapturing(RuntimeError):
    """Something that no graph can hold."""


_NO_WORK = frozenset(
    """view _unsafe_view slice select transpose t permute expand unsqueeze squeeze split split_with_sizes unbind
    as_strided alias detach diagonal unfold chunk _reshape_alias view_as narrow reshape lift_fresh unsafe_split flatten
    unflatten empty empty_like empty_strided new_empty new_empty_strided""".split()  # noqa: SIM905 - a list to be read
)
_ALLOCATE = frozenset(["empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"])
_WAITS = frozenset(
    """_local_scalar_dense item equal is_nonzero nonzero masked_select _unique2 unique_dim unique_consecutive bincount
    allclose""".split()  # noqa: SIM905
)
"""Operators whose result's shape or value the host must have."""
_INDEXED = frozenset(["index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"])


class Memory:
    """Bytes of the device's tensors: of each storage that a tensor refers to, by its address."""

    def __init__(self) -> None:
        self._tensors: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self._watched: dict[int, weakref.ref[Tensor]] = {}
        self.now = self.most = 0

    def add(self, tensor: Tensor, held: Tensor) -> None:
        storage = held.untyped_storage()
        address = storage.data_ptr()
        if not address:
            return
        if address not in self._sizes:
            self._sizes[address], self._tensors[address] = storage.nbytes(), 0
            self.now += self._sizes[address]
            self.most = max(self.most, self.now)
        self._tensors[address] += 1
        number = id(tensor)
        self._watched[number] = weakref.ref(tensor, lambda _: self._remove(number, address))

    def _remove(self, number: int, address: int) -> None:
        del self._watched[number]
        self._tensors[address] -= 1
        if not self._tensors[address]:
            del self._tensors[address]
            self.now -= self._sizes.pop(address)

    def trim(self) -> None:
        self.most = self.now

    def forget(self) -> None:
        """Count from nothing."""
        self._watched.clear()  # whose callbacks would take it off
        self._tensors.clear()
        self._sizes.clear()
        self.now = self.most = 0


MEMORY = Memory()


class Elsewhere(Tensor):
    """A tensor on the pretended device; ``held`` has its numbers."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Elsewhere:
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )
        made.held = held
        MEMORY.add(made, held)
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Elsewhere({self.held!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})

    def tolist(self) -> Any:
        _refuse_in_graph("tolist")
        JOURNAL.copy("to host blocking")
        JOURNAL.wait()
        return self.held.tolist()

    def numpy(self, **_: Any) -> Any:  # type: ignore[override]
        raise TypeError("a tensor of the pretended device has no numpy array")

    def data_ptr(self) -> int:
        return self.held.data_ptr()


class Pretending(TorchDispatchMode):
    """Catches what makes tensors on the device out of none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def pin(tensor: Tensor) -> Tensor:
    """Copies from and to this memory need not be waited for."""
    PINNED[tensor.untyped_storage().data_ptr()] = tensor
    return tensor


def is_pinned(tensor: Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() in PINNED


def inner(x: Any) -> Any:
    return x.held if isinstance(x, Elsewhere) else x


def outer(x: Any) -> Any:
    return Elsewhere(x) if isinstance(x, Tensor) and not isinstance(x, Elsewhere) else x


def tensors_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """An operator's tensors, which stand alone or in lists; ``tree_flatten`` takes ten times as long."""
    found: list[Tensor] = []
    for x in (*args, *kwargs.values()):
        if isinstance(x, Tensor):
            found.append(x)
        elif isinstance(x, list | tuple):
            found += [y for y in x if isinstance(y, Tensor)]
    return found


def inners(x: Any) -> Any:
    return [inner(y) for y in x] if isinstance(x, list | tuple) else inner(x)


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One operator, wherever its tensors are."""
    name = func.name().split("::")[-1].partition(".")[0]
    tensors = tensors_of(args, kwargs)
    if name == "to":
        return _to(func, args, kwargs)
    device = kwargs.get("device")
    is_here = any(isinstance(x, Elsewhere) for x in tensors)
    is_wanted = device is not None and torch.device(device).type == KIND
    if not is_here and not is_wanted:
        return _on_host(name, func, args, kwargs)
    if name == "_to_copy":
        return _to_copy(args[0], dict(kwargs), is_wanted)
    if name == "copy_":
        return _copy(func, args[0], args[1], args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    if any(not isinstance(x, Elsewhere) and x.dim() for x in tensors):
        JOURNAL.mixed(name)
        if name not in _INDEXED:
            raise RuntimeError(f"{name}: expected all tensors to be on the same device")
    has_mask = name in _INDEXED and any(isinstance(x, Tensor) and x.dtype == torch.bool for x in args[1])
    if name in _WAITS or has_mask or (name == "repeat_interleave" and len(args) < 2):
        _refuse_in_graph(name)
        JOURNAL.launch(name)
        JOURNAL.wait()
    elif name not in _NO_WORK:
        JOURNAL.launch(name)
    given_args = tuple(inners(x) for x in args)
    given_kwargs = {k: torch.device("cpu") if k == "device" and is_wanted else inners(x) for k, x in kwargs.items()}
    out = func(*given_args, **given_kwargs)
    _record(func, given_args, given_kwargs, out)
    if func._schema.is_mutable:  # what was given comes back
        given = {id(inner(x)): x for x in tensors}
        return tree_map(lambda x: given.get(id(x), outer(x)) if isinstance(x, Tensor) else x, out)
    return outer(out) if isinstance(out, Tensor) else tree_map(outer, out)


def _on_host(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operator of the host's, which writes so many bytes."""
    out = func(*args, **kwargs)
    if name not in _NO_WORK and isinstance(out, Tensor):
        JOURNAL.host_bytes[name] += out.nbytes
    return out


def _refuse_in_graph(name: str) -> None:
    if NODES is not None:
        raise WhileCapturing(f"{name} at {here()} makes the host wait, or reads its memory")


def _record(func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Keep an operator for replays, if it writes to memory: its own result's, or what it was given."""
    if NODES is None or func._schema.name.split("::")[-1] in _ALLOCATE:
        return
    given = {x.untyped_storage().data_ptr() for x in tensors_of(args, kwargs)}
    made = [x for x in tree_flatten(out)[0] if isinstance(x, Tensor)]
    is_new = [x.untyped_storage().data_ptr() not in given for x in made]
    if not func._schema.is_mutable and not any(is_new):
        return

    pool = [Elsewhere(x) for x, new in zip(made, is_new, strict=True) if new]  # a graph keeps what its steps make

    def again() -> None:
        assert len(pool) == sum(is_new)
        found = [x for x in tree_flatten(func(*args, **kwargs))[0] if isinstance(x, Tensor)]
        for kept, x, new in zip(made, found, is_new, strict=True):
            if new:
                kept.copy_(x)

    NODES.append(again)


def _to(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """``Tensor.to``, which in inference mode comes as one operator."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    x, other = given["self"], given.get("other")
    device, dtype = given.get("device"), given.get("dtype")
    if other is not None:
        device, dtype = other.device, other.dtype
    is_same = device is None or torch.device(device).type == x.device.type
    if is_same and dtype in (None, x.dtype) and not given.get("copy"):
        return x
    if is_same and not isinstance(x, Elsewhere):
        return _on_host("_to_copy", func, args, kwargs)
    more = {"non_blocking": given.get("non_blocking", False), "device": device, "dtype": dtype}
    return _to_copy(x, {k: v for k, v in more.items() if v is not None}, torch.device(device or x.device).type == KIND)


def _to_copy(x: Tensor, kwargs: dict[str, Any], is_wanted: bool) -> Tensor:
    """A copy, elsewhere or in another precision."""
    no_wait = bool(kwargs.pop("non_blocking", False))
    to_device = is_wanted if kwargs.pop("device", None) is not None else isinstance(x, Elsewhere)
    kwargs.pop("pin_memory", None)
    out = aten._to_copy.default(inner(x), **kwargs)
    if to_device and not isinstance(x, Elsewhere) and out.dtype != x.dtype:
        JOURNAL.host_bytes["_to_copy"] += out.nbytes  # torch rounds before it copies
    if isinstance(x, Elsewhere) and to_device:
        JOURNAL.launch("_to_copy")
        _record(aten._to_copy.default, (inner(x),), kwargs, out)
        return Elsewhere(out)
    _refuse_in_graph("a copy")
    if to_device:
        JOURNAL.sent_bytes += x.nbytes
        if no_wait and is_pinned(x):
            JOURNAL.copy("to device pinned", x)
        else:
            JOURNAL.copy(f"to device {'pinned' if is_pinned(x) else 'pageable'}{'' if no_wait else ' blocking'}")
            if not no_wait:
                JOURNAL.wait()
        return Elsewhere(out)
    JOURNAL.copy("to host blocking")  # into memory of its own, which is never pinned
    JOURNAL.wait()
    return out


def _copy(func: Any, target: Tensor, source: Tensor, no_wait: bool) -> Tensor:
    """``Tensor.copy_``."""
    if isinstance(target, Elsewhere) and isinstance(source, Elsewhere):
        JOURNAL.launch("copy_")
        _record(func, (inner(target), inner(source)), {}, inner(target))
        func(inner(target), inner(source))
        return target
    _refuse_in_graph("a copy")
    if isinstance(target, Elsewhere):
        JOURNAL.sent_bytes += target.nbytes
        if source.dtype != target.dtype:
            JOURNAL.host_bytes["copy_"] += target.nbytes  # torch rounds before it copies
        if no_wait and is_pinned(source):
            JOURNAL.copy("to device pinned", source)
        else:
            JOURNAL.copy(f"to device {'pinned' if is_pinned(source) else 'pageable'}{'' if no_wait else ' blocking'}")
            if not no_wait:
                JOURNAL.wait()
    elif no_wait and is_pinned(target):
        JOURNAL.copy("to host pinned", target, to_host=inner(source).to(target.dtype))
        return target
    else:
        JOURNAL.copy("to host blocking")
        JOURNAL.wait()
    func(inner(target), inner(source))
    return target
