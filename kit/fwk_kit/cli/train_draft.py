"""``fwk train-draft MODEL --out DIR``: train a head that drafts for a model, on what the model itself writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fwk.cli.common import note, read_options
from fwk.cli.option_parsing import Parser
from fwk.errors import ConfigError
from fwk.types import SamplingParams
from fwk_kit.training.prompts import add_data_argument, prompts_of
from fwk_process.folders import output_folder
from fwk_process.log import set_up_log

if TYPE_CHECKING:
    from fwk.config import Config
    from fwk.plugins import PluginSet
    from fwk.types import ModelConfig
    from fwk_kit.training.collect import Target, Text

UNFINISHED = "training.pt"
AT_ONCE = 16


def run(argv: Sequence[str]) -> int:
    """Generate, train, and write config.json and model.safetensors."""
    parser = Parser(
        "fwk train-draft",
        description="Train an EAGLE-3 head for a model. Serve it with --speculative-algorithm eagle3 "
        "--speculative-draft-model-path DIR.",
        allow_abbrev=False,
    )
    parser.add_argument("bare_model", nargs="?", default=None, metavar="MODEL", help="none: the default one")
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="where the head goes; a run cut short continues there"
    )
    parser.add_argument("--algorithm", choices=["eagle3"], default="eagle3")
    add_data_argument(parser)
    parser.add_argument("--max-tokens", type=int, default=160, help="longest answer (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=2, help="answers to each prompt (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--draft-vocab-size", type=int, default=8192, help="default: %(default)s")
    plugins, config, arguments = read_options(parser, argv)
    for name in ("max_tokens", "samples", "epochs", "draft_vocab_size"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1")
    if config.engine.speculative_algorithm != "none":
        raise ConfigError("--speculative-algorithm: the model writes its texts without drafts")
    folder = output_folder(arguments.out, "--out")
    prompts = prompts_of(arguments.data)
    if len(prompts) < 2:
        raise ConfigError(f"--data {arguments.data}: at least two prompts are wanted, one of them to measure with")
    set_up_log("warning")
    import torch  # noqa: PLC0415 - heavy

    from fwk_kit.training.eagle3 import Recipe, Trainer  # noqa: PLC0415 - torch comes with it

    model, target, texts = _collect(config, plugins, prompts, arguments.max_tokens, arguments.samples)
    note(f"{len(texts)} texts of {sum(len(text.token_ids) for text in texts)} tokens")
    recipe = Recipe(epochs=arguments.epochs, draft_vocab_size=arguments.draft_vocab_size)
    trainer = Trainer(model, target, texts, recipe, note)
    unfinished = folder / UNFINISHED
    if unfinished.exists():
        state: dict[str, Any] = torch.load(unfinished, weights_only=True)
        if not torch.equal(state["tokens"], trainer.tokens):
            raise ConfigError(
                f"{unfinished} is of other texts: delete it, or give the data and options it was begun with"
            )
        trainer.resume(state)
        note(f"continues after epoch {trainer.epoch}")

    def keep(trainer: Trainer) -> None:
        trainer.save(folder)
        torch.save(trainer.state(), unfinished)

    trainer.run(keep)
    unfinished.unlink(missing_ok=True)
    note(f"the head is in {folder}")
    return 0


def _collect(
    config: Config,
    plugins: PluginSet,
    prompts: Sequence[str | list[dict[str, str]]],
    max_tokens: int,
    samples: int,
) -> tuple[ModelConfig, Target, list[Text]]:
    """Have the model answer, the first time greedily."""
    import random  # noqa: PLC0415

    from fwk import LLM  # noqa: PLC0415 - torch comes with it
    from fwk.setup.checkpoint import open_model  # noqa: PLC0415
    from fwk_kit.training.collect import Collector, CollectorPlugin  # noqa: PLC0415

    plugins.register(CollectorPlugin(), "speculative.collector", "fwk", "1")
    engine = config.engine.model_copy(
        update={
            "speculative_algorithm": "collector",
            "prefix_cache": "none",
            "executor": "inprocess",
            "max_running_requests": AT_ONCE,
        }
    )
    with LLM.from_config(replace(config, engine=engine), plugins, note) as llm:
        ids = [llm.text.encode(p) if isinstance(p, str) else llm.text.chat_ids(p) for p in prompts]
        done = 0
        for sample in range(samples):
            for first in range(0, len(ids), 4 * AT_ONCE):
                some = ids[first : first + 4 * AT_ONCE]
                settings: dict[str, Any] = {"temperature": 0.0} if sample == 0 else {"temperature": 0.8, "seed": sample}
                llm.generate(some, SamplingParams(max_tokens=max_tokens, **settings))
                done += len(some)
                note(f"{done} of {samples * len(ids)} answers")
        assert Collector.last is not None
        assert Collector.target is not None
        Collector.last.flush()
        texts = [text for text in Collector.texts if len(text.taps) > 1]
    random.Random(0).shuffle(texts)
    return open_model(config, plugins, note).config, Collector.target, texts
