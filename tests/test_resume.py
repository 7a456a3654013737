"""A resumed run is the uninterrupted run; a checkpoint moves between plugins and numbers of processes."""

import functools
import re
import shutil
from argparse import Namespace
from pathlib import Path

import exact_resume
import pytest
import torch
from exact_resume import PLUGINS, copy_epoch, files_that_differ, read, resume_and_compare
from helpers import accuracy, run
from torchvision.models import resnet18

from eval import synthetic_data


def conditions(nproc: int) -> Namespace:
    """Of a few images on a CPU, two steps an epoch."""
    return exact_resume.parse_args(["--double", "--nproc", str(nproc)])


def train(nproc: int, plugin: str, folder: Path, *args) -> str:
    """Train and save each epoch. Returns what was printed."""
    return exact_resume.train(conditions(nproc), plugin, folder, *args)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of three epochs, uninterrupted and resumed, by processes and plugin, each made when first asked for."""
    root = tmp_path_factory.mktemp("runs")
    yield functools.cache(lambda nproc, plugin: resume_and_compare(conditions(nproc), plugin, 42, root))
    shutil.rmtree(root)


@pytest.fixture
def folder(tmp_path):
    """One for a test's checkpoints, which are large: it is removed."""
    yield tmp_path / "ckpt"
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize("nproc, plugin", [(1, "torch_ddp"), (3, "torch_ddp"), *((2, plugin) for plugin in PLUGINS)])
def test_resumed_run_is_the_uninterrupted_one(runs, nproc, plugin):
    resumed = runs(nproc, plugin)
    assert not resumed.different
    scales = resumed.scales  # if they were constant, their being the same would prove nothing
    assert scales == ([] if plugin == "torch_ddp" else [scales[0], 2 * scales[0], 4 * scales[0]])


def check_model_file(path: Path) -> float:
    """It is a plain fp32 state dict that torchvision's model loads. Returns its accuracy on the 50 test images."""
    state = read(path)
    assert all(tensor.dtype in (torch.float32, torch.int64) for tensor in state.values())
    assert not torch.equal(state["fc.weight"], state["fc.weight"].half().float()), "rounded to fp16"
    model = resnet18(num_classes=10).eval()
    model.load_state_dict(state)
    images, labels = (tensor[:50] for tensor in synthetic_data(train=False))
    with torch.no_grad():
        return 100 * (model(images / 255).argmax(1) == labels).sum().item() / 50


@pytest.mark.parametrize("plugin", PLUGINS)
def test_printed_accuracy_is_that_of_the_model_file(runs, plugin):
    resumed = runs(2, plugin)
    assert accuracy(resumed.output) == check_model_file(resumed.folder / "model_3.pth")


def test_low_level_zero_and_gemini_train_alike(runs):
    """speed_up replaces different parts of the two, so each is a check of the other."""
    outputs = [runs(2, plugin).output for plugin in ("low_level_zero", "gemini")]
    zero, gemini = ([float(loss) for loss in re.findall(r"loss ([\d.]+)", output)] for output in outputs)
    assert len(zero) == 3 and zero == pytest.approx(gemini, rel=1e-3)


def test_resume_under_other_plugins(runs, folder):
    copy_epoch(1, runs(2, "torch_ddp").folder, folder)
    for epoch, plugin in [(1, "low_level_zero"), (2, "gemini"), (3, "torch_ddp_fp16"), (4, "torch_ddp")]:
        output = train(2, plugin, folder, "-n", epoch + 1, "-r", epoch)
        assert f"Resuming after epoch {epoch}" in output
        assert "Learning rate scaled" not in output
        check_model_file(folder / f"model_{epoch + 1}.pth")
        before, after = (read(folder / f"optimizer_{e}.pth")["state"] for e in (epoch, epoch + 1))
        assert before.keys() == after.keys()
        steps = {(int(before[index]["step"]), int(after[index]["step"])) for index in before}
        assert steps == {(2 * epoch, 2 * epoch + 2)}, "each parameter's Adam state goes on"


