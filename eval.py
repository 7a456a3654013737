"""Print the test accuracy of a checkpoint that train.py saved.

    python eval.py -c ./ckpt-fp32 -e 80        # the checkpoint of epoch 80
    python eval.py -c ./ckpt-fp32 -e latest    # the newest one

It needs torch and torchvision, one device (the GPU if there is one, else the CPU), and CIFAR-10 in $DATA
(default ./data; downloaded if it is not there). It also owns what training and evaluation must agree on: the data,
the model, its files, how correct answers are counted, and the line that reports them. train.py imports them from here.
"""

import argparse
import fcntl
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.datasets import CIFAR10
from torchvision.models import resnet18

NUM_CLASSES = 10
TRAIN_IMAGES, SYNTHETIC_TRAIN_IMAGES = 50_000, 4_000


class UserError(Exception):
    """What only the user can mend. Its one line says what is wrong and what to do; the script then exits with 2."""


# ---------------------------------------------------------------------------------------------------------- the data

def data_root() -> Path:
    """The folder that holds CIFAR-10: $DATA, or ./data."""
    return Path(os.environ.get("DATA") or "./data")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes out that do the same with this folder. The lock ends with the process, however it ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def fetch_data() -> None:
    """Download, check and unpack CIFAR-10 into `data_root()`, unless it is there already.

    Processes that share the folder take turns, so that one downloads and the others find the data in place.

    Raises:
        UserError: it is not there and cannot be had. An archive that was cut short is never used: its checksum fails,
            and the next call downloads it again.
    """
    root = data_root()
    try:
        CIFAR10(root, train=False)
        return
    except RuntimeError:  # torchvision's answer when a file is missing or its checksum is wrong
        pass
    there = root.exists()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with locked(root):
            CIFAR10(root, train=False, download=True)
    except Exception as error:  # URLError, a checksum RuntimeError, OSError, EOFError and tarfile's own
        archive = root / CIFAR10.filename
        found = f"{archive} is incomplete or damaged" if archive.exists() else f"no CIFAR-10 in {root.resolve()}"
        if not there:
            with suppress(OSError):  # it is not empty
                root.rmdir()
        raise UserError(
            f"{found}, and downloading {CIFAR10.url} failed ({error}). Put {CIFAR10.filename} or the folder "
            f"{CIFAR10.base_folder} there, point $DATA to where they are, or use --synthetic"
        ) from error


