"""Train ResNet-18 on CIFAR-10 from scratch through ColossalAI's Booster.

Without a GPU, two processes on a small generated set:
    colossalai run --nproc_per_node 2 train.py -c ./ckpt-synthetic --synthetic -n 3
One GPU:
    python train.py -c ./ckpt-fp32
Two GPUs, with a plugin of your choice, going on from the newest checkpoint if there is one:
    colossalai run --nproc_per_node 2 train.py -c ./ckpt-gemini -p gemini -r latest
Two machines with eight GPUs each (the same on both, but for --node_rank):
    torchrun --nnodes 2 --node_rank 0 --nproc_per_node 8 --master_addr HOST --master_port 29500 train.py -c /shared/ckpt

The file reads as the run goes: arguments, launch, data, plugin and Booster, model, optimizer and scheduler, boost,
resume, epochs (train, step the scheduler, evaluate, save), accuracy, gate. `main` at the end is that list.
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.optim.lr_scheduler import LRScheduler, MultiStepLR
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

warnings.filterwarnings("ignore", module="colossalai")  # on import it recommends optional packages, in every process
import colossalai
from colossalai.accelerator import get_accelerator
from colossalai.booster import Booster
from colossalai.booster.mixed_precision.fp16_torch import TorchAMPOptimizer
from colossalai.booster.plugin import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from colossalai.booster.plugin.dp_plugin_base import DPPluginBase
from colossalai.booster.plugin.torch_ddp_plugin import TorchDDPModel
from colossalai.cluster import DistCoordinator
from colossalai.interface import ModelWrapper, OptimizerWrapper
from colossalai.nn.optimizer import HybridAdam
from colossalai.utils import get_current_device
from colossalai.zero import GeminiDDP, LowLevelZeroOptimizer

from eval import UserError, accuracy_line, build_model, count_correct, epoch_or_latest, fetch_data, load_data
from eval import raise_user_error, read_file, read_model, saved_epochs, to_float

PLUGINS = ("torch_ddp", "torch_ddp_fp16", "low_level_zero", "gemini")
PARTS = ("model", "optimizer", "lr_scheduler")  # a checkpoint's files are {part}_{epoch}.pth,
SCALER = "grad_scaler"  # and grad_scaler_{epoch}.pth where the plugin scales the loss


# --------------------------------------------------------------------------------------------------------- arguments


def get_args_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Train ResNet-18 on CIFAR-10 through ColossalAI's Booster.")
    parser.error = raise_user_error
    parser.add_argument("-p", "--plugin", choices=PLUGINS, default="torch_ddp", help="how to train (torch_ddp)")
    parser.add_argument(
        "-r", "--resume", type=epoch_or_latest, default=-1, help="epoch to resume from, or 'latest'; -1: afresh (-1)"
    )
    parser.add_argument("-c", "--checkpoint", type=Path, default="./checkpoint", help="their folder (./checkpoint)")
    parser.add_argument("-i", "--interval", type=int, default=5, help="epochs between checkpoints; 0: none (5)")
    parser.add_argument("--target_acc", type=float, help="fraction in 0..1; ending below it is a failure (none)")
    parser.add_argument("-n", "--num_epochs", type=int, default=80, help="total epochs (80)")
    parser.add_argument("--batch_size", type=int, default=100, help="images per process and step (100)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate per process, see README (1e-3)")
    parser.add_argument("--seed", type=int, default=42, help="weights, order and augmentation follow from it (42)")
    parser.add_argument("--synthetic", action="store_true", help="a small generated set instead of CIFAR-10")
    parser.add_argument("--tensorboard", metavar="DIR", help="also write curves there, for TensorBoard")
    return parser


def check_args(args: argparse.Namespace) -> None:
    """Raise UserError for what is known to fail before any work is done; touch nothing."""
    accelerator, processes = get_accelerator(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    gpus = accelerator.device_count() if accelerator.name != "cpu" else processes
    for wrong, message in [
        (args.interval < 0, "--interval must be 0 or more"),
        (args.num_epochs < 1, "--num_epochs must be 1 or more"),
        (args.batch_size < 1, "--batch_size must be 1 or more"),
        (not args.lr > 0, "--lr must be above 0"),
        (not 0 <= args.seed < 2**32, "--seed must be in 0..2**32-1"),
        (args.target_acc is not None and not 0 <= args.target_acc <= 1, "--target_acc is a fraction in 0..1: 0.84"),
        (args.resume not in ("latest", -1) and args.resume < 1, "--resume takes an epoch from 1 on, latest, or -1"),
        (
            accelerator.name == "cpu" and args.plugin != "torch_ddp",
            f"-p {args.plugin} needs a GPU, since ColossalAI runs it on CUDA and NPU only; use -p torch_ddp here",
        ),
        (processes > gpus, f"{processes} processes but {gpus} GPUs on this machine: start at most one per GPU"),
    ]:
        if wrong:
            raise UserError(message)
    if args.tensorboard:
        try:
            import torch.utils.tensorboard  # noqa: F401
        except ImportError:
            raise UserError("--tensorboard needs the tensorboard package: pip install tensorboard") from None
    if args.interval:
        folder = args.checkpoint.absolute()
        there = next(path for path in (folder, *folder.parents) if path.exists())
        try:
            tempfile.TemporaryFile(dir=there).close()
        except OSError as error:
            raise UserError(f"checkpoints cannot be written to {args.checkpoint}: {error.strerror}; see -c") from error


# ------------------------------------------------------------------------------------------------------------ launch


def launch(seed: int) -> DistCoordinator:
    """Join the processes that the launcher started, or be the only one where there is no launcher."""
    if "RANK" not in os.environ:
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        os.environ.update(alone)  # port 0: any free one
    colossalai.launch_from_torch(seed=seed, verbose=False)
    torch.backends.cudnn.deterministic = True  # or a resumed run would not repeat the uninterrupted one
    return DistCoordinator()


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
    except RuntimeError:  # the process that fetches has ended, and has said why
        sys.exit(2)


class Batches(Dataset):
    """Images and labels as tensors that a DataLoader takes whole batches from: no worker processes, no collating."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        index = torch.tensor(indices).to(self.labels.device, non_blocking=True)
        return self.images[index], self.labels[index]


