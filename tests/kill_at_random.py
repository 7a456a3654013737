"""Kill a run at random moments, resume each with `-r latest`, and compare with undisturbed runs, byte for byte.

    python tests/kill_at_random.py 30

Two processes on a tiny data set, so that saving is a large share of the time. Every other run is killed while it saves,
and half of these while it overwrites, epoch by epoch, what an earlier run with another seed left. After the kill, each
epoch that has a model file must be whole, and all its files of one run. Then the newest one is resumed. Prints a table;
the exit code is 1 if a run could not be resumed, or any file differs.
"""

import filecmp
import random
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

from helpers import Job, start

EPOCHS = range(1, 4)
SEED, EARLIER_SEED = 1, 2
SETTINGS = ["--synthetic", "--batch_size", 16, "-i", 1, "-n", EPOCHS[-1]]
PARTS = ("model", "optimizer", "lr_scheduler")


def train(folder: Path, *args) -> Job:
    return start(2, *SETTINGS, "-c", folder, *args, planted=["images=64,50"])


def save_under_way(folder: Path) -> str:
    """The epoch that is being saved, as its files show: those without a model file, or one under its first name."""
    for epoch in EPOCHS:
        names = {path.name for path in folder.glob(f"*_{epoch}.pth")}
        if f"model_{epoch}.pth" not in names and names:
            return f"epoch {epoch}: {'model' if f'.model_{epoch}.pth' in names else 'before the model'}"
    return "-"


def kill_at(moment: float, in_save: bool, ranks: list[int], job: Job, folder: Path) -> str:
    """SIGKILL to some ranks after `moment` seconds, or in the save that comes next; then the rest, as launchers do.

    Returns:
        the save that was under way
    """
    time.sleep(moment)
    while in_save and job.is_running():
        time.sleep(0.001)
        if save_under_way(folder) != "-":
            time.sleep(random.uniform(0, 0.3))  # somewhere within it
            if save_under_way(folder) != "-":
                break
    under_way = save_under_way(folder)
    job.kill(ranks=ranks)
    time.sleep(0.1)  # until torchrun looks again
    job.kill()
    job.wait()
    return under_way


def run_of(epoch: int, folder: Path, undisturbed: dict[int, Path]) -> int | None:
    """The seed of the undisturbed run that this epoch's files are of; None if they are of none or of several."""
    names = [f"{part}_{epoch}.pth" for part in PARTS]
    whole = (seed for seed in undisturbed if filecmp.cmpfiles(undisturbed[seed], folder, names, False)[0] == names)
    return next(whole, None)


def resume(folder: Path, undisturbed: dict[int, Path]) -> tuple[str, str]:
    """Resume a run that was killed. Returns where it went on, and what is wrong."""
    present = [epoch for epoch in EPOCHS if (folder / f"model_{epoch}.pth").exists()]
    mixed = [epoch for epoch in present if run_of(epoch, folder, undisturbed) is None]
    seed = run_of(present[-1], folder, undisturbed) if present else SEED
    result = train(folder, "--seed", seed or SEED, "-r", "latest").wait()
    resumed = [int(epoch) for epoch in re.findall(r"Resuming after epoch (\d+)", result.output)]
    if mixed or result.returncode or resumed != present[-1:] or run_of(EPOCHS[-1], folder, undisturbed) != seed:
        return "", f"epochs {mixed} are of no single run; {result}"
    return f"epoch {present[-1]} of the {'same' if seed == SEED else 'earlier'} run" if present else "afresh", ""


def main(runs: int) -> int:
    random.seed(0)
    with tempfile.TemporaryDirectory() as root:
        undisturbed = {seed: Path(root, f"undisturbed_{seed}") for seed in (SEED, EARLIER_SEED)}
        for seed, folder in undisturbed.items():
            begin = time.monotonic()
            result = train(folder, "--seed", seed).wait()
            duration = time.monotonic() - begin
            assert result.returncode == 0, result.output
        print(f"The undisturbed run took {duration:.1f} s", flush=True)
        print(f"| killed after | ranks | overwrites | save under way | resumed after | wrong |\n{'|---' * 6}|")
        failures = 0
        for number in range(runs):
            in_save, overwrites, folder = number % 2 == 1, number % 4 == 3, Path(root, f"killed_{number}")
            if overwrites:
                shutil.copytree(undisturbed[EARLIER_SEED], folder)
            moment = random.uniform(0, 0.5 * duration if in_save else duration)  # with a save still to come
            ranks = random.choice([[0, 1], [0], [1]])
            under_way = kill_at(moment, in_save, ranks, train(folder, "--seed", SEED), folder)
            resumed, wrong = resume(folder, undisturbed)
            cells = [f"{moment:.2f} s", ranks, "yes" if overwrites else "no", under_way, resumed, wrong]
            print(f"| {' | '.join(map(str, cells))} |", flush=True)
            failures += bool(wrong)
            shutil.rmtree(folder)
        print(f"{runs - failures} of {runs} runs ended as the undisturbed one")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
