"""Show that a resumed run is the uninterrupted run, bit for bit: train, resume from the middle, compare all files.

All plugins on two GPUs, CIFAR-10 in $DATA:
    python tests/exact_resume.py --nproc 2 --seeds 1 2
The same on one GPU, which more processes than GPUs share, as if each were on a machine of its own: right, but slow.
How far a CUDA graph's result is from the same run without one, after an epoch:
    python tests/exact_resume.py --nproc 2 --compare_graph
The script itself, without a GPU:
    python tests/exact_resume.py --nproc 2 --double --batch_size 8

The loss scale grows every few steps here, so that fp16 runs change it before and after the save, and are saved with
a growth half counted. Prints a table last; the exit code is 1 if anything differs.
"""

import argparse
import itertools
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from helpers import ROOT, run

PLUGINS = ("torch_ddp", "torch_ddp_fp16", "low_level_zero", "gemini")
PARTS = ("model", "optimizer", "lr_scheduler", "grad_scaler")
EXACT = {"identical", "equal values", "-"}  # verdicts; the last for torch_ddp, which scales no loss


@dataclass
class Result:
    """What a run and its resumed twin left behind: `verdicts` by part, the loss scale after each epoch (fp16 only),
    the good steps counted towards its next growth at the save, and what the uninterrupted run printed."""

    folder: Path
    output: str
    verdicts: dict[str, str]
    scales: list[float]
    counted: int

    @property
    def scale_changes(self) -> int:
        """Epochs that ended with another loss scale than the one before."""
        return sum(old != new for old, new in itertools.pairwise(self.scales))


# ----------------------------------------------------------------------------------------------------------- running


