"""Train ResNet-18 on CIFAR-10 from scratch through ColossalAI's Booster.

Without a GPU, two processes on a small generated set:
    colossalai run --nproc_per_node 2 train.py -c ./ckpt-synthetic --synthetic -n 3
One GPU:
    python train.py -c ./ckpt-fp32
Two GPUs, with a plugin of your choice, resuming from the newest checkpoint if there is one:
    colossalai run --nproc_per_node 2 train.py -c ./ckpt-gemini -p gemini -r latest
Two machines with eight GPUs each (the same command on both, except for --node_rank):
    torchrun --nnodes 2 --node_rank 0 --nproc_per_node 8 --master_addr HOST --master_port 29500 train.py -c /nfs/ckpt

To learn the Booster, read from here to the end of `main`, the overview. The rest can be skipped: what keeps runs safe,
and the workarounds that make ColossalAI 0.5.0 fast, and bit-exact on resume.
"""

import argparse
import copy
import errno
import functools
import gc
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # torch reads it; importing colossalai would start workers
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.optim.lr_scheduler import LRScheduler, MultiStepLR
from torch.utils.data import DataLoader
from tqdm import tqdm

warnings.filterwarnings("ignore", module="colossalai")  # on import it recommends optional packages, in every process
warnings.filterwarnings("ignore", module="torch.autograd.graph")  # newer torch, about streams during graph capture
import colossalai
from colossalai.accelerator import get_accelerator
from colossalai.amp.naive_amp.grad_scaler import DynamicGradScaler
from colossalai.booster import Booster
from colossalai.booster.plugin import GeminiPlugin, LowLevelZeroPlugin, Plugin, TorchDDPPlugin
from colossalai.booster.plugin.torch_ddp_plugin import TorchDDPModel
from colossalai.cluster import DistCoordinator
from colossalai.interface import ModelWrapper, OptimizerWrapper
from colossalai.nn.optimizer import HybridAdam
from colossalai.utils import get_current_device
from colossalai.zero import GeminiDDP, LowLevelZeroOptimizer

from eval import SYNTHETIC_TRAIN_IMAGES, TRAIN_IMAGES, UserError, accuracy_line, build_model, check_optimizer
from eval import count_correct, epoch_or_latest, expand_path, fetch_data, first_line, load_data, lock
from eval import print_line, raise_user_error, read_file, read_model, require_epoch, saved_epochs, to_float

PLUGINS = ("torch_ddp", "torch_ddp_fp16", "low_level_zero", "gemini")
PARTS = ("model", "optimizer", "lr_scheduler")  # a checkpoint's files are {part}_{epoch}.pth


# ---------------------------------------------------------------------------------------------------------- arguments

def get_args_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Train ResNet-18 on CIFAR-10 through ColossalAI's Booster.")
    parser.error = raise_user_error
    parser.add_argument("-p", "--plugin", choices=PLUGINS, default="torch_ddp", help="Booster plugin (torch_ddp)")
    parser.add_argument("-r", "--resume", type=epoch_or_latest, default=-1, help="epoch or 'latest'; -1: do not (-1)")
    parser.add_argument("-c", "--checkpoint", type=expand_path, default="./checkpoint", help="folder (./checkpoint)")
    parser.add_argument("-i", "--interval", type=int, default=5, help="epochs between checkpoints; 0: save none (5)")
    parser.add_argument("--target_acc", type=float, help="fraction in 0..1; fail below it (none)")
    parser.add_argument("-n", "--num_epochs", type=int, default=80, help="total epochs (80)")
    parser.add_argument("--batch_size", type=int, default=100, help="images per process and step (100)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate per process, see README (1e-3)")
    parser.add_argument("--seed", type=int, default=42, help="for weights, order and augmentation (42)")
    parser.add_argument("--synthetic", action="store_true", help="a small generated set instead of CIFAR-10")
    parser.add_argument("--tensorboard", type=expand_path, metavar="DIR", help="also log there for TensorBoard")
    return parser


def check_args(args: argparse.Namespace) -> None:
    """Raise UserError for arguments that cannot work, before any process connects; touch nothing."""
    on_cpu = get_accelerator().name == "cpu"
    processes, world_size = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
    gpus = processes if on_cpu else get_accelerator().device_count()  # a CPU takes any number
    share = (SYNTHETIC_TRAIN_IMAGES if args.synthetic else TRAIN_IMAGES) // world_size
    for wrong, message in [
        (args.interval < 0, "--interval must be 0 or more"),
        (args.num_epochs < 1, "--num_epochs must be 1 or more"),
        (args.batch_size < 2, "--batch_size must be 2 or more: BatchNorm cannot train on one image"),
        (args.batch_size > share, f"--batch_size must be {share} or less, a process's share of the images"),
        (not 0 < args.lr < float("inf"), "--lr must be a number above 0"),
        (not 0 <= args.seed < 2**32, "--seed must be in 0..2**32-1"),
        (args.target_acc is not None and not 0 <= args.target_acc <= 1, "--target_acc is a fraction in 0..1: 0.84"),
        (args.resume not in ("latest", -1) and args.resume < 1, "--resume takes an epoch from 1 on, latest, or -1"),
        (on_cpu and args.plugin != "torch_ddp", f"-p {args.plugin} runs on CUDA and NPU only; use -p torch_ddp here"),
        (processes > gpus, f"{processes} processes but {gpus} GPUs on this machine: start at most one per GPU"),
    ]:
        if wrong:
            raise UserError(message)


