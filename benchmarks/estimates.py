"""What --plan estimates for the steps that were measured: python -m benchmarks.estimates

Every step in benchmarks/measured that has a command is planned on the GPUs that it ran on.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from benchmarks.command_line import only, run
from benchmarks.records import config_of, saved
from benchmarks.results import step_seconds
from megajax.mesh.devices import find_device
from megajax.planning.memory import memory_per_device
from megajax.planning.step_time import step_times

MEASURED = Path(__file__).parent / "measured"


@dataclasses.dataclass(frozen=True)
class Estimate:
    command: str
    device: str
    measured_seconds: float
    estimated_seconds: float

    @property
    def error(self) -> float:
        return self.estimated_seconds / self.measured_seconds - 1


def measured_steps() -> Iterator[tuple[str, str, float]]:
    """(command, device such as "4 x NVIDIA H200", seconds of a step) of all records."""
    for record in (record for path in sorted(MEASURED.glob("*.json")) for record in saved(path)):
        if "flops_per_token" in record:  # of benchmarks.compare
            yield record["command"], record["device"], step_seconds(record, "megajax")
        for row in (*record.get("rows", ()), *record.get("steps", ())):
            if not isinstance(row, dict) or not isinstance(row.get("step_seconds"), float):
                continue
            command = row.get("command") or f"--config={row['run']}"
            if "--config=" in command:
                yield command, row["device"], row["step_seconds"]


def estimates() -> list[Estimate]:
    models = {}
    found = []
    for command, device, seconds in measured_steps():
        config = config_of(command).check_on(int(device.split(" x ")[0]))
        # What an estimate does not know of; without it, more of them share a model.
        execution = dataclasses.replace(config.execution, attention_backend="auto", compiler_options="")
        config = dataclasses.replace(config, execution=execution)
        key = config.model, config.precision, execution, config.mesh.pipeline, config.mesh.virtual_stages
        if key not in models:
            models[key] = config.make_model()
        program = config.make_program(model=models[key])
        _, host = memory_per_device(program, config.training)
        found.append(
            Estimate(command, device, seconds, step_times(program, config.training, find_device(device), host).step)
        )
    return found


def summary(found: list[Estimate]) -> str:
    errors = [100 * estimate.error for estimate in found]
    return (
        f"For {len(found)} steps measured on one, two and four GPUs, the estimated time was between "
        f"{-min(errors):.0f} % too short and {max(errors):.0f} % too long"
    )


def main(arguments: list[str]) -> None:
    only(arguments, {})
    found = estimates()
    for estimate in found:
        measured = f"{1000 * estimate.measured_seconds:9.1f} ms measured"
        estimated = f"{1000 * estimate.estimated_seconds:9.1f} estimated"
        print(f"{measured} {estimated} {estimate.error:+7.1%}  {estimate.device}: {estimate.command}")
    print(summary(found))


if __name__ == "__main__":
    run(main)
