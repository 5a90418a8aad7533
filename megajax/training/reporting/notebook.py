"""Live progress in a notebook: one output, changed in place, with the newest line and the curve of the loss."""

import html
import sys
from typing import Any

WIDTH, HEIGHT = 480, 100
MOST_POINTS = 500


def in_notebook() -> bool:
    ipython = sys.modules.get("IPython")  # a notebook has imported it
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None


class LiveProgress:
    def __init__(self):
        self._losses: list[tuple[int, float]] = []
        self._training = self._evaluation = ""
        self._output: Any = None

    def show(self, line: str, step: int, metrics: dict[str, Any]) -> None:
        """line: what other outputs print of these metrics."""
        from IPython.display import display

        loss = metrics.get("mean_loss", metrics.get("loss"))
        if "loss" in metrics:
            self._training = line
        else:
            self._evaluation = line
        if loss is not None:
            self._losses.append((step, loss))
        text = "\n".join(filter(None, (self._training, self._evaluation)))
        data = {"text/plain": text, "text/html": f"<pre>{html.escape(text)}</pre>{self._curve()}"}
        if self._output is None:
            self._output = display(data, raw=True, display_id=True)
        else:
            self._output.update(data, raw=True)

    def _curve(self) -> str:
        points = self._losses[:: len(self._losses) // MOST_POINTS + 1]
        if len(points) < 2:
            return ""
        steps, losses = zip(*points, strict=True)
        across = WIDTH / (steps[-1] - steps[0])
        down = HEIGHT / ((max(losses) - min(losses)) or 1)
        path = " ".join(f"{(step - steps[0]) * across:.1f},{(max(losses) - loss) * down:.1f}" for step, loss in points)
        return (
            f'<svg width="{WIDTH}" height="{HEIGHT}" viewBox="-2 -2 {WIDTH + 4} {HEIGHT + 4}">'
            f'<polyline points="{path}" fill="none" stroke="currentColor"/></svg>'
        )