def build_dataloader(args: argparse.Namespace, plugin: DPPluginBase, coordinator: DistCoordinator) -> DataLoader:
    """Batches of (uint8 images, labels) for this process, from the device itself where the data set fits there."""
    images, labels = load_data(train=True, synthetic=args.synthetic)
    share = -(-len(labels) // coordinator.world_size)
    if args.batch_size > share:
        raise UserError(f"--batch_size {args.batch_size} is more than one process's share of {share} images")
    device = get_current_device()
    if device.type == "cuda":
        if 2 * images.nbytes < torch.cuda.mem_get_info()[0]:
            images, labels = images.to(device), labels.to(device)
        else:
            coordinator.print_on_master("The images do not fit on the device: batches come from the host, slower")
    loader = plugin.prepare_dataloader(
        Batches(images, labels), batch_size=args.batch_size, shuffle=True, drop_last=True, collate_fn=lambda batch: batch
    )
    loader.sampler.seed = args.seed  # prepare_dataloader gives its own seed to worker processes only
    return loader


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Pad(4), RandomHorizontalFlip, RandomCrop(32) and ToTensor, drawn for each image by itself.

    Args:
        images: uint8, (N, 3, 32, 32)
        generator: of the images' device

    Returns:
        float32 in 0..1, (N, 3, 32, 32)
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


# ------------------------------------------------------------------------------- plugin, model, optimizer, scheduler


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
    """HybridAdam, or AdamW with HybridAdam's settings where its kernels, which it compiles on first use, cannot be had.

    With weight decay 0, HybridAdam's default, both compute the same update.
    """
    if get_accelerator().name != "cpu":
        try:
            return HybridAdam(model.parameters(), lr=lr)
        except Exception as error:  # no nvcc, one of another CUDA version, no compiler: each raises its own kind
            reason = f"HybridAdam's kernels could not be compiled ({str(error).splitlines()[0][:200]})"
        toolkit = f"install the CUDA {torch.version.cuda} toolkit, with nvcc on the PATH"
        if plugin == "gemini":
            raise UserError(f"{reason}, and gemini works with no other optimizer: {toolkit}")
        coordinator.print_on_master(f"{reason}: AdamW instead, the same update, slower; or {toolkit}")
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0)


