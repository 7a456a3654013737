"""Start the scripts many times while torch and ColossalAI, some five seconds, are imported only once.

A process that has imported them forks the ranks, each with the environment that a launcher gives. `run` does so in a
server process of its own, because forking is safe only where torch has not yet started its threads.
"""

import atexit
import functools
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from helpers import ROOT, environment, free_port


@dataclass
class Result:
    returncodes: list[int]  # of each rank; -9 of one that was killed
    output: str


def start(nproc: int, log: Path, script: str | Path, *args) -> list[int]:
    """Fork `nproc` ranks that run `script` with `args`, and write to `log`. Returns their process ids."""
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc}
    pids = []
    for rank in range(nproc):
        pid = os.fork()
        if pid == 0:
            os.environ.update({name: str(value) for name, value in {**job, "RANK": rank, "LOCAL_RANK": rank}.items()})
            become(log, str(ROOT / script), [str(arg) for arg in args])
        pids.append(pid)
    return pids


def become(log: Path, script: str, args: list[str]) -> None:
    """Run `script` as this process would have, had it been started with it, and end the process."""
    status = 1
    try:
        for descriptor, path, mode in [(0, os.devnull, os.O_RDONLY), (1, log, os.O_WRONLY), (2, log, os.O_WRONLY)]:
            os.dup2(os.open(path, mode | os.O_CREAT | os.O_APPEND), descriptor)
        sys.argv = [script, *args]
        runpy.run_path(script, run_name="__main__")
        status = 0
    except SystemExit as leaving:
        status = leaving.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def wait(pids: list[int], timeout: float = 120, patience: float = 15) -> list[int]:
    """Wait for all ranks, for `patience` seconds once one has failed; then kill what is left. Returns their codes."""
    deadline, codes = time.monotonic() + timeout, {}
    while len(codes) < len(pids):
        for pid in set(pids) - set(codes):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
                if codes[pid] != 0:
                    deadline = min(deadline, time.monotonic() + patience)
            elif time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return [codes[pid] for pid in pids]


@functools.cache
def server() -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, __file__], env=environment(), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    atexit.register(process.stdin.close)  # with nothing more to read it ends
    return process


def run(nproc: int, *args, script: str = "train.py", timeout: float = 120) -> Result:
    """Run `script`, a path relative to the repository's root, with `args` on `nproc` forked ranks."""
    with tempfile.NamedTemporaryFile() as log:
        job = {"nproc": nproc, "log": log.name, "command": [str(word) for word in (script, *args)], "timeout": timeout}
        print(json.dumps(job), file=server().stdin, flush=True)
        return Result(json.loads(server().stdout.readline()), Path(log.name).read_text(errors="replace"))


def serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever an import prints is no answer
    sys.path.insert(0, str(ROOT))
    import train  # noqa: F401

    for line in sys.stdin:
        job = json.loads(line)
        codes = wait(start(job["nproc"], job["log"], *job["command"]), job["timeout"])
        print(json.dumps(codes), file=answers, flush=True)


if __name__ == "__main__":
    serve()
