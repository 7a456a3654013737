"""What the tests share: starting the real scripts as a user starts them, and a very small CIFAR-10."""

import hashlib
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from torchvision.datasets import CIFAR10

ROOT = Path(__file__).resolve().parent.parent
LAUNCHERS = Path(sys.executable).parent  # torchrun and colossalai, of the Python that runs the tests


def free_port() -> int:
    """A TCP port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# What programs need to find themselves, their packages and the GPUs. Everything else of the caller's is left out:
# PYTHONUNBUFFERED and its like, which users do not set, proxies, a launcher's variables, odd names and values.
KEPT = ("PATH", "HOME", "TMPDIR", "LANG", "PYTHONPATH", "LD_", "CUDA_", "NVIDIA_", "NCCL_", "TORCH_", "NVSHMEM_")


def environment(**changes) -> dict[str, str]:
    """What a user's shell exports, one thread per process, and `changes`: the same whoever runs the tests."""
    kept = {name: value for name, value in os.environ.items() if name.startswith(KEPT)}
    path = f"{LAUNCHERS}{os.pathsep}{os.environ.get('PATH', '')}"  # `colossalai run` finds its torchrun there
    return {**kept, "OMP_NUM_THREADS": "1", "PATH": path, **{name: str(value) for name, value in changes.items()}}


def launch_command(nproc: int, *args, launcher: str = "torchrun", launcher_args: tuple = (), script="train.py") -> list:
    """The command that starts `script` with `args` on `nproc` processes, for `launch` or for subprocess.Popen.

    launcher: "torchrun", "colossalai" (which is `colossalai run`), or "python" (no launcher, one process)
    launcher_args: more arguments of the launcher itself
    script: a path, relative to the repository's root
    """
    start = {
        "torchrun": [LAUNCHERS / "torchrun", "--nproc_per_node", nproc, "--master_port", free_port()],
        "colossalai": [LAUNCHERS / "colossalai", "run", "--nproc_per_node", nproc, "--master_port", free_port()],
        "python": [sys.executable],
    }[launcher]
    return [str(word) for word in (*start, *launcher_args, ROOT / script, *args)]


def run(command: list, cwd=ROOT, env: dict | None = None, timeout: float = 180) -> subprocess.CompletedProcess:
    """Run a command to its end. The result has its `.returncode`, and `.stdout`: standard output and standard error.

    env: changes to `environment()`
    timeout: seconds, after which the command and what it started are killed and the test fails
    """
    process = subprocess.Popen(
        [str(word) for word in command], cwd=cwd, env=environment(**(env or {})), text=True, errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=timeout)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise AssertionError(f"not finished after {timeout} s: {command}\n{output}") from None
        raise
    return subprocess.CompletedProcess(command, process.returncode, output)


def launch(
    nproc: int, *args, launcher: str = "torchrun", launcher_args: tuple = (), script="train.py", **options
) -> subprocess.CompletedProcess:
    """Run train.py with `args` on `nproc` processes; see `launch_command`, and `run` for `options`."""
    return run(launch_command(nproc, *args, launcher=launcher, launcher_args=launcher_args, script=script), **options)


def launch_machines(machines: list[tuple], envs: list[dict], **options) -> list[subprocess.CompletedProcess]:
    """Run train.py on several machines, one process each: a torchrun agent on this machine stands for each.

    machines: each one's arguments
    envs: each one's changes to `environment()`
    options: see `launch`
    """
    rendezvous = ("--nnodes", len(machines), "--master_addr", "127.0.0.1", "--master_port", free_port())

    def launch_one(rank: int) -> subprocess.CompletedProcess:
        agent = (*rendezvous, "--node_rank", rank)
        return launch(1, *machines[rank], launcher_args=agent, env=envs[rank], **options)

    with ThreadPoolExecutor(len(machines)) as pool:
        return list(pool.map(launch_one, range(len(machines))))


def run_eval(*args, **options) -> subprocess.CompletedProcess:
    """Run eval.py with `args`; see `run` for `options`."""
    return run([sys.executable, ROOT / "eval.py", *args], **options)


def accuracy(output: str) -> float:
    """The percentage in the last accuracy line that a script printed."""
    lines = re.findall(r"Accuracy of the model on the test images: (\d+\.\d\d) %", output)
    assert lines, f"no accuracy line in:\n{output}"
    return float(lines[-1])


def error_lines(output: str, script: str = "train.py") -> list[str]:
    """The lines in which a script told its user what is wrong."""
    return [line for line in output.splitlines() if line.startswith(f"{script}: error:")]


def write_cifar10(folder: Path) -> dict:
    """Write random images in CIFAR-10's layout, 10 a file, as a folder and as an archive of it.

    Returns:
        the values that torchvision's CIFAR10 must have for these attributes, so that it takes them for the real files
    """
    rng = np.random.default_rng(0)
    base = folder / CIFAR10.base_folder
    base.mkdir(parents=True)
    names = [name for name, _ in CIFAR10.train_list + CIFAR10.test_list]
    for name in names:
        images, labels = rng.integers(256, size=(10, 3072), dtype=np.uint8), rng.permutation(10).tolist()
        (base / name).write_bytes(pickle.dumps({"data": images, "labels": labels}))
    meta = CIFAR10.meta["filename"]
    (base / meta).write_bytes(pickle.dumps({"label_names": [f"class {index}" for index in range(10)]}))
    archive = folder / CIFAR10.filename
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(base, CIFAR10.base_folder)

    def md5(path: Path) -> str:
        return hashlib.md5(path.read_bytes()).hexdigest()

    return {
        "tgz_md5": md5(archive),
        "train_list": [[name, md5(base / name)] for name in names[:-1]],
        "test_list": [[name, md5(base / name)] for name in names[-1:]],
        "meta": {**CIFAR10.meta, "md5": md5(base / meta)},
    }
