"""The scripts as users start them: every launcher, what is printed, what is counted, the gate, and how runs end."""

import functools
import itertools
import re
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import colossalai
import pytest
import torch
from helpers import accuracy, check_end, error_lines, run, run_machines, start

import train

EPOCH_LINE = r"Epoch \[(\d)/3\] loss \d\.\d{4}, learning rate 0\.002, [\d,]+ images/s(, test accuracy (\d+\.\d\d)%)?"
FEW = ["images=64,50"]
SETTINGS = ["--synthetic", "--batch_size", 16, "-i", 0]


@pytest.fixture(scope="module")
def main_job(tmp_path_factory):
    """README's main job, but for `-i 2`, so that one of its three epochs is not saved. Yields its folder and output."""
    folder = tmp_path_factory.mktemp("main") / "ckpt"
    result = run(2, "-c", folder, "--synthetic", "-n", 3, "-i", 2, launcher="colossalai")
    assert result.returncode == 0, result.output
    yield folder, result.output
    shutil.rmtree(folder)


def test_main_job(main_job):
    folder, output = main_job
    assert accuracy(output) > 90
    saved = {f"{part}_{epoch}.pth" for part in ("model", "optimizer", "lr_scheduler") for epoch in (2, 3)}
    assert {path.name for path in folder.iterdir()} == saved
    assert (
        "\ntorch_ddp (fp32), 2 process(es) on CPU, batch 2 x 100 = 200, learning rate 2 x 0.001 = 0.002, 4,000 images "
        f"per epoch, seed 42, colossalai {colossalai.__version__}, torch {torch.__version__}\n"
    ) in output
    lines = [re.fullmatch(EPOCH_LINE, line) for line in output.splitlines() if line.startswith("Epoch")]
    assert all(lines) and [line[1] for line in lines] == ["1", "2", "3"], output
    assert [bool(line[2]) for line in lines] == [False, True, True], "test accuracy on saved epochs only"
    assert float(lines[-1][3]) == accuracy(output)
    assert output.count("Accuracy of the model") == 1
    assert not re.search(r"\r|warn|destroy_process_group|leaked", output, re.IGNORECASE), "a bar, or something to worry"


@pytest.mark.parametrize("epoch, line, launcher", [("2", 0, "python"), ("latest", 1, "fork")])
def test_eval_agrees(main_job, epoch, line, launcher):
    folder, output = main_job
    trained = re.findall(r"test accuracy (\d+\.\d\d)%", output)[line]
    evaluated = run(1, "-c", folder, "-e", epoch, "--synthetic", script="eval.py", launcher=launcher)
    assert (evaluated.returncode, evaluated.output) == (0, f"Accuracy of the model on the test images: {trained} %\n")


def test_gate():
    """It is passed at equality, and failed on every process by one image, also by Python without assertions."""
    arguments = [*SETTINGS, "-n", 1, "--target_acc"]
    correct = round(accuracy(run(2, *arguments, 0, planted=FEW).output) / 2)  # of 50
    targets = correct / 50, (correct + 1) / 50
    passed, failed = (run(2, *arguments, target, planted=FEW, env={"LOCAL_RANK": 0}) for target in targets)
    assert (passed.returncodes, error_lines(passed.output)) == ([0, 0], [])
    message = f"train.py: error: test accuracy {targets[0]:.4f} is below --target_acc {targets[1]}"
    assert (failed.returncodes, error_lines(failed.output)) == ([1, 1], [message] * 2)
    alone = run(1, *arguments, 1, planted=FEW, launcher="python", launcher_args=["-O"])
    assert "1 process(es) on CPU" in alone.output
    assert (alone.returncode, error_lines(alone.output)) == (1, alone.output.splitlines()[-1:])


def test_two_machines_that_share_the_checkpoint_folder(tmp_path):
    first, second = run_machines([(*SETTINGS, "-n", 1, "-i", 1, "-c", tmp_path)] * 2, [{}, {}], planted=FEW)
    assert [first.returncode, second.returncode] == [0, 0], first.output + second.output
    assert "2 process(es)" in first.output
    torchruns = "torch/distributed/elastic"  # it logs when it outlives the first machine's
    assert [line for line in second.output.splitlines() if torchruns not in line] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lr_scheduler_1.pth", "model_1.pth", "optimizer_1.pth"]


