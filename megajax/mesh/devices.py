"""Peak numbers of the GPUs, and model FLOPs utilisation: the FLOP/s of a step relative to the peak."""

import dataclasses
from typing import Literal


# Dense bf16 matmul peak (FLOP/s), that of float32 outside the tensor cores, memory (bytes) and its bandwidth (bytes/s),
# GPU-to-GPU bandwidth inside a host (bytes/s, one direction), dense FP8 peak (FLOP/s; None: no FP8 matmuls), from the
# vendor's datasheets of the SXM parts.
@dataclasses.dataclass(frozen=True)
class Device:
    name: str
    peak_flops: float
    float32_peak_flops: float
    memory_bytes: float
    memory_bandwidth: float
    link_bandwidth: float
    fp8_peak_flops: float | None

    def computing_in(self, dtype: Literal["float32", "bfloat16"]) -> "Device":
        """The device with the peak of matmuls in this dtype; float32 ones use no TF32 (ops/matmul.py)."""
        return dataclasses.replace(self, peak_flops=self.float32_peak_flops) if dtype == "float32" else self


DEVICES = (
    Device("H100", 989e12, 67e12, 80 * 2**30, 3.35e12, 450e9, 1979e12),
    Device("H200", 989e12, 67e12, 141e9, 4.8e12, 450e9, 1979e12),
    Device("A100", 312e12, 19.5e12, 80 * 2**30, 2.0e12, 300e9, None),
    Device("B200", 2250e12, 75e12, 180e9, 8.0e12, 900e9, 4500e12),
)


def find_device(kind: str) -> Device | None:
    """Datasheet values for a JAX device kind such as 'NVIDIA H100 80GB HBM3'; None if it is unknown (a CPU)."""
    return next((device for device in DEVICES if device.name.lower() in kind.lower()), None)


def utilisation(flops_per_token: float, tokens_per_second_per_device: float, device: Device) -> float:
    """MFU (Chowdhery et al. 2022, appendix B), between 0 and 1."""
    return flops_per_token * tokens_per_second_per_device / device.peak_flops
