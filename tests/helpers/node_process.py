"""``python -m tests.helpers.node_process JSON``: a node without a model, whose ranks are those of ``remote_worker``."""

from __future__ import annotations

import json
import sys
from functools import partial

from fwk.errors import FwkError
from fwk.interfaces.executor import NodeContext
from fwk_executors.processes import ProcessesOptions
from fwk_executors.processes.member import ProcessesNode
from tests.helpers.remote_worker import recipe


def main(text: str) -> int:
    told = json.loads(text)
    say = partial(print, file=sys.stderr, flush=True)
    options = ProcessesOptions.model_validate(told["options"])
    try:
        return ProcessesNode(
            NodeContext(recipe(**told["config"]), told["size"], options, lambda: told["common"], say)
        ).run()
    except FwkError as error:
        say(f"fwk: error: {error}")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
