"""Show that a resumed run is the uninterrupted run, bit for bit: train, resume from the middle, compare all files.

All plugins on two GPUs, CIFAR-10 in $DATA:
    python tests/exact_resume.py --nproc 2 --seeds 1 2
The same on one GPU, which more processes than GPUs share, as if each were on a machine of its own: right, but slow.
Without a GPU, two steps an epoch, three of the plugins through on_double.py:
    python tests/exact_resume.py --nproc 2 --double

The loss scale grows once before the save and once after it, when the steps of both sides are counted. Prints a table
last; the exit code is 1 if anything differs.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from helpers import forkserver, run

PLUGINS = ("torch_ddp", "torch_ddp_fp16", "low_level_zero", "gemini")
EPOCHS, RESUME_AT = 3, 2


@dataclass
class Resumed:
    """What a run and its resumed twin left behind."""

    folder: Path  # of the uninterrupted run
    output: str  # of the uninterrupted run
    different: list[str]  # files of the last epoch that are not the same in both
    scales: list[float]  # the loss scale after each epoch; none for torch_ddp


def parse_args(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare resumed runs with uninterrupted ones, bit for bit.")
    parser.add_argument("--plugins", nargs="+", choices=PLUGINS, default=PLUGINS, help="(all)")
    parser.add_argument("--nproc", type=int, default=1, help="processes (1)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="one run of each plugin for each (1)")
    parser.add_argument("--batch_size", type=int, default=100, help="images per process (100)")
    parser.add_argument("--synthetic", action="store_true", help="the generated set instead of CIFAR-10")
    parser.add_argument("--parallel", action="store_true", help="all runs at once, on the same devices")
    parser.add_argument("--double", action="store_true", help="on the CPU")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for each run (1800)")
    return parser.parse_args(words)


def train(args: argparse.Namespace, plugin: str, folder: Path, *more, planted: tuple[str, ...] = ()) -> str:
    """Run train.py, saving each epoch in `folder`, with `more` of its arguments. Returns what it printed."""
    if args.double:
        batch_size = 8 if plugin == "torch_ddp" else 4  # fp16 is slow on a CPU
        images, launch = 2 * batch_size * args.nproc, {}
        planted = [f"images={images},50", *["double"] * (plugin != "torch_ddp"), *planted]
    else:
        batch_size, images = args.batch_size, 4_000 if args.synthetic else 50_000
        planted = [*["machines"] * (torch.cuda.device_count() < args.nproc), *planted]
        # port 0: a free one, chosen by the launcher, so that runs in parallel cannot choose the same
        rendezvous = ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0", "--local_addr", "127.0.0.1"]
        launch = {"launcher": "torchrun", "launcher_args": rendezvous, "gpus": True}
    growth_interval = images // args.nproc // batch_size + 1  # one step more than an epoch has
    settings = ["-p", plugin, "-c", folder, "-i", 1, "--batch_size", batch_size]
    settings += ["--synthetic"] * (args.synthetic or args.double)
    data = {"DATA": os.environ["DATA"]} if "DATA" in os.environ else {}
    planted = [f"loss_scale={growth_interval}", *planted]
    result = run(args.nproc, *settings, *more, planted=planted, env=data, timeout=args.timeout, **launch)
    if result.returncode:
        raise RuntimeError(f"training with {plugin} failed:\n{result.output[-5000:]}")
    return result.output


def map_jobs(function, jobs: list[tuple], parallel: bool) -> list:
    """`function` of each job, in their order; None for one that failed, after saying why."""

    def call(job: tuple) -> object | None:
        try:
            return function(*job)
        except (RuntimeError, AssertionError) as error:
            print(error, file=sys.stderr)

    forkserver()
    with ThreadPoolExecutor(len(jobs) if parallel else 1) as pool:
        return list(pool.map(call, jobs))


def read(path: Path) -> dict:
    return torch.load(path, map_location="cpu", weights_only=True)


def is_same(one: object, other: object) -> bool:
    """Whether two values, or all that two dicts, lists or tuples hold, are equal bit for bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    return one == other


def files_that_differ(epoch: int, one: Path, other: Path) -> list[str]:
    first, second = ({path.name: read(path) for path in folder.glob(f"*_{epoch}.pth")} for folder in (one, other))
    assert f"model_{epoch}.pth" in first
    return sorted(name for name in first.keys() | second.keys() if not is_same(first.get(name), second.get(name)))


def copy_epoch(epoch: int, source: Path, target: Path, parts: tuple[str, ...] = ("*",)) -> Path:
    target.mkdir(exist_ok=True)
    for part in parts:
        for path in source.glob(f"{part}_{epoch}.pth"):
            shutil.copy(path, target)
    return target


def resume_and_compare(args: argparse.Namespace, plugin: str, seed: int, root: Path) -> Resumed:
    whole = root / f"{plugin}_{args.nproc}_{seed}"
    output = train(args, plugin, whole, "-n", EPOCHS, "--seed", seed)
    twin = copy_epoch(RESUME_AT, whole, whole.with_name(f"{whole.name}_resumed"))
    resumed = train(args, plugin, twin, "-n", EPOCHS, "--seed", seed, "-r", RESUME_AT)
    if f"Resuming after epoch {RESUME_AT}, from {twin}" not in resumed:
        raise RuntimeError(f"{plugin} trained afresh where it should have resumed")
    optimizers = [read(whole / f"optimizer_{epoch}.pth") for epoch in range(1, EPOCHS + 1)]
    scales = [float(optimizer["grad_scaler"]["scale"]) for optimizer in optimizers if "grad_scaler" in optimizer]
    return Resumed(whole, output, files_that_differ(EPOCHS, whole, twin), scales)


def main() -> int:
    args, start = parse_args(), time.time()
    cases = [(plugin, seed) for plugin in args.plugins for seed in args.seeds]
    with tempfile.TemporaryDirectory() as root:
        results = map_jobs(resume_and_compare, [(args, *case, Path(root)) for case in cases], args.parallel)
    device = "CPU" if args.double else torch.cuda.get_device_name()
    data = "synthetic set" if args.synthetic or args.double else "CIFAR-10"
    print(f"{device}, torch {torch.__version__}, {data}, {time.strftime('%Y-%m-%d')}, {time.time() - start:.0f} s")
    print(f"Trained for {EPOCHS} epochs; resumed after epoch {RESUME_AT} and compared after the last.\n")
    print("| plugin | processes | seed | loss scale after each epoch | files that differ |\n|---|---|---|---|---|")
    for (plugin, seed), result in zip(cases, results):
        scales = " → ".join(f"{scale:g}" for scale in result.scales) if result else ""
        verdict = ", ".join(result.different) or "none" if result else "failed"
        print(f"| {plugin} | {args.nproc} | {seed} | {scales or '-'} | {verdict} |")
    return 1 if any(result is None or result.different for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
