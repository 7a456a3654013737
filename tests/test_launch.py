"""The scripts as users start them: every launcher, what is printed, what is counted, and the gate."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import forked
import pytest
from helpers import ROOT, accuracy, environment, error_lines, launch, launch_command, launch_machines, run, run_eval

EPOCH_LINE = r"Epoch \[(\d)/3\] loss \d\.\d{4}, learning rate 0\.002, [\d,]+ images/s(, test accuracy (\d+\.\d\d)%)?"
PLANTED = "tests/planted.py"


@pytest.fixture(scope="session")
def main_job(tmp_path_factory):
    """README's main job, but for `-i 2`, so that one of its three epochs is not saved. Yields its folder and result."""
    folder = tmp_path_factory.mktemp("main") / "ckpt"
    result = launch(2, "-c", folder, "--synthetic", "-n", 3, "-i", 2, launcher="colossalai")
    yield folder, result
    shutil.rmtree(folder, ignore_errors=True)


# ------------------------------------------------------------------------------------------------------ the main job


def test_main_job_learns(main_job):
    folder, result = main_job
    assert result.returncode == 0, result.stdout
    assert accuracy(result.stdout) > 90
    saved = {f"{part}_{epoch}.pth" for part in ("model", "optimizer", "lr_scheduler") for epoch in (2, 3)}
    assert {path.name for path in folder.iterdir()} == saved


def test_first_line_states_the_setup(main_job):
    import colossalai
    import torch

    lines = main_job[1].stdout.splitlines()
    assert next(line for line in lines if line.startswith("torch_ddp")) == (
        "torch_ddp (fp32), 2 process(es) on CPU, batch 2 x 100 = 200, learning rate 2 x 0.001 = 0.002, "
        f"4,000 images per epoch, seed 42, colossalai {colossalai.__version__}, torch {torch.__version__}"
    )


def test_log_has_one_line_for_each_epoch(main_job):
    output = main_job[1].stdout
    lines = [re.fullmatch(EPOCH_LINE, line) for line in output.splitlines() if line.startswith("Epoch")]
    assert all(lines), output
    assert [line[1] for line in lines] == ["1", "2", "3"]
    assert [bool(line[2]) for line in lines] == [False, True, True], "test accuracy on saved epochs only"
    assert float(lines[-1][3]) == accuracy(output)
    assert output.count("Accuracy of the model") == 1
    assert "\r" not in output, "no progress bar in a log file"


def test_nothing_is_left_to_warn_about(main_job):
    assert not re.search(r"warn|destroy_process_group|leaked", main_job[1].stdout, re.IGNORECASE), main_job[1].stdout


@pytest.mark.parametrize("epoch, line", [("2", 0), ("latest", 1)])
def test_eval_agrees(main_job, epoch, line):
    folder, result = main_job
    trained = re.findall(r"test accuracy (\d+\.\d\d)%", result.stdout)
    evaluated = run_eval("-c", folder, "-e", epoch, "--synthetic")
    assert evaluated.returncode == 0
    assert evaluated.stdout == f"Accuracy of the model on the test images: {trained[line]} %\n"


@pytest.mark.parametrize("nproc", [3, 7])
def test_shares_that_differ_give_the_same_accuracy(main_job, nproc):
    folder, result = main_job
    again = forked.run(nproc, "-c", folder, "--synthetic", "-n", 3, "-r", 3, "-i", 0)
    assert again.returncodes == [0] * nproc, again.output
    assert accuracy(again.output) == accuracy(result.stdout)


@pytest.mark.parametrize("nproc", [1, 2, 3, 4, 6, 7])
def test_images_are_counted_once(nproc):
    result = forked.run(nproc, script="tests/count_images.py")
    assert result.returncodes == [0] * nproc, result.output
    assert f"{nproc} processes evaluated 10001 images, once each" in result.output


# ---------------------------------------------------------------------------------------------------------- the gate


def test_wrong_labels_are_not_learned(main_job):
    assert float(re.findall(r"test accuracy (.*)%", main_job[1].stdout)[0]) > 80, "after two epochs of right labels"
    arguments = ["--synthetic", "-n", 2, "-i", 0, "--target_acc", 0.8]
    result = forked.run(2, "--wrong_labels", "train.py", *arguments, script=PLANTED)
    assert accuracy(result.output) < 25
    assert result.returncodes == [1, 1]
    assert result.output.count("is below --target_acc 0.8") == 2


def test_gate_without_assertions():
    """Also plain `python`, without a launcher, with its assert statements switched off."""
    arguments = ["--synthetic", "-n", 1, "-i", 0, "--batch_size", 32]
    command = [sys.executable, "-O", PLANTED, "--images", 32, "train.py", *arguments]
    result = run([*command, "--target_acc", 1])
    assert "1 process(es) on CPU" in result.stdout
    assert result.returncode == 1
    assert "is below --target_acc 1" in result.stdout.splitlines()[-1]


