"""The part in the engine: all ranks read the same, and change together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fwk.errors import EngineDead, InvalidRequest
from fwk.interfaces.feature import EnginePart
from fwk.types import Request


class EngineWeights(EnginePart):
    """Has no part in requests."""

    def operations(self) -> Mapping[str, Callable[..., Any]]:
        return {"prepare": self.prepare, "use": self.use, "discard": self.discard}

    def concerns(self, request: Request) -> bool:
        return False

    def prepare(self, model: str, load_format: str | None = None) -> str:
        """Have every worker read another checkpoint of the served model's kind; returns a fingerprint of its files.

        The current weights keep serving. Raises ``InvalidRequest`` when it does not fit, with nothing kept of it.
        """
        if self.context.moved_by:
            raise InvalidRequest(
                f"the weights stay as they are: {self.context.moved_by}, which must be of the same weights; start the "
                "servers again",
                "model_path",
            )
        answers: list[dict[str, str]] = self.context.call("prepare", model, load_format)
        errors = [answer["error"] for answer in answers if "error" in answer]
        found = {answer["fingerprint"] for answer in answers if "fingerprint" in answer}
        if not errors and len(found) != 1:
            errors = [
                f"the files of {model} changed while they were read, or their times or names differ between machines"
            ]
        if errors:
            self.discard()
            raise InvalidRequest(f"the weights stay as they are: {errors[0]}", "model_path")
        return found.pop()

    def use(self) -> None:
        """Serve what was prepared, and forget the K/V of before. No sequence may be running."""
        assert not self.context.num_running(), "running sequences would continue with other weights"
        assert self.context.blocks is not None
        try:
            self.context.call("use")
        except Exception as error:  # some ranks may have them, and others not
            raise EngineDead(f"the weights could not be exchanged: {error}") from error
        self.context.blocks.drop()

    def discard(self) -> None:
        """Discard the prepared weights, if there are any."""
        self.context.call("discard")
