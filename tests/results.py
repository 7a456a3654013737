"""Print README's table of accuracies from the logs of runs, and draw their curves. Drawing needs matplotlib.

    python tests/results.py curves.svg torch_ddp=ddp-1.log,ddp-2.log stock=stock-1.log,stock-2.log

A log is what train.py, or benchmark.py with --train_stock, printed. It may go on with further starts of the same run,
by -r latest: then the last line of an epoch counts. Where runs share a GPU, their seconds are longer than README's.
On one GPU, README's numbers come from these lines. A line that was interrupted continues when it is entered again:
    export DATA=/data    # which holds cifar-10-batches-py
    go() { python train.py -p $1 --seed $2 -c ckpt/$1-$2 -r latest >> $1-$2.log; }
    for seed in 1 2 3; do go torch_ddp $seed & go torch_ddp_fp16 $seed & done; wait
    for seed in 1 2; do go low_level_zero $seed & go gemini $seed & done; wait
    for seed in 1 2; do python tests/benchmark.py --train_stock 80 --seed $seed > stock-$seed.log & done; wait
    python tests/results.py .github/curves.svg $(for plugin in torch_ddp torch_ddp_fp16 low_level_zero gemini stock; do
        echo $plugin=$(ls $plugin-[1-9].log | paste -sd ,); done)
"""

import re
import sys
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

SETUP = re.compile(r"([\d,]+) images per epoch")
EPOCH = re.compile(r"Epoch \[(\d+)/(\d+)\] loss (\S+), .*?([\d,]+) images/s(?:, test accuracy ([\d.]+)%)?$")


class Run(NamedTuple):
    path: Path
    num_epochs: int
    loss: dict[int, float]  # by epoch, like the following
    seconds: dict[int, float]
    accuracy: dict[int, float]  # in %

    @property
    def is_finished(self) -> bool:
        return self.num_epochs in self.accuracy


def read_log(path: Path) -> Run:
    images, num_epochs = None, None
    loss, seconds, accuracy = values = {}, {}, {}
    for line in path.read_text().splitlines():
        if setup := SETUP.search(line):
            images = int(setup[1].replace(",", ""))
        elif images and (match := EPOCH.search(line)):
            epoch, num_epochs = int(match[1]), int(match[2])
            for later in [later for later in loss if later >= epoch]:  # of an earlier start, which this one repeats
                for by_epoch in values:
                    by_epoch.pop(later, None)
            loss[epoch] = float(match[3])
            seconds[epoch] = images / max(1, int(match[4].replace(",", "")))
            if match[5]:
                accuracy[epoch] = float(match[5])
    if not loss:
        sys.exit(f"{path} does not hold what train.py prints: the images per epoch, then a line for each epoch")
    return Run(path, num_epochs, *values)


def table(runs: dict[str, list[Run]]) -> list[str]:
    lines = ["| | n | test accuracy, mean | lowest | highest | s/epoch | epochs |", "|---|---|---|---|---|---|---|"]
    left_out = []
    for name, all_runs in runs.items():
        epochs = sorted({run.num_epochs for run in all_runs})
        if len(epochs) > 1:
            sys.exit(f"{name}: its runs have different numbers of epochs: {', '.join(map(str, epochs))}")
        finals = [run.accuracy[run.num_epochs] for run in all_runs if run.is_finished]
        accuracies = (f"{function(finals):.2f} %" if finals else "-" for function in (mean, min, max))
        seconds = f"{median(value for run in all_runs for value in run.seconds.values()):.2f}"
        lines.append(f"| {' | '.join([name, str(len(finals)), *accuracies, seconds, str(epochs[0])])} |")
        for run in all_runs:
            if not run.is_finished:
                left_out.append(f"{name}: {run.path} is left out, it ends at epoch {max(run.loss)} of {run.num_epochs}")
    return lines + left_out


def draw(target: Path, runs: dict[str, list[Run]]) -> None:
    """Draw the mean of each name's finished runs, in a band from the lowest to the highest."""
    try:
        import matplotlib
    except ImportError:
        sys.exit(f"{target} is not drawn: pip install matplotlib")
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "curves", "svg.fonttype": "none"})  # the same file each time; text
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axes, field, label in ((left, "loss", "training loss"), (right, "accuracy", "test accuracy (%)")):
        for name, all_runs in runs.items():
            curves = [getattr(run, field) for run in all_runs if run.is_finished]
            if not curves:
                continue
            epochs = sorted(set.intersection(*map(set, curves)))
            values = [[curve[epoch] for curve in curves] for epoch in epochs]
            [line] = axes.plot(epochs, list(map(mean, values)), label=f"{name} (n = {len(curves)})", linewidth=1.2)
            axes.fill_between(epochs, list(map(min, values)), list(map(max, values)), alpha=0.2, color=line.get_color())
        axes.set(xlabel="epoch", ylabel=label)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.margins(x=0.01)
        axes.grid(alpha=0.3)
    right.legend(loc="lower right")
    figure.savefig(target, metadata={"Date": None, "Creator": None} if target.suffix == ".svg" else None)


def main() -> None:
    if len(sys.argv) < 3 or not all("=" in argument for argument in sys.argv[2:]):
        sys.exit(__doc__)
    named = (argument.split("=", 1) for argument in sys.argv[2:])
    runs = {name: [read_log(Path(path)) for path in paths.split(",")] for name, paths in named}
    print("\n".join(table(runs)))
    draw(Path(sys.argv[1]), runs)


if __name__ == "__main__":
    main()