def test_loading_changes_no_weight(runs):
    """Resuming at the end, under another plugin and another number of processes, evaluates the very same weights."""
    folder = runs(2, "torch_ddp").folder
    others = [(1, "torch_ddp"), (3, "torch_ddp"), (2, "low_level_zero"), (2, "gemini")]
    printed = {accuracy(train(nproc, plugin, folder, "-n", 3, "-r", 3)) for nproc, plugin in others}
    assert printed == {check_model_file(folder / "model_3.pth")}


def test_resume_on_fewer_processes(runs, folder):
    """Halved processes after a milestone: the learning rate is halved, and what the milestone has divided stays so."""
    whole = runs(2, "torch_ddp").folder
    copy_epoch(2, whole, folder, parts=["model"])
    optimizer, scheduler = (read(whole / f"{part}_2.pth") for part in ("optimizer", "lr_scheduler"))
    (folder / "model_2.pth").rename(folder / "model_20.pth")
    optimizer["param_groups"][0]["lr"] = 0.002 / 3
    torch.save(optimizer, folder / "optimizer_20.pth")
    scheduler.update(last_epoch=20, _step_count=21, _last_lr=[0.002 / 3])
    torch.save(scheduler, folder / "lr_scheduler_20.pth")
    output = train(1, "torch_ddp", folder, "-n", 21, "-r", 20)
    assert re.search(r"^Learning rate scaled.*\b0\.002\b.*\b0\.001\b", output, re.MULTILINE), output
    printed = float(re.search(r"Epoch \[21/21\] .*learning rate ([\d.e-]+),", output)[1])
    assert printed == pytest.approx(0.001 / 3, rel=1e-4)
    group = read(folder / "optimizer_21.pth")["param_groups"][0]
    assert (group["lr"], group["initial_lr"]) == (pytest.approx(0.001 / 3), 0.001)
    assert read(folder / "lr_scheduler_21.pth")["base_lrs"] == [0.001]


@pytest.mark.parametrize("plugin", PLUGINS)
def test_checkpoints_cross_to_the_reference_example_and_back(runs, folder, plugin):
    """Its files have no loss scale, and low_level_zero's own saving writes the model in fp16."""
    copy_epoch(2, runs(2, "low_level_zero").folder, folder)
    result = run(1, plugin, folder, 2, script="tests/reference.py", planted=["double"])
    assert result.returncode == 0, result.output
    before, after = (read(folder / f"optimizer_{epoch}.pth") for epoch in (2, 3))
    assert "grad_scaler" in before and "grad_scaler" not in after
    for old, new in zip(before["state"].values(), after["state"].values(), strict=True):
        assert float(old["step"]) == float(new["step"]) == 4
        assert all(torch.equal(old[name], new[name]) for name in ("exp_avg", "exp_avg_sq"))
    assert "Accuracy" in run(1, "-c", folder, "-e", 3, "--synthetic", script="eval.py").output
    output = train(2, plugin, folder, "-n", 4, "-r", 3)
    assert "Resuming after epoch 3" in output
    assert ("has no loss scale of this plugin's kind" in output) == (plugin != "torch_ddp")
    check_model_file(folder / "model_4.pth")


def test_plain_torch_loads_the_optimizer_file(runs):
    """Each parameter counts its own steps."""
    model = resnet18(num_classes=10)
    optimizer = torch.optim.AdamW(model.parameters())
    content = read(runs(2, "low_level_zero").folder / "optimizer_3.pth")
    optimizer.load_state_dict(content)
    model(torch.rand(2, 3, 32, 32)).sum().backward()
    optimizer.step()
    assert {int(state["step"]) for state in optimizer.state_dict()["state"].values()} == {7}


def test_unfinished_save_is_ignored_and_replaced(runs, folder):
    whole = runs(2, "torch_ddp").folder
    copy_epoch(2, whole, folder)
    for name in ("optimizer_3.pth", ".model_3.pth", ".model_9.pth", ".model_best.pth"):
        (folder / name).write_bytes(b"half")
    assert "Resuming after epoch 2" in train(2, "torch_ddp", folder, "-n", 3, "-r", "latest")
    assert not files_that_differ(3, whole, folder)
    assert [path.name for path in folder.glob(".*")] == [".model_best.pth"], "it is not of this example"
