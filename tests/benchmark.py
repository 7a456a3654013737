"""Measure train.py against the stock way to write it, and against what the GPU could do.

    python tests/benchmark.py                                                # one GPU, CIFAR-10 in $DATA
    torchrun --standalone --nproc_per_node 2 tests/benchmark.py --steps 50   # two GPUs, or two processes without a GPU
    python tests/benchmark.py --train_stock 80 --seed 1                      # the accuracy of the stock way

Three paths take turns, segment by segment. A row gives the median (and the range) of each, scaled to a whole epoch:
- stock: the plugin with its default arguments; images one by one through torchvision's transforms, in the training
  process; eager passes; the loss read in each step
- ours: train_one_epoch, which includes what it does once per epoch, on as many images as a segment has steps for
- limit: the whole step as one CUDA graph in plain torch, in fp32 for torch_ddp and under fp16 autocast for the others.
  It has the same model and batch size, finds its batches ready, and does not communicate. Not without a GPU.
"""

import argparse
import gc
import itertools
import os
import platform
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train  # before the rest of colossalai: it silences the library's advice on import
import torch
import torch.distributed as dist
from colossalai.booster import Booster
from colossalai.booster.plugin import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from colossalai.cluster import DistCoordinator
from colossalai.utils import get_current_device
from torch import Tensor, nn
from torch.optim.lr_scheduler import MultiStepLR
from torchvision import transforms
from torchvision.datasets import CIFAR10

from eval import TRAIN_IMAGES, accuracy_line, build_model, data_root, fetch_data, load_data, to_float
from train import print_on_master

ON_GPU = torch.cuda.is_available()
WARM_UP_STEPS, SEGMENTS = 20, 5
ACCURACY_WORKERS = 4  # processes that load images for --train_stock: they change how long it takes, and the draws
TRANSFORM = transforms.Compose(
    [transforms.Pad(4), transforms.RandomHorizontalFlip(), transforms.RandomCrop(32), transforms.ToTensor()]
)


def as_stock(stock: bool) -> None:
    """Undo, or restore, what train.py sets for the whole process."""
    torch.backends.cudnn.deterministic = not stock
    torch.autograd.set_multithreading_enabled(stock)
    gc.unfreeze() if stock else gc.freeze()


class Stock:
    def __init__(self, args: argparse.Namespace, coordinator: DistCoordinator, workers: int = 0) -> None:
        as_stock(True)
        if args.plugin in ("low_level_zero", "gemini"):
            plugin = {"low_level_zero": LowLevelZeroPlugin, "gemini": GeminiPlugin}[args.plugin](initial_scale=2**5)
        else:
            plugin = TorchDDPPlugin() if ON_GPU else train.CpuDDPPlugin()
        booster = Booster(plugin=plugin, mixed_precision="fp16" if args.plugin == "torch_ddp_fp16" else None)
        images = CIFAR10(data_root(), transform=TRANSFORM)
        loading = {"batch_size": args.batch_size, "shuffle": True, "drop_last": True, "num_workers": workers}
        self.loader = plugin.prepare_dataloader(images, **loading)
        self.loader.worker_init_fn = None  # the plugin's seeds all workers alike, and alike in each epoch
        model = build_model().to(get_current_device())
        optimizer = train.build_optimizer(model, args.plugin, args.lr * coordinator.world_size)
        lr_scheduler = MultiStepLR(optimizer, milestones=[20, 40, 60, 80], gamma=1 / 3)
        boosted = booster.boost(model, optimizer, nn.CrossEntropyLoss(), lr_scheduler=lr_scheduler)
        model, optimizer, criterion, _, lr_scheduler = boosted
        self.boosted = train.Boosted(booster, model, optimizer, criterion, lr_scheduler)

    def train(self, epoch: int, steps: int) -> dict:
        """Train in the same order in each epoch, as the reference example does. Returns what train.Log reports."""
        as_stock(True)
        booster, model, optimizer, criterion, _ = self.boosted
        start, device, losses = time.time(), get_current_device(), []
        model.train()
        for images, labels in itertools.islice(self.loader, steps):
            images, labels = images.to(device), labels.to(device)
            loss = criterion(model(images), labels)
            booster.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        speed = steps * self.loader.batch_size * dist.get_world_size() / (time.time() - start)
        learning_rate = optimizer.param_groups[0]["lr"]
        return {"loss": statistics.mean(losses), "learning_rate": learning_rate, "images_per_second": speed}


class Ours:
    def __init__(self, args: argparse.Namespace, coordinator: DistCoordinator) -> None:
        as_stock(False)
        self.args, self.coordinator = args, coordinator
        booster = train.build_booster(args.plugin)
        self.plugin, self.data = booster.plugin, train.prepare_data(args, booster.plugin)
        self.boosted = train.boost(args, booster, coordinator)
        train.warm_up(args, self.boosted)
        train.speed_up(self.boosted)

    def train(self, epoch: int, steps: int) -> None:
        as_stock(False)
        images = steps * self.args.batch_size * self.coordinator.world_size
        loader = self.plugin.prepare_dataloader(range(images), self.args.batch_size, shuffle=True, drop_last=True)
        data = train.TrainingData(self.data.images[:images], self.data.labels[:images], loader)
        train.train_one_epoch(epoch, self.args.seed, data, self.boosted, self.coordinator)