# ---------------------------------------------------------------------------------------------------------- processes

def launch(seed: int) -> DistCoordinator:
    """Join the processes that the launcher started. All get the same seed."""
    try:
        colossalai.launch_from_torch(seed=seed, verbose=False)
        dist.all_reduce(torch.zeros((), device=get_current_device()))  # connects now, not in the first step
        agreement_group()
    except (OSError, RuntimeError, ValueError) as error:
        network = "MASTER_ADDR, MASTER_PORT, GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        raise UserError(f"the processes cannot start ({first_line(error)}). For the network, see {network}") from error
    torch.backends.cudnn.deterministic = True  # or a resumed run would not repeat the uninterrupted one
    return DistCoordinator()


@functools.cache
def agreement_group() -> dist.ProcessGroup:
    """A gloo group with a long timeout: one process may download or compile for longer than NCCL waits."""
    return dist.new_group(backend="gloo", timeout=timedelta(days=7))


def gather(value: object) -> list:
    """Each process's `value`, on every process, in the order of their ranks."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=agreement_group())
    return values


@contextmanager
def agreement(prefix: str, *more_errors: type[Exception]) -> Iterator[None]:
    """Turn any process's OSError or RuntimeError in this block into the same UserError on all: "{prefix}: {reason}".

    Every process must run the block, and none leaves it before all are done. `more_errors` adds types to the two. A
    UserError keeps its own text. Any other error is a bug, which ends the run with a traceback.
    """
    failure = None
    try:
        yield
    except UserError as error:
        failure = error
    except (OSError, RuntimeError, *more_errors) as error:
        failure = UserError(f"{prefix}: {first_line(error)}")
    failures = list(filter(None, gather(failure)))
    if failures:
        raise failures[0]


# --------------------------------------------------------------------------------------------------------------- data

class TrainingData(NamedTuple):
    """The training set, on the device if it fits there. Only the loader's sampler, batch size and length are used."""

    images: Tensor  # uint8, (N, 3, 32, 32)
    labels: Tensor  # int64, (N,)
    loader: DataLoader  # of indices


def prepare_data(args: argparse.Namespace, plugin: Plugin) -> TrainingData:
    images, labels = load_data(train=True, synthetic=args.synthetic)
    loader = plugin.prepare_dataloader(range(len(images)), args.batch_size, shuffle=True, drop_last=True)
    loader.sampler.seed = derive_seed(args.seed)  # prepare_dataloader does not pass its seed on to the sampler
    device = get_current_device()
    if device.type == "cuda" and 4 * images.nbytes > torch.cuda.mem_get_info()[0]:  # room for an epoch's copies
        device = "cpu"
        print_on_master("The images do not fit on the GPU: they stay in host memory, slower")
    return TrainingData(images.to(device), labels.to(device), loader)


def derive_seed(*numbers: int) -> int:
    """A 31-bit seed derived from all the numbers. torch's CPU generators use no more than 32 bits."""
    return random.Random(str(numbers)).getrandbits(31)


def epoch_batches(data: TrainingData, epoch: int, seed: int, rank: int) -> list[tuple[Tensor, Tensor]]:
    """This process's batches of (uint8 images, labels), augmented all together: faster than batch by batch."""
    data.loader.sampler.set_epoch(epoch)
    index = torch.tensor(list(data.loader.sampler), device=data.images.device)
    images = augment(data.images[index], torch.Generator().manual_seed(derive_seed(seed, epoch, rank)))
    batch_size = data.loader.batch_size
    batches = list(zip(images.split(batch_size), data.labels[index].split(batch_size)))
    return batches[: len(data.loader)]  # without an incomplete last one


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """What torchvision's Pad(4), RandomHorizontalFlip and RandomCrop(32) do, drawn per image.

    uint8 images (N, 3, 32, 32) -> the same shape and type. The generator is on the CPU, wherever the images are.
    """
    flip = torch.rand(len(images), generator=generator) < 0.5
    top, left = torch.randint(9, (2, len(images)), generator=generator)
    draws = (tensor.to(images.device) for tensor in (flip, top, left))
    chunks = zip(*(tensor.split(5000) for tensor in (images, *draws)))  # to save memory
    return torch.cat([flip_and_crop(*chunk) for chunk in chunks])


