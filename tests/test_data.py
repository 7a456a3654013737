"""The data: augmentation against torchvision's per-image transforms, order and draws, the synthetic set, counting."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torchvision.transforms.functional as TF
from colossalai.interface import ModelWrapper
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import train
from eval import build_model, count_correct, load_data, to_float


@pytest.fixture(scope="module", autouse=True)
def job():
    """A job of this process alone, with a training set of 250 images whose labels are their numbers.

    Its collectives change nothing; a real process group may hang at its end.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "load_data", lambda train, synthetic: (numbered_images(250), torch.arange(250)))
        yield
    dist.destroy_process_group()


def random_images(count: int) -> torch.Tensor:
    return torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def numbered_images(count: int) -> torch.Tensor:
    """Images that show what becomes of them: their pixels are (number of the image, row, column), each plus one."""
    numbers, places = torch.arange(1, count + 1, dtype=torch.uint8), torch.arange(1, 33, dtype=torch.uint8)
    return torch.stack(torch.broadcast_tensors(numbers[:, None, None], places[:, None], places), dim=1)


def read_draws(images: torch.Tensor) -> tuple[list[int], torch.Tensor]:
    """The numbers of augmented `numbered_images`, and the flip, top and left (N, 3) that were drawn for each."""
    number, row, column = images[:, :, 16, 16].T.int() - 1
    flip = images[:, 2, 16, 15] > images[:, 2, 16, 16]
    left = torch.where(flip, 19 - column, column - 12)
    return number.tolist(), torch.stack([flip.int(), row - 12, left], dim=1)


def share_of_equal(draws: torch.Tensor, others: torch.Tensor) -> float:
    """By chance, it is one in 162."""
    return (draws == others).all(1).float().mean().item()


def test_flip_and_crop_equals_torchvision_for_every_draw():
    draws = list(itertools.product((False, True), range(9), range(9)))  # flip, top, left: the corners are among them
    images, expected = random_images(len(draws)), []
    for image, (flip, top, left) in zip(images, draws):
        image = TF.pad(TF.to_pil_image(image), [4])
        image = TF.hflip(image) if flip else image
        expected.append(TF.pil_to_tensor(TF.crop(image, top, left, 32, 32)))
    result = train.flip_and_crop(images, *(torch.tensor(values) for values in zip(*draws)))
    assert result.dtype == torch.uint8 and torch.equal(result, torch.stack(expected))


