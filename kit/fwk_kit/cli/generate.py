"""``fwk generate "prompt"``."""

from __future__ import annotations

from collections.abc import Sequence

from fwk.cli.common import note, read_options
from fwk.cli.option_parsing import Parser
from fwk.types import SamplingParams
from fwk_process.log import set_up_log


def add_sampling_flags(parser: Parser, max_tokens: int | None) -> None:
    """Flags of the commands that generate themselves."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, default=max_tokens, help="longest answer (default: %(default)s)")
    group.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    group.add_argument("--top-p", type=float, default=1.0)
    group.add_argument("--top-k", type=int, default=0)
    group.add_argument("--seed", type=int, default=None)


def run(argv: Sequence[str]) -> int:
    """Load the model, stream one completion to standard output."""
    parser = Parser("fwk generate", description="Complete a prompt and exit.", allow_abbrev=False)
    parser.add_argument("prompt", help="text to complete")
    add_sampling_flags(parser, 64)
    parser.add_argument("--chat", action="store_true", help="put the prompt through the chat template, as a question")
    plugins, config, arguments = read_options(parser, argv)
    set_up_log("warning")
    from fwk import LLM  # noqa: PLC0415 - torch comes with it

    sampling = SamplingParams(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        seed=arguments.seed,
    )
    with LLM.from_config(config, plugins, note) as llm:
        prompt: str | list[int] = arguments.prompt
        if arguments.chat:
            prompt = llm.text.chat_ids([{"role": "user", "content": arguments.prompt}])
        for piece in llm.stream(prompt, sampling):
            print(piece, end="", flush=True)
        print()
    return 0
