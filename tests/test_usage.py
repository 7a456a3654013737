"""Bad input: one line that says what is wrong and what to do, printed once, exit code 2, and nothing touched."""

import os
import pickle
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.optim.lr_scheduler import MultiStepLR
from torchvision.datasets import CIFAR10
from torchvision.models import resnet18, resnet34

import train
from eval import UserError, build_model, fetch_data
from eval import main as eval_main
from helpers import error_lines, free_port, launch, run_eval

needs_proc = pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that nobody can write to")


@pytest.fixture(scope="session")
def whole_checkpoint(tmp_path_factory) -> Path:
    """A folder with the checkpoint of epoch 2, as torch_ddp leaves it."""
    folder = tmp_path_factory.mktemp("whole")
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0)
    scheduler = MultiStepLR(optimizer, milestones=[20, 40, 60, 80], gamma=1 / 3)
    for _ in range(2):
        model(torch.rand(2, 3, 32, 32)).sum().backward()
        optimizer.step()
        scheduler.step()
    torch.save(model.state_dict(), folder / "model_2.pth")
    torch.save(optimizer.state_dict(), folder / "optimizer_2.pth")
    torch.save(scheduler.state_dict(), folder / "lr_scheduler_2.pth")
    return folder


@pytest.fixture
def checkpoint(whole_checkpoint, tmp_path) -> Path:
    """A folder with whole checkpoints of epochs 2 and 4 whose files a test may replace or remove."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for part in train.PARTS:
        (folder / f"{part}_2.pth").symlink_to(whole_checkpoint / f"{part}_2.pth")
        (folder / f"{part}_4.pth").symlink_to(whole_checkpoint / f"{part}_2.pth")
    state = torch.load(whole_checkpoint / "lr_scheduler_2.pth", weights_only=True)
    replace(folder / "lr_scheduler_4.pth", {**state, "last_epoch": 4})
    return folder


def replace(path: Path, content: object) -> None:
    """Put a file with `content`, bytes or anything that torch saves, in the place of `path`."""
    path.unlink(missing_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)


def listing(folder: Path) -> list:
    """What is in a folder, and when it was last written."""
    return sorted((str(path), path.lstat().st_mtime_ns) for path in folder.rglob("*"))


def start(*args) -> int:
    """What train.py does with its arguments before it starts anything. Returns the epoch to resume from."""
    parsed = train.get_args_parser().parse_args([str(arg) for arg in args])
    train.check_args(parsed)
    return train.find_checkpoint(parsed)


@pytest.fixture
def refusal(tmp_path, monkeypatch):
    """A function that gives train.py's arguments to `start`, and returns the line that refuses them.

    It runs in an empty folder, and what is in the test's own folder must stay as it is.
    """

    def refuse(*args, start=start) -> str:
        before = listing(tmp_path)
        with pytest.raises(UserError) as caught:
            start(*args)
        assert listing(tmp_path) == before
        line = str(caught.value)
        assert line and "\n" not in line
        return line

    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return refuse


@pytest.fixture
def eval_refusal(refusal, monkeypatch):
    """The same for eval.py as a whole."""

    def main(*args) -> None:
        monkeypatch.setattr(sys, "argv", ["eval.py", *map(str, args)])
        eval_main()

    return lambda *args: refusal(*args, start=main)


# ---------------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    "args, message",
    [
        (["--interval", -1], "--interval must be 0 or more"),
        (["--target_acc", 84], "--target_acc is a fraction in 0..1"),
        (["--target_acc", -0.1], "--target_acc is a fraction in 0..1"),
        (["--target_acc", "nan"], "--target_acc is a fraction in 0..1"),
        (["--num_epochs", 0], "--num_epochs must be 1 or more"),
        (["--batch_size", 0], "--batch_size must be in 1..50000"),
        (["--lr", 0], "--lr must be a number above 0"),
        (["--seed", -1], "--seed must be in 0"),
        (["--resume", 0], "--resume takes an epoch from 1 on"),
        (["--resume", -2], "--resume takes an epoch from 1 on"),
        (["--resume", "newest"], "--resume: 'newest' is neither an epoch number nor 'latest'"),
        (["--plugin", "ddp"], "invalid choice: 'ddp'"),
        (["--epochs", 3], "unrecognized arguments: --epochs 3"),
        (["--num_epochs", "many"], "--num_epochs: invalid int value: 'many'"),
        (["--batch_size"], "--batch_size: expected one argument"),
    ],
)
def test_wrong_argument(refusal, args, message):
    assert message in refusal(*args)


@pytest.mark.parametrize("args", [[], ["--interval", 0], ["--target_acc", 0], ["--target_acc", 1], ["-r", "latest"]])
def test_right_arguments(args, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert start(*args) == 0
    assert listing(tmp_path) == []


@pytest.mark.parametrize("plugin", ["torch_ddp_fp16", "low_level_zero", "gemini"])
def test_plugin_that_needs_a_gpu(refusal, monkeypatch, plugin):
    monkeypatch.setattr(train, "get_accelerator", lambda: SimpleNamespace(name="cpu"))
    line = refusal("-p", plugin)
    assert f"-p {plugin} needs a GPU" in line and "use -p torch_ddp" in line


def test_more_processes_than_gpus(refusal, monkeypatch):
    monkeypatch.setattr(train, "get_accelerator", lambda: SimpleNamespace(name="cuda", device_count=lambda: 2))
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert "4 processes but 2 GPUs on this machine" in refusal()
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert start() == 0


def test_tensorboard_without_its_package(refusal, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # now importing it raises ImportError
    assert "pip install tensorboard" in refusal("--tensorboard", "curves")


def test_batch_larger_than_a_share(refusal, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "--batch_size must be in 1..2000, a process's share" in refusal("--synthetic", "--batch_size", 2001)
    assert "--batch_size must be in 1..25000, a process's share" in refusal("--batch_size", 25001)
    assert start("--synthetic", "--batch_size", 2000) == 0


def test_tensorboard_folder_is_a_file(refusal, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.ModuleType("torch.utils.tensorboard"))
    (tmp_path / "file").touch()
    line = refusal("-i", 0, "--tensorboard", tmp_path / "file")
    assert f"nothing can be written to {tmp_path / 'file'}" in line and "--tensorboard" in line


def test_checkpoint_folder_is_a_dangling_link(refusal, tmp_path):
    (tmp_path / "link").symlink_to("nowhere")
    assert f"nothing can be written to {tmp_path / 'link'}" in refusal("-c", tmp_path / "link")


def test_checkpoint_folder_is_a_file(refusal, tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    for path in (file, file / "below"):
        line = refusal("-c", path)
        assert f"nothing can be written to {path}" in line and "-c" in line
    assert file.read_text() == "mine"


@needs_proc
def test_checkpoint_folder_is_not_writable(refusal):
    assert "nothing can be written to /proc/checkpoint" in refusal("-c", "/proc/checkpoint")
    assert start("-c", "/proc/checkpoint", "--interval", 0) == 0  # nothing will be written


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_checkpoint_folder_without_permission(refusal, tmp_path):
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o500)
    assert "Permission denied" in refusal("-c", folder / "checkpoint")


# ------------------------------------------------------------------------------------------------------------- resume


def test_whole_checkpoints_are_found(checkpoint):
    assert start("-c", checkpoint, "-r", 2) == 2
    assert start("-c", checkpoint, "-r", "latest") == 4
    assert start("-c", checkpoint, "-r", "latest", "-n", 4) == 4
    assert start("-c", checkpoint) == 0


def test_resume_from_an_epoch_that_was_not_saved(refusal, checkpoint):
    line = refusal("-c", checkpoint, "-r", 3)
    assert f"{checkpoint / 'model_3.pth'} is missing" in line and "epochs 2, 4" in line


@pytest.mark.parametrize("part", train.PARTS)
def test_resume_with_a_missing_file(refusal, checkpoint, part):
    (checkpoint / f"{part}_4.pth").unlink()
    line = refusal("-c", checkpoint, "-r", 4)
    assert f"{checkpoint / f'{part}_4.pth'} is missing" in line and line.endswith("epochs 2")
    assert start("-c", checkpoint, "-r", "latest") == 2  # the newest whole one


def test_resume_without_any_checkpoint(refusal, tmp_path):
    assert "model_3.pth is missing. Saved in that folder (-c): none" in refusal("-c", tmp_path / "none", "-r", 3)
    assert start("-c", tmp_path / "none", "-r", "latest") == 0


@pytest.mark.parametrize("epoch", [4, "latest"])
def test_resume_beyond_num_epochs(refusal, checkpoint, epoch):
    line = refusal("-c", checkpoint, "-r", epoch, "-n", 3)
    assert f"--resume {epoch} means epoch 4, beyond --num_epochs 3: raise -n" in line


@pytest.mark.parametrize("part", train.PARTS)
@pytest.mark.parametrize("keep", [0, 0.99])
def test_truncated_file(refusal, checkpoint, part, keep):
    path = checkpoint / f"{part}_4.pth"
    content = path.read_bytes()
    replace(path, content[: int(keep * len(content))])
    line = refusal("-c", checkpoint, "-r", 4)
    assert f"{path} cannot be read: it is truncated, or not a checkpoint" in line


@pytest.mark.parametrize("part", train.PARTS)
@pytest.mark.parametrize("content", [b"Not a checkpoint.\n", [1, 2, 3], {"a": 1}], ids=["text", "list", "dict"])
def test_foreign_file(refusal, checkpoint, part, content):
    replace(checkpoint / f"{part}_4.pth", content)
    assert str(checkpoint / f"{part}_4.pth") in refusal("-c", checkpoint, "-r", 4)


@pytest.mark.parametrize("change", [{"base_lrs": []}, {"base_lrs": [0.0]}, {"last_epoch": 3}])
def test_scheduler_file_that_does_not_fit(refusal, checkpoint, change):
    path = checkpoint / "lr_scheduler_4.pth"
    replace(path, {**torch.load(path, weights_only=True), **change})
    assert f"{path} is not the MultiStepLR state of epoch 4" in refusal("-c", checkpoint, "-r", 4)


def test_finished_save_that_cannot_be_moved(refusal, checkpoint):
    (checkpoint / ".saved_5").touch()  # nobody can move files out of a file, not even root
    assert f"make {checkpoint} writable" in refusal("-c", checkpoint, "-r", "latest")


class Trap:
    """Unpickling it creates a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def save_pickle(content: object, path: Path) -> None:
    path.write_bytes(pickle.dumps(content, protocol=2))


