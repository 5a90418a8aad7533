"""All private or version-dependent JAX API (jax 0.10.2, 0.11.x, 0.12.x); no other file depends on the version."""

import contextlib
import ctypes
import functools
import importlib.util
import inspect
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.api_util
import jax.experimental.topologies
import jax.export
import jax.extend.core
import jax.extend.random
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AxisType


def use_virtual_cpu_devices(count: int) -> None:
    """Runs this process on `count` virtual CPU devices. Call before anything touches a device."""
    jax.config.update("jax_num_cpu_devices", count)  # RuntimeError if it is too late
    jax.config.update("jax_platforms", "cpu")


def use_gloo() -> None:
    """Uses gloo for collectives between CPU processes. Call before jax.distributed.initialize."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")


def setting(name: str) -> Any:
    """A value of jax.config."""
    return getattr(jax.config, name)


def settings() -> dict[str, Any]:
    """All of jax.config but what says where compiled programs are kept, and what is logged."""
    return {k: v for k, v in jax.config.values.items() if "cache" not in k and not k.startswith("jax_log")}


def without_writing_to_the_cache() -> contextlib.AbstractContextManager:
    """What this thread compiles meanwhile, JAX does not write to its compilation cache."""
    from jax._src.config import persistent_cache_min_compile_time_secs

    return persistent_cache_min_compile_time_secs(math.inf)


def exported(function: Callable, arguments: Sequence[jax.ShapeDtypeStruct]) -> bytes:
    """A function of arrays as StableHLO, for the platform of the current mesh, which may have no devices."""
    platform = "cuda" if mesh_platform() in ("gpu", "cuda") else mesh_platform()
    check = jax.export.DisabledSafetyCheck.custom_call  # their form is that of this version of JAX
    of_kernels = [check(_MOSAIC)]
    found = jax.export.export(jax.jit(function), platforms=[platform], disabled_checks=of_kernels)(*arguments)
    return bytes(found.serialize())


def from_exported(found: bytes) -> Callable:
    """The function of arrays of which `exported` made this, in a process with the same versions."""
    return jax.export.deserialize(bytearray(found)).call


def mesh_platform() -> str:
    """Platform of the devices of the current mesh ("cpu", "gpu", "cuda"), or the default one without a mesh.

    Ahead-of-time compilation traces for devices that this machine does not have, so the default backend may differ.
    """
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return jax.default_backend() if device is None else device.platform


def compute_capability() -> float | None:
    """Of the GPUs of the current mesh: 9.0 for Hopper, 7.5 for a T4. None for other devices, and for GPUs that exist
    for the compiler only."""
    abstract = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    device = jax.devices()[0]
    if abstract is not None and abstract.device_kind != device.device_kind:
        return None
    found = getattr(device, "compute_capability", None)
    return None if found is None else float(found)


def mosaic_problem() -> str:
    """Why Pallas Mosaic GPU kernels for Hopper cannot run on the current mesh, or an empty string."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    kind = jax.devices()[0].device_kind if device is None else device.device_kind
    return "" if is_hopper(kind) else f"no kernels for {kind}"


def kernels_of(lowered: jax.stages.Lowered) -> list[tuple[Callable, list[jax.ShapeDtypeStruct]]]:
    """(function that calls the kernel alone, shapes of its arguments) of each kernel of Mosaic in a program, but those
    that talk to other devices."""
    from jaxlib.mlir import ir

    calls: dict[bytes, ir.Operation] = {}

    def visit(operation) -> ir.WalkResult:
        operation = operation.operation
        attributes = operation.attributes
        if operation.name == "stablehlo.custom_call" and attributes["call_target_name"].value == _MOSAIC:
            calls[attributes["mhlo.backend_config"]["kernel_hash"].value_bytes] = operation
        return ir.WalkResult.ADVANCE

    program: Any = lowered.compiler_ir("stablehlo")
    program.operation.walk(visit)
    return [_kernel_of(call) for call in calls.values() if not _is_collective(call)]