# -------------------------------------------------------------------------------------------------- several machines


def run_two_agents(tmp_path, *arguments) -> list[subprocess.CompletedProcess]:
    """Train on 64 images with two agents, each with its own data folder. `NODE` in an argument becomes its number."""
    small = ["--images", 64, "train.py", "--synthetic", "--batch_size", 32, *arguments]
    machines = [tuple(str(word).replace("NODE", str(node)) for word in small) for node in range(2)]
    return launch_machines(machines, [{"DATA": tmp_path / f"data{node}"} for node in range(2)], script=PLANTED)


def test_two_agents(tmp_path):
    """The checkpoint folder is shared."""
    first, second = run_two_agents(tmp_path, "-n", 1, "-i", 1, "-c", tmp_path / "ckpt")
    assert [first.returncode, second.returncode] == [0, 0], first.stdout + second.stdout
    assert "2 process(es)" in first.stdout
    assert "Epoch" not in second.stdout, "only the master of the whole job prints"
    assert sorted(path.name for path in (tmp_path / "ckpt").iterdir()) == [
        "lr_scheduler_1.pth", "model_1.pth", "optimizer_1.pth",
    ]  # fmt: skip
    assert accuracy(run_eval("-c", tmp_path / "ckpt", "-e", 1, "--synthetic").stdout) == accuracy(first.stdout)


@pytest.mark.parametrize(
    "resumed, message",
    [("latest", "machines see different checkpoints in"), (1, "model_1.pth is missing. Saved in that folder")],
)
def test_agents_that_see_different_checkpoints(tmp_path, resumed, message):
    """The machine that has the checkpoint must not wait for the other one, which knows of no fault or refuses."""
    small = ["--images", 64, "train.py", "--synthetic", "--batch_size", 32, "-n", 1, "-i", 1]
    assert forked.run(1, *small, "-c", tmp_path / "ckpt0", script=PLANTED).returncodes == [0]
    for agent in run_two_agents(tmp_path, "-n", 2, "-r", resumed, "-c", tmp_path / "ckptNODE"):
        assert agent.returncode == 1
        [line] = error_lines(agent.stdout)
        assert message in line


# ------------------------------------------------------------------------------------------------- ending before time


def processes_with(word: str) -> list[str]:
    """The command lines of running processes that mention `word`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # it has ended
            continue
        found += [line] if word in line else []
    return found


def until(condition, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.mark.parametrize("launcher, sent", [("torchrun", signal.SIGINT), ("colossalai", signal.SIGTERM)])
def test_signal_to_the_job(tmp_path, launcher, sent):
    """Ctrl-C at a terminal, and what a scheduler sends: both go to the launcher's process group."""
    folder, log = tmp_path / "ckpt", tmp_path / "log"
    arguments = ["-c", folder, "--synthetic", "-n", 1000, "-i", 1, "--batch_size", 16]
    command = launch_command(2, "--images", 64, "train.py", *arguments, launcher=launcher, script=PLANTED)
    with open(log, "w") as out:
        job = subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        assert until(lambda: "Epoch [2/" in log.read_text(), 90), log.read_text()
        os.killpg(job.pid, sent)
        job.wait(timeout=15)
        assert job.returncode != 0
        assert until(lambda: not processes_with(str(folder)), 5), processes_with(str(folder))
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    evaluated = run_eval("-c", folder, "-e", "latest", "--synthetic")
    assert evaluated.returncode == 0, evaluated.stdout
    for model in folder.glob("model_*.pth"):
        for part in ("optimizer", "lr_scheduler"):
            assert model.with_name(model.name.replace("model", part)).exists()
    shutil.rmtree(folder)


def test_rank_that_raises_ends_the_run(tmp_path):
    arguments = ["-c", tmp_path / "ckpt", "--synthetic", "-n", 1000, "-i", 1000, "--batch_size", 16]
    fault = ["--fault", "raise", 1, 6, tmp_path / "stamp"]
    start = time.time()
    result = launch(2, "--images", 64, *fault, "train.py", *arguments, script=PLANTED)
    raised = (tmp_path / "stamp").stat().st_mtime
    assert raised > start
    assert time.time() - raised < 20
    assert result.returncode == 1
    assert "Traceback (most recent call last):" in result.stdout
    report = result.stdout[result.stdout.index("FAILED") :]
    assert re.search(r"rank\s*: 1 ", report), report
    assert "ArithmeticError: a planted fault" in report