# ------------------------------------------------------------------------------------------------------------- boost


@contextmanager
def unchanged_buffers(model: nn.Module) -> Iterator[None]:
    """Restore BatchNorm's statistics afterwards."""
    kept = [buffer.clone() for buffer in model.buffers()]
    yield
    for buffer, value in zip(model.buffers(), kept):
        buffer.copy_(value)


def capture_forward_and_backward(model: nn.Module, batch_size: int, fp16: bool) -> nn.Module:
    """Make the model replay its forward and backward pass as CUDA graphs: launching their small kernels binds otherwise.

    To be called before `booster.boost`: once DDP holds the model, the capture fails (its AccumulateGrad nodes live on
    the default stream). So what TorchDDPPlugin does to the model comes first here, and finds itself done later.
    """
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model.to(get_current_device()))
    sample = torch.rand(batch_size, 3, 32, 32, device=get_current_device())
    with unchanged_buffers(model), torch.autocast("cuda", enabled=fp16, cache_enabled=False):
        return torch.cuda.make_graphed_callables(model, (sample,))


def settle_ddp_buckets(model: ModelWrapper, optimizer: OptimizerWrapper, batch_size: int) -> None:
    """Run a step that changes nothing, so that DDP lays its buckets anew before the first real step.

    DDP does so after its first backward pass. With three processes or more the layout decides in which order gradients
    are summed, so without this a resumed run would sum differently, once, from the uninterrupted one.
    """
    with unchanged_buffers(model):
        model(torch.zeros(batch_size, 3, 32, 32, device=get_current_device())).sum().backward()
    optimizer.zero_grad()


# ------------------------------------------------------------------------------------------------------- checkpoints


@contextmanager
def full_precision(model: ModelWrapper, optimizer: OptimizerWrapper) -> Iterator[dict[str, Tensor]]:
    """Let save_model write, and load_model read, the weights in fp32. Yields ResNet-18's state dict, on every rank.

    DDP's weights are fp32 anyway. low_level_zero's model holds fp16 copies, and each rank a slice of the fp32 masters:
    the gathered masters take the copies' place. gemini rounds to `model.mixed_precision` what it saves and loads.
    Both keep BatchNorm's statistics in fp16, which are widened here.
    """
    module = model.unwrap()
    full = {buffer: buffer.float() for buffer in module.buffers() if buffer.is_floating_point()}
    if isinstance(optimizer, LowLevelZeroOptimizer):
        masters, world_size = optimizer.get_working_to_master_map(), dist.get_world_size()
        for param in module.parameters():
            shard = masters[id(param)]
            padded = shard.new_empty(shard.numel() * world_size)
            dist.all_gather_into_tensor(padded, shard)
            full[param] = padded[: param.numel()].view_as(param)
    rounded = {tensor: tensor.data for tensor in full}
    precision = getattr(model, "mixed_precision", None)
    try:
        for tensor, values in full.items():
            tensor.data = values
        if isinstance(model, GeminiDDP):
            model.mixed_precision = torch.float32
            yield model.state_dict(only_rank_0=False)
        else:
            yield module.state_dict()
    finally:
        for tensor, memory in rounded.items():
            tensor.data = memory.copy_(tensor.data)  # the same memory as before: others hold views of it
        if isinstance(model, GeminiDDP):
            model.mixed_precision = precision


def grad_scaler(optimizer: OptimizerWrapper) -> object | None:
    """What holds the loss scale, None for torch_ddp. The library's own saving forgets it."""
    if isinstance(optimizer, TorchAMPOptimizer):
        return optimizer.scaler
    for name in ("mixed_precision_mixin", "mix_precision_mixin"):  # low_level_zero's and gemini's
        if hasattr(optimizer, name):
            return getattr(optimizer, name).grad_scaler
    return None


def scaler_state(scaler: object) -> dict:
    """A loss scaler's whole state; ColossalAI's own state_dict leaves out the counters that the next change waits for."""
    counters = {name: vars(scaler)[name] for name in ("_growth_step", "_hysteresis_step") if hasattr(scaler, name)}
    return {**scaler.state_dict(), **counters}


