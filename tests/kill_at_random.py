"""Kill a run at random moments, resume each with `-r latest`, and compare with the undisturbed run, byte for byte.

    python tests/kill_at_random.py 30

Two processes on a tiny data set, so that saving is a large share of the time. At every other moment the script waits
until a save is under way. Prints a table; the exit code is 1 if a run could not be resumed or any final file differs.
"""

import argparse
import filecmp
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import forked
from helpers import ROOT

EPOCHS = 3
SMALL = ["tests/planted.py", "--images", 64, "--test_images", 50, "train.py"]
SETTINGS = ["--synthetic", "--batch_size", 16, "-i", 1, "-n", EPOCHS, "-r", "latest"]
PARTS = ("model", "optimizer", "lr_scheduler")


def start(folder: Path) -> list[int]:
    return forked.start(2, folder.with_suffix(".log"), *SMALL, "-c", folder, *SETTINGS)


def save_under_way(folder: Path) -> str:
    """What of a save that is under way can be seen: nothing, files written aside, or files being moved."""
    return next((state for state in ("saving", "saved") if list(folder.glob(f".{state}_*"))), "")


def kill_at(moment: float, in_save: bool, victims: list[int], pids: list[int], folder: Path) -> tuple[float, str]:
    """SIGKILL to `victims` after `moment` seconds, or in the save that comes next; what the launcher does to the rest.

    Returns:
        after how many seconds, and the save that was under way
    """
    begin = time.monotonic()
    time.sleep(moment)
    while in_save and not save_under_way(folder) and time.monotonic() < begin + 20:
        time.sleep(0.0005)
    time.sleep(in_save * random.uniform(0, 0.15))  # somewhere within it
    under_way = save_under_way(folder)
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    killed = time.monotonic() - begin
    time.sleep(0.1)  # until torchrun looks again
    for pid in set(pids) - set(victims):
        os.kill(pid, signal.SIGTERM)
    forked.wait(pids)
    return killed, under_way


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill a run at random moments, and resume it.")
    parser.add_argument("moments", type=int)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    random.seed(args.seed)
    os.environ["OMP_NUM_THREADS"] = "1"  # as torchrun sets it; before torch reads it
    sys.path.insert(0, str(ROOT))
    import train  # noqa: F401  # before forking

    with tempfile.TemporaryDirectory() as root:
        whole = Path(root, "undisturbed")
        begin = time.monotonic()
        codes = forked.wait(start(whole))
        duration = time.monotonic() - begin
        assert codes == [0, 0], whole.with_suffix(".log").read_text()
        names = [f"{part}_{epoch}.pth" for part in PARTS for epoch in range(1, EPOCHS + 1)]
        print(f"The undisturbed run took {duration:.1f} s", flush=True)
        print("| moment | killed | save under way | resumed from epoch | all files identical |\n|---|---|---|---|---|")
        failures = 0
        for number in range(args.moments):
            folder = Path(root, f"killed_{number}")
            pids = start(folder)
            ranks = random.choice([[0, 1], [0], [1]])
            in_save = number % 2 == 1
            moment = random.uniform(0, 0.5 * duration if in_save else duration)  # with a save still to come
            moment, under_way = kill_at(moment, in_save, [pids[rank] for rank in ranks], pids, folder)
            log = folder.with_suffix(".log")
            log.write_text("")
            codes = forked.wait(start(folder))
            resumed = re.findall(r"Resuming after epoch (\d+)", log.read_text())
            _, different, missing = filecmp.cmpfiles(whole, folder, names, shallow=False)
            identical = codes == [0, 0] and not different + missing and not list(folder.glob(".*"))
            failures += not identical
            who = "all ranks" if len(ranks) == 2 else f"rank {ranks[0]}"
            print(
                f"| {moment:.2f} s | {who} | {under_way or '-'} | {resumed[0] if resumed else 'afresh'} | "
                f"{'yes' if identical else f'NO: exit codes {codes}, {different + missing}'} |",
                flush=True,
            )
            if not identical:
                print(log.read_text(), file=sys.stderr)
            shutil.rmtree(folder)
        print(f"{args.moments - failures} of {args.moments} runs ended as the undisturbed one")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
