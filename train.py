"""Train ResNet-18 on CIFAR-10 from scratch through ColossalAI's Booster.

Without a GPU, two processes on a small generated set:
    colossalai run --nproc_per_node 2 train.py -c ./ckpt-synthetic --synthetic -n 3
One GPU:
    python train.py -c ./ckpt-fp32
Two GPUs, with a plugin of your choice, going on from the newest checkpoint if there is one:
    colossalai run --nproc_per_node 2 train.py -c ./ckpt-gemini -p gemini -r latest
Two machines with eight GPUs each (the same on both, but for --node_rank):
    torchrun --nnodes 2 --node_rank 0 --nproc_per_node 8 --master_addr HOST --master_port 29500 train.py -c /nfs/ckpt

The file reads as the run goes, and `main` at its end is the list: arguments, launch, data, boost, resume, epochs, gate.
"""

import argparse
import copy
import gc
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.optim.lr_scheduler import LRScheduler, MultiStepLR
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils.data import DataLoader
from tqdm import tqdm

warnings.filterwarnings("ignore", module="colossalai")  # on import it recommends optional packages, in every process
warnings.filterwarnings("ignore", module="torch.autograd.graph")  # newer torch on streams, while a graph is captured
import colossalai
from colossalai.accelerator import get_accelerator
from colossalai.booster import Booster
from colossalai.booster.plugin import GeminiPlugin, LowLevelZeroPlugin, Plugin, TorchDDPPlugin
from colossalai.booster.plugin.torch_ddp_plugin import TorchDDPModel
from colossalai.cluster import DistCoordinator
from colossalai.interface import ModelWrapper, OptimizerWrapper
from colossalai.nn.optimizer import HybridAdam
from colossalai.utils import get_current_device
from colossalai.zero import GeminiDDP, LowLevelZeroOptimizer

from eval import SYNTHETIC_TRAIN_IMAGES, TRAIN_IMAGES, UserError, accuracy_line, build_model, check_optimizer
from eval import count_correct, epoch_or_latest, fetch_data, load_data, publish, raise_user_error, read_file, read_model
from eval import require_epoch, saved_epochs, to_float

PLUGINS = ("torch_ddp", "torch_ddp_fp16", "low_level_zero", "gemini")
PARTS = ("model", "optimizer", "lr_scheduler")  # a checkpoint's files are {part}_{epoch}.pth,
SCALER = "grad_scaler"  # and grad_scaler_{epoch}.pth where the plugin scales the loss
COUNTERS = ("_growth_step", "_hysteresis_step")  # of ColossalAI's DynamicGradScaler


# --------------------------------------------------------------------------------------------------------- arguments

def get_args_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Train ResNet-18 on CIFAR-10 through ColossalAI's Booster.")
    parser.error = raise_user_error
    parser.add_argument("-p", "--plugin", choices=PLUGINS, default="torch_ddp", help="how to train (torch_ddp)")
    parser.add_argument(
        "-r", "--resume", type=epoch_or_latest, default=-1, help="epoch to resume from, or 'latest'; -1: afresh (-1)"
    )
    parser.add_argument("-c", "--checkpoint", type=Path, default="./checkpoint", help="where to save (./checkpoint)")
    parser.add_argument("-i", "--interval", type=int, default=5, help="epochs between checkpoints; 0: none (5)")
    parser.add_argument("--target_acc", type=float, help="fraction in 0..1; ending below it is a failure (none)")
    parser.add_argument("-n", "--num_epochs", type=int, default=80, help="total epochs (80)")
    parser.add_argument("--batch_size", type=int, default=100, help="images per process and step (100)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate per process, see README (1e-3)")
    parser.add_argument("--seed", type=int, default=42, help="weights, order and augmentation follow from it (42)")
    parser.add_argument("--synthetic", action="store_true", help="a small generated set instead of CIFAR-10")
    parser.add_argument("--tensorboard", type=Path, metavar="DIR", help="also write curves there, for TensorBoard")
    return parser


