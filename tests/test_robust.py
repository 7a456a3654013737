"""Runs that are killed or hindered, or that diverge, leave whole checkpoints; one process's failure ends all."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from exact_resume import copy_epoch, files_that_differ, read
from helpers import Result, check_end, run, run_machines, start

FEW = "images=64,50"
SETTINGS = ["--synthetic", "--batch_size", 8, "-i", 1]  # four steps in an epoch of two processes
FIRST_EPOCH = ["lr_scheduler_1.pth", "model_1.pth", "optimizer_1.pth"]
MACHINES = {"LOCAL_RANK": 0}  # each process poses as the only one of its machine, and so says itself why it ends


def train(nproc: int, folder: Path, *args, planted=(), begin=run) -> Result:
    return begin(nproc, *SETTINGS, "-c", folder, *args, planted=[FEW, *planted], env=MACHINES)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of an undisturbed run of three epochs."""
    folder = tmp_path_factory.mktemp("whole")
    assert train(2, folder, "-n", 3).returncode == 0
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def folder(whole, tmp_path):
    """A folder with that run's first checkpoint, which must stay as it is."""
    folder = copy_epoch(1, whole, tmp_path / "ckpt")
    yield folder
    assert not files_that_differ(1, whole, folder)
    shutil.rmtree(folder)


def test_kills_at_random_moments():
    result = run(1, 3, script="tests/kill_at_random.py", launcher="python")
    assert result.returncode == 0, result.output
    assert "3 of 3 runs ended as the undisturbed one" in result.output
    assert re.search(r"\| epoch \d: ", result.output), "none was killed while it saved"


def test_killed_rank_is_restarted(whole, tmp_path):
    """In the middle of epoch 3; the launcher starts all ranks again, and they go on after epoch 2."""
    restarts, planted = ["--extra_launch_args", "max_restarts=3"], [FEW, "fault=kill,1,10"]
    arguments = [*SETTINGS, "-n", 3, "-r", "latest", "-c", tmp_path]
    result = run(2, *arguments, planted=planted, launcher="colossalai", launcher_args=restarts)
    assert result.returncode == 0, result.output
    assert result.output.count(f"No checkpoint in {tmp_path}: starting afresh") == 1
    assert result.output.count("Resuming after epoch 2") == 1
    assert not any(files_that_differ(epoch, whole, tmp_path) for epoch in (1, 2, 3))


def test_model_file_comes_last(folder, tmp_path):
    """An epoch is overwritten: the old model file goes first; the new one gets its name when all is on the disk."""
    assert train(2, folder, "-n", 1, planted=[f"record={tmp_path / 'log'}"]).returncode == 0
    done, flush = (tmp_path / "log").read_text().splitlines(), f"fsync {folder.name}"
    assert done[:2] == ["unlink model_1.pth", flush]
    assert "save .model_1.pth" in done
    last_save = max(number for number, line in enumerate(done) if line.startswith("save "))
    flushed = [flush, "fsync .model_1.pth", "fsync lr_scheduler_1.pth", "fsync optimizer_1.pth"]
    assert sorted(done[last_save + 1 : -2]) == sorted(flushed)
    assert done[-2:] == ["rename .model_1.pth", flush]
    assert names(folder) == FIRST_EPOCH


def test_second_run_in_a_folder_is_refused(tmp_path):
    first = train(2, tmp_path, "-n", 1000, begin=start)
    first.wait_for("Epoch [1/")
    check_end(train(2, tmp_path, "-n", 2), 2, f"another run uses {tmp_path}: wait for it, or choose another folder")
    assert train(2, tmp_path, "-n", 1, "-i", 0).returncode == 0, "it saves nothing"
    assert first.is_running()
    first.kill()
    printed = re.findall(r"Epoch \[(\d+)/", first.wait().output)
    assert {path.name for path in tmp_path.glob("model_*")} <= {f"model_{epoch}.pth" for epoch in printed}
    assert train(2, tmp_path, "-n", len(printed) + 1, "-r", "latest").returncode == 0, "its lock has died with it"
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize("planted", ["error=fcntl.flock,ENOLCK", "error=os.fsync,EINVAL"])
def test_file_system_that_cannot_lock_or_flush(tmp_path, planted):
    assert train(2, tmp_path, "-n", 1, planted=[planted]).returncode == 0
    assert names(tmp_path) == FIRST_EPOCH


