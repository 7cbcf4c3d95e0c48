"""``fwk heavy-channels MODEL --out FILE``: which channels ``--attention-backend double_sparsity`` reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fwk.cli.common import note, read_options
from fwk.cli.option_parsing import Parser
from fwk.errors import ConfigError
from fwk.types import SamplingParams
from fwk_kit.cli.output import check_output
from fwk_kit.training.prompts import add_data_argument, prompts_of
from fwk_process.log import set_up_log

AT_ONCE = 16


def run(argv: Sequence[str]) -> int:
    """Have the model answer prompts, and write the channels of its heads, heaviest first."""
    parser = Parser(
        "fwk heavy-channels",
        description="Find the heaviest channels of a model's heads, on what it reads and writes itself. Serve with "
        "--attention-backend double_sparsity --ds-channel-config-path FILE.",
        allow_abbrev=False,
    )
    parser.add_argument("bare_model", nargs="?", default=None, metavar="MODEL", help="none: the default one")
    parser.add_argument("--out", required=True, metavar="FILE", help="where the channels go, as JSON")
    add_data_argument(parser)
    parser.add_argument("--max-tokens", type=int, default=32, help="longest answer (default: %(default)s)")
    plugins, config, arguments = read_options(parser, argv)
    if arguments.max_tokens < 1:
        raise ConfigError("--max-tokens must be at least 1")
    out = Path(arguments.out)
    try:
        check_output(out)
    except OSError as error:
        raise ConfigError(f"--out: cannot write {out}: {error.strerror}") from None
    prompts = prompts_of(arguments.data)
    set_up_log("warning")

    from fwk import LLM  # noqa: PLC0415 - torch comes with it
    from fwk.interfaces.attention import AttentionBackendSpec  # noqa: PLC0415
    from fwk.plugins import find, load_object  # noqa: PLC0415
    from fwk_kit.training.channels import NAME, Recorder, RecorderPlugin  # noqa: PLC0415

    inner = find(plugins, "attention", "torch")
    assert isinstance(inner.declaration, AttentionBackendSpec)
    plugins.register(RecorderPlugin(inner.declaration, load_object(inner)), f"attention.{NAME}", "fwk", "1")
    update = {
        "attention_backend": NAME,
        "speculative_algorithm": "none",
        "prefix_cache": "none",
        "executor": "inprocess",
        "max_running_requests": AT_ONCE,
    }
    with LLM.from_config(replace(config, engine=config.engine.model_copy(update=update)), plugins, note) as llm:
        Recorder.sizes.clear()  # of warm-up steps
        ids = [llm.text.encode(p) if isinstance(p, str) else llm.text.chat_ids(p) for p in prompts]
        for first in range(0, len(ids), 4 * AT_ONCE):
            some = ids[first : first + 4 * AT_ONCE]
            llm.generate(some, SamplingParams(max_tokens=arguments.max_tokens, temperature=0.0))
            note(f"{first + len(some)} of {len(ids)} prompts")
        lists = {
            f"{name}.{kind}_proj": x for name, sizes in Recorder.sizes.items() for kind, x in sizes.lists().items()
        }
    out.write_text(json.dumps(lists), encoding="utf-8")
    note(f"{len(lists) // 3} layers are in {out}")
    return 0
