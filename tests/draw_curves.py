"""Draw the learning curves of runs from their logs, as an SVG: training loss on the left, test accuracy on the right.

    python tests/draw_curves.py curves.svg torch_ddp=ddp.log gemini=gemini.log …
"""

import re
import sys
from pathlib import Path

COLORS = ("#1b6ca8", "#d1495b", "#3c8d5a", "#8a5a9e", "#b8860b")
WIDTH, HEIGHT, LEFT, TOP = 360, 220, 46, 28  # of a panel's plot area, and the margins before it
LINE = re.compile(r"Epoch \[(\d+)/\d+\] loss ([\d.]+).*?(?:test accuracy ([\d.]+)%)?$", re.MULTILINE)


def read_log(path: Path) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    """Points (epoch, loss) and (epoch, test accuracy in %). Where a restarted run repeats an epoch, the last counts."""
    loss, accuracy = {}, {}
    for epoch, value, percent in LINE.findall(path.read_text()):
        loss[int(epoch)] = float(value)
        if percent:
            accuracy[int(epoch)] = float(percent)
    if not loss:
        sys.exit(f"{path} holds no line that train.py prints for an epoch")
    return sorted(loss.items()), sorted(accuracy.items())


def panel(x: int, title: str, curves: dict[str, list], low: float, high: float, ticks: list[float]) -> list[str]:
    """One plot with its left edge at `x`: axes, ticks, and a curve for each name."""
    last = max(epoch for points in curves.values() for epoch, _ in points)

    def place(epoch: float, value: float) -> str:
        inside = min(max(value, low), high)
        return f"{x + LEFT + WIDTH * epoch / last:.1f},{TOP + HEIGHT * (high - inside) / (high - low):.1f}"

    parts = [f'<text x="{x + LEFT}" y="{TOP - 10}" font-weight="bold">{title}</text>']
    for tick in ticks:
        right, y = place(last, tick).split(",")
        parts.append(f'<path d="M{x + LEFT},{y}H{right}" stroke="#ddd"/>')
        parts.append(f'<text x="{x + LEFT - 6}" y="{float(y) + 4}" text-anchor="end">{tick:g}</text>')
    for epoch in range(0, last + 1, max(1, last // 4)):
        left = place(epoch, low).split(",")[0]
        parts.append(f'<text x="{left}" y="{TOP + HEIGHT + 16}" text-anchor="middle">{epoch}</text>')
    for color, points in zip(COLORS, curves.values()):
        line = " ".join(place(*point) for point in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.6"/>')
    return parts


def main() -> None:
    target, *arguments = sys.argv[1:] or sys.exit(__doc__)
    logs = {name: read_log(Path(path)) for name, path in (argument.split("=", 1) for argument in arguments)}
    top = max(value for loss, _ in logs.values() for _, value in loss)
    parts = panel(0, "training loss", {name: log[0] for name, log in logs.items()}, 0, top, [0, 0.5, 1, 1.5])
    accuracy = {name: log[1] for name, log in logs.items()}
    parts += panel(WIDTH + LEFT + 20, "test accuracy, %", accuracy, 60, 86, [60, 65, 70, 75, 80, 85])
    for index, name in enumerate(logs):
        x, y = LEFT + 160 * (index % 5), TOP + HEIGHT + 38
        parts.append(f'<path d="M{x},{y - 4}h18" stroke="{COLORS[index]}" stroke-width="3"/>')
        parts.append(f'<text x="{x + 24}" y="{y}">{name}</text>')
    size = f'width="{2 * (WIDTH + LEFT) + 40}" height="{TOP + HEIGHT + 50}"'
    style = 'font-family="sans-serif" font-size="12" fill="#222"'
    background = '<rect width="100%" height="100%" fill="white"/>'
    body = "\n".join(parts)
    Path(target).write_text(f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n{background}\n{body}\n</svg>\n')


if __name__ == "__main__":
    main()