@pytest.mark.parametrize("part", [*train.PARTS, train.SCALER])
@pytest.mark.parametrize("save", [torch.save, save_pickle])
def test_code_in_a_file_is_not_run(refusal, checkpoint, tmp_path, part, save):
    path = checkpoint / f"{part}_4.pth"
    path.unlink(missing_ok=True)
    save({"state": Trap(tmp_path / "sprung")}, path)
    assert f"{path} cannot be read" in refusal("-c", checkpoint, "-r", 4)
    assert not (tmp_path / "sprung").exists()


def test_model_of_another_kind(refusal, checkpoint):
    path = checkpoint / "model_4.pth"
    for other in (resnet34(num_classes=10), resnet18(num_classes=100)):
        replace(path, other.state_dict())
        assert f"{path} is a checkpoint of another model than ResNet-18" in refusal("-c", checkpoint, "-r", 4)


@pytest.mark.parametrize("index", [0, 30, 61])
def test_optimizer_file_that_lacks_a_parameter(refusal, checkpoint, index):
    path = checkpoint / "optimizer_4.pth"
    content = torch.load(path, weights_only=True)
    del content["state"][index]
    replace(path, content)
    line = refusal("-c", checkpoint, "-r", 4)
    assert str(path) in line and "does not hold Adam's state of all 62 parameters" in line


