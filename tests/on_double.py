"""A double of the accelerator, so that train.py's GPU-only plugins run on the CPU: `planted.py double`.

The accelerator, HybridAdam's kernel and the few calls that torch has for GPUs only get stand-ins, through ColossalAI's
own extension points where it has them. What runs on top is the library and train.py as they are, so this shows their
logic (who saves what, what a resumed run continues with), never speed or a GPU's rounding.
"""

import contextlib
import functools
from types import SimpleNamespace
from unittest import mock

import torch
from colossalai.accelerator import set_accelerator
from colossalai.accelerator.cpu_accelerator import CpuAccelerator
from colossalai.kernel.kernel_loader import CPUAdamLoader


def autocast(enabled=True, dtype=None, cache_enabled=True) -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled, cache_enabled=cache_enabled)


class AdamStandIn:
    """The interface of HybridAdam's CPU kernel, on torch's own AdamW (weight decay is 0 here, so Adam is AdamW)."""

    def __init__(self, lr, beta1, beta2, eps, weight_decay, adamw_mode):
        assert weight_decay == 0

    def step(self, step, lr, beta1, beta2, eps, weight_decay, bias_correction, param, grad, mean, square, div_scale):
        grad = grad.float() / div_scale if div_scale > 0 else grad.float()
        torch.optim._functional.adamw(
            [param], [grad], [mean], [square], [], [torch.tensor(step - 1.0)], foreach=False, amsgrad=False,
            beta1=beta1, beta2=beta2, lr=lr, weight_decay=0.0, eps=eps, maximize=False,
        )  # fmt: skip


def install() -> None:
    accelerator = CpuAccelerator()
    accelerator._name = "cuda"  # low_level_zero and gemini insist on it
    accelerator.device_count = lambda: 8
    # Everything is done when it is called, so there is nothing to wait for
    accelerator.Stream = accelerator.current_stream = accelerator.synchronize = mock.Mock()
    accelerator.stream = contextlib.nullcontext
    accelerator.autocast = autocast
    set_accelerator(accelerator)
    kernel = SimpleNamespace(CPUAdamOptimizer=AdamStandIn)
    extension = SimpleNamespace(
        name="cpu_adam_stand_in", priority=1, is_available=lambda: True, assert_compatible=lambda: None,
        load=lambda: kernel,
    )  # fmt: skip
    CPUAdamLoader.register_extension(lambda: extension)
    torch.nn.SyncBatchNorm.convert_sync_batchnorm = lambda module, process_group=None: module
    torch.cuda.make_graphed_callables = lambda function, sample_args: function
    torch.cuda.amp.GradScaler = functools.partial(torch.amp.GradScaler, "cpu")
