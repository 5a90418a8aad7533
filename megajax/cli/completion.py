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
from megajax.terminal.command_line import options

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
    from megajax.cli import infer
    from megajax.cli.help import described
    from megajax.cli.train import Options
    from megajax.config import Config

    if command in ("train", "plan"):
        found = {field.name: field.type for field in dataclasses.fields(described(Config(), Options()))}
        return found | {"config": Literal[tuple(configs.docstrings())]}
    kind = infer.COMMANDS.get(command)
    if kind is None:
        return {}
    found = {}
    sections = {}
    for option in options(kind):
        section, dot, field = option.name.partition(".")
        if dot:
            sections.setdefault(section, []).append((field, str))
        else:
            found[option.name] = str
    return found | {name: dataclasses.make_dataclass(name, fields) for name, fields in sections.items()}
