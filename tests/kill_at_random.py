"""Kill a run at random moments, resume each with `-r latest`, and compare with undisturbed runs, bit for bit.

    python tests/kill_at_random.py 30

Two processes on a tiny data set, so that saving is a large share of the time. Every other run is killed while it saves,
and half of these while it overwrites, epoch by epoch, what an earlier run with another seed left. After the kill, each
epoch that has a model file must be whole, and all its files of one run. Then the newest one is resumed. Prints a table;
ends with an error at the first run that is not resumed exactly.
"""

import random
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

from exact_resume import files_that_differ
from helpers import Job, start

EPOCHS = (1, 2, 3)
SEED, EARLIER_SEED = 1, 2
SETTINGS = ["--synthetic", "--batch_size", 16, "-i", 1, "-n", EPOCHS[-1]]


def train(folder: Path, *args) -> Job:
    return start(2, *SETTINGS, "-c", folder, *args, planted=["images=64,50"])


def save_under_way(folder: Path) -> str:
    """The epoch that is being saved, as its files show: those without a model file, or one under its first name."""
    for epoch in EPOCHS:
        names = {path.name for path in folder.glob(f"*_{epoch}.pth")}
        if names and f"model_{epoch}.pth" not in names:
            return f"epoch {epoch}: {'model' if f'.model_{epoch}.pth' in names else 'before the model'}"
    return ""


def kill(job: Job, folder: Path, latest: float, in_save: bool) -> str:
    """SIGKILL to some ranks before `latest` seconds, or in the save that comes next; then to the rest, as launchers do.

    Returns the save that was under way.
    """
    time.sleep(random.uniform(0, latest))
    while in_save and job.is_running():
        time.sleep(0.001)
        if save_under_way(folder):
            time.sleep(random.uniform(0, 0.2))
            if save_under_way(folder):
                break
    under_way = save_under_way(folder)
    job.kill(ranks=random.choice([[0, 1], [0], [1]]))
    time.sleep(0.1)  # until torchrun looks again
    job.kill()
    job.wait()
    return under_way


def run_of(epoch: int, folder: Path, undisturbed: dict[int, Path]) -> int:
    """The seed of the undisturbed run that all of this epoch's files are of."""
    for seed, whole in undisturbed.items():
        if not files_that_differ(epoch, whole, folder):
            return seed
    sys.exit(f"The files of epoch {epoch} are of no single run")


def main(runs: int) -> None:
    random.seed(0)
    with tempfile.TemporaryDirectory() as root:
        undisturbed = {seed: Path(root, f"undisturbed_{seed}") for seed in (SEED, EARLIER_SEED)}
        for seed, folder in undisturbed.items():
            begin = time.monotonic()
            assert train(folder, "--seed", seed).wait().returncode == 0
            duration = time.monotonic() - begin
        print("| overwrites | save under way at the kill | resumed after |\n|---|---|---|", flush=True)
        for number in range(runs):
            in_save, overwrites, folder = number % 2 == 0, number % 4 == 0, Path(root, f"killed_{number}")
            if overwrites:
                shutil.copytree(undisturbed[EARLIER_SEED], folder)
            job = train(folder, "--seed", SEED)
            under_way = kill(job, folder, duration / 2 if in_save else duration, in_save)  # with a save still to come
            present = [epoch for epoch in EPOCHS if (folder / f"model_{epoch}.pth").exists()]
            seeds = [run_of(epoch, folder, undisturbed) for epoch in present] or [SEED]
            result = train(folder, "--seed", seeds[-1], "-r", "latest").wait()
            resumed = [int(epoch) for epoch in re.findall(r"Resuming after epoch (\d+)", result.output)]
            if result.returncode or resumed != present[-1:]:
                sys.exit(f"Not resumed after epoch {present[-1:]}:\n{result.output}")
            if run_of(EPOCHS[-1], folder, undisturbed) != seeds[-1]:
                sys.exit("The resumed run ended as another one")
            print(f"| {overwrites} | {under_way or '-'} | {present[-1] if present else '-'} |", flush=True)
            shutil.rmtree(folder)
    print(f"{runs} of {runs} runs ended as the undisturbed one")


if __name__ == "__main__":
    main(int(sys.argv[1]))
