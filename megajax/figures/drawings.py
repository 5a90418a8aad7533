"""Matplotlib figures: curves of runs, a sharding, an attention mask, the memory of a plan, latency under load.

Each function returns a matplotlib Figure, which a notebook shows, and `save` or `figure.savefig` writes.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from megajax.figures.runs import X_LABELS, Curve, RunMetrics, XAxis, panels
from megajax.mesh.allocators import USABLE_MEMORY
from megajax.mesh.devices import Device
from megajax.ops import attention_mask as masks
from megajax.parallel.schedule import Stages, Table, make_table
from megajax.parameters import named
from megajax.planning.memory import memory_per_device
from megajax.training.config import TrainingConfig
from megajax.training.program import Program
from megajax.training.reporting.console import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from megajax.inference.traffic import Result
    from megajax.library import Run
    from megajax.planning.summary import Plan

MOST_MASK_TOKENS = 512
MAX_TICKS = 80
"""Only this many ticks of a schedule are drawn."""


# ----------------------------------------------------------------------------- runs


EVALUATED = ("o--", "s:", "^-.", "D-")
"""Lines of the metrics of evaluations in a panel."""


def curves(runs: Sequence[RunMetrics], x: XAxis = "step", smooth: int = 1) -> "Figure":
    """A panel per kind of metric and a colour per run. runs: from `read_run`. smooth: mean of the last N losses and
    gradient norms."""
    found = panels(runs, x, smooth)
    columns = min(len(found), 2)
    rows = math.ceil(len(found) / columns)
    figure = new_figure(5.5 * columns, 3 * rows)
    all_axes = figure.subplots(rows, columns, squeeze=False).flat
    for axes in all_axes[len(found) :]:
        axes.set_visible(False)
    for axes, (title, shown) in zip(all_axes, found, strict=False):
        axes.set(title=title, xlabel=X_LABELS[x])
        _draw_curves(axes, shown, x)
    all_axes[0].legend(fontsize="small")
    return figure


def loss(lines: Sequence[Mapping[str, Any]]) -> "Figure":
    """Training and evaluation loss against the step. lines: as from `Run.metrics`, dicts with step and loss, mean_loss
    or eval_loss. The training loss is mean_loss; that of single steps is drawn faintly."""
    (_, shown), *_ = panels([RunMetrics("", list(map(dict, lines)), None)], "step", 1)
    figure = new_figure(6.4, 3.6)
    axes = figure.subplots()
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    _draw_curves(axes, shown, "step")
    axes.legend()
    return figure


def _draw_curves(axes: "Axes", shown: Sequence[Curve], x: XAxis) -> None:
    axes.grid(alpha=0.3)
    evaluated = list(dict.fromkeys(curve.metric for curve in shown if curve.is_evaluation))
    for curve in shown:
        color = f"C{curve.number}"
        if curve.metric == "mean_loss":  # and, behind it, that of single steps
            axes.plot(*curve.run.series("loss", x), color=color, alpha=0.3, linewidth=0.8)
        if curve.is_evaluation:
            style = EVALUATED[evaluated.index(curve.metric) % len(EVALUATED)]
            axes.plot(curve.at, curve.values, style, color=color, label=curve.label, markersize=3)
        else:
            axes.plot(curve.at, curve.values, color=color, label=curve.label, linewidth=1.2)
    if len(evaluated) > 1:
        axes.legend(fontsize="small")


# ----------------------------------------------------------------------------- meshes and masks


def sharding(run: "Run", parameter: str) -> "Figure":
    """Which devices hold which part of a parameter: one rectangle per part of its last two dims.

    parameter: its name in a checkpoint, such as layers.dense.mlp.up. If an earlier dim is split, such as that of the
    layers in a pipeline, each part has its own panel. Raises ValueError for an unknown name.
    """
    arrays = named(run.program.abstract_state.weights)
    if parameter not in arrays:
        raise ValueError(f"parameter={parameter} is unknown; use one of {', '.join(arrays)}")
    array = arrays[parameter]
    parts = _parts(array)
    parts_of = sorted({index[:-2] for index in parts})
    figure = new_figure(max(3.2, 2.6 * len(parts_of)), 2.8)
    all_axes = figure.subplots(1, len(parts_of), squeeze=False).flat
    number = {device: index for index, device in enumerate(run.mesh.devices.flat)}
    for axes, panel in zip(all_axes, parts_of, strict=True):
        for index, devices in parts.items():
            if index[:-2] == panel:
                _draw_part(axes, index[-2:], sorted(number[device] for device in devices), run.mesh.size)
        rows, columns = array.shape[-2:] if array.ndim > 1 else (1, array.shape[0])
        axes.set(xlim=(0, columns), ylim=(rows, 0), xticks=[0, columns], yticks=[0, rows])
        if panel:
            axes.set_title(" ".join(f"[{start}:{stop}]" for start, stop in panel), fontsize=9)
    sizes = ", ".join(f"{axis} {size}" for axis, size in run.mesh.shape.items() if size > 1) or "one device"
    figure.suptitle(f"{parameter} {list(array.shape)} on {sizes}", fontsize=9)
    return figure


def mesh(run: "Run") -> "Figure":
    """The coordinates of each device on the axes of the mesh that are larger than 1."""
    shape = {axis: size for axis, size in run.mesh.shape.items() if size > 1} or {"data": 1}
    coordinates = np.stack(np.unravel_index(np.arange(run.mesh.size), tuple(shape.values())), 0)
    figure = new_figure(0.7 * run.mesh.size + 1.4, 0.5 * len(shape) + 0.9)
    axes = figure.subplots()
    axes.imshow(coordinates, cmap="Pastel1", vmin=0, vmax=8, aspect="auto")
    for (row, column), value in np.ndenumerate(coordinates):
        axes.text(column, row, str(value), ha="center", va="center")
    axes.set(xlabel="device", xticks=range(run.mesh.size), yticks=range(len(shape)), yticklabels=list(shape))
    return figure


def attention_mask(batch: Mapping[str, np.ndarray], row: int | None = None, *, window: int | None = None) -> "Figure":
    """Which keys each query attends to in one sequence of a batch, for causal attention; the first 512 tokens.

    Documents packed into the sequence (segment_ids) do not attend to each other. row: number of the sequence; default:
    the one in which documents hide the most of each other. window: model.window.
    """
    length = min(batch["tokens"].shape[1], MOST_MASK_TOKENS)
    segments_BT = np.asarray(batch.get("segment_ids", np.zeros(batch["tokens"].shape)))[:, :length]
    sizes = [np.unique(segments, return_counts=True)[1] for segments in segments_BT]  # of the documents of each row
    if row is None:
        row = int(np.argmin([(counts**2).sum() for counts in sizes]))
    query = jnp.arange(length)[:, None]
    key = jnp.arange(length)[None]
    visible = (masks.CAUSAL & masks.window(window)).visible(query - key, key)
    visible &= segments_BT[row][:, None] == segments_BT[row][None]
    figure = new_figure(3.6, 3.6)
    axes = figure.subplots()
    axes.imshow(visible, cmap="Blues", vmin=0, vmax=1.3, interpolation="nearest")
    title = f"sequence {row}, {len(sizes[row])} document{'s' * (len(sizes[row]) > 1)}"
    axes.set(xlabel="key", ylabel="query", title=title)
    return figure


def _parts(array: jax.ShapeDtypeStruct) -> dict[tuple[tuple[int, int], ...], list]:
    """(start, stop) of each dim of a shard -> the devices that hold it; a vector counts as one row."""
    found: dict[tuple[tuple[int, int], ...], list] = {}
    for device, index in array.sharding.devices_indices_map(array.shape).items():
        bounds = tuple(slice_.indices(size)[:2] for slice_, size in zip(index, array.shape, strict=True))
        bounds = bounds if len(bounds) > 1 else ((0, 1), *bounds)
        found.setdefault(bounds, []).append(device)
    is_unsplit = [len({bounds[dim] for bounds in found}) == 1 for dim in range(len(next(iter(found))) - 2)]
    # Earlier dims that are not split need no panels.
    return {
        (*(bound for bound, unsplit in zip(bounds, is_unsplit, strict=False) if not unsplit), *bounds[-2:]): devices
        for bounds, devices in found.items()
    }


def _draw_part(axes, bounds: tuple[tuple[int, int], ...], devices: list[int], num_devices: int) -> None:
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    (top, bottom), (left, right) = bounds
    colour = colormaps["tab20"](devices[0] / max(num_devices, 1))
    axes.add_patch(Rectangle((left, top), right - left, bottom - top, facecolor=colour, edgecolor="black", alpha=0.6))
    text = ",".join(map(str, devices))
    axes.text((left + right) / 2, (top + bottom) / 2, text, ha="center", va="center", fontsize=8)


# ----------------------------------------------------------------------------- plans


def memory(*plans: "Plan") -> "Figure":
    """Memory per device of each plan as stacked bars, with the usable memory."""
    figure = new_figure(8, 0.7 * len(plans) + 1.4)
    _draw_memory(figure.subplots(), [(plan.title, plan.memory_bytes, plan.usable_bytes) for plan in plans])
    return figure


def plan_figure(program: Program, training: TrainingConfig, device: Device, title: str = "") -> "Figure":
    """Memory of one GPU and, if something is offloaded, of its host; the schedule of the pipeline, if there is one."""
    stages = program.model.stages
    on_device, host = memory_per_device(program, training)
    figure = new_figure(9, 2.6 if stages is None else 5.2)
    axes = figure.subplots(1 if stages is None else 2, squeeze=False)[:, 0]
    bars = [(device.name, on_device, USABLE_MEMORY * device.memory_bytes)]
    _draw_memory(axes[0], [*bars, ("its host", host, None)] if host else bars)
    if stages is not None:
        _draw_schedule(axes[1], stages, training.schedule(program.mesh_config)(training.steps).num_microbatches)
    figure.suptitle(f"{title}: {program.mesh_config.num_devices} x {device.name}" if title else "")
    return figure


def _draw_memory(axes: "Axes", bars: Sequence[tuple[str, Mapping[str, int], float | None]]) -> None:
    """Stacked bars: (name, bytes by kind, usable bytes or None) of each."""
    kinds = list(dict.fromkeys(kind for _, sizes, _ in bars for kind in sizes))
    left = np.zeros(len(bars))
    for kind in kinds:
        sizes = np.array([sizes.get(kind, 0) for _, sizes, _ in bars]) / 2**30
        axes.barh(range(len(bars)), sizes, left=left, label=kind)
        left += sizes
    for y, (_, sizes, usable) in enumerate(bars):
        axes.text(left[y], y, f" {format_bytes(sum(sizes.values()))}", va="center")
        if usable is not None:
            axes.plot([usable / 2**30] * 2, [y - 0.45, y + 0.45], "k--", linewidth=1)
    axes.margins(x=0.2)  # for the text
    axes.set_xlim(left=0)
    axes.set_yticks(range(len(bars)), [name for name, _, _ in bars])
    axes.invert_yaxis()
    axes.set_xlabel("GiB per device (dashed: usable)")
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))


def _draw_schedule(axes: "Axes", stages: Stages, num_microbatches: int) -> None:
    """The pipeline schedule: rows are ranks, columns are ticks; forward above, backward below, with the microbatch
    number, lighter for later chunks of virtual stages."""
    table = make_table(stages.num_ranks, num_microbatches, stages.num_chunks)
    ticks = min(len(table.forward), MAX_TICKS)
    for kind, color, y in (("forward", "C0", 0.0), ("backward", "C1", 0.42)):
        for tick, rank in itertools.product(range(ticks), range(stages.num_ranks)):
            _draw_pass(axes, table, kind, color, tick, rank, rank + y)
    shown = "" if ticks == len(table.forward) else f", the first {ticks} of {len(table.forward)} ticks"
    axes.set_title(f"1F1B, {num_microbatches} microbatches{shown}", fontsize="medium")
    axes.set_xlim(0, ticks)
    axes.set_ylim(stages.num_ranks, 0)
    axes.set_yticks([rank + 0.42 for rank in range(stages.num_ranks)], [f"rank {r}" for r in range(stages.num_ranks)])
    axes.set_xlabel("tick: one forward pass (blue) and one backward pass (orange)")


def _draw_pass(axes: "Axes", table: Table, kind: str, color: str, tick: int, rank: int, y: float) -> None:
    microbatch = getattr(table, kind)[tick, rank]
    if microbatch < 0:
        return
    chunk = getattr(table, f"{kind}_chunk")[tick, rank]
    axes.barh(y, 1, left=tick, height=0.4, align="edge", color=color, alpha=1 / (1 + 0.5 * chunk), edgecolor="white")
    axes.text(tick + 0.5, y + 0.2, str(microbatch), ha="center", va="center", fontsize=6)


# ----------------------------------------------------------------------------- serving


def traffic(results: Sequence["Result"]) -> "Figure":
    """Latencies against throughput, a point per load."""
    figure = new_figure(9, 3.6)
    all_axes = figure.subplots(1, 2)
    kinds = ([r for r in results if r.load.concurrency is None], [r for r in results if r.load.concurrency is not None])
    latencies = (("time to first token (s)", "first_token"), ("time between tokens (s)", "between_tokens"))
    for axes, (title, latency) in zip(all_axes, latencies, strict=True):
        for colour, shown in enumerate(kinds):
            shown = [result for result in shown if getattr(result, latency)]
            rates = [result.tokens_per_second for result in shown]
            for percentile, style, label in (("p50", "o-", "median"), ("p99", "o--", "99th percentile")):
                values = [getattr(result, latency)[percentile] for result in shown]
                axes.plot(rates, values, style, color=f"C{colour}", markersize=4, label=label if shown else None)
            for result, rate in zip(shown, rates, strict=True):
                at = (rate, getattr(result, latency)["p50"])
                axes.annotate(str(result.load), at, (4, 4), textcoords="offset points", fontsize=8)
        fastest = max(result.tokens_per_second for result in results)
        axes.set(xlabel="generated tokens/s", ylabel=title, xlim=(0, 1.25 * fastest), ylim=(0, None))
        axes.grid(alpha=0.3)
    all_axes[0].legend(*(found[:2] for found in all_axes[0].get_legend_handles_labels()))
    return figure


# ----------------------------------------------------------------------------- files


def new_figure(width: float, height: float) -> "Figure":
    """Without pyplot, which has windows and global state. Raises ValueError if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ValueError(
            "figures need matplotlib, which is not installed; pip install 'megajax[plot]' (without it, megajax plot "
            "--terminal draws curves of runs)"
        ) from None
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: "Figure", path: str) -> None:
    """Raises ValueError for an unsupported file type, and if the file cannot be written."""
    suffix = Path(path).suffix.lower().removeprefix(".")
    known = ("png", "svg", "pdf")
    if suffix not in known:
        raise ValueError(f"{path}: the name must end in .{', .'.join(known)}")
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ValueError(f"{path} cannot be written ({error.strerror})") from None
