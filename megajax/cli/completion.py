r"""Shell completion: megajax completion {bash,zsh,fish,tcsh} prints the script.

  bash: megajax completion bash > \
          ~/.local/share/bash-completion/completions/megajax
  zsh:  megajax completion zsh > _megajax, in a folder of $fpath
  fish: megajax completion fish > ~/.config/fish/completions/megajax.fish

It completes commands, recipes, and the options of train, plan, generate, chat,
serve, bench, fill, embed and classify.
"""

import dataclasses
import functools
import operator
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from megajax.fields.suggestions import did_you_mean
from megajax.terminal.command_line import Option, options

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

    def command(name: str, text: str) -> Any:
        kind = dataclasses.make_dataclass(name, _options(name).items())
        return Annotated[kind, tyro.conf.subcommand(name, description=text)]

    commands = functools.reduce(operator.or_, (command(name, text) for name, (_, _, text) in COMMANDS.items()))
    tyro.cli(commands, args=["--tyro-print-completion", shell], prog="megajax", use_underscores=True)


def _options(command: str) -> dict[str, Any]:
    """Name of each option or section -> its type; empty for commands whose options are not completed."""
    import configs
    from megajax.cli import infer
    from megajax.cli.train import Options
    from megajax.config import Config

    if command in ("train", "plan"):
        one_of: Any = Literal  # of names that only this machine knows
        return _types([*options(Options), *options(Config())]) | {"config": one_of[tuple(configs.docstrings())]}
    return _types(options(infer.COMMANDS[command])) if command in infer.COMMANDS else {}


def _types(known: Iterable[Option]) -> dict[str, Any]:
    """A dataclass for each section."""
    found: dict[str, Any] = {}
    sections: dict[str, list[Option]] = {}
    for option in known:
        section, dot, rest = option.name.partition(".")
        if dot:
            sections.setdefault(section, []).append(option._replace(name=rest))
        else:
            found[option.name] = option.hint
    parts = {name: dataclasses.make_dataclass(name, _types(part).items()) for name, part in sections.items()}
    return found | parts