def load_scaler_state(scaler: object, state: dict) -> None:
    if state.keys() == scaler_state(scaler).keys():  # or it is the other kind of scaler's: start with the initial scale
        scaler.load_state_dict(state)
        vars(scaler).update({name: state[name] for name in ("_growth_step", "_hysteresis_step") if name in state})


def publish(folder: Path) -> None:
    """Move finished saves to their final names, the model last: only with it a checkpoint counts as saved.

    Every process also does this before it looks for checkpoints, and so completes what a killed run had begun.
    """
    for finished in folder.glob(".saved_*"):
        with suppress(FileNotFoundError):  # another process moves the same files
            for path in sorted(finished.iterdir(), key=lambda path: path.name.startswith("model")):
                with suppress(FileNotFoundError):
                    path.replace(folder / path.name)
            finished.rmdir()


def sync_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def save_checkpoint(
    folder: Path,
    epoch: int,
    booster: Booster,
    model: ModelWrapper,
    optimizer: OptimizerWrapper,
    lr_scheduler: LRScheduler,
    coordinator: DistCoordinator,
) -> None:
    """Save model, optimizer, scheduler and loss scale, whole or not at all; called by all processes in `full_precision`.

    They are written aside and flushed; renaming their folder is the moment from which the checkpoint exists.

    Raises:
        UserError: the disk is full, or the folder no longer writable; older checkpoints are as they were
    """
    aside, scaler = folder / f".saving_{epoch}", grad_scaler(optimizer)
    try:
        if coordinator.is_master():
            shutil.rmtree(aside, ignore_errors=True)  # left by a run that was killed
            aside.mkdir(parents=True)
        coordinator.block_all()
        booster.save_model(model, f"{aside}/model_{epoch}.pth")
        booster.save_optimizer(optimizer, f"{aside}/optimizer_{epoch}.pth")
        booster.save_lr_scheduler(lr_scheduler, f"{aside}/lr_scheduler_{epoch}.pth")
        if coordinator.is_master():
            if scaler:
                torch.save(scaler_state(scaler), aside / f"{SCALER}_{epoch}.pth")
            else:
                (folder / f"{SCALER}_{epoch}.pth").unlink(missing_ok=True)  # of another plugin's checkpoint
            for path in (*aside.iterdir(), aside):
                sync_to_disk(path)
            aside.rename(folder / f".saved_{epoch}")
            publish(folder)
            sync_to_disk(folder)
    except (OSError, RuntimeError) as error:
        if not isinstance(error, OSError) and "PytorchStreamWriter" not in str(error):  # torch.save's own OSError
            raise
        shutil.rmtree(aside, ignore_errors=True)
        reason = str(error).splitlines()[0]
        raise UserError(f"epoch {epoch} could not be saved in {folder} ({reason}); older checkpoints are intact") from error
    coordinator.block_all()  # or another process could end, and its launcher the job, while this one still writes


def find_checkpoint(args: argparse.Namespace) -> int:
    """The epoch to resume from, 0 to start afresh. Each file is read and checked before anything else touches it.

    Raises:
        UserError: a file is missing, damaged or foreign, or the epoch lies beyond --num_epochs
    """
    if args.resume == -1:
        return 0
    folder = args.checkpoint
    publish(folder)
    whole = sorted(set.intersection(*(set(saved_epochs(folder, part)) for part in PARTS)))
    epoch = args.resume if args.resume != "latest" else whole[-1] if whole else 0
    if epoch == 0:
        return 0
    missing = [f"{part}_{epoch}.pth" for part in PARTS if epoch not in saved_epochs(folder, part)]
    if missing:
        there = f"epochs {', '.join(map(str, whole))}" if whole else "no epoch"
        raise UserError(f"epoch {epoch} cannot be resumed: {folder / missing[0]} is missing; whole there: {there}")
    if epoch > args.num_epochs:
        raise UserError(f"--resume {args.resume} means epoch {epoch}, which is beyond --num_epochs {args.num_epochs}")
    read_model(folder / f"model_{epoch}.pth")
    check_optimizer(folder / f"optimizer_{epoch}.pth")
    if read_file(folder / f"lr_scheduler_{epoch}.pth").get("last_epoch") != epoch:
        raise UserError(f"{folder}/lr_scheduler_{epoch}.pth is not the MultiStepLR state of epoch {epoch}")
    if (folder / f"{SCALER}_{epoch}.pth").exists():
        read_file(folder / f"{SCALER}_{epoch}.pth")
    return epoch