def flip_and_crop(images: Tensor, flip: Tensor, top: Tensor, left: Tensor) -> Tensor:
    """Pad (N, 3, 32, 32) by 4, mirror where `flip` (N,), and crop 32 x 32 at `top`, `left` in 0..8 (each (N,))."""
    windows = nn.functional.pad(images, (4, 4, 4, 4)).unfold(2, 32, 1).unfold(3, 32, 1)  # (N, 3, 9, 9, 32, 32), a view
    left = torch.where(flip, 8 - left, left)  # flipped after cropping, so mirror the offset
    crops = windows[torch.arange(len(images), device=images.device), :, top, left]
    return torch.where(flip[:, None, None, None], crops.flip(3), crops)


# ----------------------------------------------------------------------------------- booster, optimizer, and training

class Boosted(NamedTuple):
    """What `booster.boost` returned, and the booster."""

    booster: Booster
    model: ModelWrapper
    optimizer: OptimizerWrapper
    criterion: nn.Module
    lr_scheduler: LRScheduler


def build_booster(name: str) -> Booster:
    """The Booster for a plugin's name, with its plugin at `.plugin`. low_level_zero and gemini train in fp16."""
    if name == "low_level_zero":  # the whole model fits into one bucket, so there is nothing to overlap
        return Booster(plugin=LowLevelZeroPlugin(initial_scale=2**5, overlap_communication=False))
    if name == "gemini":  # the same: it fits into one chunk
        return Booster(plugin=GeminiPlugin(initial_scale=2**5, enable_async_reduce=False))
    ddp_plugin = CpuDDPPlugin if get_accelerator().name == "cpu" else TorchDDPPlugin
    # No broadcast: SyncBatchNorm or, without a GPU, average_buffers keeps the buffers equal
    plugin = ddp_plugin(broadcast_buffers=False, gradient_as_bucket_view=True)
    return Booster(plugin=plugin, mixed_precision="fp16" if name == "torch_ddp_fp16" else None)


def boost(args: argparse.Namespace, booster: Booster, coordinator: DistCoordinator) -> Boosted:
    model = build_model().to(get_current_device())
    if get_accelerator().name != "cpu":
        flatten_parameters(model)  # optional, for speed: into one, since the plugins loop over all of them in Python
    optimizer = build_optimizer(model, args.plugin, args.lr * coordinator.world_size)  # HybridAdam, where it compiles
    lr_scheduler = MultiStepLR(optimizer, milestones=[20, 40, 60, 80], gamma=1 / 3)
    model, optimizer, criterion, _, lr_scheduler = booster.boost(
        model, optimizer, criterion=nn.CrossEntropyLoss(), lr_scheduler=lr_scheduler
    )
    return Boosted(booster, model, optimizer, criterion, lr_scheduler)


def train_one_epoch(epoch: int, seed: int, data: TrainingData, boosted: Boosted, coordinator: DistCoordinator) -> dict:
    """Train for an epoch, whose order and augmentation depend on seed, epoch and rank. Returns what `Log` prints."""
    booster, model, optimizer, criterion, _ = boosted
    start, device = time.time(), get_current_device()
    batches = epoch_batches(data, epoch, seed, coordinator.rank)
    loss_sum = torch.zeros((), device=device)
    model.train()
    for images, labels in show_progress(batches, epoch, coordinator):
        loss = criterion(model(to_float(images.to(device))), labels.to(device))
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        loss_sum += loss.detach()  # on the device, so that no step waits for it
    average_buffers(model.unwrap())
    dist.all_reduce(loss_sum)
    steps, learning_rate = len(batches) * coordinator.world_size, optimizer.param_groups[0]["lr"]
    mean_loss = loss_sum.item() / steps  # waits for the device, so that the time is right
    speed = steps * data.loader.batch_size / (time.time() - start)
    return {"loss": mean_loss, "learning_rate": learning_rate, "images_per_second": speed}


def evaluate(boosted: Boosted, images: Tensor, labels: Tensor, coordinator: DistCoordinator) -> float:
    """The accuracy, in 0..1, of the fp32 weights that a checkpoint holds, so that eval.py finds the same."""
    share, device = slice(coordinator.rank, None, coordinator.world_size), get_current_device()
    with full_precision(boosted) as state:
        correct = count_correct(state, images[share], labels[share], device)
    correct = torch.tensor(correct, dtype=torch.float64, device=device)
    dist.all_reduce(correct)
    return correct.item() / len(labels)


# -------------------------------------------------------------------------------------------------------- checkpoints

def find_checkpoint(args: argparse.Namespace) -> int:
    """The epoch to resume from, 0 to start afresh; UserError if its files are missing, damaged or of another model."""
    folder = args.checkpoint
    if args.resume == -1 or (args.resume == "latest" and not saved_epochs(folder, PARTS)):
        return 0
    epoch = require_epoch(args.resume, folder, PARTS)
    if epoch > args.num_epochs:
        raise UserError(f"--resume {args.resume} means epoch {epoch}, beyond --num_epochs {args.num_epochs}: raise -n")
    read_model(folder / f"model_{epoch}.pth")
    check_optimizer(folder / f"optimizer_{epoch}.pth")
    match read_file(folder / f"lr_scheduler_{epoch}.pth"):
        case {"last_epoch": last_epoch, "base_lrs": [float(lr)]} if last_epoch == epoch and 0 < lr < float("inf"):
            return epoch
    raise UserError(f"{folder}/lr_scheduler_{epoch}.pth is not the MultiStepLR state of epoch {epoch}")