@pytest.mark.parametrize("planted", ["error=os.fsync,EIO", "file_limit=60000000"])
def test_save_that_fails(folder, planted):
    """The limit lets no optimizer be written, which takes 89 MB."""
    result = train(2, folder, "-n", 2, "-r", 1, planted=[planted])
    line = check_end(result, 2, f"epoch 2 could not be saved in {folder} (other checkpoints are intact): ")
    assert "disk is full" not in line
    assert re.search(r"Epoch \[2/2\] loss .*, test accuracy [\d.]+%\n", result.output), "what is known is printed first"
    assert not (folder / "model_2.pth").exists()


def test_full_disk(folder, tmp_path):
    """The first checkpoint takes 134 MB of it, so that the second's optimizer does not fit."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=150m", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no small disk here: {mounted.stderr.decode().strip()}")
    try:
        copy_epoch(1, folder, disk)
        line = f"epoch 2 could not be saved in {disk} (other checkpoints are intact): the disk is full"
        check_end(train(2, disk, "-n", 2, "-r", 1), 2, line)
        assert names(disk) == FIRST_EPOCH and not files_that_differ(1, folder, disk)
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def test_loss_that_is_not_finite(folder, tmp_path):
    check_end(train(2, tmp_path / "new", "-n", 2, "--lr", 1e20, "-i", 0), 1, "diverged", "epoch 1", "a lower --lr")
    check_end(train(2, folder, "-n", 3, "--lr", 1e20, "-r", "latest"), 1, "diverged", "epoch 2", "lower --lr", "-r 1")
    assert names(folder) == FIRST_EPOCH


@pytest.mark.parametrize("plugin, kind, rank", [
    ("torch_ddp", "weight", 0), ("torch_ddp_fp16", "moment", 0), ("gemini", "weight", 0), ("gemini", "moment", 0),
    ("low_level_zero", "weight", 1), ("low_level_zero", "moment", 1),  # of which this process has another share
])  # fmt: skip
def test_weight_or_moment_that_is_not_finite(tmp_path, plugin, kind, rank):
    planted = ["images=32,50", *["double"] * (plugin != "torch_ddp"), f"fault={kind},{rank},2"]
    result = train(2, tmp_path, "-p", plugin, "-n", 1, planted=planted)
    check_end(result, 1, "diverged", "epoch 1", "a lower --lr")
    assert not names(tmp_path)


@pytest.mark.parametrize("plugin, scale", [("torch_ddp_fp16", 1e38), ("low_level_zero", 1e6), ("gemini", 1e6)])
def test_steps_that_fp16_skips_are_no_divergence(tmp_path, plugin, scale):
    result = train(2, tmp_path, "-p", plugin, "-n", 1, planted=["images=32,50", "double", f"loss_scale=1000,{scale}"])
    assert result.returncode == 0, result.output
    assert 0 < read(tmp_path / "optimizer_1.pth")["grad_scaler"]["scale"] < scale, "none was skipped"
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize("other, planted, resumed, message", [
    ("ckpt", ["error=torch.load,EACCES"], 1, "ckpt/model_1.pth cannot be read: it is truncated, or not a checkpoint"),
    ("other", [], 1, "other/model_1.pth is missing or empty. Epochs in that folder"),
    ("other", [], "latest", "machines see different checkpoints in"),
])  # fmt: skip
def test_problem_of_one_machine_ends_both(folder, tmp_path, other, planted, resumed, message):
    arguments = [
        (FEW, *words, "train.py", *SETTINGS, "-c", path, "-n", 2, "-r", resumed)
        for words, path in [([], folder), (planted, tmp_path / other)]
    ]
    first, second = run_machines(arguments, [{}, {}], launcher="fork", script="tests/planted.py")
    check_end(Result(first.returncodes + second.returncodes, first.output + second.output), 2, message)