def check_optimizer(path: Path) -> None:
    """Raise UserError unless the file holds Adam's state of each of ResNet-18's parameters: the library would not."""
    state = read_file(path).get("state", {})
    with torch.device("meta"):
        shapes = [param.shape for param in build_model().parameters()]
    for index, shape in enumerate(shapes):
        held = state.get(index, {})
        if "step" not in held or any(getattr(held.get(k), "shape", None) != shape for k in ("exp_avg", "exp_avg_sq")):
            raise UserError(f"{path} is not Adam's state of ResNet-18: parameter {index} of {len(shapes)} is missing")


def load_checkpoint(
    folder: Path,
    epoch: int,
    booster: Booster,
    model: ModelWrapper,
    optimizer: OptimizerWrapper,
    lr_scheduler: LRScheduler,
) -> None:
    """Load what `save_checkpoint` saved, under whatever plugin and number of processes. All processes call it."""
    with full_precision(model, optimizer):
        booster.load_model(model, f"{folder}/model_{epoch}.pth")
    booster.load_optimizer(optimizer, f"{folder}/optimizer_{epoch}.pth")
    for group in optimizer.param_groups:  # HybridAdam and AdamW have settings that the other's file lacks,
        for name, value in optimizer.defaults.items():
            group.setdefault(name, value)
    if isinstance(optimizer.optim, HybridAdam):  # and count steps in a tensor or an int
        for state in optimizer.optim.state.values():
            state["step"] = int(state["step"])
    scaler, scaler_file = grad_scaler(optimizer), folder / f"{SCALER}_{epoch}.pth"
    if scaler and scaler_file.exists():
        load_scaler_state(scaler, read_file(scaler_file))
    booster.load_lr_scheduler(lr_scheduler, f"{folder}/lr_scheduler_{epoch}.pth")


def resume(args: argparse.Namespace, epoch: int, coordinator: DistCoordinator, boosted: tuple) -> None:
    """Load the checkpoint of `epoch`, and fit its learning rate to this run's --lr and number of processes."""
    agreed = [None] * coordinator.world_size
    dist.all_gather_object(agreed, epoch)
    if len(set(agreed)) > 1:
        raise UserError(f"processes see different checkpoints in {args.checkpoint}: all machines must share that folder")
    if epoch == 0:
        if args.resume == "latest":
            coordinator.print_on_master(f"No checkpoint in {args.checkpoint}: starting afresh")
        return
    load_checkpoint(args.checkpoint, epoch, *boosted)
    _, _, optimizer, lr_scheduler = boosted
    coordinator.print_on_master(f"Resuming from epoch {epoch} in {args.checkpoint}")
    old, new = lr_scheduler.base_lrs[0], args.lr * coordinator.world_size
    if old != new:
        lr_scheduler.base_lrs = [new] * len(lr_scheduler.base_lrs)
        for group in optimizer.param_groups:
            group["initial_lr"], group["lr"] = new, group["lr"] * new / old
        coordinator.print_on_master(f"Initial learning rate {old:g} in the checkpoint, {new:g} in this run: scaled")


# ------------------------------------------------------------------------------------------------------------ epochs


@torch.no_grad()
def average_buffers(model: nn.Module) -> None:
    """Make BatchNorm's running statistics agree on all processes: only SyncBatchNorm, in torch_ddp on GPUs, does."""
    statistics = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    flat = torch.cat([buffer.float().flatten() for buffer in statistics])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for buffer, mean in zip(statistics, flat.split([buffer.numel() for buffer in statistics])):
        buffer.copy_(mean.view_as(buffer))


def train_one_epoch(
    epoch: int,
    seed: int,
    dataloader: DataLoader,
    booster: Booster,
    model: ModelWrapper,
    optimizer: OptimizerWrapper,
    criterion: nn.Module,
    coordinator: DistCoordinator,
) -> float:
    """Train on this process's share of the data, in an order and with draws that follow from seed, epoch and rank.

    Returns:
        the mean loss over all steps and processes
    """
    device = get_current_device()
    dataloader.sampler.set_epoch(epoch)
    generator = torch.Generator(device).manual_seed(seed << 32 | epoch << 16 | coordinator.rank)
    loss_sum = torch.zeros((), device=device)
    bar = tqdm(dataloader, desc=f"Epoch {epoch + 1}", leave=False, disable=None if coordinator.is_master() else True)
    model.train()
    for images, labels in bar:  # nothing in here waits for the device
        images, labels = augment(images.to(device), generator), labels.to(device)
        loss = criterion(model(images), labels)
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        loss_sum += loss.detach()
    average_buffers(model.unwrap())
    dist.all_reduce(loss_sum)
    return loss_sum.item() / (len(dataloader) * coordinator.world_size)


