"""The benchmarks' figures, as matplotlib draws them (pip install -e ".[plot]")."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from megajax.figures.drawings import new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def bars(path: str, groups: Mapping[str, Sequence[tuple[str, float, str, str]]]) -> None:
    """{title: (name, length, label, color) of each bar}, one group below the other."""
    figure = new_figure(8, 0.5 + 1.3 * len(groups))
    for axes, (title, rows) in zip(figure.subplots(len(groups), squeeze=False).flat, groups.items(), strict=True):
        names, lengths, labels, colors = zip(*rows, strict=True)
        axes.bar_label(axes.barh(names, lengths, color=colors), labels, padding=4, fontsize="small")
        axes.set(xlim=(0, 1.5 * max(lengths)), xticks=[])
        axes.tick_params(length=0)
        axes.set_title(title, loc="left", fontsize="medium", fontweight="bold")
        axes.invert_yaxis()
        axes.spines[:].set_visible(False)
    save(figure, path)


def losses(path: str, steps: Sequence[int], curves: Mapping[str, Sequence[float]]) -> None:
    """Curves, and below them their differences from the first. One may end before the others."""
    figure = new_figure(7, 6)
    above, below = figure.subplots(2, sharex=True, height_ratios=(2, 1))
    first = next(iter(curves.values()))
    for name, values in curves.items():
        above.plot(steps[: len(values)], values, linewidth=1, label=name)
        differences = [value - other for value, other in zip(values, first, strict=False)]
        below.plot(steps[: len(differences)], differences, linewidth=1)
    above.set(ylabel="loss")
    below.set(ylabel="difference", xlabel="step")
    above.legend()
    save(figure, path)


def lines(path: str, series: Mapping[str, Iterable[tuple[float, float]]], x: str, y: str) -> None:
    """{name: points of a line}."""
    figure = new_figure(7, 4)
    axes = figure.subplots()
    for name, points in series.items():
        axes.plot(*zip(*points, strict=True), linewidth=1.5, label=name)
    axes.set(xlabel=x, ylabel=y)
    axes.legend()
    save(figure, path)


def lines_and_dots(
    path: str, series: Mapping[str, tuple[Iterable[tuple[float, float]], Iterable[tuple[float, float]]]], x: str, y: str
) -> None:
    """{name: (points of a line, dots)}; x is a power of two, y a fraction."""
    figure = new_figure(6.4, 3.6)
    axes = figure.subplots()
    for number, (name, (line, dots)) in enumerate(series.items()):
        axes.plot(*zip(*line, strict=True), color=f"C{number}", label=name)
        axes.plot(*zip(*dots, strict=True), "o", color=f"C{number}")
    axes.set_xscale("log", base=2)
    axes.set(xlabel=x, ylabel=y)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.legend()
    save(figure, path)


GROWTH = {
    "step_seconds": "step, planned (s)",
    "bytes_per_gpu": "memory per GPU, planned (GiB)",
    "compile_seconds": "compiling for H100 (s)",
    "start_seconds": "start of a tiny model on CPU (s)",
}


def growth(path: str, series: Sequence[Mapping]) -> None:
    """A row for each series and a column for each quantity of GROWTH, both axes logarithmic; dotted: in proportion to
    what grows, or to its inverse. series: as benchmarks/growth.py records them."""
    figure = new_figure(11, 2.1 * len(series))
    for parts, one in zip(figure.subfigures(len(series), squeeze=False).flat, series, strict=True):
        parts.suptitle(one["title"], fontsize="medium", fontweight="bold", x=0.01, ha="left")
        for axes, (name, label) in zip(parts.subplots(1, len(GROWTH)), GROWTH.items(), strict=True):
            scale = 2**30 if name == "bytes_per_gpu" else 1
            points = [(int(value), row[name] / scale) for value, row in one["rows"].items() if name in row]
            axes.set_visible(len(points) > 1)
            if len(points) > 1:
                _draw_growth(axes, *zip(*points, strict=True))
                axes.set_title(label, fontsize="small")
    save(figure, path)


def _draw_growth(axes: "Axes", x: tuple[int, ...], y: tuple[float, ...]) -> None:
    axes.plot(x, y, "o-", markersize=3)
    ratio = x[-1] / x[0] if y[-1] > y[0] / 2 else x[0] / x[-1]
    axes.plot((x[0], x[-1]), (y[0], y[0] * ratio), ":", color="grey", linewidth=1)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(min(y) / 2, max(y) * 2)
    axes.set_xticks(x, [f"{value // 1024}k" if value >= 1024 and value % 1024 == 0 else str(value) for value in x])
    axes.set_xticks([], minor=True)
    ticks = [power * digit for power in (0.01, 0.1, 1, 10, 100, 1000) for digit in (1, 3)]
    axes.set_yticks([tick for tick in ticks if min(y) / 2 <= tick <= max(y) * 2])
    axes.set_yticks([], minor=True)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.tick_params(labelsize="x-small")
    axes.grid(alpha=0.3)