def agree_on_start(args: argparse.Namespace, coordinator: DistCoordinator) -> int:
    """The epoch to resume from, 0 to start afresh, the same on all processes. The master locks the folder."""
    with agreement("the checkpoint folder (-c)"):
        epoch = find_checkpoint(args)
        if coordinator.is_master() and args.interval:
            claim(args.checkpoint)
    if len(set(gather(epoch))) > 1:
        raise UserError(f"machines see different checkpoints in {args.checkpoint} (-c): they must share that folder")
    later = [saved for saved in saved_epochs(args.checkpoint, PARTS) if saved > epoch]
    if later:
        print_on_master(f"{args.checkpoint} holds later epochs {later}: -r latest would resume from {later[-1]}")
    return epoch


def resume(args: argparse.Namespace, epoch: int, boosted: Boosted, coordinator: DistCoordinator) -> None:
    """Load the checkpoint of `epoch`, unless that is 0, saved by any plugin and any number of processes."""
    if epoch == 0:
        if args.resume == "latest":
            print_on_master(f"No checkpoint in {args.checkpoint}: starting afresh")
        return
    booster, model, optimizer, _, lr_scheduler = boosted
    model_file, optimizer_file, scheduler_file = (f"{args.checkpoint}/{part}_{epoch}.pth" for part in PARTS)
    booster.load_model(model, model_file)
    booster.load_optimizer(optimizer, optimizer_file)
    booster.load_lr_scheduler(lr_scheduler, scheduler_file)
    print_on_master(f"Resuming after epoch {epoch}, from {args.checkpoint}")
    scale_learning_rate(optimizer, lr_scheduler, args.lr * coordinator.world_size)


def save_checkpoint(folder: Path, epoch: int, boosted: Boosted, coordinator: DistCoordinator) -> None:
    """Save all parts of a checkpoint. It exists as soon as its model file does, which gets its name last.

    Every process must call save_optimizer and save_model, since some plugins gather in them; the master alone writes.
    Each of these calls is agreed on before the next, or a write that fails would leave the other processes waiting.
    """
    booster, model, optimizer, _, lr_scheduler = boosted
    model_file, optimizer_file, scheduler_file = (folder / f"{part}_{epoch}.pth" for part in PARTS)
    unfinished, is_master = folder / f".model_{epoch}.pth", coordinator.is_master()
    problem = f"epoch {epoch} could not be saved in {folder} (other checkpoints are intact)"
    moments = [value for state in lr_scheduler.optimizer.state.values() for value in state.values()]
    with agreement("the weights"):
        check_finite(folder, epoch, *model.parameters(), *model.buffers(), *moments)
    with agreement(problem):
        if is_master:
            make_room([model_file, optimizer_file, scheduler_file], model)  # so that the files of two runs never mix
    with agreement(problem):
        booster.save_optimizer(optimizer, str(optimizer_file))
    with agreement(problem):
        booster.save_model(model, str(unfinished))
        booster.save_lr_scheduler(lr_scheduler, str(scheduler_file))
        if is_master:
            flush_to_disk(unfinished, optimizer_file, scheduler_file, folder)
            unfinished.rename(model_file)
            flush_to_disk(folder)


# --------------------------------------------------------------------------------------------------------------- main

def main() -> None:
    args = get_args_parser().parse_args()
    prepare_environment()
    check_args(args)

    coordinator = launch(args.seed)
    start_epoch = agree_on_start(args, coordinator)
    with agreement("CIFAR-10 ($DATA)"):  # one process of each machine downloads, and the others wait
        if coordinator.is_node_master() and not args.synthetic:
            fetch_data()
    booster = build_booster(args.plugin)
    data = prepare_data(args, booster.plugin)
    test_images, test_labels = load_data(train=False, synthetic=args.synthetic)
    log = Log(args, data, start_epoch)

    boosted = boost(args, booster, coordinator)
    complete_checkpoints(boosted)  # or a resumed run would go on from rounded weights and another loss scale
    warm_up(args, boosted)  # exactness and speed; before `resume`, since it resets BatchNorm's statistics
    resume(args, start_epoch, boosted, coordinator)
    speed_up(boosted)  # optional

    accuracy = None
    for epoch in range(start_epoch + 1, args.num_epochs + 1):
        values = train_one_epoch(epoch, args.seed, data, boosted, coordinator)
        boosted.lr_scheduler.step()
        is_due = epoch == args.num_epochs or (args.interval and epoch % args.interval == 0)
        if is_due:
            values["accuracy"] = accuracy = evaluate(boosted, test_images, test_labels, coordinator)
        check_finite(args.checkpoint, epoch, *values.values())
        log.report(epoch, values)
        if is_due and args.interval:
            save_checkpoint(args.checkpoint, epoch, boosted, coordinator)

    if accuracy is None:  # nothing was left to train
        accuracy = evaluate(boosted, test_images, test_labels, coordinator)
    print_on_master(accuracy_line(accuracy))
    if args.target_acc is not None and accuracy < args.target_acc:
        raise RunFailed(f"test accuracy {accuracy:.4f} is below --target_acc {args.target_acc}")