def get_args_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Compare resumed runs with uninterrupted ones, bit for bit.")
    parser.add_argument("--plugins", nargs="+", choices=PLUGINS, help="(all with a GPU or --double, else torch_ddp)")
    parser.add_argument("--nproc", type=int, default=1, help="processes (1)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="one run of each plugin for each (1)")
    parser.add_argument("--epochs", type=int, default=3, help="of the uninterrupted run (3)")
    parser.add_argument("--resume_at", type=int, default=2, help="epoch from which its twin goes on (2)")
    parser.add_argument("--batch_size", type=int, default=100, help="images per process (100)")
    parser.add_argument("--synthetic", action="store_true", help="the generated set instead of CIFAR-10")
    parser.add_argument("--growth_interval", type=int, help="steps between growths of the loss scale (2/3 of an epoch)")
    parser.add_argument("--no_graph", action="store_true", help="capture no CUDA graph")
    parser.add_argument("--compare_graph", action="store_true", help="instead: an epoch with and without CUDA graph")
    parser.add_argument("--parallel", action="store_true", help="all runs at once, on the same devices")
    parser.add_argument("--double", action="store_true", help="all plugins on the CPU, see on_double.py")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for each run (1800)")
    return parser


def parse_args(words: list[str] | None = None) -> argparse.Namespace:
    parser = get_args_parser()
    args = parser.parse_args(words)
    if not 0 < args.resume_at < args.epochs:
        parser.error("--resume_at must be at least 1 and less than --epochs")
    args.synthetic |= args.double
    args.plugins = args.plugins or (PLUGINS if args.double or torch.cuda.is_available() else PLUGINS[:1])
    if not args.growth_interval:
        images = 64 if args.double else 4_000 if args.synthetic else 50_000
        args.growth_interval = 2 * (images // args.nproc // args.batch_size) // 3 + 1
    return args


def train(args: argparse.Namespace, plugin: str, seed: int, folder: Path, *more, no_graph: bool = False) -> str:
    """Run train.py, saving each epoch in `folder`, with `more` of its arguments. Returns what it printed."""
    # port 0: a free one, chosen by the launcher, so that runs in parallel cannot choose the same
    launcher = ["--nproc_per_node", args.nproc, "--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"]
    conditions = ["--growth_interval", args.growth_interval]
    conditions += ["--no_graph"] * (no_graph or args.no_graph)
    conditions += ["--double", "--images", 64, "--test_images", 64] * args.double
    conditions += ["--machines"] * (0 < torch.cuda.device_count() < args.nproc)
    settings = ["-p", plugin, "--seed", seed, "-c", folder, "-i", 1, "--batch_size", args.batch_size]
    settings += ["--synthetic"] * args.synthetic
    torchrun = [sys.executable, "-m", "torch.distributed.run", *launcher, "--local_addr", "127.0.0.1"]
    data = {"DATA": os.environ["DATA"]} if "DATA" in os.environ else {}
    command = [*torchrun, ROOT / "tests/planted.py", *conditions, "train.py", *settings, *more]
    done = run(command, env=data, timeout=args.timeout)
    if done.returncode:
        raise RuntimeError(f"training with {plugin} failed:\n{done.stdout[-5000:]}")
    return done.stdout


def map_jobs(function, jobs: list[tuple], parallel: bool) -> list:
    """`function` of each job, in their order; None for one that failed, after saying why."""

    def attempt(job: tuple) -> object | None:
        try:
            return function(*job)
        except (RuntimeError, AssertionError) as error:
            print(error, file=sys.stderr)
            return None

    with ThreadPoolExecutor(len(jobs) if parallel else 1) as pool:
        return list(pool.map(attempt, jobs))


# --------------------------------------------------------------------------------------------------------- comparing


def read(path: Path) -> dict:
    return torch.load(path, map_location="cpu", weights_only=True)


def leaves(value, name: str = "") -> Iterator[tuple[str, object]]:
    """All that nested dicts, lists and tuples hold, each under the path that leads to it."""
    if isinstance(value, dict | list | tuple):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(inner, f"{name}/{key}")
    else:
        yield name, value


def largest_difference(one: object, other: object) -> float:
    """Of two tensors or numbers; inf where they cannot be subtracted and are not the same."""
    if not isinstance(one, torch.Tensor | int | float) or not isinstance(other, torch.Tensor | int | float):
        return 0.0 if one == other else float("inf")
    one, other = torch.as_tensor(one), torch.as_tensor(other)
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return float("inf")
    if torch.equal(one, other):
        return 0.0
    return (one.double() - other.double()).abs().nan_to_num(float("inf")).max().item()


def compare(one: Path, other: Path) -> str:
    """`identical` (all bytes), `equal values` (in files that differ otherwise), or the largest difference."""
    if not one.exists() or not other.exists():
        return "missing"
    if one.read_bytes() == other.read_bytes():
        return "identical"
    values, others = dict(leaves(read(one))), dict(leaves(read(other)))
    if values.keys() != others.keys():
        return "other entries"
    worst = max(largest_difference(value, others[name]) for name, value in values.items())
    return f"{worst:.1e}" if worst else "equal values"


def is_exact(result: Result | None) -> bool:
    return result is not None and set(result.verdicts.values()) <= EXACT


def resume_and_compare(args: argparse.Namespace, plugin: str, seed: int, root: Path) -> Result:
    whole, twin = root / f"{plugin}_{seed}", root / f"{plugin}_{seed}_resumed"
    output = train(args, plugin, seed, whole, "-n", args.epochs)
    twin.mkdir()
    for path in whole.glob(f"*_{args.resume_at}.pth"):
        shutil.copy(path, twin)
    copied = twin / f"model_{args.resume_at}.pth"
    before = copied.stat().st_mtime_ns
    train(args, plugin, seed, twin, "-n", args.epochs, "-r", args.resume_at)
    if copied.stat().st_mtime_ns != before:
        raise RuntimeError(f"{plugin} trained afresh where it should have resumed")
    last = {part: f"{part}_{args.epochs}.pth" for part in PARTS}
    verdicts = {part: compare(whole / name, twin / name) for part, name in last.items()}
    if plugin == "torch_ddp":
        verdicts["grad_scaler"] = "-"
    paths = [whole / f"grad_scaler_{epoch}.pth" for epoch in range(1, args.epochs + 1)]
    states = [read(path) for path in paths if path.exists()]
    at_save = states[args.resume_at - 1] if states else {}
    counted = at_save.get("_growth_tracker", at_save.get("_growth_step", 0))  # torch's name and ColossalAI's
    return Result(whole, output, verdicts, [float(state["scale"]) for state in states], counted)


def weight_differences(one: Path, other: Path) -> tuple[float, float]:
    """The largest and the mean difference of two model files."""
    first, second = read(one), read(other)
    differences = torch.cat([(first[name].double() - second[name].double()).abs().flatten() for name in first])
    return differences.max().item(), differences.mean().item()


def compare_graph(args: argparse.Namespace, plugin: str, seed: int, root: Path) -> tuple[float, float, str, str]:
    """Train an epoch with and without a CUDA graph.

    Returns:
        the largest and the mean difference of the weights, and what the runs printed
    """
    with_graph, without = root / f"{plugin}_{seed}_graph", root / f"{plugin}_{seed}_no_graph"
    outputs = [
        train(args, plugin, seed, with_graph, "-n", 1),
        train(args, plugin, seed, without, "-n", 1, no_graph=True),
    ]
    return (*weight_differences(with_graph / "model_1.pth", without / "model_1.pth"), *outputs)


# -------------------------------------------------------------------------------------------------------- the tables


def graph_cells(result: tuple[float, float, str, str] | None) -> list[str]:
    if result is None:
        return ["failed"] * 4
    largest, mean, *outputs = result
    return [f"{largest:.1e}", f"{mean:.1e}", *(re.findall(r"loss (\d+\.\d+)", output)[-1] for output in outputs)]


def resume_cells(result: Result | None, interval: int) -> list[str]:
    if result is None:
        return ["failed"] * (1 + len(PARTS))
    scales = " → ".join(f"{scale:g}" for scale in result.scales)
    changes = f"{result.scale_changes} ({scales}), {result.counted} of {interval} steps counted at the save"
    return [changes if scales else "-", *result.verdicts.values()]


def print_table(header: str, rows: list[list]) -> None:
    print(f"\n| {header} |\n|{'---|' * (header.count('|') + 1)}")
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |")


def main() -> int:
    args, start = parse_args(), time.time()
    cpu = args.double or not torch.cuda.is_available()
    device = "CPU" + " (double)" * args.double if cpu else torch.cuda.get_device_name()
    with tempfile.TemporaryDirectory() as root:
        cases = [(plugin, seed) for plugin in args.plugins for seed in args.seeds]
        jobs = [(args, plugin, seed, Path(root)) for plugin, seed in cases]
        results = map_jobs(compare_graph if args.compare_graph else resume_and_compare, jobs, args.parallel)
    print(
        f"torch {torch.__version__}, {'synthetic set' if args.synthetic else 'CIFAR-10'}, batch {args.batch_size} per "
        f"process, {time.strftime('%Y-%m-%d')}, {time.time() - start:.0f} s for all runs"
    )
    columns = "plugin | processes | device | seed"
    if args.compare_graph:
        columns += " | largest difference of a weight | mean | loss with graph | without"
        cells = [graph_cells(result) for result in results]
    else:
        print(f"Trained for {args.epochs} epochs; resumed after epoch {args.resume_at} and compared after the last.")
        columns += " | epochs | loss-scale changes | model | optimizer | scheduler | loss scaler"
        cells = [[args.epochs, *resume_cells(result, args.growth_interval)] for result in results]
    print_table(columns, [[plugin, args.nproc, device, seed, *rest] for (plugin, seed), rest in zip(cases, cells)])
    done = [result is not None if args.compare_graph else is_exact(result) for result in results]
    return 0 if all(done) else 1


if __name__ == "__main__":
    sys.exit(main())
