"""What the commands with argparse share: errors in one line, and the options of the mesh. Has no slow imports."""

import argparse
import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn

from megajax.fields.suggestions import did_you_mean
from megajax.terminal.one_line import print_error, reflowed, shorten_library_errors, terminal_width

if TYPE_CHECKING:
    from megajax.mesh.config import MeshConfig

AXES = ("data", "fsdp", "expert", "context", "tensor", "pipeline")  # those of mesh/config.py, which is slow to import


class Parser(argparse.ArgumentParser):
    """Shows the description as it is written, wrapped for the terminal, and raises ValueError for options that are
    unknown or wrong."""

    def __init__(self, **settings):
        if settings.get("description"):
            settings["description"] = reflowed(settings["description"], terminal_width())
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **({"allow_abbrev": False} | settings))

    def parse_args(self, args: Sequence[str] | None = None, namespace=None) -> argparse.Namespace:
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            known = [name for name in vars(options) if name != "command"]
            typed = unknown[0].lstrip("-").partition("=")[0].replace("-", "_")
            hint = did_you_mean(typed, known, "--") or f"; see {self.prog} --help"
            raise ValueError(f"{unknown[0]} is unknown{hint}")
        return options

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help")


@contextlib.contextmanager
def errors_in_one_line() -> Iterator[None]:
    """A ValueError ends the process with status 2 and its message; libraries log only errors, in one line each."""
    logging.getLogger("absl").setLevel(logging.ERROR)
    shorten_library_errors()
    try:
        yield
    except ValueError as error:
        print_error(error)
        raise SystemExit(2) from None


def add_mesh_options(command: argparse.ArgumentParser, data: str = "devices on this axis") -> None:
    """--mesh.AXIS and --launch.cpu_devices, for `mesh_of`. data: the help of the axis of that name."""
    for axis in AXES:
        text = data if axis == "data" else "devices on this axis"
        command.add_argument(f"--mesh.{axis}", type=int, default=1, help=f"{text} (1); -1: the rest")
    command.add_argument(
        "--launch.cpu_devices",
        type=int,
        default=0,
        help="number of virtual CPU devices to try a mesh on; 0: use the real devices (0)",
    )


def mesh_of(options: argparse.Namespace) -> "MeshConfig":
    """The mesh that the options name; also starts the virtual devices. Raises ValueError for sizes that no mesh has."""
    from megajax.fields.ranges import check_fields
    from megajax.mesh.config import MeshConfig
    from megajax.mesh.processes import use_cpu_devices

    number = getattr(options, "launch.cpu_devices")
    if not 0 <= number <= 4096:
        raise ValueError(f"launch.cpu_devices={number} must be from 0 to 4096; use 0 for the real devices")
    mesh = MeshConfig(**{axis: getattr(options, f"mesh.{axis}") for axis in AXES})
    check_fields(mesh, "--mesh.")
    mesh.check()
    if number:
        use_cpu_devices(number)
    return mesh