# ====================================================================================================================
# The example ends here. What follows keeps runs safe, and works around ColossalAI 0.5.0 to make it bit-exact on resume,
# and fast. The workarounds say what the library does, and what goes wrong without them.
# ====================================================================================================================


# -------------------------------------------------------------------------------------------------------- environment

LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR")
TASK_COUNTS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")  # of srun, Open MPI, and MPICH or Intel MPI


def prepare_environment() -> None:
    """See that launch_from_torch finds the variables that it reads. Without a launcher, set them for one process.

    UserError where it would fail or hang, or where several tasks would each start a run of their own.
    """
    if torch.__version__ < (2, 4):  # ColossalAI allows 2.2, whose weights_only=True refuses MultiStepLR's Counter
        raise UserError(f"torch {torch.__version__} cannot read a scheduler's file safely: install torch 2.4 or newer")
    start = "start with torchrun or colossalai run; under Slurm with srun torchrun"
    if not any(os.environ.get(name) for name in LAUNCHER_VARIABLES[:4]):
        for name in TASK_COUNTS:
            if os.environ.get(name, "1") != "1":
                raise UserError(f"{name} is {os.environ[name]}, but these tasks would not work together: {start}")
        os.environ.update(zip(LAUNCHER_VARIABLES, ("0", "0", "1", "1", str(get_free_port()), "127.0.0.1")))
    os.environ.setdefault("LOCAL_WORLD_SIZE", "1")  # launch_from_torch does without
    for name in LAUNCHER_VARIABLES:
        value = os.environ.get(name, "")
        if not (value.isdecimal() or value and name == "MASTER_ADDR"):
            raise UserError(f"{name} is {value!r}, so the launcher's environment is incomplete: {start}")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank >= world_size:
        raise UserError(f"RANK is {rank}, but must be below WORLD_SIZE, which is {world_size}: {start}")


def build_optimizer(model: nn.Module, plugin: str, lr: float) -> torch.optim.Optimizer:
    """HybridAdam; AdamW, the same update at weight decay 0, on a CPU or where a process cannot compile the kernels."""
    if get_accelerator().name != "cpu":
        try:  # no nvcc, one of another CUDA version, no compiler: each raises its own type of error
            with agreement("HybridAdam's kernels cannot be compiled", Exception):
                return HybridAdam(model.parameters(), lr=lr)
        except UserError as problem:
            toolkit = f"install the CUDA {torch.version.cuda} toolkit, with nvcc on the PATH"
            if plugin == "gemini":
                raise UserError(f"{problem}. gemini works with no other optimizer: {toolkit}") from None
            print_on_master(f"{problem}. AdamW instead, the same update, slower; or {toolkit}")
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0, fused=True)


class CpuDDPPlugin(TorchDDPPlugin):
    """TorchDDPPlugin without its conversion to SyncBatchNorm, which torch has for GPUs only."""

    def configure(self, model, optimizer=None, criterion=None, dataloader=None, lr_scheduler=None):
        return TorchDDPModel(model, **self.ddp_kwargs), OptimizerWrapper(optimizer), criterion, dataloader, lr_scheduler


# -------------------------------------------------------------------------------------------------- logs and progress

def print_on_master(line: str) -> None:
    if dist.get_rank() == 0:
        print_line(line)


class Log:
    """What a run prints about its settings and epochs, and writes for TensorBoard where that is asked for."""

    def __init__(self, args: argparse.Namespace, data: TrainingData, start_epoch: int) -> None:
        self.num_epochs, self.writer = args.num_epochs, None
        world, device = dist.get_world_size(), get_current_device()
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
        print_on_master(
            f"{args.plugin} ({'fp32' if args.plugin == 'torch_ddp' else 'fp16'}), {world} process(es) on {name}, "
            f"batch {world} x {args.batch_size} = {world * args.batch_size}, learning rate {world} x {args.lr:g} = "
            f"{world * args.lr:g}, {len(data.loader) * args.batch_size * world:,} images per epoch, seed {args.seed}, "
            f"colossalai {colossalai.__version__}, torch {torch.__version__}"
        )
        with agreement("--tensorboard"):
            if args.tensorboard and dist.get_rank() == 0:
                try:
                    from torch.utils.tensorboard import SummaryWriter
                except ImportError:
                    raise UserError("--tensorboard needs the tensorboard package: pip install tensorboard") from None
                self.writer = SummaryWriter(args.tensorboard, purge_step=start_epoch + 1)

    def report(self, epoch: int, values: dict[str, float]) -> None:
        """Print the epoch's line, and write its values for TensorBoard."""
        line = "loss {loss:.4f}, learning rate {learning_rate:g}, {images_per_second:,.0f} images/s"
        line += ", test accuracy {accuracy:.2%}" if "accuracy" in values else ""
        print_on_master(f"Epoch [{epoch}/{self.num_epochs}] {line.format(**values)}")
        if self.writer:
            try:
                for name, value in values.items():
                    self.writer.add_scalar(name, value, epoch)
                self.writer.flush()
            except OSError as error:  # say a full disk: curves are no reason to lose a training
                print_line(f"--tensorboard: {first_line(error)}; training goes on without it")
                self.writer = None