def evaluate(state: dict[str, Tensor], images: Tensor, labels: Tensor, coordinator: DistCoordinator) -> int:
    """How many of all `images` a model with the weights `state` classifies as `labels`; each process counts its share."""
    mine = slice(coordinator.rank, None, coordinator.world_size)
    correct = torch.tensor(count_correct(state, images[mine], labels[mine], get_current_device()))
    correct = correct.to(get_current_device())
    dist.all_reduce(correct)
    return int(correct)


def main() -> None:
    args = get_args_parser().parse_args()
    check_args(args)
    start_epoch = find_checkpoint(args)

    coordinator = launch(args.seed)
    if not args.synthetic:
        fetch_data_once_per_machine(coordinator)
    booster = build_booster(args.plugin)
    dataloader = build_dataloader(args, booster.plugin, coordinator)
    test_images, test_labels = load_data(train=False, synthetic=args.synthetic)
    log_setup(args, coordinator, len(dataloader) * args.batch_size * coordinator.world_size)

    model = build_model()
    if args.plugin in ("torch_ddp", "torch_ddp_fp16") and get_current_device().type == "cuda":
        model = capture_forward_and_backward(model, args.batch_size, fp16=args.plugin == "torch_ddp_fp16")
    optimizer = build_optimizer(model, args.plugin, args.lr * coordinator.world_size, coordinator)
    lr_scheduler = MultiStepLR(optimizer, milestones=[20, 40, 60, 80], gamma=1 / 3)
    criterion = nn.CrossEntropyLoss()
    model, optimizer, criterion, _, lr_scheduler = booster.boost(
        model, optimizer, criterion=criterion, lr_scheduler=lr_scheduler
    )
    if args.plugin in ("torch_ddp", "torch_ddp_fp16"):
        settle_ddp_buckets(model, optimizer, args.batch_size)
    boosted = booster, model, optimizer, lr_scheduler
    resume(args, start_epoch, coordinator, boosted)

    correct = None
    for epoch in range(start_epoch, args.num_epochs):
        start, lr = time.time(), optimizer.param_groups[0]["lr"]
        loss = train_one_epoch(epoch, args.seed, dataloader, booster, model, optimizer, criterion, coordinator)
        speed = len(dataloader) * args.batch_size * coordinator.world_size / (time.time() - start)
        lr_scheduler.step()
        line = f"Epoch [{epoch + 1}/{args.num_epochs}] loss {loss:.4f}, learning rate {lr:g}, {speed:,.0f} images/s"
        last = epoch + 1 == args.num_epochs
        if last or (args.interval and (epoch + 1) % args.interval == 0):
            with full_precision(model, optimizer) as state:
                correct = evaluate(state, test_images, test_labels, coordinator)
                if args.interval:
                    save_checkpoint(args.checkpoint, epoch + 1, *boosted, coordinator)
            line += f", test accuracy {100 * correct / len(test_labels):.2f} %"
        coordinator.print_on_master(line)
    if correct is None:
        with full_precision(model, optimizer) as state:
            correct = evaluate(state, test_images, test_labels, coordinator)
    coordinator.print_on_master(accuracy_line(correct, len(test_labels)))
    if args.target_acc is not None and correct < args.target_acc * len(test_labels):
        raise RuntimeError(f"accuracy {correct / len(test_labels):.4f} is below --target_acc {args.target_acc}")


@record  # makes torchrun end its report with the traceback of the process that failed first
def run() -> None:
    try:
        main()
    except UserError as error:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(5)  # local rank 0 says the same now, and then the launcher ends this process
        print(f"train.py: error: {error}", file=sys.stderr)
        sys.exit(2)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a process at once, without a traceback from each
    run()
