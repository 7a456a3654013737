"""Measure train.py against the way it is usually written, on the same machine in one run.

Two GPUs, CIFAR-10 in $DATA, whole epochs; or 50 steps in place of each epoch:
    torchrun --nproc_per_node 2 tests/benchmark.py
    torchrun --nproc_per_node 2 tests/benchmark.py --steps 50
Without a GPU, about a minute:
    torchrun --nproc_per_node 2 tests/benchmark.py --synthetic

The stock path has the same model, plugin, optimizer and hyperparameters, and what people write around them: a PIL image
at a time through torchvision's transforms, in the training process, eager passes, and the loss read in each step.
Times are medians over --epochs timed segments. A GPU is busy while a kernel or copy runs on it. Those of NCCL are given
by themselves, since they also run while they wait for another process. The profiler slows the steps, so its busy time
is divided by the time of unprofiled ones. Memory is what torch reserved at most, beyond what it held before.
Results are printed last, as a table.
"""

import time

script_start = time.time()

import argparse
import gc
import itertools
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

# CUPTI, which the profiler uses, must stay as it is between profiles where there are CUDA graphs
os.environ |= {"DISABLE_CUPTI_LAZY_REINIT": "1", "TEARDOWN_CUPTI": "0"}
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train  # before all else: it silences colossalai's advice on import
import torch
from colossalai.cluster import DistCoordinator
from colossalai.utils import get_current_device
from PIL import Image
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms
from torchvision.datasets import CIFAR10

from eval import build_model, data_root, load_data

WARM_UP_STEPS = 20
PROFILED_STEPS = 20
TRANSFORM = transforms.Compose(
    [transforms.Pad(4), transforms.RandomHorizontalFlip(), transforms.RandomCrop(32), transforms.ToTensor()]
)


def process_start() -> float:
    """When this process began, as time.time() counts."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")
    except OSError:  # not Linux: the interpreter's own start is missing
        return script_start


@dataclass
class Trainer:
    """A path, ready to train: `train(epoch, steps)` does the first steps of an epoch of `steps_per_epoch`."""

    train: Callable[[int, int], object]
    steps_per_epoch: int
    seconds_for_data: float
    seconds_for_boost: float


@dataclass
class Times:
    """Seconds per epoch, one value for each timed segment, and peak memory."""

    seconds: list[float]
    steps_per_epoch: int
    peak_mib: float | None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


# -------------------------------------------------------------------------------------------------------- our path


class FirstSteps:
    """The first batches of a DataLoader, for train_one_epoch."""

    def __init__(self, dataloader: DataLoader, steps: int) -> None:
        self.dataloader, self.sampler, self.steps = dataloader, dataloader.sampler, steps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator:
        return itertools.islice(self.dataloader, self.steps)


def build_ours(args: argparse.Namespace, coordinator: DistCoordinator) -> Trainer:
    """What train.main does before its first epoch."""
    start = time.time()
    booster = train.build_booster(args.plugin)
    dataloader = train.build_dataloader(args, booster.plugin, coordinator)
    load_data(train=False, synthetic=args.synthetic)
    data_ready = time.time()
    boosted = train.boost(args, booster, coordinator)

    def train_steps(epoch: int, steps: int) -> None:
        train.train_one_epoch(epoch, args.seed, FirstSteps(dataloader, steps), boosted, coordinator)

    return Trainer(train_steps, len(dataloader), data_ready - start, time.time() - data_ready)


# ------------------------------------------------------------------------------------------------------- stock path


class PilDataset(Dataset):
    """What CIFAR10 is to CIFAR-10, for the synthetic set."""

    def __init__(self) -> None:
        images, self.labels = load_data(train=True, synthetic=True)
        self.images = images.permute(0, 2, 3, 1).numpy()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return TRANSFORM(Image.fromarray(self.images[index])), int(self.labels[index])


def build_stock(args: argparse.Namespace, coordinator: DistCoordinator) -> Trainer:
    start = time.time()
    booster = train.build_booster(args.plugin)
    dataset = PilDataset() if args.synthetic else CIFAR10(data_root(), train=True, transform=TRANSFORM)
    dataloader = booster.plugin.prepare_dataloader(dataset, batch_size=args.batch_size, shuffle=True, drop_last=True)
    data_ready, device = time.time(), get_current_device()
    model = build_model()
    optimizer = train.build_optimizer(model, args.plugin, args.lr * coordinator.world_size, coordinator)
    model, optimizer, criterion, _, _ = booster.boost(model, optimizer, criterion=nn.CrossEntropyLoss())

    def train_steps(epoch: int, steps: int) -> None:
        dataloader.sampler.set_epoch(epoch)
        model.train()
        for images, labels in itertools.islice(dataloader, steps):
            images, labels = images.to(device), labels.to(device)
            loss = criterion(model(images), labels)
            booster.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            loss.item()

    return Trainer(train_steps, len(dataloader), data_ready - start, time.time() - data_ready)


# -------------------------------------------------------------------------------------------------------- measuring


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def reserved_memory() -> int:
    """Bytes that torch holds on the device after all that can be freed has been; the peak counts afresh from there."""
    gc.collect()  # models and CUDA graphs hang in reference cycles
    if not torch.cuda.is_available():
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_reserved()


def build(path: Callable, args: argparse.Namespace, coordinator: DistCoordinator) -> Trainer:
    torch.backends.cudnn.deterministic = path is build_ours  # launch sets it for exact resume; few people do
    return path(args, coordinator)


def first_step(args: argparse.Namespace, coordinator: DistCoordinator) -> str:
    """Where the time goes from the start of train.py's process to its first finished step."""
    trainer, start = build(build_ours, args, coordinator), time.time()
    trainer.train(0, 1)
    return f"data {trainer.seconds_for_data:.1f}, boost {trainer.seconds_for_boost:.1f}, step {time.time() - start:.1f}"


