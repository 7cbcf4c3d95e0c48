"""The kit's commands, as entry points of the group ``fwk.commands`` name them."""

from fwk.interfaces.command import Command

chat = Command("talk to a model in the terminal", "fwk_kit.cli.chat:run")
generate = Command("complete a prompt and exit", "fwk_kit.cli.generate:run")
run_batch = Command("answer a file of requests in OpenAI's batch format", "fwk_kit.cli.run_batch:run")
train_draft = Command("train a head that drafts for a model", "fwk_kit.cli.train_draft:run")
heavy_channels = Command("find the channels that double sparsity reads of a model", "fwk_kit.cli.heavy_channels:run")
pull = Command("fetch a model and keep it", "fwk_kit.cli.models:pull")
list_models = Command("the models that are kept on this machine", "fwk_kit.cli.models:list_models")
remove = Command("delete models that are kept", "fwk_kit.cli.models:remove")
bench = Command("measure servers, the engine, start-up, this machine", "fwk_kit.cli.bench:run")
arguments = Command("print the page of all arguments (docs/arguments.md)", "fwk_kit.cli.arguments:run")
limits = Command("print the page of all limits of requests (docs/limits.md)", "fwk_kit.cli.limits:run")
plugins_list = Command(
    "what is installed, from which package, in which state", "fwk_kit.cli.installed_plugins:list_plugins"
)
plugins_why = Command(
    "the candidates of a family, and why each would be taken or refused", "fwk_kit.cli.installed_plugins:why"
)
plugins_freeze = Command("the resolved set as JSON, for --plugins-lock", "fwk_kit.cli.installed_plugins:freeze")
plugins_new = Command("begin a package with a plugin that works", "fwk_kit.cli.plugins:new")
plugins_test = Command("run the contract of its family on an installed plugin", "fwk_kit.cli.plugins:test")
plugins_bench = Command("compare a plugin with another of its family: parity and speed", "fwk_kit.cli.plugins:bench")
plugins_doctor = Command(
    "what is wrong with the installed plugins; exit code 1 if anything is", "fwk_kit.cli.plugins:doctor"
)
