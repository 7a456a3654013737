"""Print the test accuracy of a checkpoint that train.py saved.

    python eval.py -c ./ckpt-fp32 -e 80        # the checkpoint of epoch 80
    python eval.py -c ./ckpt-fp32 -e latest    # the newest one

It needs torch, torchvision and CIFAR-10 in $DATA (default ./data; downloaded if it is not there). It only reads the
checkpoint folder. The file also defines what training and evaluation must agree on.
"""

import argparse
import fcntl
import os
import re
import socket
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.datasets import CIFAR10
from torchvision.datasets.utils import check_integrity
from torchvision.models import resnet18

NUM_CLASSES = 10
TRAIN_IMAGES, SYNTHETIC_TRAIN_IMAGES = 50_000, 4_000
DOWNLOAD_TIMEOUT = 30.0  # seconds without a byte; torchvision tries a second time


class UserError(Exception):
    """A failure that the user can fix. Its one line says what is wrong and what to do."""

    exit_code = 2


def first_line(error: Exception) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0][:200]


def print_line(line: str) -> None:
    """Print at once, also into a log file or a pipe."""
    try:
        print(line, flush=True)
    except OSError as error:
        sys.stdout = open(os.devnull, "w")  # or Python would fail once more when it flushes at exit
        raise UserError(f"standard output cannot be written: {error.strerror}") from error


# --------------------------------------------------------------------------------------------------------------- data

def expand_path(text: str) -> Path:
    """A folder from the command line or the environment. Shells do not expand ~ in --option=~/x and DATA='~/x'."""
    if not text:
        raise argparse.ArgumentTypeError("the folder has no name")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise UserError(f"{text}: {error}") from error


def data_root() -> Path:
    """The folder that holds CIFAR-10: $DATA, or ./data."""
    return expand_path(os.environ.get("DATA") or "./data")


def lock(folder: Path, wait: bool) -> int:
    """Lock a folder until the returned descriptor is closed or the process ends. If it is taken, wait or UserError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise UserError(f"another run uses {folder}: wait for it, or choose another folder") from None
    except OSError:
        pass  # a file system without locks, as some network shares are
    return descriptor


def find_data_problem(root: Path) -> str | None:
    """Why CIFAR-10 cannot be read from `root`: the first file that is missing or damaged. None if it can be."""
    folder = root / CIFAR10.base_folder
    if not folder.is_dir():
        return f"there is no {CIFAR10.base_folder} in {root.resolve()}"
    for name, md5 in [*CIFAR10.train_list, *CIFAR10.test_list, (CIFAR10.meta["filename"], CIFAR10.meta["md5"])]:
        if not check_integrity(folder / name, md5):
            return f"{folder / name} " + ("has a wrong checksum" if (folder / name).exists() else "is missing")
    return None


def fetch_data() -> None:
    """Download, check and unpack CIFAR-10 into `data_root()`, unless it is there already.

    Processes that share the folder take turns: one downloads, the others find the data in place. UserError if it cannot
    be had; then no new folder is left behind.
    """
    root = data_root()
    archive = root / CIFAR10.filename
    if (root / CIFAR10.train_list[0][0]).exists():
        raise UserError(f"$DATA must be the folder that holds {CIFAR10.base_folder}: DATA={root.resolve().parent}")
    if not (problem := find_data_problem(root)):
        return
    new_folders = [path for path in (root, *root.parents) if not path.exists()]
    socket.setdefaulttimeout(DOWNLOAD_TIMEOUT)  # torchvision's download would wait forever
    try:
        root.mkdir(parents=True, exist_ok=True)
        with ExitStack() as unlock:
            unlock.callback(os.close, lock(root, wait=True))
            if find_data_problem(root) and not check_integrity(archive, CIFAR10.tgz_md5):
                print_line(f"{problem}: downloading {CIFAR10.url} to {archive}")
            CIFAR10(root, train=False, download=True)
    except Exception as error:  # URLError, TimeoutError, OSError, EOFError, RuntimeError, and tarfile's own
        if archive.exists() and not check_integrity(archive, CIFAR10.tgz_md5):
            problem = f"{archive} is incomplete or damaged"
        for folder in new_folders:
            with suppress(OSError):  # not empty
                folder.rmdir()
        raise UserError(
            f"{problem}, and getting {CIFAR10.url} failed ({first_line(error)}). Put {CIFAR10.filename} or the "
            f"folder {CIFAR10.base_folder} into {root.resolve()}, point $DATA to where they are, or use --synthetic"
        ) from error


def load_data(train: bool, synthetic: bool) -> tuple[Tensor, Tensor]:
    """Images (uint8, (N, 3, 32, 32)) and labels (int64, (N,)) of one split of CIFAR-10, or of the synthetic stand-in.

    They are on the CPU. `fetch_data` must have put CIFAR-10 in place.
    """
    if synthetic:
        return synthetic_data(train)
    split = CIFAR10(data_root(), train=train)
    return torch.from_numpy(split.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(split.targets)


def synthetic_data(train: bool) -> tuple[Tensor, Tensor]:
    """Ten classes that a few dozen steps can learn, in CIFAR-10's shape: 4,000 images to train on, 1,000 to test.

    An image is much noise on its class's smooth pattern, which is symmetric because training flips images. The same in
    every run. Returns what `load_data` returns.
    """
    corners = torch.rand(NUM_CLASSES, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    patterns = F.interpolate(corners + corners.flip(-1), size=(32, 32), mode="bilinear")
    generator = torch.Generator().manual_seed(1 if train else 2)
    labels = torch.randint(NUM_CLASSES, (SYNTHETIC_TRAIN_IMAGES if train else 1_000,), generator=generator)
    noise = torch.randn(len(labels), 3, 32, 32, generator=generator)
    return (127.5 * patterns[labels] + 60 * noise).clamp(0, 255).to(torch.uint8), labels


# -------------------------------------------------------------------------------------- the model and its checkpoints

def build_model() -> nn.Module:
    """torchvision's ResNet-18 for ten classes, randomly initialized: (N, 3, 32, 32) in 0..1 -> (N, 10) logits."""
    return resnet18(num_classes=NUM_CLASSES)