def load_data(train: bool, synthetic: bool) -> tuple[Tensor, Tensor]:
    """Read one split of CIFAR-10, or of the synthetic stand-in, which `fetch_data` has put in place.

    Returns:
        images: uint8, (N, 3, 32, 32), on the CPU
        labels: int64, (N,)
    """
    if synthetic:
        return synthetic_data(train)
    split = CIFAR10(data_root(), train=train)
    return torch.from_numpy(split.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(split.targets)


def synthetic_data(train: bool) -> tuple[Tensor, Tensor]:
    """Ten classes that a few dozen steps can learn, in CIFAR-10's shape: 4,000 images to train on, 1,000 to test.

    A class is a smooth random pattern, the same when mirrored (training flips images); an image is its class's pattern
    with much noise. The same numbers on every machine and in every run. Returns what `load_data` returns.
    """
    corners = torch.rand(NUM_CLASSES, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    patterns = F.interpolate(corners + corners.flip(-1), size=(32, 32), mode="bilinear")
    generator = torch.Generator().manual_seed(1 if train else 2)
    labels = torch.randint(NUM_CLASSES, (SYNTHETIC_TRAIN_IMAGES if train else 1_000,), generator=generator)
    noise = torch.randn(len(labels), 3, 32, 32, generator=generator)
    return (127.5 * patterns[labels] + 60 * noise).clamp(0, 255).to(torch.uint8), labels


# ------------------------------------------------------------------------------------ the model and its checkpoints

def build_model() -> nn.Module:
    """torchvision's ResNet-18 for ten classes, randomly initialized: (N, 3, 32, 32) in 0..1 -> (N, 10) logits."""
    return resnet18(num_classes=NUM_CLASSES)


def publish(folder: Path) -> None:
    """Move finished saves to their final names, the model last: only with it a checkpoint counts as saved.

    train.py does so after each save, and every process of both scripts before it looks for checkpoints: whoever comes
    first completes what a killed run had begun.

    Raises:
        UserError: that is not allowed here
    """
    for finished in folder.glob(".saved_*"):
        try:
            for path in sorted(finished.iterdir(), key=lambda path: path.name.startswith("model")):
                with suppress(FileNotFoundError):
                    path.replace(folder / path.name)
            finished.rmdir()
        except FileNotFoundError:  # another process moves the same files
            pass
        except OSError as error:
            raise UserError(f"{finished} holds a checkpoint to be moved: make {folder} writable") from error


def saved_epochs(folder: Path, parts: tuple[str, ...] = ("model",)) -> list[int]:
    """The epochs, in ascending order, of which `folder` holds a `{part}_{epoch}.pth` for each of `parts`."""
    try:
        names = os.listdir(folder)
    except OSError:  # it is not there, no folder, or closed to us
        names = []
    found = [[re.fullmatch(rf"{part}_(\d+)\.pth", name) for name in names] for part in parts]
    return sorted(set.intersection(*({int(match[1]) for match in matches if match} for matches in found)))


def require_epoch(epoch: int | str, folder: Path, parts: tuple[str, ...] = ("model",)) -> int:
    """`epoch`, or the newest for `latest`; UserError names a file that is missing, and the epochs that are there."""
    saved = saved_epochs(folder, parts)
    if epoch == "latest":
        if not saved:
            raise UserError(f"there is no checkpoint in {folder}: see -c")
        return saved[-1]
    if epoch not in saved:
        missing = next(part for part in parts if epoch not in saved_epochs(folder, (part,)))
        there = f"epochs {', '.join(map(str, saved))}" if saved else "none"
        raise UserError(f"{folder / missing}_{epoch}.pth is missing. Saved in that folder (-c): {there}")
    return epoch


def read_file(path: Path) -> dict:
    """Read a checkpoint file, running none of the code that a pickle may carry.

    Raises:
        UserError: it is truncated, or no checkpoint file at all
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # OSError, EOFError, UnpicklingError, RuntimeError: each kind of damage has its own
        raise UserError(f"{path} cannot be read: it is truncated, or not a checkpoint of this example") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a checkpoint of this example: it holds a {type(content).__name__}")
    return content


def read_model(path: Path) -> dict[str, Tensor]:
    """Read a `model_{epoch}.pth` and check that it fits `build_model()`.

    Raises:
        UserError: it cannot be read, or it is of another model
    """
    state = read_file(path)
    with torch.device("meta"):
        expected = build_model().state_dict()
    fits = state.keys() == expected.keys() and all(
        isinstance(state[name], Tensor) and state[name].shape == expected[name].shape for name in expected
    )
    if not fits:
        raise UserError(f"{path} is a checkpoint of another model than ResNet-18 with {NUM_CLASSES} classes")
    return state


def check_optimizer(path: Path) -> None:
    """Raise UserError unless an `optimizer_{epoch}.pth` holds Adam's state of each of `build_model()`'s parameters.

    ColossalAI would load one that lacks some without a word.
    """
    content = read_file(path)
    with torch.device("meta"):
        shapes = [param.shape for param in build_model().parameters()]
    try:
        [group], state = content["param_groups"], content["state"]
        whole = group["lr"] > 0 and len(group["params"]) == len(shapes) and all(
            state[index][moment].shape == shape and state[index]["step"] > 0
            for index, shape in enumerate(shapes)
            for moment in ("exp_avg", "exp_avg_sq")
        )
    except (AttributeError, KeyError, TypeError, ValueError):  # it is something else, or some of it is missing
        whole = False
    if not whole:
        raise UserError(f"{path} does not hold Adam's state of all {len(shapes)} parameters of ResNet-18")


# ------------------------------------------------------------------------------------------------------ the accuracy

def to_float(images: Tensor) -> Tensor:
    """uint8 images in 0..255 -> float32 in 0..1, as torchvision's ToTensor does."""
    return images.float().div_(255)


@torch.no_grad()
def count_correct(state: dict[str, Tensor], images: Tensor, labels: Tensor, device: torch.device) -> int:
    """How many of `images` (uint8, (N, 3, 32, 32)) a ResNet-18 with the weights `state` classifies as `labels` (N,)."""
    model = build_model().to(device).eval()
    model.load_state_dict(state)
    correct = torch.zeros((), dtype=torch.int64, device=device)
    # in full fp32, since TF32 could change an answer with the size of the batch that an image is in
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        for batch, answers in zip(images.split(1000), labels.split(1000)):
            predicted = model(to_float(batch.to(device))).argmax(dim=1)
            correct += (predicted == answers.to(device)).sum()
    return int(correct)


def accuracy_line(correct: int, total: int) -> str:
    return f"Accuracy of the model on the test images: {100 * correct / total:.2f} %"


# -------------------------------------------------------------------------------------------------------- the script

def epoch_or_latest(text: str) -> int | str:
    """argparse type: an epoch number, or the word `latest`."""
    if text == "latest":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither an epoch number nor 'latest'") from None


def raise_user_error(message: str) -> NoReturn:
    """For `parser.error`: argparse itself would add its usage, and under a launcher every process would print both."""
    raise UserError(message)


def get_args_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Print the test accuracy of a checkpoint that train.py saved.")
    parser.error = raise_user_error
    parser.add_argument("-e", "--epoch", type=epoch_or_latest, default=80, help="epoch number, or 'latest' (80)")
    parser.add_argument("-c", "--checkpoint", type=Path, default="./checkpoint", help="its folder (./checkpoint)")
    parser.add_argument("--synthetic", action="store_true", help="on the generated set that --synthetic trains on")
    return parser


def main() -> None:
    args = get_args_parser().parse_args()
    publish(args.checkpoint)
    state = read_model(args.checkpoint / f"model_{require_epoch(args.epoch, args.checkpoint)}.pth")
    if not args.synthetic:
        fetch_data()
    images, labels = load_data(train=False, synthetic=args.synthetic)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(accuracy_line(count_correct(state, images, labels, device), len(labels)))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"eval.py: error: {error}", file=sys.stderr)
        sys.exit(2)
