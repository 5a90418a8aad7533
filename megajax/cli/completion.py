"""Shell completion: megajax completion {bash,zsh,fish,tcsh} prints the script.

  bash: megajax completion bash > ~/.local/share/bash-completion/completions/megajax
  zsh:  megajax completion zsh > _megajax, in a folder of $fpath
  fish: megajax completion fish > ~/.config/fish/completions/megajax.fish

It completes the commands, recipes, and the options of train and plan.
"""

import dataclasses
from typing import Annotated, Literal, Union

from megajax.suggestions import did_you_mean

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

    import configs
    from megajax.cli import COMMANDS
    from megajax.cli.help import described
    from megajax.cli.train import Options
    from megajax.config import Config

    def command(name: str, text: str) -> type:
        fields = []
        if COMMANDS[name][0] == "megajax.cli.train" and name != "configs":
            shown = described(Config(), Options())
            kinds = {field.name: field.type for field in dataclasses.fields(shown)}
            kinds["config"] = Literal[tuple(configs.docstrings())]
            fields = [(name, kind) for name, kind in kinds.items()]
        kind = dataclasses.make_dataclass(name, fields)
        return Annotated[kind, tyro.conf.subcommand(name, description=text)]

    commands = Union[tuple(command(name, text) for name, (_, _, text) in COMMANDS.items())]  # noqa: UP007
    tyro.cli(commands, args=["--tyro-print-completion", shell], prog="megajax", use_underscores=True)