def saved_epochs(folder: Path, parts: tuple[str, ...] = ("model",)) -> list[int]:
    """The epochs, in ascending order, of which `folder` holds a `{part}_{epoch}.pth` for each of `parts`, not empty."""
    def epochs(part: str) -> set[int]:
        names = [path.stem for path in folder.glob(f"{part}_*.pth") if path.is_file() and path.stat().st_size]
        return {int(name[len(part) + 1 :]) for name in names if re.fullmatch(rf"{part}_[1-9]\d*", name)}

    return sorted(set.intersection(*map(epochs, parts)))


def require_epoch(epoch: int | str, folder: Path, parts: tuple[str, ...] = ("model",)) -> int:
    """`epoch`, or the newest for `latest`; UserError names a file that is missing, and the epochs that are there."""
    saved = saved_epochs(folder, parts)
    if epoch == "latest" and not saved:
        raise UserError(f"there is no checkpoint in {folder}: see -c")
    epoch = saved[-1] if epoch == "latest" else epoch
    missing = [folder / f"{part}_{epoch}.pth" for part in parts if epoch not in saved_epochs(folder, (part,))]
    if missing:
        raise UserError(f"{missing[0]} is missing or empty. Epochs in that folder (-c): {saved or 'none'}")
    return epoch


def read_file(path: Path) -> dict:
    """Read a checkpoint file, running none of the code that a pickle may carry. UserError unless it holds a dict."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        if isinstance(content, dict):
            return content
        problem = f"it holds a {type(content).__name__}"
    except (OSError, RuntimeError) as error:
        problem = first_line(error)
    except Exception:  # of many types, whose messages say nothing, or advise to run the code in the file
        problem = "torch.save did not write it, or it carries code"
    others = [epoch for epoch in saved_epochs(path.parent) if not path.stem.endswith(f"_{epoch}")] or "none"
    problem = f"it is truncated, or not a checkpoint of this example ({problem})"
    raise UserError(f"{path} cannot be read: {problem}. Other epochs in that folder: {others}")


def read_model(path: Path) -> dict[str, Tensor]:
    """Read a `model_{epoch}.pth`. Raises UserError if it cannot be read, or fails `check_tensors`."""
    state = read_file(path)
    with torch.device("meta"):
        expected = build_model().state_dict()
    check_tensors(path, f"the plain state dict of ResNet-18 with {NUM_CLASSES} classes", state, expected)
    return state


def check_optimizer(path: Path) -> None:
    """Raise UserError unless an `optimizer_{epoch}.pth` holds Adam's state of each of `build_model()`'s parameters.

    ColossalAI silently loads one that lacks some. The state of a loss scaler, `grad_scaler`, may be there, too.
    """
    content, moments = read_file(path), ("exp_avg", "exp_avg_sq")
    with torch.device("meta"):
        params = dict(enumerate(build_model().parameters()))
    try:
        states, [group] = content["state"], content["param_groups"]
        found = {f"{name} of parameter {i}": states[i][name] for i in states for name in moments}
        numbers = (group["lr"], *(states[i]["step"] for i in params), *content.get("grad_scaler", {}).values())
        complete = len(group["params"]) == len(params) and all(0 <= float(number) < float("inf") for number in numbers)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):  # something else, or some of it is missing
        complete = False
    if not complete:
        what = f"Adam's state of all {len(params)} parameters of ResNet-18, or what is in grad_scaler is no number"
        raise UserError(f"{path} does not hold {what}")
    expected = {f"{name} of parameter {i}": params[i] for i in params for name in moments}
    check_tensors(path, "Adam's state of ResNet-18", found, expected)


def check_tensors(path: Path, what: str, found: dict, expected: dict[str, Tensor]) -> None:
    """Raise UserError, with the first entry that differs, unless `found` has the names, shapes and kinds of `expected`.

    Any floating type may stand for another. Values must be finite, and mean squares not negative.
    """
    for name in [*expected, *found]:
        value, like = found.get(name), expected.get(name)
        if kind(value) != kind(like):
            problem = f"{name} is {kind(value)}, not {kind(like)}; its first entry is {next(iter(found), 'absent')}"
        elif value.is_meta or not value.float().isfinite().all():
            problem = f"{name} is not finite: the run that saved it had diverged"
        elif ("running_var" in name or "exp_avg_sq" in name) and value.min() < 0:
            problem = f"{name} is negative"
        else:
            continue
        raise UserError(f"{path} is not {what}: {problem}")


def kind(value: object) -> str:
    """What one tensor must have in common with another to take its place."""
    if not isinstance(value, Tensor):
        return "absent" if value is None else f"a {type(value).__name__}"
    return f"{tuple(value.shape)}, {'floating' if value.is_floating_point() else value.dtype}, {value.layout}"


# ----------------------------------------------------------------------------------------------------------- accuracy

def to_float(images: Tensor) -> Tensor:
    """uint8 images in 0..255 -> float32 in 0..1, as torchvision's ToTensor does."""
    return images.float().div_(255)


