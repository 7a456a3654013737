"""Run train.py on few images, under other conditions, or with something wrong planted in it.

    torchrun … tests/planted.py --images 64 --fault kill 1 5 ./stamp train.py ARGUMENTS OF train.py
    torchrun … tests/planted.py --images 64 --double train.py -p gemini --synthetic …
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


def set_growth_interval(steps: int) -> None:
    """Let the loss scale grow after so many good steps; the plugins' own settings say 1000 or more."""
    from colossalai.amp.naive_amp.grad_scaler import DynamicGradScaler

    for scaler in (torch.amp.GradScaler, DynamicGradScaler):
        construct = scaler.__init__
        scaler.__init__ = lambda *args, construct=construct, **kwargs: construct(
            *args, **{**kwargs, "growth_interval": steps}
        )


def become_a_machine() -> None:
    """Let this process and NCCL take it for the only one on its machine. NCCL refuses two processes of one machine on
    the same GPU; those of different machines it connects through sockets."""
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_WORLD_SIZE=os.environ["WORLD_SIZE"])
    os.environ.update(NCCL_HOSTID=os.environ["RANK"], NCCL_SOCKET_IFNAME="lo")


def refuse_to_capture(*args, **kwargs):
    raise RuntimeError("switched off by --no_graph")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=4000, help="training images of the synthetic set")
    parser.add_argument("--test_images", type=int, default=1000, help="and its test images")
    parser.add_argument("--wrong_labels", action="store_true")
    parser.add_argument("--fault", nargs=4, metavar=("kill|raise", "RANK", "STEP", "STAMP"))
    parser.add_argument("--file_limit", type=int, help="bytes that a file may grow to")
    parser.add_argument("--double", action="store_true", help="all plugins on the CPU, see on_double.py")
    parser.add_argument("--growth_interval", type=int, help="good steps after which the loss scale grows")
    parser.add_argument("--no_graph", action="store_true", help="capture no CUDA graph")
    parser.add_argument("--machines", action="store_true", help="each process as if on a machine of its own")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    change_synthetic_data(args.images, args.test_images, args.wrong_labels)
    if args.fault:
        plant_fault(*args.fault)
    if args.file_limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (args.file_limit, args.file_limit))
    if args.growth_interval:
        set_growth_interval(args.growth_interval)
    if args.double:
        import on_double

        on_double.install()
    if args.no_graph:
        torch.cuda.make_graphed_callables = refuse_to_capture
    if args.machines:
        become_a_machine()
    sys.argv = [str(ROOT / args.command[0]), *args.command[1:]]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