def check_args(args: argparse.Namespace) -> None:
    """Raise UserError for what is known to fail before any work is done; touch nothing."""
    on_cpu, launched = get_accelerator().name == "cpu", os.environ if "LOCAL_RANK" in os.environ else {}
    processes, world_size = (int(launched.get(name, 1)) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    gpus = processes if on_cpu else get_accelerator().device_count()
    share = (SYNTHETIC_TRAIN_IMAGES if args.synthetic else TRAIN_IMAGES) // world_size
    not_here = f"-p {args.plugin} needs a GPU, since ColossalAI runs it on CUDA and NPU only; use -p torch_ddp here"
    for wrong, message in [
        (args.interval < 0, "--interval must be 0 or more"),
        (args.num_epochs < 1, "--num_epochs must be 1 or more"),
        (not 1 <= args.batch_size <= share, f"--batch_size must be in 1..{share}, a process's share of the images"),
        (not 0 < args.lr < float("inf"), "--lr must be a number above 0"),
        (not 0 <= args.seed < 2**32, "--seed must be in 0..2**32-1"),
        (args.target_acc is not None and not 0 <= args.target_acc <= 1, "--target_acc is a fraction in 0..1: 0.84"),
        (args.resume not in ("latest", -1) and args.resume < 1, "--resume takes an epoch from 1 on, latest, or -1"),
        (on_cpu and args.plugin != "torch_ddp", not_here),
        (processes > gpus, f"{processes} processes but {gpus} GPUs on this machine: start at most one per GPU"),
    ]:
        if wrong:
            raise UserError(message)
    if args.tensorboard:
        try:
            import torch.utils.tensorboard
        except ImportError:
            raise UserError("--tensorboard needs the tensorboard package: pip install tensorboard") from None
    if os.environ.get("RANK", "0") == "0":  # only this process writes
        if args.interval:
            check_writable(args.checkpoint, "-c")
        if args.tensorboard:
            check_writable(args.tensorboard, "--tensorboard")


def check_writable(folder: Path, option: str) -> None:
    """Raise UserError unless files can be made in `folder`, or in as much of its path as there is."""
    paths = folder.absolute(), *folder.absolute().parents
    try:
        tempfile.TemporaryFile(dir=next(path for path in paths if path.exists() or path.is_symlink())).close()
    except OSError as error:
        raise UserError(f"nothing can be written to {folder}: {error.strerror}; see {option}") from error


# ------------------------------------------------------------------------------------------------------------ launch

def launch(seed: int) -> DistCoordinator:
    """Join the processes that the launcher started, or be the only one where there is no launcher."""
    if "LOCAL_RANK" not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    colossalai.launch_from_torch(seed=seed, verbose=False)
    torch.backends.cudnn.deterministic = True  # or a resumed run would not repeat the uninterrupted one
    return DistCoordinator()


def gather(value: object) -> list:
    """Each process's `value`. A UserError among them is raised on all processes."""
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, value)
    for given in everywhere:
        if isinstance(given, UserError):
            raise given
    return everywhere


def first_reason(reason: str | None) -> str | None:
    """Of the reasons that processes give for a failure, the first; None if all give None. The same on all of them."""
    return next(filter(None, gather(reason)), None)


def log_setup(args: argparse.Namespace, coordinator: DistCoordinator, images_per_epoch: int) -> None:
    world, device = coordinator.world_size, get_current_device()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    coordinator.print_on_master(
        f"{args.plugin} ({'fp32' if args.plugin == 'torch_ddp' else 'fp16'}), {world} process(es) on {name}, "
        f"batch {world} x {args.batch_size} = {world * args.batch_size}, learning rate {world} x {args.lr:g} = "
        f"{world * args.lr:g}, {images_per_epoch:,} images per epoch, seed {args.seed}, "
        f"colossalai {colossalai.__version__}, torch {torch.__version__}"
    )


# -------------------------------------------------------------------------------------------------------------- data