def show_progress(batches: list, epoch: int, coordinator: DistCoordinator) -> Iterator:
    """Yield the batches, with a bar on a terminal, or a line every half minute in a log."""
    bar = tqdm(batches, f"Epoch {epoch}", leave=False, disable=not (sys.stderr.isatty() and coordinator.is_master()))
    start = last = time.monotonic()
    for step, batch in enumerate(bar):
        if bar.disable and (now := time.monotonic()) - last > 30:
            last, images = now, step * len(batch[1]) * coordinator.world_size
            print_on_master(f"Epoch {epoch}: step {step} of {len(batches)}, {images / (now - start):,.0f} images/s")
        yield batch


# ------------------------------------------------------------------------------------------------------- exact resume

def average_buffers(model: nn.Module) -> None:
    """Average BatchNorm's running statistics over the processes.

    low_level_zero, gemini and CpuDDPPlugin leave each process its own, and the master's are saved. Without this, the
    accuracy printed would depend on which process counts an image, and a resumed run would differ.
    """
    for buffer in filter(torch.is_floating_point, model.buffers()):
        mean = buffer.float() / dist.get_world_size()
        dist.all_reduce(mean)
        buffer.copy_(mean)


@contextmanager
def full_precision(boosted: Boosted) -> Iterator[dict[str, Tensor]]:
    """Hold the model in fp32 while it is saved, loaded or evaluated. Yields its state dict, on every process.

    low_level_zero saves and loads fp16 weights, but updates fp32 masters, sharded over the processes: here the gathered
    masters take the weights' place, and load_model copies what it loads into them. gemini uses its fp32 chunk. Both
    keep BatchNorm's statistics in fp16, here fp32. Without this, a resumed run starts from rounded weights.
    """
    model, optimizer, module = boosted.model, boosted.optimizer, boosted.model.unwrap()
    fp32 = {buffer: buffer.float() for buffer in module.buffers() if buffer.is_floating_point()}
    if isinstance(optimizer, LowLevelZeroOptimizer):
        for param in module.parameters():
            shard = optimizer.get_working_to_master_map()[id(param)]
            padded = shard.new_empty(shard.numel() * dist.get_world_size())
            dist.all_gather_into_tensor(padded, shard)
            fp32[param] = padded[: param.numel()].view_as(param)
    memory = {tensor: tensor.data for tensor in fp32}
    try:
        for tensor, values in fp32.items():
            tensor.data = values
        yield model.state_dict(only_rank_0=False) if isinstance(model, GeminiDDP) else module.state_dict()
    finally:
        for tensor, own in memory.items():
            tensor.data = own.copy_(tensor.data)  # in the same memory as before, of which the plugins hold views


def complete_checkpoints(boosted: Boosted) -> None:
    """Let the booster save and load, in the plugins' own files, all that a resumed run needs.

    The plugins' files lack the loss scale and fp32 weights (see `full_precision`). HybridAdam and AdamW each save
    settings that the other one lacks. And gemini cannot load HybridAdam's steps: ints there, tensors here.
    """
    booster, model, optimizer, _, _ = boosted
    shapes, scaler = getattr(model.unwrap(), "flat_shapes", None), find_scaler(optimizer)
    stock_state_dict, stock_load_state_dict = optimizer.state_dict, optimizer.load_state_dict
    counters = [name for name in ("_growth_step", "_hysteresis_step") if hasattr(scaler, name)]

    def scaler_state() -> dict:
        return {**scaler.state_dict(), **{name: vars(scaler)[name] for name in counters}}

    def state_dict(*args, **kwargs) -> dict:
        state = stock_state_dict(*args, **kwargs)
        state = split_state(state, shapes) if shapes else state
        return {**state, "grad_scaler": scaler_state()} if scaler else state

    def load_state_dict(saved: dict) -> None:
        [group] = saved["param_groups"]
        states = {i: {**state, "step": torch.tensor(float(state["step"]))} for i, state in saved["state"].items()}
        state = {"state": states, "param_groups": [{**optimizer.param_groups[0], **group}]}
        stock_load_state_dict(join_state(state, shapes) if shapes else state)
        if scaler and saved.get("grad_scaler", {}).keys() == scaler_state().keys():
            scaler.load_state_dict(saved["grad_scaler"])
            vars(scaler).update({name: saved["grad_scaler"][name] for name in counters})
        elif scaler:
            print_on_master("The checkpoint has no loss scale of this plugin's kind: starting with the initial one")

    optimizer.state_dict, optimizer.load_state_dict = state_dict, load_state_dict
    booster.save_model = full_precision(boosted)(booster.save_model)
    booster.load_model = full_precision(boosted)(booster.load_model)
    if shapes and isinstance(model, GeminiDDP):
        model._state_dict_hooks = model.module._state_dict_hooks
        model._load_state_dict_pre_hooks = model.module._load_state_dict_pre_hooks