class Limit:
    def __init__(self, args: argparse.Namespace, batches: list[tuple[Tensor, Tensor]]) -> None:
        as_stock(False)
        self.fp16, self.batches, device = args.plugin != "torch_ddp", batches, get_current_device()
        self.images, self.labels = (tensor.to(device, copy=True) for tensor in batches[0])  # what the graph reads
        self.model = build_model().to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=args.lr, fused=True, capturable=True)
        self.optimizer.grad_scale = torch.tensor(2.0**10 if self.fp16 else 1.0, device=device)  # it divides by this
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        images = to_float(self.images)
        with torch.autocast(images.device.type, torch.float16, enabled=self.fp16, cache_enabled=False):
            loss = nn.functional.cross_entropy(self.model(images), self.labels)
        (loss * self.optimizer.grad_scale).backward()
        self.optimizer.step()

    def train(self, epoch: int, steps: int) -> None:
        for images, labels in self.batches[:steps]:
            self.images.copy_(images)
            self.labels.copy_(labels)
            self.graph.replay()


def time_segment(path: Stock | Ours | Limit, epoch: int, steps: int) -> float:
    synchronize = torch.cuda.synchronize if ON_GPU else lambda: None
    synchronize()
    dist.barrier()
    start = time.perf_counter()
    path.train(epoch, steps)
    synchronize()
    return time.perf_counter() - start


def train_stock(args: argparse.Namespace, coordinator: DistCoordinator) -> None:
    """Train the stock path for args.num_epochs, and print what train.py prints."""
    stock = Stock(args, coordinator, ACCURACY_WORKERS)
    test_images, test_labels = load_data(train=False, synthetic=False)
    log = train.Log(args, stock, start_epoch=0)
    for epoch in range(1, args.num_epochs + 1):
        values = stock.train(epoch, len(stock.loader))
        values["loss"] = statistics.mean(train.gather(values["loss"]))
        stock.boosted.lr_scheduler.step()
        if epoch == args.num_epochs or epoch % 5 == 0:
            values["accuracy"] = train.evaluate(stock.boosted, test_images, test_labels, coordinator)
        log.report(epoch, values)
    print_on_master(accuracy_line(values["accuracy"]))


def get_args_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Measure train.py against the stock way to write it.")
    everywhere = train.PLUGINS if ON_GPU else train.PLUGINS[:1]
    parser.add_argument("--plugins", nargs="+", choices=train.PLUGINS, default=everywhere, help="(all that run here)")
    parser.add_argument("--steps", type=int, help="of a segment (a whole epoch)")
    parser.add_argument("--batch_size", type=int, default=100, help="images per process and step (100)")
    parser.add_argument("--seed", type=int, default=42, help="as train.py's (42)")
    parser.add_argument("--train_stock", type=int, metavar="EPOCHS", help="train the stock way with the first plugin")
    return parser


def header(options: argparse.Namespace, steps: int, steps_per_epoch: int) -> str:
    device = torch.cuda.get_device_name() if ON_GPU else f"CPU process with {torch.get_num_threads()} thread(s)"
    return (
        f"{dist.get_world_size()} x {device}, torch {torch.__version__}, colossalai {train.colossalai.__version__}, "
        f"Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}, CIFAR-10, batch {options.batch_size} per "
        f"process, {SEGMENTS} segments of {steps} of an epoch's {steps_per_epoch} steps\n\n"
        f"| plugin | stock s/epoch | ours | limit | stock/ours | ours/limit |\n|{'---|' * 6}"
    )


def row(args: argparse.Namespace, steps: int, steps_per_epoch: int, coordinator: DistCoordinator) -> str:
    ours = Ours(args, coordinator)
    paths = [Stock(args, coordinator), ours]
    if ON_GPU:
        paths.append(Limit(args, train.epoch_batches(ours.data, 1, args.seed, coordinator.rank)))
    for path in paths:
        path.train(1, min(steps, WARM_UP_STEPS))
    rounds = [[time_segment(path, 2 + segment, steps) for path in paths] for segment in range(SEGMENTS)]
    columns = [[seconds * steps_per_epoch / steps for seconds in column] for column in zip(*rounds)]
    cells = [f"{statistics.median(column):.2f} ({min(column):.2f}-{max(column):.2f})" for column in columns]
    stock, ours, *limit = map(statistics.median, columns)
    cells += [f"{stock / ours:.2f}", f"{ours / limit[0]:.2f}"] if limit else ["-", f"{stock / ours:.2f}", "-"]
    return f"| {args.plugin} | {' | '.join(cells)} |"


def main() -> None:
    options = get_args_parser().parse_args()
    settings = f"-i 0 --batch_size {options.batch_size} --seed {options.seed} -n {options.train_stock or 1}".split()
    all_args = [train.get_args_parser().parse_args(["-p", plugin, *settings]) for plugin in options.plugins]
    train.prepare_environment()
    coordinator = train.launch(options.seed)
    fetch_data()
    if options.train_stock:
        train_stock(all_args[0], coordinator)
        return
    steps_per_epoch = TRAIN_IMAGES // (options.batch_size * coordinator.world_size)
    steps = min(options.steps or steps_per_epoch, steps_per_epoch)
    print_on_master(header(options, steps, steps_per_epoch))
    for args in all_args:
        print_on_master(row(args, steps, steps_per_epoch, coordinator))
        gc.collect()  # models and CUDA graphs hang in reference cycles
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
    train.gather(None)  # no process ends while another one still needs it
    os._exit(0)  # as train.py does
