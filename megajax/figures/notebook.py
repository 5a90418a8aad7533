"""Matplotlib figures: a loss curve, a sharding, an attention mask, the memory of a plan, latency under load.

Each function returns a matplotlib Figure, which a notebook shows and `figure.savefig` writes.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from megajax.figures.plot import FAINT, draw_memory, new_figure, with_mean_loss
from megajax.ops import attention_mask as masks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from megajax.inference.traffic import Result
    from megajax.library import Plan, Run

MOST_MASK_TOKENS = 512


def loss(lines: Sequence[Mapping[str, Any]]) -> "Figure":
    """Training and evaluation loss against the step. lines: dicts with step, loss, mean_loss, eval_loss, as from
    `Run.metrics`. The training loss is mean_loss, if there is one; that of single steps is drawn faintly."""
    figure, axes = _new(6.4, 3.6)
    for key, style in (
        ("loss", {"color": "C0"} | FAINT),
        ("mean_loss", {"color": "C0", "label": "training"}),
        ("eval_loss", {"color": "C1", "label": "evaluation", "marker": "o", "markersize": 4}),
    ):
        points = [(line["step"], line[key]) for line in map(with_mean_loss, lines) if key in line]
        if points:
            axes.plot(*zip(*points, strict=True), **style)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def sharding(run: "Run", parameter: str) -> "Figure":
    """Which devices hold which part of a parameter: one rectangle per part of its last two dims.

    parameter: its name in a checkpoint, such as layers.dense.mlp.up. If an earlier dim is split, such as that of the
    layers in a pipeline, each part has its own panel. Raises ValueError for an unknown name.
    """
    from megajax.parameters import name_of

    leaves = jax.tree_util.tree_leaves_with_path(run.program.abstract_state.weights)
    arrays = {name_of(path): leaf for path, leaf in leaves}
    if parameter not in arrays:
        raise ValueError(f"parameter={parameter} is unknown; use one of {', '.join(arrays)}")
    array = arrays[parameter]
    parts = _parts(array)
    panels = sorted({index[:-2] for index in parts})
    figure, all_axes = _new(max(3.2, 2.6 * len(panels)), 2.8, len(panels))
    number = {device: index for index, device in enumerate(run.mesh.devices.flat)}
    for axes, panel in zip(np.atleast_1d(all_axes), panels, strict=True):
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
    figure, axes = _new(0.7 * run.mesh.size + 1.4, 0.5 * len(shape) + 0.9)
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
    query = np.arange(length)[:, None]
    key = np.arange(length)[None]
    visible = (masks.CAUSAL & masks.window(window)).visible(query - key, key)
    visible &= segments_BT[row][:, None] == segments_BT[row][None]
    figure, axes = _new(3.6, 3.6)
    axes.imshow(visible, cmap="Blues", vmin=0, vmax=1.3, interpolation="nearest")
    title = f"sequence {row}, {len(sizes[row])} document{'s' * (len(sizes[row]) > 1)}"
    axes.set(xlabel="key", ylabel="query", title=title)
    return figure


def memory(*plans: "Plan") -> "Figure":
    """Memory per device of each plan as stacked bars, with the usable memory."""
    figure, axes = _new(8, 0.7 * len(plans) + 1.4)
    draw_memory(axes, [(plan.title, plan.memory_bytes, plan.usable_bytes) for plan in plans])
    return figure


def traffic(results: Sequence["Result"]) -> "Figure":
    """Latencies against throughput, a point per load."""
    figure, all_axes = _new(9, 3.6, 2)
    kinds = ([r for r in results if r.load.concurrency is None], [r for r in results if r.load.concurrency is not None])
    panels = (("time to first token (s)", "first_token"), ("time between tokens (s)", "between_tokens"))
    for axes, (title, latency) in zip(all_axes, panels, strict=True):
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


def _new(width: float, height: float, columns: int = 1):
    """-> (figure, axes)."""
    figure = new_figure(width, height)
    return figure, figure.subplots(1, columns)


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
