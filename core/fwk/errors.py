"""Every exception fwk raises on purpose. Each message names the thing and what to do about it.

Those that packages alongside core raise, too, are defined in ``fwk_errors``.
"""

from __future__ import annotations

from typing import Any

from fwk_errors import ConfigError as ConfigError
from fwk_errors import FwkError as FwkError
from fwk_errors import InvalidRequest as InvalidRequest
from fwk_errors import ModelLoadError as ModelLoadError
from fwk_errors import NotServed as NotServed
from fwk_errors import PluginError as PluginError
from fwk_errors import PortTaken as PortTaken
from fwk_errors import one_line_traceback as one_line_traceback
from fwk_errors import what_is_wrong as what_is_wrong


class PluginLoadError(PluginError):
    """A selected plugin failed to import, to declare or to build."""


class RequestFailed(FwkError):
    """One accepted request failed while it was served; others continue."""


class PluginFault(RequestFailed, RuntimeError):
    """A plugin raised where it must not, or answered what cannot be used; the message names it and its package.

    A ``RuntimeError``, as torch's are, for those that try whether something can be done.
    """

    exit_code = 5


class EngineDead(FwkError):
    """The engine stopped or hangs: nothing can be served until it is restarted.

    ``detail`` is for the log alone: clients are told the message.
    ``exit_code``: that of the error which kept the engine from starting; None: it died of something else.
    """

    exit_code = 6

    def __init__(self, message: str, detail: str = "", exit_code: int | None = None) -> None:
        super().__init__(message)
        self.detail = detail
        if exit_code is not None:
            self.exit_code = exit_code


class BlameSequence(FwkError):
    """Raised by a worker's plugin when a failure belongs to exactly one sequence (its ``slot``).

    The engine fails that sequence's request and continues with the others. ``is_refusal``: what the request asks for
    cannot be had (its limits rule out every token); its client is told so with 400, otherwise with 500.
    """

    def __init__(self, slot: int, message: str, is_refusal: bool = False) -> None:
        super().__init__(message)
        self.slot = slot
        self.is_refusal = is_refusal


def shaped(answer: Any, shape: tuple[int, ...], dtype: Any) -> str | None:
    """Why this is no tensor of that shape and dtype; None: it is one."""
    try:
        found = answer.shape
        if found == shape and answer.dtype is dtype:
            return None
        return f"answered {list(found)} {answer.dtype}, not {list(shape)} {dtype},"
    except AttributeError:
        return f"answered a {type(answer).__name__}, no tensor,"


def in_range(answer: Any, end: int, what: str, least: int = 0) -> str | None:
    """Why whole numbers of a tensor on the host are not in [least, end); None: they are. Others are not looked at."""
    if answer.device.type == "cpu" and answer.numel():
        numbers = answer.numpy()  # whose looks no recorded step would repeat
        low, high = int(numbers.min()), int(numbers.max())
        if low < least or high >= end:
            return f"answered {what} {low if low < least else high}, outside {least} to {end - 1},"
    return None


def one_line(error: BaseException, max_length: int) -> str:
    """An error's kind and what it says, whatever its class makes of ``str``."""
    try:
        said = " ".join(f"{type(error).__name__}: {error}".split())
    except Exception:
        said = f"{type(error).__name__}, which cannot be printed"
    return said if len(said) <= max_length else f"{said[:max_length]} ..."


class NotCapturable(Exception):
    """Why steps of this model cannot be captured, as a sentence continues after "computed operator by operator:"."""