def scale_learning_rate(optimizer: OptimizerWrapper, lr_scheduler: LRScheduler, lr: float) -> None:
    """After a resume, scale the learning rate to this run's, whose --lr or number of processes may be another.

    It comes with the optimizer's file, and loading the scheduler does not touch it: the old one would stay.
    """
    [group] = optimizer.param_groups
    old = lr_scheduler.base_lrs[0]
    if old != lr:
        lr_scheduler.base_lrs, group["initial_lr"], group["lr"] = [lr], lr, group["lr"] * lr / old
        print_on_master(f"Learning rate scaled: the checkpoint's run started with {old:g}, this one with {lr:g}")


def find_scaler(optimizer: OptimizerWrapper) -> object | None:
    """The loss scaler; None for torch_ddp."""
    for name in ("mixed_precision_mixin", "mix_precision_mixin"):  # low_level_zero's and gemini's
        if hasattr(optimizer, name):
            return getattr(optimizer, name).grad_scaler
    return getattr(optimizer, "scaler", None)  # torch_ddp_fp16's


# ---------------------------------------------------------------------------------------------------- safe checkpoints

def claim(folder: Path) -> None:
    """Make the checkpoint folder, see that it can be written, and keep other runs out until this process ends."""
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()
    lock(folder, wait=False)
    for path in folder.glob(".model_*.pth"):
        if path.stem.removeprefix(".model_").isdecimal():  # left by a run that was killed while it saved
            path.unlink()


class RunFailed(UserError):
    """Training diverged, or ended below --target_acc."""

    exit_code = 1


def check_finite(folder: Path, epoch: int, *values: float | Tensor) -> None:
    """Raise RunFailed unless the values that this process is about to report or save are finite."""
    if not all(torch.as_tensor(value).isfinite().all() for value in values):
        good = [saved for saved in saved_epochs(folder, PARTS) if saved < epoch]
        advice = f"lower --lr and go on with -r {good[-1]}" if good else "start again with a lower --lr"
        raise RunFailed(f"the run diverged: the loss or a weight of epoch {epoch} is not finite; {advice}")


def make_room(paths: list[Path], model: nn.Module) -> None:
    """Remove an epoch's files, the model first: without it there is no checkpoint. OSError if new ones will not fit."""
    for path in paths:
        path.unlink(missing_ok=True)
        flush_to_disk(path.parent)
    needed = 3 * 4 * sum(param.numel() for param in model.parameters())  # weights and Adam's two moments, in fp32
    if shutil.disk_usage(paths[0].parent).free < needed:  # torch.save's own error does not say so
        raise OSError("the disk is full")


def flush_to_disk(*paths: Path) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):  # of file systems without fsync
                raise
        finally:
            os.close(descriptor)


# -------------------------------------------------------------------------------------------------------------- speed

def flatten_parameters(model: nn.Module) -> None:
    """Replace a model's parameters by a single one, `flat`, of which its layers get views before each forward pass.

    The plugins and HybridAdam do up to some dozen things in Python for each parameter in each step, and the GPU waits
    for them: ResNet-18 has 62. They shard, reduce and update the one as they do the many. Files hold the many.
    """
    names, params = zip(*model.named_parameters())
    owners, shapes = [name.rpartition(".")[::2] for name in names], [param.shape for param in params]
    for path, attribute in owners:
        delattr(model.get_submodule(path), attribute)
        model.get_submodule(path).affine = False  # TorchDDPPlugin converts BatchNorm, and would copy its parameters
    model.register_parameter("flat", nn.Parameter(torch.cat([param.detach().flatten() for param in params])))
    model.flat_shapes, plain_forward = shapes, model.forward

    def forward(images: Tensor) -> Tensor:
        for (path, attribute), view in zip(owners, split_flat(model.flat, shapes)):
            vars(model.get_submodule(path))[attribute] = view  # not setattr: SyncBatchNorm takes parameters only
        return plain_forward(images)

    def split(model: nn.Module, state: dict, *args) -> None:
        if len(flat := state.pop("flat")):  # in gemini, it is empty on other processes than the master
            state.update(zip(names, split_flat(flat, shapes)))

    def join(state: dict, *args) -> None:
        state["flat"] = torch.cat([state.pop(name).flatten() for name in names])

    model.forward = forward
    model._register_state_dict_hook(split)
    model._register_load_state_dict_pre_hook(join)


def split_flat(flat: Tensor, shapes: list[torch.Size]) -> list[Tensor]:
    """Views of a flat tensor, of these shapes."""
    return [part.view(shape) for part, shape in zip(flat.split([shape.numel() for shape in shapes]), shapes)]