def _kernel_of(call) -> tuple[Callable, list[jax.ShapeDtypeStruct]]:
    attributes = {}
    for named in call.attributes["mhlo.backend_config"]:
        attribute = named.attr
        attributes[named.name] = attribute.value_bytes if hasattr(attribute, "value_bytes") else attribute.value
    results = [_like(result.type) for result in call.results]

    def kernel(*arguments: jax.Array) -> Sequence[jax.Array]:
        return jax.ffi.ffi_call(_MOSAIC, results)(*arguments, **attributes)

    return kernel, [_like(operand.type) for operand in call.operands]


def _is_collective(call) -> bool:
    config = call.attributes["mhlo.backend_config"]
    return any("collective" in named.name and named.attr.value for named in config)


def _like(tensor) -> jax.ShapeDtypeStruct:
    """Of the type of an MLIR value."""
    from jaxlib.mlir import ir

    ranked = ir.RankedTensorType(tensor)
    return jax.ShapeDtypeStruct(ranked.shape, _DTYPES[str(ranked.element_type)])


_MOSAIC = "mosaic_gpu_v2"
_DTYPES = {
    "i1": jnp.bool_, "i8": jnp.int8, "i16": jnp.int16, "i32": jnp.int32, "ui8": jnp.uint8, "ui16": jnp.uint16,
    "ui32": jnp.uint32, "f16": jnp.float16, "bf16": jnp.bfloat16, "f32": jnp.float32, "f8E4M3FN": jnp.float8_e4m3fn,
    "f8E5M2": jnp.float8_e5m2,
}  # fmt: skip
"""Of the names of MLIR."""


def is_hopper(kind: str) -> bool:
    """kind: name of a device."""
    return any(name in kind for name in ("H100", "H200", "H800", "H20"))


def reaches_memory(device: jax.Device, other: jax.Device) -> bool:
    """Whether a GPU of this process can read and write the memory of another one."""
    found = ctypes.c_int(0)
    ordinals = (device.local_hardware_id, other.local_hardware_id)
    return not ctypes.CDLL("libcuda.so.1").cuDeviceCanAccessPeer(ctypes.byref(found), *ordinals) and bool(found.value)


def gpu_compiler_installed() -> bool:
    """Whether the CUDA plugin of JAX is installed (it can compile without a GPU)."""
    return any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13, 14))