@pytest.mark.parametrize("seconds, steps", [(2.9, []), (12, [2, 5, 8])])
@pytest.mark.parametrize("terminal", [False, True])
def test_progress(monkeypatch, capsys, terminal, seconds, steps):
    """Of ten batches that take so many seconds each; a log has lines after these steps, a terminal has a bar."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    monkeypatch.setattr(train.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(train.time, "monotonic", functools.partial(next, itertools.count(step=seconds)))
    coordinator = SimpleNamespace(is_master=lambda: True, world_size=2)
    batches = [(torch.zeros(5), torch.zeros(5))] * 10
    assert list(train.show_progress(batches, 7, coordinator)) == batches
    output = capsys.readouterr()
    assert output.out.splitlines() == [f"Epoch 7: step {step} of 10, 1 images/s" for step in steps if not terminal]
    assert ("Epoch 7:" in output.err) == bool(output.err) == terminal


CLOSE_STDOUT = "import os, sys; os.close(1); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"


@pytest.mark.parametrize("script, args", [("train.py", ["-n", 3, "-r", 3]), ("eval.py", ["-e", 3])])
def test_full_or_closed_output(main_job, script, args):
    arguments = ["-c", main_job[0], "--synthetic", *args]
    full = run(1, *arguments, script=script, stdout="/dev/full")
    assert full.returncodes == [2]
    assert full.output == f"{script}: error: standard output cannot be written: No space left on device\n"
    closed = run(1, *arguments, script=script, launcher="python", launcher_args=["-c", CLOSE_STDOUT])
    assert (closed.returncodes, closed.output) == ([0], "")


def test_wrong_network_interface():
    result = run(2, "--synthetic", env={"GLOO_SOCKET_IFNAME": "eth9", "LOCAL_RANK": 0})
    check_end(result, 2, "the processes cannot start (", "GLOO_SOCKET_IFNAME")
    assert len(result.output.splitlines()) == 2


def is_running(word: str) -> bool:
    """Whether the command line of any process mentions `word`."""
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            commands.append(path.read_text(errors="replace"))
    return word in "".join(commands)


def children(pid: int) -> list[int]:
    """The processes that a process and its threads have started."""
    lists = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for part in lists for child in part]


@pytest.mark.parametrize("script", ["train", "eval"])
def test_import_starts_no_process(script):
    """With its default of compile threads, torch starts workers when colossalai imports bitsandbytes."""
    code = f"import {script}, time; time.sleep(1); print('imported', flush=True); time.sleep(60)"
    job = start(1, launcher="python", launcher_args=["-c", code])
    job.wait_for("imported")
    assert children(job.processes[0].pid) == []
    job.kill()


def test_job_has_no_other_processes():
    job = start(2, *SETTINGS, launcher="torchrun")
    job.wait_for("2 process(es)")
    ranks = children(job.processes[0].pid)
    assert len(ranks) == 2 and not any(map(children, ranks))
    job.kill(signal.SIGTERM)  # which torchrun passes on
    job.wait()


@pytest.mark.parametrize("launcher, sent", [("torchrun", signal.SIGINT), ("colossalai", signal.SIGTERM)])
def test_signal_to_the_job(tmp_path, launcher, sent):
    """Ctrl-C at a terminal, and what a scheduler sends: both go to the launcher's process group."""
    job = start(2, *SETTINGS, "-c", tmp_path, "-n", 1000, "-i", 1, planted=FEW, launcher=launcher)
    job.wait_for("Epoch [2/")
    job.kill(sent)
    assert job.wait(timeout=30).returncode != 0
    end = time.monotonic() + 5
    while is_running(str(tmp_path)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not is_running(str(tmp_path))
    evaluated = run(1, "-c", tmp_path, "-e", "latest", "--synthetic", script="eval.py")
    assert evaluated.returncode == 0, evaluated.output
    shutil.rmtree(tmp_path)


def test_rank_that_raises_ends_the_run():
    """The launcher's report says which rank failed first, and why."""
    result = run(2, *SETTINGS, "-n", 1000, planted=[*FEW, "fault=raise,1,6"], launcher="torchrun")
    assert result.returncode == 1
    report = result.output[result.output.index("FAILED") :]
    assert re.search(r"rank\s*: 1 ", report), report
    assert "ArithmeticError: a planted fault" in report and "Traceback (most recent call last):" in result.output