def test_optimizer_file_of_another_optimizer(refusal, checkpoint):
    path = checkpoint / "optimizer_4.pth"
    replace(path, torch.optim.SGD(build_model().parameters(), lr=0.1).state_dict())
    assert f"{path} does not hold Adam's state of all 62 parameters of ResNet-18" in refusal("-c", checkpoint, "-r", 4)


def test_scheduler_file_of_another_epoch(refusal, checkpoint):
    path = checkpoint / "lr_scheduler_4.pth"
    replace(path, (checkpoint / "lr_scheduler_2.pth").read_bytes())
    assert f"{path} is not the MultiStepLR state of epoch 4" in refusal("-c", checkpoint, "-r", 4)


# --------------------------------------------------------------------------------------------------------------- data


@pytest.fixture
def data(tmp_path, monkeypatch) -> Path:
    """A folder for $DATA, on a machine whose network has no CIFAR-10."""
    monkeypatch.setattr(CIFAR10, "url", f"http://127.0.0.1:{free_port()}/cifar-10-python.tar.gz")
    monkeypatch.setenv("DATA", str(tmp_path / "data"))
    return tmp_path / "data"


def test_no_data_and_no_network(data):
    with pytest.raises(UserError) as caught:
        fetch_data()
    line = str(caught.value)
    assert "\n" not in line
    for words in (f"no CIFAR-10 in {data}", f"downloading {CIFAR10.url} failed", "refused", "$DATA", "--synthetic"):
        assert words in line
    assert not any(path.is_dir() or path.stat().st_size for path in data.rglob("*"))


