"""Bad input: one line that says what is wrong and what to do, printed once, exit code 2, and nothing touched."""

import os
import pickle
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from helpers import error_lines, run
from torch.optim.lr_scheduler import MultiStepLR
from torchvision.models import resnet18, resnet34

import eval
import train
from eval import UserError, build_model, saved_epochs


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A folder with the checkpoints of epochs 2 and 4, as torch_ddp leaves them."""
    folder = tmp_path_factory.mktemp("saved")
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0)
    scheduler = MultiStepLR(optimizer, milestones=[20, 40, 60, 80], gamma=1 / 3)
    for epoch in range(1, 5):
        model(torch.rand(2, 3, 32, 32)).sum().backward()
        optimizer.step()
        scheduler.step()
        if epoch % 2 == 0:
            for part, source in zip(train.PARTS, (model, optimizer, scheduler)):
                torch.save(source.state_dict(), folder / f"{part}_{epoch}.pth")
    return folder


@pytest.fixture
def checkpoint(saved, tmp_path) -> Path:
    """A folder with these checkpoints, whose files a test may replace or remove."""
    return shutil.copytree(saved, tmp_path / "checkpoint", copy_function=os.symlink)


def replace(path: Path, content: object) -> None:
    """Put a file with `content`, bytes or anything that torch saves, in the place of `path`."""
    path.unlink(missing_ok=True)
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)


def change(path: Path, how) -> None:
    """Put `how(content)` in the place of a file that torch saved."""
    replace(path, how(torch.load(path, weights_only=True)))


@pytest.fixture(autouse=True)
def job(tmp_path, monkeypatch) -> None:
    """A job of one process, without a GPU, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "get_accelerator", lambda: SimpleNamespace(name="cpu"))
    monkeypatch.setattr(train, "gather", lambda value: [value])
    monkeypatch.setattr(train.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(train.dist, "get_world_size", lambda: 1)


MASTER = SimpleNamespace(is_master=lambda: True)


def listing() -> list:
    """What is in the working folder, and when it was last written."""
    return sorted((path, path.lstat().st_mtime_ns) for path in Path().rglob("*"))


def start(*args) -> int:
    """What train.py does with its arguments before it writes anything. Returns the epoch to resume from."""
    parsed = train.get_args_parser().parse_args([str(arg) for arg in args])
    with mock.patch.dict(os.environ):
        train.prepare_environment()
        train.check_args(parsed)
    return train.find_checkpoint(parsed)


def evaluate(*args) -> None:
    """Run eval.py in this process."""
    with mock.patch.object(sys, "argv", ["eval.py", *map(str, args)]):
        eval.main()


def refusal(function, *args) -> str:
    """The line with which `function` refuses `args`. What is in the working folder must stay as it is."""
    before = listing()
    with pytest.raises(UserError) as caught:
        function(*args)
    assert listing() == before
    [line] = str(caught.value).splitlines()
    return line


@pytest.mark.parametrize("args, message", [
    (["--interval", -1], "--interval must be 0 or more"),
    (["--target_acc", 84], "--target_acc is a fraction in 0..1"),
    (["--batch_size", 1], "--batch_size must be 2 or more"),
    (["--lr", 0], "--lr must be a number above 0"),
    (["--lr", "nan"], "--lr must be a number above 0"),
    (["--seed", -1], "--seed must be in 0"),
    (["--resume", 0], "--resume takes an epoch from 1 on"),
    (["--resume", "newest"], "--resume: 'newest' is neither an epoch number nor 'latest'"),
    (["--plugin", "ddp"], "invalid choice: 'ddp'"),
    (["-p", "gemini"], "-p gemini runs on CUDA and NPU only; use -p torch_ddp here"),
    (["-c", ""], "-c/--checkpoint: the folder has no name"),
    (["--tensorboard="], "--tensorboard: the folder has no name"),
])  # fmt: skip
def test_wrong_argument(args, message):
    assert message in refusal(start, *args)


@pytest.mark.parametrize("script, option", [("train.py", "--resume"), ("eval.py", "--epoch")])
def test_help_needs_no_launcher(script, option):
    result = run(1, "--help", script=script, env={"LOCAL_RANK": "", "WORLD_SIZE": ""})
    assert result.returncodes == [0] and option in result.output and "Traceback" not in result.output


def test_path_in_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for script in (train, eval):
        assert script.get_args_parser().parse_args(["-c=~/x"]).checkpoint == tmp_path / "x"
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # as for a user without an entry
    assert "~/x: Could not determine home directory" in refusal(start, "-c=~/x")


START = "start with torchrun or colossalai run; under Slurm with srun torchrun"
LAUNCHED = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("variables, message", [
    ({**LAUNCHED, "LOCAL_RANK": ""}, "LOCAL_RANK is ''"),
    ({"LOCAL_RANK": "0"}, "RANK is ''"),
    ({**LAUNCHED, "MASTER_ADDR": ""}, "MASTER_ADDR is ''"),
    ({**LAUNCHED, "WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'"),
    ({**LAUNCHED, "RANK": "2"}, "RANK is 2, but must be below WORLD_SIZE, which is 2"),
    ({**LAUNCHED, "LOCAL_WORLD_SIZE": "two"}, "LOCAL_WORLD_SIZE is 'two'"),
    ({"LOCAL_WORLD_SIZE": "2"}, "RANK is ''"),
    ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, "SLURM_STEP_NUM_TASKS is 2"),
    ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE is 2"),
    ({"PMI_SIZE": "2"}, "PMI_SIZE is 2"),
])  # fmt: skip
def test_part_of_a_launcher_environment(variables, message):
    with mock.patch.dict(os.environ, variables):
        line = refusal(start)
    assert message in line and START in line


@pytest.mark.parametrize("variables, args", [
    ({}, ["--interval", 0, "--target_acc", 0, "-r", "latest"]),
    ({}, ["--target_acc", 1]),
    ({"SLURM_NTASKS": "2"}, []),  # alone in an interactive allocation
    ({"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "1"}, []),
    ({"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", **LAUNCHED}, []),  # srun torchrun
])  # fmt: skip
def test_start_that_is_right(variables, args):
    with mock.patch.dict(os.environ, variables):
        assert start(*args) == 0
    assert listing() == []


def test_torch_that_cannot_read_what_it_writes(monkeypatch):
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.3.1+cu121"))
    line = refusal(start)
    assert "torch 2.3.1+cu121" in line and "install torch 2.4 or newer" in line


def test_more_processes_than_gpus(monkeypatch):
    monkeypatch.setattr(train, "get_accelerator", lambda: SimpleNamespace(name="cuda", device_count=lambda: 2))
    with mock.patch.dict(os.environ, {**LAUNCHED, "LOCAL_WORLD_SIZE": "4"}):
        assert "4 processes but 2 GPUs on this machine" in refusal(start)
    with mock.patch.dict(os.environ, {**LAUNCHED, "LOCAL_WORLD_SIZE": "2"}):
        assert start() == 0


@pytest.mark.parametrize("args, share", [([], 25000), (["--synthetic"], 2000)])
def test_batch_larger_than_a_share(args, share):
    with mock.patch.dict(os.environ, LAUNCHED):
        assert start(*args, "--batch_size", share) == 0
        line = refusal(start, *args, "--batch_size", share + 1)
    assert f"--batch_size must be {share} or less, a process's share" in line


def open_log(tensorboard: Path) -> train.Log:
    args = train.get_args_parser().parse_args(["--tensorboard", str(tensorboard)])
    return train.Log(args, SimpleNamespace(loader=[]), start_epoch=0)


def test_tensorboard_that_cannot_be_written(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # now importing it raises ImportError
    assert "pip install tensorboard" in refusal(open_log, tmp_path / "curves")
    package = SimpleNamespace(SummaryWriter=lambda folder, purge_step: os.makedirs(folder, exist_ok=True))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", package)
    (tmp_path / "file").touch()
    assert str(tmp_path / "file") in refusal(open_log, tmp_path / "file")


def test_checkpoint_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for path in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "link", Path("/proc/checkpoint")):
        args = train.get_args_parser().parse_args(["-c", str(path)])
        line = refusal(train.agree_on_start, args, MASTER)
        assert line.startswith("the checkpoint folder (-c): ") and str(path) in line
        args.interval = 0  # nothing will be written
        assert train.agree_on_start(args, MASTER) == 0


def test_what_is_no_checkpoint_is_not_counted(checkpoint):
    for name in ("model_99.pth", "model_11.pth.part", ".model_6.pth"):
        (checkpoint / name).touch()
    (checkpoint / "model_7.pth").mkdir()
    for name in ("model_011.pth", "model_0.pth", "model_x.pth", "model_12.pth"):
        (checkpoint / name).symlink_to("model_2.pth")
    assert saved_epochs(checkpoint) == [2, 4, 12]
    assert start("-c", checkpoint, "-r", "latest") == 4  # epoch 12 has no optimizer file


def test_epoch_that_was_not_saved(checkpoint, tmp_path):
    for function, option in ((start, "-r"), (evaluate, "-e")):
        line = refusal(function, "-c", checkpoint, option, 3, "--synthetic")
        assert f"{checkpoint / 'model_3.pth'} is missing" in line and line.endswith(": [2, 4]")
        line = refusal(function, "-c", tmp_path / "none", option, 3, "--synthetic")
        assert "model_3.pth is missing" in line and line.endswith(": none")
    assert f"no checkpoint in {tmp_path / 'none'}" in refusal(evaluate, "-c", tmp_path / "none", "-e", "latest")
    assert start("-c", tmp_path / "none", "-r", "latest") == 0


@pytest.mark.parametrize("part", train.PARTS)
def test_resume_with_a_missing_or_empty_file(checkpoint, part):
    for spoil in (Path.unlink, Path.touch):
        spoil(checkpoint / f"{part}_4.pth")
        line = refusal(start, "-c", checkpoint, "-r", 4)
        assert f"{checkpoint / f'{part}_4.pth'} is missing or empty" in line and line.endswith(": [2]")
    assert start("-c", checkpoint, "-r", "latest") == 2  # the newest whole one


def test_resume_beyond_num_epochs(checkpoint):
    assert start("-c", checkpoint, "-r", 2, "-n", 3) == 2
    assert start("-c", checkpoint, "-r", "latest", "-n", 4) == 4
    for epoch in (4, "latest"):
        line = refusal(start, "-c", checkpoint, "-r", epoch, "-n", 3)
        assert f"--resume {epoch} means epoch 4, beyond --num_epochs 3: raise -n" in line


@pytest.mark.parametrize("epoch, later", [("-1", "epochs [2, 4]"), ("2", "epochs [4]")])
def test_start_before_later_epochs_says_so(checkpoint, capsys, epoch, later):
    args = train.get_args_parser().parse_args(["-c", str(checkpoint), "-r", epoch, "-i", "0"])
    train.agree_on_start(args, MASTER)
    assert capsys.readouterr().out == f"{checkpoint} holds later {later}: -r latest would resume from 4\n"


@pytest.mark.parametrize("script", ["train.py", "eval.py"])
def test_outputs_that_are_not_finite(checkpoint, script):
    """Though each weight is: an accuracy would say nothing."""
    change(checkpoint / "model_4.pth", lambda state: {**state, "fc.weight": torch.full((10, 512), 1e38)})
    arguments = ["-r", 4, "-n", 4, "-i", 0] if script == "train.py" else ["-e", 4]
    result = run(1, "-c", checkpoint, "--synthetic", *arguments, script=script)
    assert result.returncodes == [2]
    line = f"{script}: error: the model's outputs are not finite: its file is damaged, or of a run that diverged"
    assert result.output.splitlines()[-1] == line and "Accuracy" not in result.output


def test_eval_only_reads_the_folder(checkpoint):
    """Even what an interrupted save has left stays as it is."""
    for name in ("optimizer_5.pth", ".model_5.pth"):
        (checkpoint / name).touch()
    checkpoint.chmod(0o555)
    before = listing()
    evaluate("-c", checkpoint, "-e", "latest", "--synthetic")
    assert listing() == before
    checkpoint.chmod(0o755)


class Trap:
    """Unpickling it creates a folder."""

    def __reduce__(self):
        return os.mkdir, ("sprung",)


NO_CHECKPOINT = "torch.save did not write it, or it carries code)"


@pytest.mark.parametrize("part", train.PARTS)
@pytest.mark.parametrize("spoil, reason", [
    (lambda content: content[: int(0.99 * len(content))], "PytorchStreamReader failed"),
    (lambda content: b"Not a checkpoint.\n", NO_CHECKPOINT),
    (lambda content: b"learning rate 0.1, epoch 4\n", NO_CHECKPOINT),
    (lambda content: b"epoch 4\n", NO_CHECKPOINT),
    (lambda content: [1, 2, 3], "it holds a list"),
    (lambda content: {"state": Trap()}, NO_CHECKPOINT),
    (lambda content: pickle.dumps({"state": Trap()}, protocol=2), NO_CHECKPOINT),
], ids=["truncated", "text", "words", "a word", "list", "code", "code in an old format"])  # fmt: skip
def test_file_that_cannot_be_read(checkpoint, part, spoil, reason):
    path = checkpoint / f"{part}_4.pth"
    replace(path, spoil(path.read_bytes()))
    line = refusal(start, "-c", checkpoint, "-r", "latest")
    assert f"{path} cannot be read: it is truncated, or not a checkpoint of this example ({reason}" in line
    assert line.endswith("Other epochs in that folder: [2]")
    if part == "model":
        assert line == refusal(evaluate, "-c", checkpoint, "-e", "latest", "--synthetic")


def with_first(convert):
    """A change of a model's state dict that converts its first tensor."""
    return lambda state: {**state, "conv1.weight": convert(state["conv1.weight"])}


@pytest.mark.parametrize("how, problem", [
    (lambda state: {f"module.{name}": state[name] for name in state}, "first entry is module.conv1.weight"),
    (lambda state: {**state, "epoch": torch.tensor(4)}, "epoch is (), torch.int64, torch.strided, not absent"),
    (lambda state: {key: state[key] for key in state if "num_batches" not in key}, "bn1.num_batches_tracked is absent"),
    (lambda state: resnet34(num_classes=10).state_dict(), "layer1.2.conv1.weight is (64, 64, 3, 3)"),
    (lambda state: resnet18(num_classes=100).state_dict(), "fc.weight is (100, 512)"),
    (with_first(torch.Tensor.int), "conv1.weight is (64, 3, 7, 7), torch.int32"),
    (with_first(lambda weight: weight.to(torch.complex64)), "conv1.weight is (64, 3, 7, 7), torch.complex64"),
    (with_first(torch.Tensor.to_sparse), "conv1.weight is (64, 3, 7, 7), floating, torch.sparse_coo"),
    (with_first(lambda weight: weight.to("meta")), "conv1.weight is not finite"),
    (with_first(lambda weight: weight.index_fill(0, torch.tensor(3), torch.nan)), "conv1.weight is not finite"),
    (lambda state: {**state, "bn1.running_var": torch.full((64,), torch.inf)}, "bn1.running_var is not finite"),
    (lambda state: {**state, "bn1.running_var": torch.full((64,), -0.1)}, "bn1.running_var is negative"),
])  # fmt: skip
def test_model_file_that_does_not_fit(checkpoint, how, problem):
    path = checkpoint / "model_4.pth"
    change(path, how)
    line = refusal(start, "-c", checkpoint, "-r", 4)
    assert f"{path} is not the plain state dict of ResNet-18 with 10 classes: " in line and problem in line
    assert line == refusal(evaluate, "-c", checkpoint, "-e", 4, "--synthetic")


def with_state(index: int, **values):
    """A change of an optimizer's state dict, in what it holds of parameter `index`."""
    return lambda content: {**content, "state": {**content["state"], index: {**content["state"][index], **values}}}


@pytest.mark.parametrize("part, how, problem", [
    ("optimizer", lambda _: torch.optim.SGD(build_model().parameters()).state_dict(), "does not hold Adam's state"),
    ("optimizer", lambda state: state["state"].pop(61) and state, "does not hold Adam's state of all 62 parameters"),
    ("optimizer", lambda state: {**state, "grad_scaler": {"scale": "high"}}, "or what is in grad_scaler is no number"),
    ("optimizer", lambda state: {**state, "grad_scaler": [32.0]}, "or what is in grad_scaler is no number"),
    ("optimizer", with_state(1, exp_avg=torch.zeros(3)),
     "exp_avg of parameter 1 is (3,), floating, torch.strided, not (64,)"),
    ("optimizer", with_state(1, exp_avg=torch.full((64,), torch.nan)), "exp_avg of parameter 1 is not finite"),
    ("optimizer", with_state(61, exp_avg_sq=torch.full((10,), torch.inf)), "exp_avg_sq of parameter 61 is not finite"),
    ("lr_scheduler", lambda _: {"a": 1}, "is not the MultiStepLR state of epoch 4"),
    ("lr_scheduler", lambda state: {**state, "base_lrs": [0.0]}, "is not the MultiStepLR state of epoch 4"),
    ("lr_scheduler", lambda state: {**state, "last_epoch": 2}, "is not the MultiStepLR state of epoch 4"),
])  # fmt: skip
def test_other_file_that_does_not_fit(checkpoint, part, how, problem):
    path = checkpoint / f"{part}_4.pth"
    change(path, how)
    line = refusal(start, "-c", checkpoint, "-r", 4)
    assert line.startswith(f"{path} ") and problem in line


@pytest.mark.parametrize("script, args, env, message", [
    ("train.py", ["-n", 0], {}, "--num_epochs must be 1 or more"),
    ("train.py", [], {"MASTER_ADDR": ""}, f"MASTER_ADDR is '', so the launcher's environment is incomplete: {START}"),
    ("eval.py", ["-p", "gemini"], {}, "unrecognized arguments: -p gemini"),
    ("eval.py", ["-e", "newest"], {}, "argument -e/--epoch: 'newest' is neither an epoch number nor 'latest'"),
    ("eval.py", ["-c", "none", "-e", 7], {}, "none/model_7.pth is missing or empty. Epochs in that folder (-c): none"),
])  # fmt: skip
def test_refusal_is_one_line_and_exit_code_2(script, args, env, message):
    result = run(1, *args, script=script, env=env, cwd=Path.cwd())
    assert (result.returncodes, result.output) == ([2], f"{script}: error: {message}\n")
    assert listing() == []


def test_refusal_is_printed_once_for_all_processes():
    result = run(2, "--num_epochs", 3, "--nonsense", 1, launcher="colossalai", cwd=Path.cwd())
    assert result.returncodes != [0]  # torchrun's own code is 1 whenever a process fails
    assert error_lines(result.output) == ["train.py: error: unrecognized arguments: --nonsense 1"]
    assert "exitcode  : 2" in result.output and "usage:" not in result.output