def test_augment_draws_every_flip_and_offset_for_each_image():
    images = numbered_images(1).expand(10_000, -1, -1, -1)
    result, again, other = (train.augment(images, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert result.dtype == torch.uint8 and result.shape == images.shape
    assert torch.equal(result, again) and not torch.equal(result, other)
    _, draws = read_draws(result)
    for values, outcomes in zip(draws.T, (2, 9, 9)):
        shares = torch.bincount(values) / len(values)
        assert len(shares) == outcomes and (shares - 1 / outcomes).abs().max() < 0.015
    assert (torch.corrcoef(draws.T.float()) - torch.eye(3)).abs().max() < 0.04
    for shift in (1, 5000):
        assert share_of_equal(draws[:-shift], draws[shift:]) < 0.01


def test_to_float_equals_to_tensor():
    images = torch.arange(256, dtype=torch.uint8).repeat(12).view(1, 3, 32, 32)  # every value that a byte can have
    assert torch.equal(to_float(images)[0], TF.to_tensor(images[0].permute(1, 2, 0).numpy()))


def prepare(seed=42, share=0, shares=1) -> train.TrainingData:
    """The data as process number `share` of `shares` has it, in batches of 60."""
    plugin = train.build_booster("torch_ddp").plugin
    plugin.rank, plugin.world_size = share, shares
    args = train.get_args_parser().parse_args(["--seed", str(seed), "--batch_size", "60"])
    return train.prepare_data(args, plugin)


def train_epoch(epoch=1, seed=42, share=0, shares=1, rank=0) -> tuple[list[int], torch.Tensor]:
    """Train an epoch, with the draws of process number `rank`. Returns the images' labels, in order, and the draws."""
    batches, labels = [], []

    def criterion(images, answers):
        batches.append(images.cpu())
        labels.extend(answers.tolist())
        return images.mean()

    booster = SimpleNamespace(backward=lambda loss, optimizer: None)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    boosted = train.Boosted(booster, ModelWrapper(nn.Identity()), optimizer, criterion, None)
    process = SimpleNamespace(rank=rank, world_size=1, is_master=lambda: False)
    values = train.train_one_epoch(epoch, seed, prepare(seed, share, shares), boosted, process)
    assert [len(images) for images in batches] == [60] * (250 // shares // 60), "the rest is dropped"
    images = torch.cat(batches)
    assert values["loss"] == pytest.approx(images.mean().item(), abs=1e-5)
    pixels = images.mul(255).round().to(torch.uint8)
    assert torch.equal(images, to_float(pixels))
    numbers, draws = read_draws(pixels)
    assert numbers == labels, "images keep their labels"
    return labels, draws


def test_order_and_draws_follow_from_seed_and_epoch():
    order, draws = train_epoch()
    assert len(set(order)) == 240 and order != sorted(order)
    again, same_draws = train_epoch()
    assert order == again and torch.equal(draws, same_draws)
    epochs = [(order, draws), train_epoch(epoch=2), train_epoch(epoch=3), train_epoch(seed=43)]
    for (order, draws), (other, other_draws) in itertools.combinations(epochs, 2):
        assert order != other and share_of_equal(draws, other_draws) < 0.05


def test_processes_share_the_images_out_and_draw_differently():
    orders = [train_epoch(share=share, shares=2)[0] for share in (0, 1)]
    assert len(set(orders[0] + orders[1])) == 240
    order, draws = train_epoch(rank=0)
    other, other_draws = train_epoch(rank=1)  # of the same share of the images
    assert order == other and share_of_equal(draws, other_draws) < 0.05


def test_derived_seeds_follow_from_all_the_numbers():
    cases = [(42,), (1, 0, 0), (42, 0, 0), (2**32 - 1, 0, 0), (42, 1, 0), (42, 0, 1), (1, 42, 0), (4, 2, 0)]
    generators = [torch.Generator().manual_seed(train.derive_seed(*numbers)) for numbers in cases]
    assert len({tuple(torch.rand(4, generator=generator).tolist()) for generator in generators}) == len(cases)


def test_images_that_do_not_fit_on_the_gpu_stay_on_the_host(monkeypatch, capsys):
    monkeypatch.setattr(train, "get_current_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (numbered_images(250).nbytes, 2**40))
    assert prepare().images.device.type == "cpu"
    assert "do not fit on the GPU" in capsys.readouterr().out


def test_synthetic_data():
    seen = set()
    for is_train, count in ((True, 4000), (False, 1000)):
        images, labels = load_data(train=is_train, synthetic=True)
        assert images.shape == (count, 3, 32, 32) and images.dtype == torch.uint8 and labels.dtype == torch.int64
        shares = torch.bincount(labels) / count
        assert len(shares) == 10 and shares.min() > 0.07 and shares.max() < 0.13
        torch.manual_seed(1)  # it has its own generator
        again = load_data(train=is_train, synthetic=True)
        assert torch.equal(images, again[0]) and torch.equal(labels, again[1])
        seen.update(image.numpy().tobytes() for image in images)
    assert len(seen) == 5000, "no image is in both"


def test_count_correct_is_exact():
    torch.manual_seed(0)
    model = build_model().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):  # statistics of its own, so that eval mode is what counts right
            module.running_mean.uniform_(-0.1, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    images = random_images(1234)
    with torch.no_grad():
        answers = torch.cat([model(to_float(batch)).argmax(dim=1) for batch in images.split(617)])
    labels = torch.where(torch.arange(1234) < 234, (answers + 1) % 10, answers)
    assert count_correct(model.state_dict(), images, labels, torch.device("cpu")) == 1000
    model.fc.bias.data[3] = torch.inf
    assert math.isnan(count_correct(model.state_dict(), images, labels, torch.device("cpu")))


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_evaluate_counts_each_image_once_at_any_world_size(monkeypatch, world_size):
    shares = []
    monkeypatch.setattr(train, "count_correct", lambda state, images, *_: shares.append(images) or len(images))
    boosted = train.Boosted(None, ModelWrapper(nn.Identity()), None, None, None)
    processes = [SimpleNamespace(rank=rank, world_size=world_size) for rank in range(world_size)]
    images = labels = torch.arange(10_000)
    accuracies = [train.evaluate(boosted, images, labels, process) for process in processes]  # each one's own share
    assert sum(accuracies) == pytest.approx(1)
    assert torch.equal(torch.cat(shares).sort().values, images)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