def test_half_downloaded_archive(data):
    data.mkdir()
    archive = data / CIFAR10.filename
    archive.write_bytes(b"\x1f\x8b the first half of an archive")
    with pytest.raises(UserError) as caught:
        fetch_data()
    line = str(caught.value)
    assert "\n" not in line
    assert f"{archive} is incomplete or damaged" in line and f"downloading {CIFAR10.url} failed" in line
    assert not (data / CIFAR10.base_folder).exists()


# ------------------------------------------------------------------------------------------------------------ eval.py


def test_eval_of_an_epoch_that_was_not_saved(eval_refusal, checkpoint):
    line = eval_refusal("-c", checkpoint, "--synthetic")  # epoch 80, the default
    assert f"{checkpoint / 'model_80.pth'} is missing" in line and "epochs 2, 4" in line


def test_eval_without_any_checkpoint(eval_refusal, tmp_path):
    line = eval_refusal("-c", tmp_path / "none", "-e", 3, "--synthetic")
    assert "model_3.pth is missing" in line and line.endswith(": none")
    assert f"there is no checkpoint in {tmp_path / 'none'}" in eval_refusal("-c", tmp_path / "none", "-e", "latest")


def test_eval_of_another_model(eval_refusal, checkpoint):
    replace(checkpoint / "model_4.pth", resnet34(num_classes=10).state_dict())
    line = eval_refusal("-c", checkpoint, "-e", 4, "--synthetic")
    assert f"{checkpoint / 'model_4.pth'} is a checkpoint of another model" in line


def test_eval_of_a_truncated_file(eval_refusal, checkpoint):
    path = checkpoint / "model_4.pth"
    replace(path, path.read_bytes()[:1000000])
    assert f"{path} cannot be read: it is truncated" in eval_refusal("-c", checkpoint, "-e", "latest", "--synthetic")


def test_eval_without_data(eval_refusal, checkpoint, data):
    line = eval_refusal("-c", checkpoint, "-e", 4)
    assert f"no CIFAR-10 in {data}" in line and "$DATA" in line


@pytest.mark.parametrize(
    "args, message",
    [
        (["--epochs", 3], "unrecognized arguments: --epochs 3"),
        (["-e", "newest"], "'newest' is neither an epoch number nor 'latest'"),
        (["-p", "gemini"], "unrecognized arguments: -p gemini"),
    ],
)
def test_wrong_argument_of_eval(eval_refusal, args, message):
    assert message in eval_refusal(*args)


# ------------------------------------------------------------------------------------------------- the real processes


def test_help_needs_no_launcher(tmp_path):
    result = launch(1, "--help", launcher="python", cwd=tmp_path)
    assert result.returncode == 0
    for action in train.get_args_parser()._actions:
        assert all(option in result.stdout for option in action.option_strings)
    result = run_eval("--help", cwd=tmp_path)
    assert result.returncode == 0
    for option in ("--epoch", "--checkpoint", "--synthetic"):
        assert option in result.stdout
    assert listing(tmp_path) == []


def test_refusal_without_a_launcher(tmp_path):
    result = launch(1, "--synthetic", "--target_acc", 84, launcher="python", cwd=tmp_path)
    assert result.returncode == 2
    assert error_lines(result.stdout) == ["train.py: error: --target_acc is a fraction in 0..1: 0.84"]
    assert result.stdout.splitlines()[-1] == error_lines(result.stdout)[0]
    assert "Traceback" not in result.stdout and "usage:" not in result.stdout
    assert listing(tmp_path) == []


def test_refusal_of_eval(tmp_path):
    result = run_eval("--synthetic", "-c", "none", "-e", 7, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stdout == "eval.py: error: none/model_7.pth is missing. Saved in that folder (-c): none\n"
    assert listing(tmp_path) == []


@pytest.mark.parametrize(
    "launcher, args, message",
    [
        ("colossalai", ["--num_epoch", 3, "--nonsense", 1], "unrecognized arguments: --nonsense 1"),
        ("torchrun", ["--batch_size", 2001], "--batch_size must be in 1..2000, a process's share"),
    ],
)
def test_refusal_is_printed_once_for_all_processes(tmp_path, launcher, args, message):
    result = launch(2, "--synthetic", *args, launcher=launcher, cwd=tmp_path)
    assert result.returncode != 0  # torchrun's own code is 1 whenever a process fails
    assert len(error_lines(result.stdout)) == 1 and message in error_lines(result.stdout)[0]
    assert "exitcode  : 2" in result.stdout
    assert "usage:" not in result.stdout
    assert listing(tmp_path) == []