def fetch_data_once_per_machine(coordinator: DistCoordinator) -> None:
    """The first process of each machine fetches CIFAR-10, while the others wait for as long as that takes."""
    patient = dist.new_group(backend="gloo", timeout=timedelta(days=7))
    if coordinator.local_rank == 0:
        fetch_data()
    try:
        dist.barrier(patient)
    except RuntimeError:  # the processes of the machine where it failed do not get as far as saying this
        raise UserError("another machine failed while CIFAR-10 was fetched, and its log says why") from None


def build_dataloader(args: argparse.Namespace, plugin: Plugin, coordinator: DistCoordinator) -> DataLoader:
    """Batches of (uint8 images, labels) for this process, from the device itself where the data set fits there."""
    images, labels = load_data(train=True, synthetic=args.synthetic)
    device = get_current_device()
    if device.type != "cuda" or 2 * images.nbytes < torch.cuda.mem_get_info()[0]:
        images, labels = images.to(device), labels.to(device)
    else:
        coordinator.print_on_master("The images do not fit on the device: batches come from the host, slower")

    def take(batch: list[int]) -> tuple[Tensor, Tensor]:
        index = torch.tensor(batch).to(images.device, non_blocking=True)
        return images[index], labels[index]

    numbers = range(len(images))  # the loader deals these out; no image is touched before `take` makes a whole batch
    loader = plugin.prepare_dataloader(numbers, args.batch_size, shuffle=True, drop_last=True, collate_fn=take)
    loader.sampler.seed = draw_seed(args.seed)  # prepare_dataloader gives its seed to worker processes only
    return loader


def draw_seed(*numbers: int) -> int:
    """A seed of 31 bits that follows from all the numbers: on a CPU, torch's generators look at no more than 32."""
    return random.Random(str(numbers)).getrandbits(31)


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Pad(4), RandomHorizontalFlip, RandomCrop(32) and ToTensor, drawn for each image by itself.

    uint8 images (N, 3, 32, 32) -> float32 in 0..1 of the same shape. The generator is of the images' device.
    """
    n, device = len(images), images.device
    flip = torch.rand(n, generator=generator, device=device) < 0.5
    top, left = torch.randint(9, (2, n), generator=generator, device=device)
    return to_float(flip_and_crop(images, flip, top, left))


def flip_and_crop(images: Tensor, flip: Tensor, top: Tensor, left: Tensor) -> Tensor:
    """Pad (N, 3, 32, 32) by 4, mirror where `flip` (N,), and cut 32 x 32 out at `top`, `left` in 0..8 (each (N,))."""
    rows = top[:, None] + torch.arange(32, device=images.device)
    columns = left[:, None] + torch.arange(32, device=images.device)
    columns = torch.where(flip[:, None], 39 - columns, columns)
    index = (40 * rows[:, :, None] + columns[:, None, :]).view(-1, 1, 32 * 32)
    padded = F.pad(images, (4, 4, 4, 4)).view(-1, 3, 40 * 40)
    return padded.gather(2, index.expand(-1, 3, -1)).view_as(images)


# -------------------------------------------------------------- plugin, model, optimizer, scheduler, and boosting them

class CpuDDPPlugin(TorchDDPPlugin):
    """TorchDDPPlugin without its SyncBatchNorm, which torch has for GPUs only."""

    def configure(self, model, optimizer=None, criterion=None, dataloader=None, lr_scheduler=None):
        return TorchDDPModel(model, **self.ddp_kwargs), OptimizerWrapper(optimizer), criterion, dataloader, lr_scheduler


def build_booster(name: str) -> Booster:
    """The Booster for a plugin's name. Its plugin is at `booster.plugin`."""
    if name in ("torch_ddp", "torch_ddp_fp16"):
        plugin = CpuDDPPlugin() if get_accelerator().name == "cpu" else TorchDDPPlugin()
        return Booster(plugin=plugin, mixed_precision="fp16" if name == "torch_ddp_fp16" else None)
    plugin_class = LowLevelZeroPlugin if name == "low_level_zero" else GeminiPlugin
    return Booster(plugin=plugin_class(initial_scale=2**5))