def split_state(state: dict, shapes: list[torch.Size]) -> dict:
    """Turn an optimizer's state dict of the flat parameter into that of the parameters which it replaced."""
    [group], flat = state["param_groups"], state["state"].get(0, {})  # empty on a process that saves nothing
    columns = {name: [part.clone() for part in split_flat(flat[name], shapes)] for name in flat if name != "step"}
    columns |= {"step": [torch.tensor(float(flat["step"])) for _ in shapes]} if flat else {}
    states = [dict(zip(columns, row)) for row in zip(*columns.values())]
    return {"state": dict(enumerate(states)), "param_groups": [{**group, "params": list(range(len(shapes)))}]}


def join_state(state: dict, shapes: list[torch.Size]) -> dict:
    """The inverse of `split_state`."""
    [group], states = state["param_groups"], [state["state"][i] for i in range(len(shapes))]
    flat = {name: torch.cat([state[name].flatten() for state in states]) for name in states[0] if name != "step"}
    return {"state": {0: {**flat, "step": states[0]["step"]}}, "param_groups": [{**group, "params": [0]}]}


def speed_up(boosted: Boosted) -> None:
    """Cut what Python does in each step besides the model's own work."""
    if isinstance(scaler := find_scaler(boosted.optimizer), DynamicGradScaler):
        for name in ("_scale", "_min_scale", "_max_scale"):  # on the GPU, reading it would make each step wait twice
            vars(scaler)[name] = vars(scaler)[name].cpu()
    torch.autograd.set_multithreading_enabled(False)  # a second thread would contend for the GIL in hooks
    gc.collect()
    gc.freeze()  # or each of the many collections would visit what the imports created


def warm_up(args: argparse.Namespace, boosted: Boosted) -> None:
    """On a GPU, let the model replay its forward and backward passes as CUDA graphs; on a CPU, settle DDP's buckets.

    DDP arranges the buckets anew after its first step, and their layout decides in which order three or more processes
    sum a gradient. Without this, the first step after a resume would differ from the uninterrupted run's.
    """
    module = boosted.model.unwrap()
    if get_accelerator().name == "cuda":
        try:
            with agreement("No CUDA graph, so slower"):
                replay = capture_forward_and_backward(boosted.model, args)
            module.forward = replay  # always in training mode and at this batch size: evaluate builds its own model
        except UserError as problem:
            print_on_master(str(problem))
    if get_accelerator().name == "cpu":
        for _ in range(2):  # the second one uses the new buckets
            boosted.model(torch.zeros(2, 3, 32, 32)).sum().backward()
        boosted.model.zero_grad()
    for layer in module.modules():
        if isinstance(layer, nn.modules.batchnorm._NormBase):
            layer.reset_running_stats()


def capture_forward_and_backward(model: ModelWrapper, args: argparse.Namespace) -> Callable[[Tensor], Tensor]:
    """A forward pass that replays itself, and then its backward pass, as CUDA graphs.

    A step of this model launches hundreds of small kernels, and gemini runs hooks around each operator; a graph is one
    launch, and one operator. The plugins see its gradients as usual.
    """
    module, is_gemini = model.unwrap(), isinstance(model, GeminiDDP)
    names, params = zip(*module.named_parameters())
    if is_gemini and not all(chunk.keep_gathered for chunk in model.chunk_manager.get_chunks(params)):
        raise RuntimeError("gemini does not keep all parameters of this model gathered")
    # The same memory under other names: on the parameters themselves, the capture would run the plugins' hooks
    aliases = [param.detach().as_subclass(Tensor).requires_grad_() for param in params]
    sample = torch.zeros(args.batch_size, 3, 32, 32, dtype=aliases[0].dtype, device=aliases[0].device)
    plain = copy.copy(module)  # shares the layers, and keeps the original forward

    def run_plain(images: Tensor, *weights: Tensor) -> Tensor:
        return torch.func.functional_call(plain, dict(zip(names, weights)), (images,))

    # autocast's cache would keep what the warm-up cast, and the graph would never cast again
    with get_accelerator().autocast(enabled=args.plugin == "torch_ddp_fp16", cache_enabled=False):
        graphed = torch.cuda.make_graphed_callables(run_plain, (sample, *aliases))

    def replay(images: Tensor) -> Tensor:
        if is_gemini:  # so that the hooks of its parameters run before and after the graph
            return torch.overrides.handle_torch_function(graphed, params, images, *params)
        return graphed(images, *params)

    return replay


# -------------------------------------------------------------------------------------------------------- entry point

@record  # so that torchrun's report ends with the traceback of the process that failed first
def run() -> int:
    """`main`, and the exit status. An error that the user can fix is one line, printed once."""
    try:
        main()
        gather(None)  # no process ends while another one still needs it
    except UserError as error:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(5)  # local rank 0 prints the same and exits, and the launcher then ends this process
        print(f"train.py: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a process at once, without a traceback from each
    status = 1
    try:
        status = run() or 0  # None after --help
    except Exception:
        traceback.print_exc()
    with suppress(OSError):
        print(end="", flush=True)  # sys.stdout itself is None where the caller closed it
    os._exit(status)  # the usual teardown of NCCL and gloo can hang on CUDA graphs or lost processes
