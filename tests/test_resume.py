"""A resumed run is the uninterrupted run; a checkpoint moves between plugins and numbers of processes."""

import filecmp
import re
import shutil
from pathlib import Path

import forked
import pytest
import torch
from eval import build_model, synthetic_data
from helpers import accuracy, run_eval
from torchvision.models import resnet18

PARTS = ("model", "optimizer", "lr_scheduler", "grad_scaler")
GROWTH_INTERVAL = 3  # steps until the loss scale doubles, in place of 1000 or 2000: within the second epoch here


def train(nproc: int, plugin: str, folder: Path, *args) -> str:
    """Train on `nproc` processes, two steps an epoch, and save each epoch. Returns what was printed."""
    double = [] if plugin == "torch_ddp" else ["--double", "--growth_interval", GROWTH_INTERVAL]
    batch_size = 8 if plugin == "torch_ddp" else 4  # fp16 is slow on a CPU
    few = ["--images", 2 * batch_size * nproc, "--test_images", 50]
    arguments = ["-p", plugin, "-c", folder, "--synthetic", "-i", 1, "--batch_size", batch_size, *args]
    result = forked.run(nproc, *few, *double, "train.py", *arguments, script="tests/planted.py")
    assert result.returncodes == [0] * nproc, result.output
    return result.output


def copy_epoch(epoch: int, source: Path, target: Path, parts=PARTS) -> Path:
    target.mkdir()
    for part in parts:
        if (source / f"{part}_{epoch}.pth").exists():
            shutil.copy(source / f"{part}_{epoch}.pth", target)
    return target


def files_that_differ(epoch: int, one: Path, other: Path) -> list[str]:
    names = {path.name for folder in (one, other) for path in folder.glob(f"*_{epoch}.pth")}
    assert f"model_{epoch}.pth" in names
    _, different, missing = filecmp.cmpfiles(one, other, names, shallow=False)
    return sorted(different + missing)


