"""Tables and plots of what `benchmarks.compare` measured. A result is the JSON that it writes, one per recipe."""

import statistics

from benchmarks import figures
from megajax.mesh.devices import find_device, utilisation
from megajax.training.reporting.console import format_count

NAMES = {"megajax": "megajax", "loop": "megajax, training loop", "torch": "PyTorch", "limit": "limit"}
COLORS = {"megajax": "#1f6feb", "loop": "#79b0ff", "torch": "#e07b39", "limit": "#bbbbbb"}


def windows(result: dict, contender: str) -> list[float]:
    """Seconds of a step in every window of a contender, over all rounds."""
    return [window for measured in result["measurements"].get(contender, []) for window in measured["windows"]]


def step_seconds(result: dict, contender: str) -> float | None:
    found = windows(result, contender)
    return statistics.median(found) if found else None


def tokens_per_second(result: dict, contender: str) -> float | None:
    """Per GPU."""
    seconds = step_seconds(result, contender)
    return result["tokens_per_step"] / seconds / result["num_devices"] if seconds else None


def mfu(result: dict, contender: str) -> float | None:
    """MFU with attention counted in full; None if the peak of the device is unknown."""
    device = find_device(result["device"])
    tokens = tokens_per_second(result, contender)
    return utilisation(result["flops_per_token"], tokens, device) if device and tokens else None


def table(results: list[dict]) -> str:
    """Markdown, a row for each contender of each result, and where the numbers come from."""
    lines = [
        "| work | program | step | tokens/s per GPU | MFU | of the limit | against PyTorch |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        work = f"`{result['config']}`, {result['work']}, {result['device']}"
        for contender in (name for name in NAMES if windows(result, name)):
            lines.append(f"| {work} | {' | '.join(_cells(result, contender))} |")
            work = ""
    return "\n".join([*lines, "", *map(source, results)])


def summary(results: list[dict]) -> str:
    """Markdown, a row for each result: megajax, PyTorch and the limit."""
    lines = ["| work | megajax | PyTorch | against PyTorch | limit |", "|---|---|---|---|---|"]
    for result in results:
        ours, peer, limit = (step_seconds(result, name) for name in ("megajax", "torch", "limit"))
        shown = (
            f"{1000 * ours:.1f} ms, {format_count(tokens_per_second(result, 'megajax'))} tokens/s per GPU, "
            f"MFU {mfu(result, 'megajax'):.1%}"
        )
        lines.append(
            f"| `{result['config']}`, {result['work']}, {result['device']} | {shown} | {1000 * peer:.1f} ms | "
            f"{peer / ours - 1:+.1%} | {1000 * limit:.1f} ms |"
        )
    return "\n".join(lines)


def _cells(result: dict, contender: str) -> list[str]:
    seconds = step_seconds(result, contender)
    used = mfu(result, contender)
    bare, peer, limit = (step_seconds(result, name) for name in ("megajax", "torch", "limit"))
    name = NAMES[contender]
    if contender == "loop" and bare:
        name += f" ({seconds / bare - 1:+.1%} per step)"
    return [
        name,
        f"{1000 * seconds:.1f} ms",
        format_count(tokens_per_second(result, contender)),
        f"{used:.1%}" if used else "-",
        f"{limit / seconds:.0%}" if limit else "-",
        f"{peer / seconds - 1:+.1%}" if peer and contender in ("megajax", "loop") else "-",
    ]


def source(result: dict) -> str:
    """One line: command, device, versions, date, commit, and the spread of the windows of each contender."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    spreads = []
    for name in (name for name in NAMES if windows(result, name)):
        found = windows(result, name)
        spreads.append(f"{name} {max(found) / min(found) - 1:.1%} of {len(found)}")
    return (
        f"- `{result['config']}`: `{result['command']}`; {result['device']}; {versions}; {result['date']}; "
        f"commit {result['commit']}. Spread of the windows: {', '.join(spreads)}."
    )


def plot(results: list[dict], path: str) -> None:
    """Bars of tokens/s per GPU."""
    groups = {}
    for result in results:
        rows = groups[f"{result['config']}, {result['work']}, {result['device']}"] = []
        for name in (name for name in NAMES if windows(result, name)):
            speed = tokens_per_second(result, name)
            used = mfu(result, name)
            label = f"{format_count(speed)} tokens/s" + (f", MFU {used:.1%}" if used else "")
            rows.append((NAMES[name], speed, label, COLORS[name]))
    figures.bars(path, groups)