def build_optimizer(model: nn.Module, plugin: str, lr: float, coordinator: DistCoordinator) -> torch.optim.Optimizer:
    """HybridAdam, or AdamW, the same update at weight decay 0, where a process cannot compile HybridAdam's kernels."""
    if get_accelerator().name != "cpu":
        reason = None
        try:
            optimizer = HybridAdam(model.parameters(), lr=lr)
        except Exception as error:  # no nvcc, one of another CUDA version, no compiler: each raises its own kind
            reason = first_line(error)[:200]
        reason = first_reason(reason)
        if not reason:
            return optimizer
        problem = f"HybridAdam's kernels could not be compiled ({reason})"
        toolkit = f"install the CUDA {torch.version.cuda} toolkit, with nvcc on the PATH"
        if plugin == "gemini":
            raise UserError(f"{problem}, and gemini works with no other optimizer: {toolkit}")
        coordinator.print_on_master(f"{problem}: AdamW instead, the same update, slower; or {toolkit}")
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0)


def first_line(error: Exception) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]


class Boosted(NamedTuple):
    """What `booster.boost` returned, and the booster."""

    booster: Booster
    model: ModelWrapper
    optimizer: OptimizerWrapper
    criterion: nn.Module
    lr_scheduler: LRScheduler


@contextmanager
def unchanged_buffers(model: nn.Module) -> Iterator[None]:
    """Restore BatchNorm's statistics afterwards."""
    kept = [buffer.clone() for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffer, value in zip(model.buffers(), kept):
            buffer.copy_(value)


def capture_forward_and_backward(model: ModelWrapper, batch_size: int, autocast: bool) -> None:
    """Let the boosted model replay its forward and backward passes as CUDA graphs.

    At this model's size a step is bound by launching small kernels, and in gemini by hooks around each operator; a
    graph is one launch, and one operator. Its gradients reach the plugins as any other operator's.
    """
    module = model.unwrap()
    plain = copy.copy(module)  # with the same layers; its forward stays as it is
    names, params = zip(*module.named_parameters())
    if isinstance(model, GeminiDDP) and not all(c.keep_gathered for c in model.chunk_manager.get_chunks(params)):
        raise RuntimeError("gemini moves the parameters of a model as large as this one")
    # The same memory under other names: on the parameters themselves, the capture would run the plugins' hooks.
    aliases = [param.detach().as_subclass(Tensor).requires_grad_() for param in params]
    sample = torch.zeros(batch_size, 3, 32, 32, dtype=aliases[0].dtype, device=aliases[0].device)

    def eager(images: Tensor, *weights: Tensor) -> Tensor:
        return torch.func.functional_call(plain, dict(zip(names, weights)), (images,))

    # autocast's cache would keep what the warm-up cast, and the graph never cast again
    with unchanged_buffers(module), get_accelerator().autocast(enabled=autocast, cache_enabled=False):
        graphed = torch.cuda.make_graphed_callables(eager, (sample, *aliases))

    def replay(images: Tensor) -> Tensor:
        if not module.training or images.shape != sample.shape:
            return plain(images)
        if has_torch_function(params):  # gemini's parameters, which run its hooks before and after an operator
            return handle_torch_function(graphed, params, images, *params)
        return graphed(images, *params)

    module.forward = replay


def batch_zero_checks(optimizer: LowLevelZeroOptimizer) -> None:
    """Let LowLevelZeroOptimizer.step check all gradients at once, not each of the 62 with a wait for the device."""

    def check_local_overflow() -> bool:
        grads = [grad.flatten() for grad in optimizer.get_working_grads_by_group_id(0)]
        return not bool(torch.cat(grads).isfinite().all())

    optimizer.mixed_precision_mixin.check_local_overflow = check_local_overflow
    optimizer._compute_grad_norm = lambda *args, **kwargs: 0.0  # as slow, and read for clipping only, which is off


def settle_ddp_buckets(model: ModelWrapper, optimizer: OptimizerWrapper, batch_size: int) -> None:
    """Run a step that changes nothing, since DDP lays its buckets anew after the first.

    With three processes or more their layout decides in which order gradients are summed, so that the first step of a
    resumed run would differ from the uninterrupted one.
    """
    with unchanged_buffers(model):
        model(torch.zeros(batch_size, 3, 32, 32, device=get_current_device())).sum().backward()
    optimizer.zero_grad()


def boost(args: argparse.Namespace, booster: Booster, coordinator: DistCoordinator) -> Boosted:
    model = build_model().to(get_current_device())
    optimizer = build_optimizer(model, args.plugin, args.lr * coordinator.world_size, coordinator)
    lr_scheduler = MultiStepLR(optimizer, milestones=[20, 40, 60, 80], gamma=1 / 3)
    model, optimizer, criterion, _, lr_scheduler = booster.boost(
        model, optimizer, criterion=nn.CrossEntropyLoss(), lr_scheduler=lr_scheduler
    )
    if get_accelerator().name == "cuda":
        reason = None
        try:
            capture_forward_and_backward(model, args.batch_size, autocast=args.plugin == "torch_ddp_fp16")
        except RuntimeError as error:
            reason = first_line(error)
        reason = first_reason(reason)
        if reason:
            vars(model.unwrap()).pop("forward", None)  # back to the class's own
            coordinator.print_on_master(f"No CUDA graph, so slower: {reason}")
    if isinstance(optimizer, LowLevelZeroOptimizer):
        batch_zero_checks(optimizer)
    elif args.plugin != "gemini":
        settle_ddp_buckets(model, optimizer, args.batch_size)
    return Boosted(booster, model, optimizer, criterion, lr_scheduler)


# ------------------------------------------------------------------------------------------------------- checkpoints

@contextmanager
def full_precision(boosted: Boosted) -> Iterator[dict[str, Tensor]]:
    """Let save_model write, and load_model read, the weights in fp32. Yields ResNet-18's state dict, on every rank.

    DDP's weights are fp32 anyway. low_level_zero's model holds fp16 copies, and each rank a slice of the fp32 masters:
    the gathered masters take the copies' place. gemini rounds to `model.mixed_precision` what it saves and loads.
    Both keep BatchNorm's statistics in fp16, which are widened here.
    """
    model, optimizer, module = boosted.model, boosted.optimizer, boosted.model.unwrap()
    full = {buffer: buffer.float() for buffer in module.buffers() if buffer.is_floating_point()}
    if isinstance(optimizer, LowLevelZeroOptimizer):
        for param in module.parameters():
            shard = optimizer.get_working_to_master_map()[id(param)]
            padded = shard.new_empty(shard.numel() * dist.get_world_size())
            dist.all_gather_into_tensor(padded, shard)
            full[param] = padded[: param.numel()].view_as(param)
    rounded = {tensor: tensor.data for tensor in full}
    is_gemini, rounds_to = isinstance(model, GeminiDDP), getattr(model, "mixed_precision", None)
    try:
        for tensor, values in full.items():
            tensor.data = values
        if is_gemini:
            model.mixed_precision = torch.float32
        yield model.state_dict(only_rank_0=False) if is_gemini else module.state_dict()
    finally:
        for tensor, memory in rounded.items():
            tensor.data = memory.copy_(tensor.data)  # the same memory as before: others hold views of it
        if is_gemini:
            model.mixed_precision = rounds_to


def grad_scaler(optimizer: OptimizerWrapper) -> object | None:
    """What holds the loss scale, None for torch_ddp. The library's own saving forgets it."""
    for name in ("mixed_precision_mixin", "mix_precision_mixin"):  # low_level_zero's and gemini's
        if hasattr(optimizer, name):
            return getattr(optimizer, name).grad_scaler
    return getattr(optimizer, "scaler", None)  # torch_ddp_fp16's


def scaler_state(scaler: object) -> dict:
    """The whole state of a loss scaler: ColossalAI's own state_dict leaves out when the next change is due."""
    return {**scaler.state_dict(), **{name: vars(scaler)[name] for name in COUNTERS if name in vars(scaler)}}


def flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def finish_save(aside: Path, epoch: int) -> None:
    """Flush what was written aside, and make it the checkpoint of `epoch`: from the renaming on, that exists."""
    folder, scaler_file = aside.parent, f"{SCALER}_{epoch}.pth"
    has_scaler = (aside / scaler_file).exists()
    for path in (*aside.iterdir(), aside):
        flush_to_disk(path)
    aside.rename(folder / f".saved_{epoch}")
    if not has_scaler:
        (folder / scaler_file).unlink(missing_ok=True)  # of another plugin's checkpoint, which this one replaces
    publish(folder)
    flush_to_disk(folder)


def save_checkpoint(folder: Path, epoch: int, boosted: Boosted, coordinator: DistCoordinator) -> None:
    """Save model, optimizer, scheduler and loss scale, whole or not at all; to be called in `full_precision`.

    Raises:
        UserError: on every process; the disk is full, or not writable any more. Older checkpoints are as they were.
    """
    booster, scaler, is_master = boosted.booster, grad_scaler(boosted.optimizer), coordinator.is_master()
    aside, reasons = folder / f".saving_{epoch}", []

    def attempt(step, *arguments) -> None:
        try:
            step(*arguments)
        except (OSError, RuntimeError, UserError) as error:  # torch.save raises RuntimeError when the disk is full
            if not is_master:
                raise
            reasons.append(first_line(error))  # and go on: the others wait for it in the steps to come

    if is_master:  # the only one that writes
        for unfinished in folder.glob(".saving_*"):  # by runs that were killed; two at once need two folders
            shutil.rmtree(unfinished, ignore_errors=True)
        attempt(os.makedirs, aside)
    attempt(booster.save_model, boosted.model, f"{aside}/model_{epoch}.pth")
    attempt(booster.save_optimizer, boosted.optimizer, f"{aside}/optimizer_{epoch}.pth")
    attempt(booster.save_lr_scheduler, boosted.lr_scheduler, f"{aside}/lr_scheduler_{epoch}.pth")
    if is_master and scaler:
        attempt(torch.save, scaler_state(scaler), aside / f"{SCALER}_{epoch}.pth")
    if is_master and not reasons:
        attempt(finish_save, aside, epoch)
    reason = first_reason(next(iter(reasons), None))  # no process goes on, or ends the job, before all is written
    if reason:
        shutil.rmtree(aside, ignore_errors=True)
        raise UserError(
            f"epoch {epoch} could not be saved in {folder} ({reason}): is the disk full? older checkpoints are intact"
        )


def find_checkpoint(args: argparse.Namespace) -> int:
    """The epoch to resume from, 0 to start afresh; UserError for one whose files are missing, damaged or foreign."""
    folder = args.checkpoint
    publish(folder)
    if args.resume == -1 or (args.resume == "latest" and not saved_epochs(folder, PARTS)):
        return 0
    epoch = require_epoch(args.resume, folder, PARTS)
    if epoch > args.num_epochs:
        raise UserError(f"--resume {args.resume} means epoch {epoch}, beyond --num_epochs {args.num_epochs}: raise -n")
    read_model(folder / f"model_{epoch}.pth")
    check_optimizer(folder / f"optimizer_{epoch}.pth")
    scheduler = read_file(folder / f"lr_scheduler_{epoch}.pth")
    if scheduler.get("last_epoch") != epoch or not all(scheduler.get("base_lrs") or [0]):
        raise UserError(f"{folder}/lr_scheduler_{epoch}.pth is not the MultiStepLR state of epoch {epoch}")
    if (folder / f"{SCALER}_{epoch}.pth").exists():
        read_file(folder / f"{SCALER}_{epoch}.pth")
    return epoch


def check_before_launch(args: argparse.Namespace) -> int | UserError:
    """The epoch to resume from; or a UserError for `gather` to raise, where other machines wait and must hear of it."""
    try:
        check_args(args)
        return find_checkpoint(args)
    except UserError as error:
        if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
            raise
        return error


def resume(args: argparse.Namespace, epoch: int, boosted: Boosted, coordinator: DistCoordinator) -> None:
    """Load the checkpoint of `epoch`, unless that is 0, whatever plugin and number of processes it was saved by."""
    folder = args.checkpoint
    booster, model, optimizer, _, lr_scheduler = boosted
    if epoch == 0:
        if args.resume == "latest":
            coordinator.print_on_master(f"No checkpoint in {folder}: starting afresh")
        return
    with full_precision(boosted):
        booster.load_model(model, f"{folder}/model_{epoch}.pth")
    fresh = dict(optimizer.param_groups[0])
    if isinstance(model, GeminiDDP):  # insists on steps that are tensors, while HybridAdam's own are ints
        saved = read_file(folder / f"optimizer_{epoch}.pth")
        for state in saved["state"].values():
            state["step"] = torch.tensor(float(state["step"]))
        optimizer.load_state_dict(saved)
    else:
        booster.load_optimizer(optimizer, f"{folder}/optimizer_{epoch}.pth")
    [group] = optimizer.param_groups
    settings = {name: group.get(name, value) for name, value in fresh.items()}  # HybridAdam and AdamW differ in some
    group.clear()
    group.update(settings)
    booster.load_lr_scheduler(lr_scheduler, f"{folder}/lr_scheduler_{epoch}.pth")
    scaler, scaler_file = grad_scaler(optimizer), folder / f"{SCALER}_{epoch}.pth"
    state = read_file(scaler_file) if scaler and scaler_file.exists() else {}
    if state and state.keys() == scaler_state(scaler).keys():  # another kind of scaler starts with its initial scale
        scaler.load_state_dict(state)
        vars(scaler).update({name: state[name] for name in COUNTERS if name in state})
    coordinator.print_on_master(f"Resuming after epoch {epoch}, from {folder}")
    old, new = lr_scheduler.base_lrs[0], args.lr * coordinator.world_size
    if old != new:
        lr_scheduler.base_lrs, group["initial_lr"], group["lr"] = [new], new, group["lr"] * new / old
        coordinator.print_on_master(f"Learning rate scaled: it started at {old:g} there, at {new:g} in this run")


# ------------------------------------------------------------------------------------------------------------ epochs

def average_buffers(model: nn.Module) -> None:
    """Make BatchNorm's running statistics agree on all processes; of themselves only SyncBatchNorm's do."""
    for buffer in filter(torch.is_floating_point, model.buffers()):
        mean = buffer.float() / dist.get_world_size()
        dist.all_reduce(mean)
        buffer.copy_(mean)


def train_one_epoch(epoch: int, seed: int, loader: DataLoader, boosted: Boosted, coordinator: DistCoordinator) -> float:
    """Train in an order and with draws that follow from seed, epoch and rank. Returns all processes' mean loss."""
    device, model, optimizer = get_current_device(), boosted.model, boosted.optimizer
    loader.sampler.set_epoch(epoch)
    generator = torch.Generator(device).manual_seed(draw_seed(seed, epoch, coordinator.rank))
    loss_sum = torch.zeros((), device=device)
    model.train()
    hidden = None if coordinator.is_master() else True  # None: there is no bar in a log file, only on a terminal
    for images, labels in tqdm(loader, f"Epoch {epoch + 1}", leave=False, disable=hidden):
        images, labels = augment(images.to(device), generator), labels.to(device)
        loss = boosted.criterion(model(images), labels)
        boosted.booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        loss_sum += loss.detach()  # on the device: nothing in this loop waits for it
    average_buffers(model.unwrap())
    dist.all_reduce(loss_sum)
    return loss_sum.item() / (len(loader) * coordinator.world_size)


def evaluate(state: dict[str, Tensor], images: Tensor, labels: Tensor, coordinator: DistCoordinator) -> int:
    """How many of all `images` a ResNet-18 with the weights `state` classifies right; each process counts its share."""
    mine = slice(coordinator.rank, None, coordinator.world_size)
    return sum(gather(count_correct(state, images[mine], labels[mine], get_current_device())))


def report(
    epoch: int, num_epochs: int, values: dict[str, float], writer: object | None, coordinator: DistCoordinator
) -> None:
    """Print the epoch's line, and write its values for TensorBoard."""
    line = "loss {loss:.4f}, learning rate {learning_rate:g}, {images_per_second:,.0f} images/s"
    line += ", test accuracy {accuracy:.2%}" if "accuracy" in values else ""
    coordinator.print_on_master(f"Epoch [{epoch}/{num_epochs}] {line.format(**values)}")
    if writer:
        for name, value in values.items():
            writer.add_scalar(name, value, epoch)
        writer.flush()


# -------------------------------------------------------------------------------------------------------------- main

def main() -> None:
    args = get_args_parser().parse_args()
    start_epoch = check_before_launch(args)

    coordinator = launch(args.seed)
    if len(set(gather(start_epoch))) > 1:
        raise UserError(f"machines see different checkpoints in {args.checkpoint} (-c): they must share that folder")
    if not args.synthetic:
        fetch_data_once_per_machine(coordinator)
    booster = build_booster(args.plugin)
    loader = build_dataloader(args, booster.plugin, coordinator)
    test_images, test_labels = load_data(train=False, synthetic=args.synthetic)
    images_per_epoch = len(loader) * args.batch_size * coordinator.world_size
    log_setup(args, coordinator, images_per_epoch)

    boosted = boost(args, booster, coordinator)
    resume(args, start_epoch, boosted, coordinator)

    writer = None
    if args.tensorboard and coordinator.is_master():
        writer = torch.utils.tensorboard.SummaryWriter(args.tensorboard, purge_step=start_epoch + 1)

    for epoch in range(start_epoch, args.num_epochs):
        start, values = time.time(), {"learning_rate": boosted.optimizer.param_groups[0]["lr"]}
        values["loss"] = train_one_epoch(epoch, args.seed, loader, boosted, coordinator)
        values["images_per_second"] = images_per_epoch / (time.time() - start)
        boosted.lr_scheduler.step()
        if epoch + 1 == args.num_epochs or (args.interval and (epoch + 1) % args.interval == 0):
            with full_precision(boosted) as state:
                correct = evaluate(state, test_images, test_labels, coordinator)
                if args.interval:
                    save_checkpoint(args.checkpoint, epoch + 1, boosted, coordinator)
            values["accuracy"] = correct / len(test_labels)
        report(epoch + 1, args.num_epochs, values, writer, coordinator)

    if start_epoch == args.num_epochs:  # nothing was left to train
        with full_precision(boosted) as state:
            correct = evaluate(state, test_images, test_labels, coordinator)
    coordinator.print_on_master(accuracy_line(correct, len(test_labels)))
    if args.target_acc is not None and correct / len(test_labels) < args.target_acc:
        raise RuntimeError(f"test accuracy {correct / len(test_labels):.4f} is below --target_acc {args.target_acc}")


@record  # so that torchrun's report ends with the traceback of the process that failed first
def run() -> None:
    try:
        main()
    except UserError as error:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(5)  # local rank 0 says the same now and leaves, whereupon the launcher ends this process
        print(f"train.py: error: {error}", file=sys.stderr)
        leave(2)
    finish()


def finish() -> None:
    """End this process after all is done and saved: a teardown that hangs must not hold up the job."""
    watchdog = threading.Timer(30, leave, (0,))
    watchdog.daemon = True
    watchdog.start()
    gc.collect()  # frees the CUDA graphs, since NCCL waits for the graphs that its collectives are part of
    group = dist.group.WORLD  # kept: the end of a gloo group waits for a thread that may need Python's lock meanwhile
    dist.destroy_process_group(group)
    leave(0)


def leave(status: int) -> None:
    """End this process at once, without the usual teardown, which can wait for lost processes forever."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # each line at once, also into a log file or a pipe
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a process at once, without a traceback from each
    try:
        run()
    except Exception:
        traceback.print_exc()
        leave(1)