def read(path: Path) -> dict:
    return torch.load(path, map_location="cpu", weights_only=True)


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Uninterrupted runs of three epochs by (processes, plugin), each made when first asked for."""
    root, made = tmp_path_factory.mktemp("runs"), {}

    def run(nproc: int, plugin: str) -> Path:
        if (nproc, plugin) not in made:
            made[nproc, plugin] = root / f"{plugin}-{nproc}"
            train(nproc, plugin, made[nproc, plugin], "-n", 3)
        return made[nproc, plugin]

    yield run
    shutil.rmtree(root)


# ------------------------------------------------------------------------------------------------------------- exact


@pytest.mark.parametrize(
    "nproc, plugin",
    [(1, "torch_ddp"), (2, "torch_ddp"), (3, "torch_ddp"), (4, "torch_ddp"), (2, "torch_ddp_fp16")]
    + [(1, "low_level_zero"), (2, "low_level_zero"), (2, "gemini")],
)
def test_resumed_run_is_the_uninterrupted_one(runs, tmp_path, nproc, plugin):
    whole = runs(nproc, plugin)
    resumed = copy_epoch(2, whole, tmp_path / "resumed")
    assert f"Resuming after epoch 2, from {resumed}" in train(nproc, plugin, resumed, "-n", 3, "-r", 2)
    assert not files_that_differ(3, whole, resumed)
    assert (whole / "grad_scaler_3.pth").exists() == (plugin != "torch_ddp")
    shutil.rmtree(resumed)


@pytest.mark.parametrize("plugin", ["torch_ddp_fp16", "low_level_zero", "gemini"])
def test_loss_scale_changes_before_the_checkpoint(runs, plugin):
    """That is, what the exact runs above have in common is no constant."""
    scales = [float(read(runs(2, plugin) / f"grad_scaler_{epoch}.pth")["scale"]) for epoch in (1, 2, 3)]
    assert scales[1] == 2 * scales[0]
    assert scales[2] == 4 * scales[0]


def test_without_the_loss_scale_a_resumed_run_differs(runs, tmp_path):
    whole = runs(2, "low_level_zero")
    resumed = copy_epoch(2, whole, tmp_path / "resumed", parts=PARTS[:3])
    train(2, "low_level_zero", resumed, "-n", 3, "-r", 2)
    assert {"model_3.pth", "optimizer_3.pth", "grad_scaler_3.pth"} <= set(files_that_differ(3, whole, resumed))
    shutil.rmtree(resumed)


# ---------------------------------------------------------------------------------------------------------- portable


def check_model_file(path: Path) -> None:
    state = read(path)
    assert type(state) in (dict, type(build_model().state_dict()))
    assert all(tensor.dtype in (torch.float32, torch.int64) for tensor in state.values())
    resnet18(num_classes=10).load_state_dict(state)


@pytest.mark.parametrize("plugin", ["torch_ddp", "torch_ddp_fp16", "low_level_zero", "gemini"])
def test_model_file_is_a_plain_fp32_state_dict(runs, plugin):
    check_model_file(runs(2, plugin) / "model_3.pth")


def test_resume_under_other_plugins(runs, tmp_path):
    folder = copy_epoch(1, runs(2, "torch_ddp"), tmp_path / "ckpt")
    for epoch, plugin in [(1, "low_level_zero"), (2, "gemini"), (3, "torch_ddp_fp16"), (4, "torch_ddp")]:
        output = train(2, plugin, folder, "-n", epoch + 1, "-r", epoch)
        assert f"Resuming after epoch {epoch}" in output
        assert "Learning rate scaled" not in output
        check_model_file(folder / f"model_{epoch + 1}.pth")
        before, after = (read(folder / f"optimizer_{e}.pth")["state"] for e in (epoch, epoch + 1))
        assert before.keys() == after.keys()
        steps = {(int(before[index]["step"]), int(after[index]["step"])) for index in before}
        assert steps == {(2 * epoch, 2 * epoch + 2)}, "each parameter's Adam state goes on"
    shutil.rmtree(folder)


def test_loading_changes_no_weight(runs, tmp_path):
    """Resuming at the end, under another plugin and another number of processes, evaluates the very same weights."""
    folder = runs(2, "torch_ddp")
    lines = {accuracy(train(nproc, plugin, folder, "-n", 3, "-r", 3)) for nproc, plugin in [
        (1, "torch_ddp"), (3, "torch_ddp"), (2, "low_level_zero"), (2, "gemini"),
    ]}  # fmt: skip
    images, labels = (tensor[:50] for tensor in synthetic_data(train=False))
    model = build_model().eval()
    model.load_state_dict(read(folder / "model_3.pth"))
    with torch.no_grad():
        correct = (model(images / 255).argmax(1) == labels).sum().item()
    assert lines == {100 * correct / 50}


def test_resume_on_fewer_processes(runs, tmp_path):
    folder = copy_epoch(2, runs(2, "torch_ddp"), tmp_path / "ckpt")
    output = train(1, "torch_ddp", folder, "-n", 3, "-r", 2)
    assert re.search(r"^Learning rate scaled.*\b0\.002\b.*\b0\.001\b", output, re.MULTILINE), output
    assert "Epoch [3/3]" in output
    assert "learning rate 0.001, " in output[output.index("Epoch [3/3]") :]
    group = read(folder / "optimizer_3.pth")["param_groups"][0]
    assert (group["lr"], group["initial_lr"]) == (0.001, 0.001)
    assert read(folder / "lr_scheduler_3.pth")["base_lrs"] == [0.001]
    shutil.rmtree(folder)


def test_scaled_learning_rate_keeps_its_decay(runs, tmp_path):
    """Halved processes after a milestone: what the milestone has divided stays divided."""
    folder = copy_epoch(2, runs(2, "torch_ddp"), tmp_path / "ckpt", parts=["model"])
    optimizer, scheduler = (read(runs(2, "torch_ddp") / f"{part}_2.pth") for part in ("optimizer", "lr_scheduler"))
    (folder / "model_2.pth").rename(folder / "model_20.pth")
    for group in optimizer["param_groups"]:
        group["lr"] = 0.002 / 3
    torch.save(optimizer, folder / "optimizer_20.pth")
    scheduler.update(last_epoch=20, _step_count=21, _last_lr=[0.002 / 3])
    torch.save(scheduler, folder / "lr_scheduler_20.pth")
    output = train(1, "torch_ddp", folder, "-n", 21, "-r", 20)
    printed = float(re.search(r"Epoch \[21/21\] .*learning rate ([\d.e-]+),", output)[1])
    assert printed == pytest.approx(0.001 / 3, rel=1e-4)
    assert read(folder / "optimizer_21.pth")["param_groups"][0]["lr"] == pytest.approx(0.001 / 3)
    shutil.rmtree(folder)


def test_checkpoint_of_the_reference_example(runs, tmp_path):
    """Three files; low_level_zero's own saving writes the model in fp16."""
    folder = copy_epoch(2, runs(2, "low_level_zero"), tmp_path / "ckpt", parts=PARTS[:3])
    state = read(folder / "model_2.pth")
    half = {name: value.half() if value.is_floating_point() else value for name, value in state.items()}
    torch.save(half, folder / "model_2.pth")
    assert "Accuracy" in run_eval("-c", folder, "-e", 2, "--synthetic").stdout
    for epoch, plugin in [(2, "low_level_zero"), (3, "torch_ddp")]:
        assert f"Resuming after epoch {epoch}" in train(2, plugin, folder, "-n", epoch + 1, "-r", epoch)
        check_model_file(folder / f"model_{epoch + 1}.pth")
    shutil.rmtree(folder)


