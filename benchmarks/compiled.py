"""Performance regression check without a GPU: compares the compiled benchmark recipes with a record.

    python -m benchmarks.compiled             compiles for H100, prints what differs from the record
    python -m benchmarks.compiled --update    writes the record
    ... --output=FOLDER                       saves NAME.hlo and NAME.json of each recipe

Needs the CUDA wheels, which can compile without a GPU. XLA then cannot autotune, so this says nothing about single
kernels; memory, collectives, copies and transposes follow from the program's shardings and layouts, on any machine.
They depend on XLA, so a record belongs to one jaxlib.
"""

import dataclasses
import json
import sys
from collections import Counter
from pathlib import Path

import jaxlib

import configs
from benchmarks.hlo import Program
from megajax.config import Config
from megajax.mesh import compat
from megajax.mesh.config import make_mesh
from megajax.overrides import override
from megajax.planning.plan import compile_step, devices_without_gpu, plan_device

RECORD = Path(__file__).parents[1] / "tests" / "compiled" / "recorded.json"
RECIPES: dict[str, tuple[str, ...]] = {
    "gpt_1p3b": (),
    "llama3_8b_8layers": (),
    "llama3_8b": (),
    "llama3_8b_fp8": ("--model.num_layers=2", "--mesh.fsdp=2", "--mesh.tensor=4"),
    "gpt_175b": ("--model.num_layers=2", "--mesh.fsdp=2", "--training.global_batch_size=2"),  # one sequence at a time
    "gpt3_7b": ("--model.num_layers=8",),  # all 32 layers compile in 30 s and give the same result
    "gpt3_7b_pipeline": ("--model.num_layers=8", "--mesh.virtual_stages=2"),
    "qwen3_30b_a3b": ("--model.num_layers=2", "--mesh.expert=2", "--mesh.fsdp=2", "--training.global_batch_size=8"),
    "llama3_8b_128k": ("--model.num_layers=4",),
}
TOLERANCE = 0.02  # of bytes; a count must not grow at all
MOVES = {"transpose": "transposes", "copy": "copies"}
LARGE = 2**20  # bytes; copies and transposes below cost nothing but their launch


def compile_recipe(config: Config):
    """The compiled train step of a recipe on H100s; an axis of the mesh of -1 counts as 1."""
    mesh_config = dataclasses.replace(config.mesh, **{a: max(size, 1) for a, size in config.mesh.sizes().items()})
    config = dataclasses.replace(config, mesh=mesh_config).check_on(mesh_config.num_devices)
    mesh = make_mesh(mesh_config, devices_without_gpu(mesh_config.num_devices, plan_device("h100")))
    program = dataclasses.replace(config.make_program(), mesh=mesh)
    compiled, _ = compile_step(program, config.training)
    return compiled


def measure(program: Program) -> dict[str, int]:
    """The numbers that are compared. Names end in .number or .bytes; the body of a loop counts once.

    .exposed: collectives with no matmul between their start and their end.
    """
    found = Counter()
    for computation in program.run_computations():
        for collective in program.collectives(computation):
            found[f"{collective.kind}.number"] += 1
            found[f"{collective.kind}.bytes"] += collective.bytes
            found[f"{collective.kind}.exposed"] += not program.matmuls_under(computation, collective)
    for instruction in program.instructions():
        found["kernels.number"] += instruction.opcode in ("fusion", "custom-call")
        kind = _moves(instruction.name, instruction.opcode)
        if kind and instruction.bytes >= LARGE:
            found[f"{kind}.number"] += 1
            found[f"{kind}.bytes"] += instruction.bytes
    return dict(sorted(found.items()))


def _moves(name: str, opcode: str) -> str | None:
    """The kind of an instruction that only moves data; XLA names fusions after their operations."""
    named = name if opcode == "fusion" else opcode
    return next((kind for word, kind in MOVES.items() if word in named and not named.endswith("-start")), None)


def differences(now: dict[str, int], recorded: dict[str, int]) -> list[str]:
    """One line for each number that differs from the record: bytes in both directions, counts if they grow."""
    lines = []
    for name in sorted(now.keys() | recorded.keys()):
        new = now.get(name, 0)
        old = recorded.get(name, 0)
        if abs(new - old) > TOLERANCE * old if name.endswith("bytes") else new > old:
            lines.append(f"{name}: {new:,}, recorded {old:,}" + (f" ({new / old - 1:+.1%})" if old else ""))
    return lines


def main(arguments: list[str]) -> int:
    """-> exit status: 1 if a number differs from the record, 2 if there is no record for this jaxlib."""
    update = "--update" in arguments
    output = next((Path(a.removeprefix("--output=")) for a in arguments if a.startswith("--output=")), None)
    recorded = {"jaxlib": jaxlib.__version__, "recipes": {}} if update else json.loads(RECORD.read_text())
    if recorded["jaxlib"] != jaxlib.__version__:
        print(f"nothing to compare: the record is for jaxlib {recorded['jaxlib']}, this is {jaxlib.__version__}; "
              "--update writes one for it")  # fmt: skip
        if not output:
            return 2
    recipes = {}
    changed = []
    for name, overrides in RECIPES.items():
        compiled = compile_recipe(override(configs.recipe(name), list(overrides)))
        text = compiled.as_text()
        memory = compiled.memory_analysis()
        numbers = {
            "memory.peak.bytes": memory.peak_memory_in_bytes,
            "memory.arguments.bytes": memory.argument_size_in_bytes,
            "memory.temporary.bytes": memory.temp_size_in_bytes,
            **measure(Program(text)),
        }
        print(f"{name} {' '.join(overrides)}", json.dumps(numbers), flush=True)
        recipes[name] = {"overrides": list(overrides), "numbers": numbers}
        if not update and recorded["jaxlib"] == jaxlib.__version__:
            changed += [f"{name} {line}" for line in differences(numbers, recorded["recipes"][name]["numbers"])]
        if output:
            output.mkdir(parents=True, exist_ok=True)
            (output / f"{name}.hlo").write_text(text)
            (output / f"{name}.json").write_text(json.dumps(numbers))
    if update:
        RECORD.write_text(json.dumps({"jaxlib": jaxlib.__version__, "recipes": recipes}, indent=1) + "\n")
    print("\n".join(changed))
    return 1 if changed else 0


if __name__ == "__main__":
    if not compat.gpu_compiler_installed():
        raise SystemExit("needs the CUDA wheels: pip install -e '.[cuda13]'")
    raise SystemExit(main(sys.argv[1:]))
