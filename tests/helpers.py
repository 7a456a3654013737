"""What the tests share: one way to start the scripts.

Importing torch and ColossalAI takes some five seconds. A server process (multiprocessing's forkserver) does it once and
forks from itself what a test starts. Most tests take `launcher="fork"`: ranks that are spared the imports.
"""

import ctypes
import functools
import multiprocessing
import multiprocessing.forkserver
import os
import re
import runpy
import signal
import socket
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
LAUNCHERS = Path(sys.executable).parent  # torchrun and colossalai, of the Python that runs the tests

# What programs need to find themselves, packages and GPUs. All else is left out, say PYTHONUNBUFFERED and proxies.
KEPT = ("PATH", "HOME", "TMPDIR", "LANG", "PYTHONPATH", "LD_", "CUDA_", "NVIDIA_", "NCCL_", "TORCH_", "NVSHMEM_")


def environment(**changes) -> dict[str, str]:
    """What a user's shell exports, one thread per process, and `changes`: the same whoever runs the tests."""
    kept = {name: value for name, value in os.environ.items() if name.startswith(KEPT)}
    path = f"{LAUNCHERS}{os.pathsep}{os.environ.get('PATH', '')}"  # `colossalai run` finds its torchrun there
    name = f"user-{os.getuid()}"  # it asks for one, which not every uid has; pytest's temporary folder bears it, too
    settings = {"OMP_NUM_THREADS": 1, "PATH": path, "LOGNAME": name}
    return {**kept, **{name: str(value) for name, value in {**settings, **changes}.items()}}


def free_port() -> int:
    """A TCP port that nothing listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


@dataclass
class Result:
    returncodes: list[int]  # of each rank, or of the launcher alone; -9 of one that was killed
    output: str  # standard output and standard error

    @property
    def returncode(self) -> int:
        return next((code for code in self.returncodes if code), 0)


class Job:
    """A script that runs in processes: its ranks, or their launcher."""

    def __init__(self, command: list, environments: list[dict], cwd: Path, stdout: str | None) -> None:
        self.log = tempfile.NamedTemporaryFile()
        files = [os.devnull, stdout or self.log.name, self.log.name]
        create = functools.partial(forkserver().Process, target=become, daemon=True)
        self.processes = [create(args=([str(word) for word in command], env, cwd, files)) for env in environments]
        for process in self.processes:
            process.start()

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return Path(self.log.name).read_text(errors="replace")

    def is_running(self) -> bool:
        return any(process.exitcode is None for process in self.processes)

    def wait_for(self, text: str, timeout: float = 120) -> None:
        """Wait until it has printed `text`."""
        end = time.monotonic() + timeout
        while text not in self.output:
            assert self.is_running() and time.monotonic() < end, self.output
            time.sleep(0.05)

    def kill(self, number: int = signal.SIGKILL, ranks: list[int] | None = None) -> None:
        """Send a signal to the process groups of those ranks, or of all its processes, that still run."""
        for rank, process in enumerate(self.processes):
            if process.exitcode is None and (ranks is None or rank in ranks):
                os.killpg(process.pid, number)

    def wait(self, timeout: float = 240) -> Result:
        """Wait for its end. After `timeout` seconds, it is killed and the test fails."""
        end = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0, end - time.monotonic()))
        if self.is_running():
            self.kill(signal.SIGTERM)  # which launchers pass on
            time.sleep(2)
            self.kill()
            raise AssertionError(f"not finished after {timeout} s:\n{self.output}")
        return Result([process.exitcode for process in self.processes], self.output)


@functools.cache
def forkserver() -> ForkServerContext:
    """The server. It starts in an environment of its own: call this before there are threads, which would see that."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train"])
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    # tqdm's semaphores outlive a rank that is killed, and the server would warn about them
    settings = {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": -1, "PYTHONWARNINGS": "ignore:resource_tracker"}
    with mock.patch.dict(os.environ, environment(**settings), clear=True):
        multiprocessing.forkserver.ensure_running()
    return context


def become(command: list[str], environ: dict[str, str], cwd: Path, files: list[str]) -> None:
    """Become a program, or run a script as if Python had been started with it, in a process group of its own."""
    status = 1
    try:
        os.setsid()
        # The server ends when nobody holds this pipe: the tests have ended, also if they were killed
        os.close(multiprocessing.forkserver._forkserver._forkserver_alive_fd)
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: this process ends with the server
        for descriptor, path in enumerate(files):
            os.dup2(os.open(path, os.O_RDWR | os.O_APPEND), descriptor)
        os.chdir(cwd)
        if not command[0].endswith(".py"):
            os.execve(command[0], command, environ)
        os.environ.clear()
        os.environ.update(environ)
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")
        status = 0
    except SystemExit as leaving:
        status = leaving.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def start(
    nproc: int, *args, script="train.py", planted=(), launcher="fork", launcher_args=(), env=None, cwd=ROOT,
    stdout=None, gpus=False,
) -> Job:  # fmt: skip
    """Start `script` with `args` on `nproc` processes.

    script: a path relative to the repository's root
    planted: what planted.py, which then starts the script, is to change
    launcher: "fork" (the ranks, each with the environment that a launcher gives), "torchrun", "colossalai" (which is
        `colossalai run`), or "python" (no launcher, one process)
    launcher_args: more arguments of a real launcher, or of Python
    env: changes to `environment()`, and to what "fork" gives its ranks
    stdout: a file for standard output, which is in the result's output otherwise
    gpus: whether the processes see GPUs; forked ones cannot use them
    """
    port, ranks = free_port(), [{}]
    several = ["--nproc_per_node", nproc, "--master_port", port, *launcher_args]
    before = {
        "fork": [],
        "torchrun": [LAUNCHERS / "torchrun", *several],
        "colossalai": [LAUNCHERS / "colossalai", "run", *several],
        "python": [sys.executable, *launcher_args],
    }[launcher]
    command = [*before, *([ROOT / "tests/planted.py", *planted, script] if planted else [ROOT / script]), *args]
    if launcher == "fork":
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc}
        ranks = [{**job, "RANK": rank, "LOCAL_RANK": rank} for rank in range(nproc)]
    changes = {**({} if gpus else {"CUDA_VISIBLE_DEVICES": -1}), **(env or {})}
    environments = [environment(**{**rank, **changes}) for rank in ranks]
    return Job(command, environments, cwd, stdout)


