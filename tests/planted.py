"""Run train.py on few images, or with something wrong planted in it.

    torchrun … tests/planted.py --images 64 --fault kill 1 5 ./stamp train.py ARGUMENTS OF train.py
"""

import argparse
import itertools
import os
import resource
import runpy
import signal
import sys
from pathlib import Path

import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import eval


def change_synthetic_data(images: int, test_images: int, wrong_labels: bool) -> None:
    """Keep the first images of each split; deal the training labels out at random."""
    whole = eval.synthetic_data

    def changed(train: bool) -> tuple[torch.Tensor, torch.Tensor]:
        kept, labels = (tensor[: images if train else test_images] for tensor in whole(train))
        if train and wrong_labels:
            labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))]
        return kept, labels

    eval.synthetic_data = changed


def plant_fault(kind: str, rank: str, step: str, stamp: str) -> None:
    """Let `rank` kill itself, or raise, in its step number `step`, unless the file `stamp` shows that it has."""
    forward, steps = nn.CrossEntropyLoss.forward, itertools.count(1)

    def faulty_forward(self, *args):
        if next(steps) == int(step) and os.environ["RANK"] == rank and not Path(stamp).exists():
            Path(stamp).touch()
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ArithmeticError("a planted fault")
        return forward(self, *args)

    nn.CrossEntropyLoss.forward = faulty_forward


def run_on_double(growth_interval: int) -> None:
    """Stand in for a GPU, and let the loss scale grow each `growth_interval` steps (1000 or more by default)."""
    import on_double
    from colossalai.amp.naive_amp.grad_scaler import DynamicGradScaler

    on_double.install()
    scaler, dynamic = torch.cuda.amp.GradScaler, DynamicGradScaler.__init__
    torch.cuda.amp.GradScaler = lambda **settings: scaler(**{**settings, "growth_interval": growth_interval})
    DynamicGradScaler.__init__ = lambda self, **settings: dynamic(
        self, **{**settings, "growth_interval": growth_interval}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=4000, help="training images")
    parser.add_argument("--test_images", type=int, default=1000)
    parser.add_argument("--wrong_labels", action="store_true")
    parser.add_argument("--fault", nargs=4, metavar=("kill|raise", "RANK", "STEP", "STAMP"))
    parser.add_argument("--file_limit", type=int, help="bytes that a file may grow to")
    parser.add_argument("--double", type=int, metavar="GROWTH_INTERVAL", help="run on tests/on_double.py")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    change_synthetic_data(args.images, args.test_images, args.wrong_labels)
    if args.fault:
        plant_fault(*args.fault)
    if args.file_limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (args.file_limit, args.file_limit))
    if args.double:
        run_on_double(args.double)
    sys.argv = [str(ROOT / args.command[0]), *args.command[1:]]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
