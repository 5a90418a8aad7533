r"""Shell completion: megajax completion {bash,zsh,fish,tcsh} prints the script.

  bash: megajax completion bash > \
          ~/.local/share/bash-completion/completions/megajax
  zsh:  megajax completion zsh > _megajax, in a folder of $fpath
  fish: megajax completion fish > ~/.config/fish/completions/megajax.fish

It completes commands, recipes, and the options of train, plan, generate, chat,
serve, bench, fill, embed and classify.
"""

import dataclasses
from typing import Annotated, Literal, Union

from megajax.fields.suggestions import did_you_mean

SHELLS = ("bash", "zsh", "fish", "tcsh")


def main(arguments: list[str]) -> None:
    if arguments in (["--help"], ["-h"]):
        print(__doc__.rstrip())
        return
    if len(arguments) != 1 or arguments[0] not in SHELLS:
        typed = " ".join(arguments)
        raise ValueError(
            f"megajax completion {typed}: name one shell: {', '.join(SHELLS)}{did_you_mean(typed, SHELLS)}"
        )
    _print_script(arguments[0])


def _print_script(shell: str) -> None:
    import tyro

    from megajax.cli import COMMANDS

    def command(name: str, text: str) -> type:
        kind = dataclasses.make_dataclass(name, _options(name).items())
        return Annotated[kind, tyro.conf.subcommand(name, description=text)]

    commands = Union[tuple(command(name, text) for name, (_, _, text) in COMMANDS.items())]  # noqa: UP007
    tyro.cli(commands, args=["--tyro-print-completion", shell], prog="megajax", use_underscores=True)


def _options(command: str) -> dict[str, type]:
    """Name of each option or section -> its type; empty for commands whose options are not completed."""
    import configs
    from megajax.cli import COMMANDS, infer
    from megajax.cli.help import described
    from megajax.cli.train import Options
    from megajax.config import Config

    if command in ("train", "plan"):
        options = {field.name: field.type for field in dataclasses.fields(described(Config(), Options()))}
        return options | {"config": Literal[tuple(configs.docstrings())]}
    if COMMANDS[command][0] != "megajax.cli.infer":
        return {}
    options = {}
    sections = {}
    for name in vars(infer.parse([command, "--run=DIR"])):
        section, dot, field = name.partition(".")
        if dot:
            sections.setdefault(section, []).append((field, str))
        elif name != "command":
            options[name] = str
    return options | {name: dataclasses.make_dataclass(name, fields) for name, fields in sections.items()}