@torch.no_grad()
def count_correct(state: dict[str, Tensor], images: Tensor, labels: Tensor, device: torch.device) -> float:
    """How many of `images` (uint8, (N, 3, 32, 32)) a ResNet-18 with the weights `state` classifies as `labels` (N,).

    nan if an output of the model is not finite: argmax would still take it for an answer.
    """
    with torch.device("meta"):  # no memory and no time for weights that are replaced
        model = build_model()
    model.load_state_dict(state, assign=True)
    model.to(device).float().eval()
    correct = torch.zeros((), device=device)
    # in full fp32, since TF32 could change an answer with the size of the batch that an image is in
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        for batch, answers in zip(images.split(1000), labels.split(1000)):
            logits = model(to_float(batch.to(device)))
            correct += (logits.argmax(dim=1) == answers.to(device)).sum() + 0 * logits.sum()
    return correct.item()


def accuracy_line(accuracy: float) -> str:
    """The line that both scripts end with. `accuracy` is in 0..1; UserError if it is nan."""
    if not 0 <= accuracy <= 1:
        raise UserError("the model's outputs are not finite: its file is damaged, or of a run that diverged")
    return f"Accuracy of the model on the test images: {100 * accuracy:.2f} %"


# --------------------------------------------------------------------------------------------------------- the script

def epoch_or_latest(text: str) -> int | str:
    """argparse type: an epoch number, or the word `latest`."""
    if not re.fullmatch(r"latest|-?\d+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is neither an epoch number nor 'latest'")
    return text if text == "latest" else int(text)


def raise_user_error(message: str) -> NoReturn:
    """For `parser.error`: argparse itself would print its usage too, in every process."""
    raise UserError(message)


def get_args_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Print the test accuracy of a checkpoint that train.py saved.")
    parser.error = raise_user_error
    parser.add_argument("-e", "--epoch", type=epoch_or_latest, default=80, help="epoch number, or 'latest' (80)")
    parser.add_argument("-c", "--checkpoint", type=expand_path, default="./checkpoint", help="folder (./checkpoint)")
    parser.add_argument("--synthetic", action="store_true", help="on the generated set that --synthetic trains on")
    return parser


def main() -> None:
    args = get_args_parser().parse_args()
    state = read_model(args.checkpoint / f"model_{require_epoch(args.epoch, args.checkpoint)}.pth")
    if not args.synthetic:
        fetch_data()
    images, labels = load_data(train=False, synthetic=args.synthetic)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print_line(accuracy_line(count_correct(state, images, labels, device) / len(labels)))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"eval.py: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
