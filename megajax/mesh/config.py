"""The section `mesh` of a configuration: six named axes over all devices of all processes."""

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megajax.fields.ranges import PositiveInt
from megajax.mesh.allocators import use_gpu_memory

if TYPE_CHECKING:
    from jax.sharding import Mesh

# From the slowest network to the fastest: neighbours along the last axes are in one host.
AXES = ("pipeline", "data", "fsdp", "expert", "context", "tensor")
MOST_VIRTUAL_DEVICES = 16
"""To suggest on a CPU; a mesh for more devices is that of a model for which a CPU is too small."""


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    data: int = 1
    """Replicas of the model; each takes its part of the batch. One axis may be -1: all remaining devices."""
    fsdp: int = 1
    """Devices that share one copy of parameters, gradients and optimizer state (ZeRO-3); also splits the batch."""
    tensor: int = 1
    """Devices that split heads, feed-forward width and vocabulary, and tokens between layers (sequence parallelism,
    Korthikanti et al. 2022)."""
    pipeline: int = 1
    """Pipeline stages: each device holds some of the layers, and microbatches pass through all stages."""
    expert: int = 1
    """Devices that split the experts of a mixture, and the batch everywhere else."""
    context: int = 1
    """Devices that split each sequence, attention included; also shards parameters and optimizer state, like fsdp."""
    virtual_stages: PositiveInt = 1
    """Chunks of layers per pipeline device; more than one gives interleaved 1F1B, with a smaller bubble."""
    pipeline_layout: str = ""
    """Which layers each stage has, in Megatron's notation: "tt|ttt|t*4|tt"; empty: evenly."""

    def sizes(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    def with_sizes(self, sizes: Mapping[str, int]) -> "MeshConfig":
        """Other sizes of some axes."""
        changes: dict[str, Any] = dict(sizes)
        return dataclasses.replace(self, **changes)

    @property
    def batch_shards(self) -> int:
        """Parts into which the batch dim is split."""
        return self.data * self.fsdp * self.expert

    @property
    def weight_shards(self) -> int:
        """Devices that share one copy of the weights, not counting those that split the layers or their matrices."""
        return self.fsdp * self.context

    @property
    def num_devices(self) -> int:
        return math.prod(self.sizes().values())

    def check(self) -> None:
        """Raises ValueError for sizes that no mesh can have."""
        free = [axis for axis, size in self.sizes().items() if size == -1]
        for axis, size in self.sizes().items():
            if size < 1 and size != -1:
                raise ValueError(f"mesh.{axis}={size} must be a positive number, or -1 for all remaining devices")
        if len(free) > 1:
            raise ValueError(
                f"mesh.{free[0]}=-1 and mesh.{free[1]}=-1: only one axis may take the remaining devices; fix one"
            )
        if self.pipeline == 1 and (self.virtual_stages > 1 or self.pipeline_layout):
            raise ValueError(
                f"mesh.virtual_stages={self.virtual_stages}, mesh.pipeline_layout={self.pipeline_layout!r}: there is "
                "no pipeline; set --mesh.pipeline, or remove them"
            )

    def resolve(self, num_devices: int) -> "MeshConfig":
        """The same mesh with the axis -1 filled in. Raises ValueError if it does not cover the devices exactly."""
        self.check()
        sizes = self.sizes()
        free = [axis for axis, size in sizes.items() if size == -1]
        fixed = math.prod(size for size in sizes.values() if size != -1)
        if free and num_devices % fixed == 0:
            return self.with_sizes({free[0]: num_devices // fixed})
        if free or fixed != num_devices:
            product = " * ".join(f"{axis}({size})" for axis, size in sizes.items() if size != 1) or "data(1)"
            ways = self._ways_out(num_devices, fixed)
            raise ValueError(f"mesh: {product} does not match the number of devices, {num_devices}; {ways}")
        return self

    def _ways_out(self, num_devices: int, fixed: int) -> str:
        """What makes the mesh match the devices. fixed: product of the sizes that are not -1."""
        sizes = self.sizes()
        has_free = -1 in sizes.values()
        ways = []
        if not has_free:
            # The axes that would have another size then; data, if all have size 1.
            order = sorted(sizes, key=lambda axis: (sizes[axis] == 1, axis != "data"))
            fitting = [axis for axis in order if num_devices % (fixed // sizes[axis]) == 0]
            ways += [f"use --mesh.{axis}=-1 for the rest of the devices" for axis in fitting[:1]]
        ways.append(f"start with {'a multiple of ' if has_free else ''}{fixed} devices")
        if fixed <= MOST_VIRTUAL_DEVICES:
            ways.append(f"try the mesh on a CPU: --launch.cpu_devices={fixed}")
        else:
            ways.append("see what the run needs: --plan; recipes that end in _tiny train on a CPU")
        return ", ".join(ways[:-1]) + ", or " + ways[-1]


def make_mesh(config: MeshConfig, devices=None) -> "Mesh":
    """Mesh with all six axes over `devices` (default: all). Raises ValueError if the sizes do not match."""
    import jax  # slow; commands that show their options need none of it
    import numpy as np
    from jax.sharding import AxisType, Mesh

    use_gpu_memory()
    devices = jax.devices() if devices is None else devices
    sizes = config.resolve(len(devices)).sizes()
    return Mesh(np.array(devices).reshape(tuple(sizes.values())), AXES, axis_types=(AxisType.Auto,) * len(AXES))
