"""Runs that are killed, restarted, or out of disk space leave whole checkpoints, and end as undisturbed ones."""

import filecmp
import shutil
import subprocess
import sys
from pathlib import Path

import forked
import pytest
import train
from helpers import ROOT, launch, run

PLANTED = "tests/planted.py"
SMALL = ["--images", 64, "--test_images", 50]
SETTINGS = ["--synthetic", "--batch_size", 8, "-i", 1]  # four steps in an epoch of two processes
NAMES = [f"{part}_{{}}.pth" for part in ("model", "optimizer", "lr_scheduler")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    result = forked.run(2, *SMALL, "train.py", *SETTINGS, "-n", 3, "-c", folder, script=PLANTED)
    assert result.returncodes == [0, 0], result.output
    yield folder
    shutil.rmtree(folder)


def check_equal(epochs: range, folder: Path, undisturbed: Path) -> None:
    names = [name.format(epoch) for epoch in epochs for name in NAMES]
    assert filecmp.cmpfiles(folder, undisturbed, names, shallow=False) == (names, [], [])
    assert not list(folder.glob(".*"))


# ------------------------------------------------------------------------------------------------------------ killed


def test_kills_at_random_moments():
    result = run([sys.executable, ROOT / "tests/kill_at_random.py", 4])
    assert result.returncode == 0, result.stdout
    assert "4 of 4 runs ended as the undisturbed one" in result.stdout
    assert "| saving |" in result.stdout, "at least one was killed while it saved"


@pytest.mark.parametrize(
    "launcher, restarts, rank",
    [("torchrun", ["--max-restarts", 3], 1), ("colossalai", ["--extra_launch_args", "max_restarts=3"], 0)],
)
def test_killed_rank_is_restarted(undisturbed, tmp_path, launcher, restarts, rank):
    """In the middle of epoch 3; the launcher starts all ranks again, and they go on after epoch 2."""
    folder, stamp = tmp_path / "ckpt", tmp_path / "stamp"
    arguments = [*SETTINGS, "-n", 3, "-r", "latest", "-c", folder]
    planted = [*SMALL, "--fault", "kill", rank, 10, stamp, "train.py"]
    result = launch(2, *planted, *arguments, launcher=launcher, launcher_args=restarts, script=PLANTED)
    assert result.returncode == 0, result.stdout
    assert stamp.exists()
    assert result.stdout.count("starting afresh") == 1
    assert result.stdout.count("Resuming after epoch 2") == 1
    check_equal(range(1, 4), folder, undisturbed)
    shutil.rmtree(folder)


def test_overwritten_checkpoint_is_whole_until_the_new_one_exists(tmp_path, monkeypatch):
    """One of torch_ddp, which has no loss scale, over one of a plugin that has."""
    aside, scaler, model = tmp_path / ".saving_1", tmp_path / "grad_scaler_1.pth", tmp_path / "model_1.pth"
    aside.mkdir()
    for path, text in [(scaler, "old"), (model, "old"), (aside / "model_1.pth", "new")]:
        path.write_text(text)

    def end(*paths):
        raise SystemExit("the run ends here")

    with monkeypatch.context() as changed, pytest.raises(SystemExit):
        changed.setattr(Path, "rename", end)
        train.finish_save(aside, 1)
    assert scaler.read_text() == model.read_text() == "old"
    train.finish_save(aside, 1)
    assert model.read_text() == "new" and {path.name for path in tmp_path.iterdir()} == {"model_1.pth"}


# --------------------------------------------------------------------------------------------------- nowhere to write


def check_refused(result: forked.Result, folder: Path, undisturbed: Path) -> None:
    """The save of epoch 2 failed on both ranks; epoch 1 is as it was."""
    assert result.returncodes == [2, 2], result.output
    errors = [line for line in result.output.splitlines() if "error" in line.lower()]
    start, end = f"train.py: error: epoch 2 could not be saved in {folder} (", "older checkpoints are intact"
    assert all(error.startswith(start) and error.endswith(end) for error in errors)
    assert 1 <= len(errors) <= 2, "the launcher ends the second rank before it says the same"
    assert "Traceback" not in result.output
    assert sorted(path.name for path in folder.iterdir()) == sorted(name.format(1) for name in NAMES)
    check_equal(range(1, 2), folder, undisturbed)


def resume_from_first(folder: Path, undisturbed: Path, *planted) -> forked.Result:
    for name in NAMES:
        shutil.copy(undisturbed / name.format(1), folder)
    arguments = [*SETTINGS, "-n", 2, "-r", "latest", "-c", folder]
    return forked.run(2, *SMALL, *planted, "train.py", *arguments, script=PLANTED)


def test_file_limit(undisturbed, tmp_path):
    """It lets the model be written, 45 MB, but not the optimizer, 89 MB."""
    check_refused(resume_from_first(tmp_path, undisturbed, "--file_limit", 60_000_000), tmp_path, undisturbed)


def test_full_disk(undisturbed, tmp_path):
    """The first checkpoint takes 134 MB of it, so that the second's model does not fit."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=150m", "tmpfs", tmp_path], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no small disk here: {mounted.stderr.decode().strip()}")
    try:
        check_refused(resume_from_first(tmp_path, undisturbed), tmp_path, undisturbed)
    finally:
        subprocess.run(["umount", "--lazy", tmp_path], check=True)
