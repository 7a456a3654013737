"""Run train.py under changed conditions: `torchrun … tests/train_with.py [THESE OPTIONS] ARGUMENTS OF train.py`.

exact_resume.py and test_gpu.py start train.py through it.
"""

import argparse
import os
import runpy
import sys
from pathlib import Path

import torch
from colossalai.amp.naive_amp.grad_scaler import DynamicGradScaler

ROOT = Path(__file__).resolve().parent.parent


def set_growth_interval(scaler_class: type, interval: int) -> None:
    construct = scaler_class.__init__

    def __init__(self, *args, **kwargs):
        construct(self, *args, **{**kwargs, "growth_interval": interval})

    scaler_class.__init__ = __init__


def become_a_machine() -> None:
    """Let this process and NCCL take it for the only one on its machine. NCCL refuses two processes of one machine on
    the same GPU; those of different machines it connects through sockets."""
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_WORLD_SIZE=os.environ["WORLD_SIZE"])
    os.environ.update(NCCL_HOSTID=os.environ["RANK"], NCCL_SOCKET_IFNAME="lo")


def refuse_to_capture(*args, **kwargs):
    raise RuntimeError("switched off by --no_graph")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Run train.py under changed conditions.", allow_abbrev=False)
    parser.add_argument("--growth_interval", type=int, help="good steps after which the loss scale doubles")
    parser.add_argument("--no_graph", action="store_true", help="capture no CUDA graph")
    parser.add_argument("--machines", action="store_true", help="each process as if on a machine of its own")
    parser.add_argument("--double", action="store_true", help="on the CPU, on 64 images, as on_double.py does")
    args, arguments_of_train = parser.parse_known_args()

    sys.path.insert(0, str(ROOT))
    if args.double:
        import on_double

        on_double.install()
        on_double.shrink_synthetic_data(64)
    if args.growth_interval:
        for scaler_class in (torch.amp.GradScaler, DynamicGradScaler):
            set_growth_interval(scaler_class, args.growth_interval)
    if args.machines:
        become_a_machine()
    if args.no_graph:
        torch.cuda.make_graphed_callables = refuse_to_capture
    sys.argv = [str(ROOT / "train.py"), *arguments_of_train]
    runpy.run_path(sys.argv[0], run_name="__main__")