def run(nproc: int, *args, timeout: float = 240, **options) -> Result:
    """Run a script to its end; see `start` for `options`."""
    return start(nproc, *args, **options).wait(timeout)


def run_machines(machines: list[tuple], envs: list[dict], launcher="torchrun", timeout=240, **options) -> list[Result]:
    """Run a script on several machines, one process each: a torchrun, or a forked rank, on this one stands for each.

    Each has its own arguments, `machines`, and changes to the environment, `envs`.
    """
    jobs, port = [], free_port()
    for node, (args, env) in enumerate(zip(machines, envs, strict=True)):
        agent = ("--nnodes", len(machines), "--node_rank", node, "--master_addr", "127.0.0.1", "--master_port", port)
        if launcher == "fork":
            agent, env = (), {"RANK": node, "WORLD_SIZE": len(machines), "MASTER_PORT": port, **env}
        jobs.append(start(1, *args, launcher=launcher, launcher_args=agent, env=env, **options))
    return [job.wait(timeout) for job in jobs]


def accuracy(output: str) -> float:
    """The percentage in the last accuracy line that a script printed."""
    lines = re.findall(r"Accuracy of the model on the test images: (\d+\.\d\d) %", output)
    assert lines, f"no accuracy line in:\n{output}"
    return float(lines[-1])


def error_lines(output: str) -> list[str]:
    """The lines in which train.py told its user what is wrong."""
    return [line for line in output.splitlines() if line.startswith("train.py: error:")]


def check_end(result: Result, exit_code: int, *words: str) -> str:
    """Both processes ended with one line, their last, that has all the words. Returns it."""
    assert result.returncodes == [exit_code] * 2, result.output
    lines = error_lines(result.output)
    assert len(lines) == 2 and lines == result.output.splitlines()[-2:], result.output
    assert all(word in line for line in lines for word in words), lines
    assert "Traceback" not in result.output, result.output
    return lines[0]