# ------------------------------------------------------------------------------------------------- whole or not at all


def test_latest_without_any_starts_afresh(runs, tmp_path):
    folder = tmp_path / "ckpt"
    assert f"No checkpoint in {folder}: starting afresh" in train(2, "torch_ddp", folder, "-n", 1, "-r", "latest")
    assert not files_that_differ(1, folder, copy_epoch(1, runs(2, "torch_ddp"), tmp_path / "whole"))


def test_unfinished_save_is_ignored_and_cleaned_up(runs, tmp_path):
    whole = runs(2, "torch_ddp")
    folder = copy_epoch(2, whole, tmp_path / "ckpt")
    aside = copy_epoch(3, whole, folder / ".saving_3")
    (aside / "optimizer_3.pth").write_bytes(b"half")
    (aside / "grad_scaler_3.pth").write_bytes(b"of another plugin")
    (folder / ".saving_1").mkdir()  # by an earlier run, of an epoch that this one does not save
    assert "Resuming after epoch 2" in train(2, "torch_ddp", folder, "-n", 3, "-r", "latest")
    assert not files_that_differ(3, whole, folder)
    assert not list(folder.glob(".*"))


@pytest.mark.parametrize("moved", [(), ("lr_scheduler",), ("lr_scheduler", "optimizer")])
@pytest.mark.parametrize("script", ["train.py", "eval.py"])
def test_interrupted_publishing_is_completed(runs, tmp_path, moved, script):
    whole = runs(2, "torch_ddp")
    folder = copy_epoch(2, whole, tmp_path / "ckpt")
    copy_epoch(3, whole, folder / ".saved_3")
    for part in moved:
        (folder / ".saved_3" / f"{part}_3.pth").rename(folder / f"{part}_3.pth")
    if script == "train.py":
        assert "Resuming after epoch 3" in train(2, "torch_ddp", folder, "-n", 3, "-r", "latest")
    else:
        assert forked.run(1, "-c", folder, "-e", "latest", "--synthetic", script="eval.py").returncodes == [0]
    assert not files_that_differ(3, whole, folder)
    assert not list(folder.glob(".*"))