def compile_only_devices(num_devices: int, target: str) -> list:
    """Compile-only devices, in hosts of 8 GPUs. target: a GpuTargetConfigProto as text."""
    hosts = max(num_devices // 8, 1)
    topology = jax.experimental.topologies.get_topology_desc(
        platform="cuda", topology=f"1x{hosts}x{num_devices // hosts}", target_config=target
    )
    return list(topology.devices)


def cudnn_version() -> int | None:
    """cuDNN's version, 91400 for 9.14.0; None without cuDNN, or if JAX does not report it."""
    try:
        from jax._src.lib import cuda_versions

        return cuda_versions.cudnn_get_version() if cuda_versions else None
    except (ImportError, AttributeError):
        return None


def is_auto(axis_type: AxisType) -> bool:
    return axis_type == AxisType.Auto


def varying_axes(x) -> frozenset[str]:
    """Mesh axes along which a value inside shard_map is marked as varying."""
    found = jax.typeof(x)
    return found.mat.varying if hasattr(found, "mat") else found.vma


def vary(tree, axes):
    """Marks arrays as varying along these mesh axes; needed for results of a kernel, which are not marked."""

    def mark(x):
        # Sorted, because a program whose text depends on the process is found in no cache.
        missing = tuple(sorted(set(axes) - varying_axes(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(mark, tree)


def options_to_run_once() -> dict[str, str]:
    """Compiler options for a program that runs once: on a CPU XLA compiles the initial weights in a third of the time
    or a half if it optimises less, with the same result. Empty if XLA_FLAGS has the level."""
    level = "xla_backend_optimization_level"
    is_set = level in os.environ.get("XLA_FLAGS", "")
    return {} if is_set or mesh_platform() != "cpu" else {level: "1"}


def psum_within_auto(x: jax.Array, axis: str) -> jax.Array:
    """lax.psum in a region that XLA partitions along other axes.

    On CPU it sums in float32: XLA promotes sums of 16-bit numbers to 32 bits there, and the pass that does so
    (all-reduce-promotion) aborts the process in such a region (jaxlib 0.10.2).
    """
    is_wide = x.dtype.itemsize >= 4 or mesh_platform() != "cpu"
    return jax.lax.psum(x, axis) if is_wide else jax.lax.psum(x.astype(jnp.float32), axis).astype(x.dtype)


def row_major(x: jax.Array) -> jax.Array:
    """Constrains x to be stored with its last dim contiguous."""
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))


@jax.custom_jvp
def erf(x: jax.Array) -> jax.Array:
    """jax.lax.erf, whose gradient jax 0.12.0 refuses in manual regions."""
    return jax.lax.erf(x)


erf.defjvps(lambda tangent, _, x: tangent * (2 / math.sqrt(math.pi) * jnp.exp(-jnp.square(x))))


def counter_bits(key: jax.Array, high: jax.Array, low: jax.Array) -> jax.Array:
    """uint32 random bits, one for each pair of uint32 counters: a pure function of (key, high, low).

    Threefry-2x32 (Salmon et al. 2011) applied to the counters themselves; `high` and `low` broadcast together. It is
    element-wise, so that XLA can partition it.
    """
    words = jax.random.key_data(key).astype(jnp.uint32)
    operands = jnp.broadcast_arrays(words[0], words[1], high.astype(jnp.uint32), low.astype(jnp.uint32))
    varying = frozenset().union(*(varying_axes(operand) for operand in operands))
    return jax.extend.random.threefry2x32_p.bind(*vary(operands, tuple(varying)))[0]


# ----------------------------------------------------------------------------- cuDNN attention, private calls


@functools.cache
def _cudnn_module():
    from jax._src.cudnn import fused_attention_stablehlo

    return fused_attention_stablehlo


def _cudnn_mask(causal: bool):
    kinds = _cudnn_module().MaskType
    return kinds.CAUSAL if causal else kinds.NO_MASK


_BACKWARD_ARGUMENTS = {"scale", "seed", "dropout_rate", "variadic_args", "mask_type", "layout", "sliding_window_length",
                       "return_residual", "res", "grad_output"}  # fmt: skip
_MORE_BACKWARD_ARGUMENTS = {"is_training"}, {"score_mod", "cudnn_version"}
"""Until jax 0.11, and from 0.12 on."""


def cudnn_attention_problem() -> str:
    """Empty if the private cuDNN attention calls have the signature that we know, else what is different."""
    try:
        found = inspect.signature(_cudnn_module()._dot_product_attention_bwd_rule).parameters.keys()
    except (ImportError, AttributeError) as error:
        return f"jax {jax.__version__} has no cuDNN attention where it is expected ({error})"
    if not any(found == _BACKWARD_ARGUMENTS | more for more in _MORE_BACKWARD_ARGUMENTS):
        return f"jax {jax.__version__} changed the private cuDNN attention backward call"
    return ""


def cudnn_attention_forward(
    q_BTNH, k_BSKH, v_BSKH, bias_BNTS=None, *, scale: float, window: int | None, causal: bool = True
):
    """Attention by cuDNN -> (out [B,T,N,H] in q's dtype, log-sum-exp [B,N,T] float32).

    bias: added to the scores, in q's dtype, [B or 1, N or 1, T, S]. window: with causal only.
    """
    return _cudnn_module().dot_product_attention(
        q_BTNH,
        k_BSKH,
        v_BSKH,
        bias_BNTS,
        scale=scale,
        mask_type=_cudnn_mask(causal),
        sliding_window_length=window,
        return_residual=True,
    )


def cudnn_attention_backward(
    q_BTNH, k_BSKH, v_BSKH, out_BTNH, lse_BNT, d_out_BTNH, bias_BNTS=None, *, scale: float, window: int | None,
    causal: bool = True, learns_bias: bool = False,
):  # fmt: skip
    """Gradients (dq, dk, dv) of cudnn_attention_forward, from its own (out, log-sum-exp), or from those of attention to
    a larger set of keys that includes these, and d_bias if it learns: as the bias, summed over rows that share it."""
    module = _cudnn_module()
    backward = module._dot_product_attention_bwd_rule
    unused = jnp.zeros(0, q_BTNH.dtype)
    has_bias = bias_BNTS is not None
    arrays = q_BTNH, k_BSKH, v_BSKH, bias_BNTS if has_bias else unused, *(unused,) * 6
    common = dict(
        scale=scale, seed=42, dropout_rate=0.0, variadic_args=(has_bias, learns_bias), mask_type=_cudnn_mask(causal),
        layout=module._normalize_layout("BTNH").value, sliding_window_length=window, return_residual=False,
        grad_output=d_out_BTNH,
    )  # fmt: skip
    if "score_mod" in inspect.signature(backward).parameters:
        common |= dict(score_mod=None, cudnn_version=None, res=(*arrays, (), lse_BNT, out_BTNH))
    else:
        common |= dict(is_training=True, res=(*arrays, lse_BNT, out_BTNH))
    gradients: Any = backward(**common)
    return gradients[: 3 + learns_bias]


# ----------------------------------------------------------------------------- the equations of a jaxpr


def closed(jaxpr):
    """A ClosedJaxpr; a plain Jaxpr (remat) has no constants."""
    return jaxpr if hasattr(jaxpr, "consts") else jax.extend.core.ClosedJaxpr(jaxpr, ())


def is_jaxpr(param) -> bool:
    return isinstance(param, jax.extend.core.Jaxpr | jax.extend.core.ClosedJaxpr)


def function_of_equation(equation) -> Callable:
    """One equation of a jaxpr as a function of its inputs, literals included -> list of its outputs."""
    variables = list(dict.fromkeys(atom for atom in equation.invars if not hasattr(atom, "val")))
    nameless = dict(result_paths_thunk=lambda: ("",) * len(equation.outvars))
    about = jax.api_util.debug_info(equation.primitive.name, lambda *inputs: None, variables, {}, **nameless)
    jaxpr = jax.extend.core.Jaxpr((), variables, equation.outvars, [equation], equation.effects, about)
    run = jax.extend.core.jaxpr_as_fun(jax.extend.core.ClosedJaxpr(jaxpr, ()))

    def call(*inputs):
        values = {atom: value for atom, value in zip(equation.invars, inputs, strict=True) if not hasattr(atom, "val")}
        return run(*(values[variable] for variable in variables))

    return call


def name_stack_of(equation) -> str:
    """Names of the transformations and scopes in which the equation was traced: "transpose(jvp(...))"."""
    return str(equation.source_info.name_stack)


def source_of(equation) -> list[tuple[str, int, str]]:
    """(file, line, function) of the calls that traced the equation, innermost first, without frames of JAX."""
    from jax._src import source_info_util

    frames = source_info_util.user_frames(equation.source_info.traceback)
    return [(frame.file_name, frame.start_line, frame.function_name) for frame in frames]


def scan_counts(params: dict) -> tuple[int, int]:
    """(number of constants, number of carried values) that precede the scanned values in the equation of a scan."""
    if "ft_in" not in params:
        return params["num_consts"], params["num_carry"]
    constants, carried, _ = params["ft_in"].unpack()
    return len(list(constants)), len(list(carried))