def measure(
    path: Callable, args: argparse.Namespace, segments: int, steps: int | None, coordinator: DistCoordinator
) -> Times:
    """Time `segments` times `steps` steps, None for whole epochs."""
    before = reserved_memory()
    trainer = build(path, args, coordinator)
    full = trainer.steps_per_epoch
    steps = min(steps or full, full)
    trainer.train(0, min(steps, WARM_UP_STEPS))
    seconds = []
    for epoch in range(1, 1 + segments):
        synchronize()
        coordinator.block_all()
        start = time.time()
        trainer.train(epoch, steps)
        synchronize()
        seconds.append((time.time() - start) * full / steps)
    peak_mib = (torch.cuda.max_memory_reserved() - before) / 2**20 if torch.cuda.is_available() else None
    return Times(seconds, full, peak_mib)


def union(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of what intervals cover together."""
    covered, end = 0.0, float("-inf")
    for first, last in sorted(intervals):
        covered += max(0.0, last - max(first, end))
        end = max(end, last)
    return covered


def busy_seconds(path: Callable, args: argparse.Namespace, coordinator: DistCoordinator) -> tuple[float, float] | None:
    """Seconds per step in which the GPU is busy with anything but NCCL, and with NCCL alone. None: no profile here."""
    reserved_memory()
    trainer = build(path, args, coordinator)
    steps = min(PROFILED_STEPS, trainer.steps_per_epoch)
    trainer.train(0, steps)
    synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        trainer.train(1, steps)
        synchronize()
    spans = [
        (event.time_range.start, event.time_range.end, "nccl" in event.name.lower())
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    ]
    if not spans:
        return None
    everything = union((start, end) for start, end, _ in spans)
    own = union((start, end) for start, end, is_nccl in spans if not is_nccl)
    return own / 1e6 / steps, (everything - own) / 1e6 / steps  # the profiler counts microseconds


def augmentation_ratio(batch_size: int, batches: int = 20) -> str:
    """The time of train.augment against that of the per-image transforms, from uint8 images to a float batch."""
    images = load_data(train=True, synthetic=True)[0][:batch_size]
    arrays, generator = images.permute(0, 2, 3, 1).numpy(), torch.Generator()

    def seconds(augment: Callable) -> float:
        augment()
        start = time.perf_counter()
        for _ in range(batches):
            augment()
        return (time.perf_counter() - start) / batches

    batched = seconds(lambda: train.augment(images, generator))
    per_image = seconds(lambda: torch.stack([TRANSFORM(Image.fromarray(array)) for array in arrays]))
    return (
        f"Augmenting {len(images)} images on the CPU, {torch.get_num_threads()} thread(s): per image with PIL "
        f"{1e3 * per_image:.1f} ms, batched {1e3 * batched:.1f} ms, ratio {per_image / batched:.1f}"
    )


# ----------------------------------------------------------------------------------------------------------- report


def get_args_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Measure train.py against the way it is usually written.")
    parser.add_argument("--plugins", nargs="+", choices=train.PLUGINS, help="(all with a GPU, else torch_ddp)")
    parser.add_argument("--epochs", type=int, default=5, help="timed segments (5)")
    parser.add_argument("--steps", type=int, help="of a segment (a whole epoch)")
    parser.add_argument("--synthetic", action="store_true", help="the generated set instead of CIFAR-10")
    parser.add_argument("--batch_size", type=int, default=100, help="images per process (100)")
    return parser


def print_conditions(options: argparse.Namespace, world_size: int, full: int) -> None:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU process"
    steps = min(options.steps or full, full)
    print(
        f"\n{world_size} x {device}, torch {torch.__version__}, colossalai {train.colossalai.__version__}, "
        f"{time.strftime('%Y-%m-%d')}, {'synthetic set' if options.synthetic else 'CIFAR-10'}, "
        f"batch {options.batch_size} per process; medians (and ranges) of {options.epochs} segments of "
        + (f"{full} steps, an epoch each" if steps == full else f"{steps} of {full} steps, scaled to whole epochs")
        + "\n"
    )


def print_table(plugins: Iterable[str], times: dict, busy: dict, images_per_step: int) -> None:
    def seconds(measured: Times) -> str:
        return f"{measured.median:.2f} ({min(measured.seconds):.2f}-{max(measured.seconds):.2f})"

    def busy_share(case: tuple[str, Callable]) -> str:
        if busy.get(case) is None:
            return "-"
        seconds_per_step = times[case].median / times[case].steps_per_epoch
        own, nccl = (100 * value / seconds_per_step for value in busy[case])
        return f"{own:.0f} + {nccl:.0f} NCCL"

    print("| plugin | stock s/epoch | ours s/epoch | ratio | ours images/s | GPU busy stock % | ours % |", end=" ")
    print(f"peak MiB stock | ours |\n|{'---|' * 9}")
    for plugin in plugins:
        cases = (plugin, build_stock), (plugin, build_ours)
        stock, ours = (times[case] for case in cases)
        images_per_second = ours.steps_per_epoch * images_per_step / ours.median
        memory = ("-" if peak is None else f"{peak:.0f}" for peak in (stock.peak_mib, ours.peak_mib))
        ratio = f"{stock.median / ours.median:.1f}"
        cells = [plugin, seconds(stock), seconds(ours), ratio, f"{images_per_second:,.0f}"]
        cells += [*map(busy_share, cases), *memory]
        print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    imports = time.time() - process_start()
    options, on_gpu = get_args_parser().parse_args(), torch.cuda.is_available()
    start = time.time()
    coordinator = train.launch(seed=42)
    if not options.synthetic:
        train.fetch_data_once_per_machine(coordinator)
    launched = time.time() - start

    def say(line: str) -> None:
        if coordinator.is_master():
            print(line, flush=True)

    plugins = options.plugins or (train.PLUGINS if on_gpu else train.PLUGINS[:1])
    settings = ["-i", "0", "--batch_size", str(options.batch_size)] + ["--synthetic"] * options.synthetic
    args = {plugin: train.get_args_parser().parse_args(["-p", plugin, *settings]) for plugin in plugins}
    for each in args.values():
        train.check_args(each)
    start = time.time()
    parts = first_step(args[plugins[0]], coordinator)
    total = imports + launched + time.time() - start
    say(
        f"Start-up with {plugins[0]}: {total:.1f} s from the process's start to the end of its first step: "
        f"imports {imports:.1f}, launch {launched:.1f}, {parts}"
    )
    if not on_gpu:
        say(augmentation_ratio(options.batch_size))

    times, busy = {}, {}
    for case in itertools.product(plugins, (build_stock, build_ours)):
        plugin, path = case
        times[case] = measure(path, args[plugin], options.epochs, options.steps, coordinator)
        say(f"{plugin}, {path.__name__.removeprefix('build_')}: {times[case].median:.2f} s per epoch")
    for plugin, path in times if on_gpu else ():  # not before all is timed: CUPTI stays and might slow things down
        busy[plugin, path] = busy_seconds(path, args[plugin], coordinator)

    if coordinator.is_master():
        images_per_step = coordinator.world_size * options.batch_size
        print_conditions(options, coordinator.world_size, times[plugins[0], build_ours].steps_per_epoch)
        print_table(plugins, times, busy, images_per_step)


if __name__ == "__main__":
    main()
    train.finish()
