"""Run train.py on few images, under other conditions, or with something wrong planted in it.

    torchrun … tests/planted.py images=64,50 fault=kill,1,5 train.py ARGUMENTS OF train.py
    torchrun … tests/planted.py images=64,50 double train.py -p gemini --synthetic …

Each word before train.py calls a function of this file: `images=64,50` calls images("64", "50").
"""

import errno
import importlib
import itertools
import json
import os
import resource
import runpy
import signal
import sys
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import eval


def images(train_images: str, test_images: str) -> None:
    """Generate the first images of each split of the synthetic set, and no others."""
    whole, counts = eval.synthetic_data, {True: int(train_images), False: int(test_images)}

    def few(train: bool) -> tuple[torch.Tensor, torch.Tensor]:
        draw_labels = torch.randint  # which an `images` before this one may have changed
        with mock.patch("torch.randint", lambda *args, **kwargs: draw_labels(*args, **kwargs)[: counts[train]]):
            return whole(train)

    eval.synthetic_data = few


def cifar10(attributes: str) -> None:
    """Let torchvision's CIFAR10 have the attributes in a JSON file: its URL, and the checksums of its files."""
    for name, value in json.loads(Path(attributes).read_text()).items():
        setattr(eval.CIFAR10, name, value)


def collective_timeout(seconds: str) -> None:
    """Let no collective take longer, except in a group with a timeout of its own."""
    torch.distributed.distributed_c10d.default_pg_timeout = timedelta(seconds=int(seconds))


def fault(kind: str, rank: str, step: str) -> None:
    """After its step of that number, let one process die, raise, or have an infinite weight or moment of Adam."""
    steps = itertools.count(1)

    def act(optimizer: torch.optim.Optimizer, *args) -> None:
        if next(steps) != int(step) or os.environ["RANK"] != rank:
            return
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "raise":
            raise ArithmeticError("a planted fault")
        weight = optimizer.param_groups[0]["params"][0]
        {"weight": weight, "moment": optimizer.state[weight]["exp_avg"]}[kind].data.view(-1)[0] = torch.inf

    register_optimizer_step_post_hook(act)


def error(function: str, code: str) -> None:
    """Let a function, say os.fsync, raise an OSError with a code, say EIO, whenever it is called."""
    module, _, name = function.rpartition(".")

    def fail(*args, **kwargs):
        raise OSError(getattr(errno, code), os.strerror(getattr(errno, code)))

    setattr(importlib.import_module(module), name, fail)


def file_limit(size: str) -> None:
    """Let no file grow beyond so many bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(size), int(size)))


def record(log: str) -> None:
    """Append a line to `log` for each file that is saved, flushed, renamed or removed, before that is done."""

    def recording(function, find_path):
        def call(*args, **kwargs):
            with open(log, "a") as file:
                print(function.__name__, Path(find_path(*args)).name, file=file)
            return function(*args, **kwargs)

        return call

    torch.save = recording(torch.save, lambda content, path: path)
    os.fsync = recording(os.fsync, lambda descriptor: os.readlink(f"/proc/self/fd/{descriptor}"))
    Path.rename = recording(Path.rename, lambda path, target: path)
    Path.unlink = recording(Path.unlink, lambda path: path)


def loss_scale(growth_interval: str, initial: str = "") -> None:
    """Let the loss scale grow after so many good steps, and start with `initial`."""
    from colossalai.amp.naive_amp.grad_scaler import DynamicGradScaler

    for scaler, name in [(torch.amp.GradScaler, "init_scale"), (DynamicGradScaler, "initial_scale")]:
        settings = {"growth_interval": int(growth_interval), **({name: float(initial)} if initial else {})}

        def construct(self, *args, settings=settings, original=scaler.__init__, **kwargs):
            original(self, *args, **{**kwargs, **settings})

        scaler.__init__ = construct


def double() -> None:
    """All plugins on the CPU."""
    importlib.import_module("on_double").install()


def machines() -> None:
    """Let each process seem alone on its machine, also to NCCL, which refuses two of one machine on the same GPU."""
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_WORLD_SIZE=os.environ["WORLD_SIZE"])
    os.environ.update(NCCL_HOSTID=os.environ["RANK"], NCCL_SOCKET_IFNAME="lo")


if __name__ == "__main__":
    while not (word := sys.argv.pop(1)).endswith(".py"):
        name, _, values = word.partition("=")
        globals()[name](*filter(None, values.split(",")))
    sys.argv[0] = str(ROOT / word)
    runpy.run_path(sys.argv[0], run_name="__main__")
