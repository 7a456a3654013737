"""The data: augmentation against torchvision's per-image transforms, order and draws, the synthetic set, counting."""

import functools
import itertools
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torchvision.transforms as T
import torchvision.transforms.functional as TF
from torch import nn
from torchvision.datasets import CIFAR10

import train
from eval import build_model, count_correct, fetch_data, load_data, synthetic_data, to_float
from helpers import write_cifar10


def random_images(count: int) -> torch.Tensor:
    return torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


# ------------------------------------------------------------------------------------------------------ augmentation


def test_flip_and_crop_equals_torchvision_for_every_draw():
    draws = list(itertools.product((False, True), range(9), range(9)))  # flip, top, left: the corners are among them
    images = random_images(len(draws))
    flip, top, left = (torch.tensor(values) for values in zip(*draws))
    expected = []
    for image, (flipped, row, column) in zip(images, draws):
        image = TF.pad(TF.to_pil_image(image), [4])
        image = TF.hflip(image) if flipped else image
        expected.append(TF.pil_to_tensor(TF.crop(image, row, column, 32, 32)))
    result = train.flip_and_crop(images, flip, top, left)
    assert result.dtype == torch.uint8
    assert torch.equal(result, torch.stack(expected))


def test_augment_draws_for_each_image_and_repeats_with_the_seed():
    images = random_images(1).expand(64, -1, -1, -1).contiguous()  # the same image, so that only the draws differ

    def augmented(seed: int) -> torch.Tensor:
        return train.augment(images, torch.Generator().manual_seed(seed))

    first = augmented(1)
    assert first.dtype == torch.float32 and first.shape == images.shape
    assert first.min() == 0 and 0.99 < first.max() <= 1
    assert torch.equal(first, augmented(1))
    assert not torch.equal(first, augmented(2))
    # 64 draws out of 162 equally likely results: 53 different ones are expected
    assert len({image.numpy().tobytes() for image in first}) > 40


def test_augment_draws_every_flip_and_offset(monkeypatch):
    seen = {}
    monkeypatch.setattr(train, "flip_and_crop", lambda images, *draws: seen.update(draws=draws) or images)
    train.augment(random_images(1).expand(20000, -1, -1, -1), torch.Generator().manual_seed(0))
    flip, top, left = seen["draws"]
    assert abs(flip.float().mean() - 0.5) < 0.02
    for offset in (top, left):
        shares = torch.bincount(offset, minlength=9) / len(offset)
        assert len(shares) == 9 and torch.all((shares - 1 / 9).abs() < 0.01)
    assert abs(torch.corrcoef(torch.stack([flip.float(), top.float(), left.float()])) - torch.eye(3)).max() < 0.03


def test_to_float_equals_to_tensor():
    images = torch.arange(256, dtype=torch.uint8).repeat(12).view(1, 3, 32, 32)  # every value that a byte can have
    expected = T.ToTensor()(images[0].permute(1, 2, 0).numpy())
    assert torch.equal(to_float(images)[0], expected)


def test_augmentation_is_not_slower_than_per_image_transforms():
    images = random_images(500)
    per_image = T.Compose([T.Pad(4), T.RandomHorizontalFlip(), T.RandomCrop(32), T.ToTensor()])
    pictures = [TF.to_pil_image(image) for image in images]
    generator = torch.Generator().manual_seed(0)

    def seconds(function) -> float:
        times = []
        for _ in range(5):
            start = time.perf_counter()
            function()
            times.append(time.perf_counter() - start)
        return min(times)

    batched = seconds(lambda: train.augment(images, generator))
    stock = seconds(lambda: torch.stack([per_image(picture) for picture in pictures]))
    print(f"batched augmentation: {stock / batched:.1f} times as fast as the per-image transforms")
    assert stock >= batched


# ---------------------------------------------------------------------------------------------------------- data sets


@pytest.mark.parametrize("is_train, count", [(True, 4000), (False, 1000)])
def test_synthetic_data(is_train, count):
    torch.manual_seed(0)
    images, labels = load_data(train=is_train, synthetic=True)
    assert images.shape == (count, 3, 32, 32) and images.dtype == torch.uint8
    assert labels.shape == (count,) and labels.dtype == torch.int64
    shares = torch.bincount(labels) / count
    assert len(shares) == 10 and shares.min() > 0.07 and shares.max() < 0.13
    torch.manual_seed(1)  # it has its own generator
    again = load_data(train=is_train, synthetic=True)
    assert torch.equal(images, again[0]) and torch.equal(labels, again[1])


def test_synthetic_training_and_test_images_differ():
    train_images, test_images = synthetic_data(train=True)[0], synthetic_data(train=False)[0]
    assert not {image.numpy().tobytes() for image in train_images} & {image.numpy().tobytes() for image in test_images}


def test_load_data_reads_cifar10_from_data(tmp_path, monkeypatch):
    for name, value in write_cifar10(tmp_path).items():
        monkeypatch.setattr(CIFAR10, name, value)
    monkeypatch.setattr(CIFAR10, "url", "http://127.0.0.1:9/not-needed")
    monkeypatch.setenv("DATA", str(tmp_path))
    fetch_data()
    for is_train, count in ((True, 50), (False, 10)):
        images, labels = load_data(train=is_train, synthetic=False)
        assert images.shape == (count, 3, 32, 32) and images.dtype == torch.uint8 and images.is_contiguous()
        assert labels.shape == (count,) and labels.dtype == torch.int64
        stock = CIFAR10(tmp_path, train=is_train, transform=T.ToTensor())  # what people write
        for index in (0, 7, count - 1):
            image, label = stock[index]
            assert torch.equal(to_float(images[index : index + 1])[0], image) and labels[index] == label


# ------------------------------------------------------------------------------- order and draws, as training has them


@pytest.fixture(scope="module")
def coordinator():
    """A process group of this process alone, as train.py makes it without a launcher."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            patch.setenv(name, "")  # so that what `launch` sets is undone afterwards
            patch.delenv(name)
        yield train.launch(seed=42)
        dist.destroy_process_group()


class Watcher(nn.Module):
    """Stands for the boosted model and for the Booster, and keeps the images that it is given."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("running_mean", torch.zeros(1))
        self.seen = []

    def unwrap(self):
        return self

    def forward(self, images):
        self.seen.append(images)
        return self.scale * images.mean(dim=(2, 3))

    def backward(self, loss, optimizer):
        loss.backward()


@pytest.fixture
def epoch_of(coordinator, monkeypatch):
    """A function that trains for an epoch on 400 images, and returns them as the model saw them, and their numbers."""
    data = random_images(400), torch.arange(400)  # an image's label is its number
    monkeypatch.setattr(train, "load_data", lambda train, synthetic: data)

    def run(epoch=0, seed=42, share=0, shares=1, rank=0, workers=0) -> tuple[torch.Tensor, list[int], float]:
        plugin = train.build_booster("torch_ddp").plugin
        plugin.rank, plugin.world_size = share, shares  # which part of the data
        plugin.prepare_dataloader = functools.partial(plugin.prepare_dataloader, num_workers=workers)
        args = train.get_args_parser().parse_args(["--synthetic", "--seed", str(seed), "--batch_size", "50"])
        loader = train.build_dataloader(args, plugin, coordinator)
        watcher, numbers = Watcher(), []

        def criterion(output, labels):
            numbers.extend(labels.tolist())
            return output.mean()

        boosted = SimpleNamespace(
            booster=watcher, model=watcher, optimizer=torch.optim.SGD(watcher.parameters(), lr=0), criterion=criterion
        )
        other = SimpleNamespace(rank=rank, world_size=1, is_master=lambda: False)
        loss = train.train_one_epoch(epoch, seed, loader, boosted, other)
        return torch.cat(watcher.seen).cpu(), numbers, loss

    return run


def test_batches_are_images_with_their_labels(coordinator, monkeypatch):
    images, numbers = random_images(20), torch.arange(20)
    monkeypatch.setattr(train, "load_data", lambda train, synthetic: (images, numbers))
    args = train.get_args_parser().parse_args(["--batch_size", "8"])
    batches = list(train.build_dataloader(args, train.build_booster("torch_ddp").plugin, coordinator))
    assert [len(labels) for _, labels in batches] == [8, 8], "the rest is dropped"
    for batch_images, labels in batches:
        assert torch.equal(batch_images.cpu(), images[labels.cpu()])


def share_of_equal_images(images: torch.Tensor, others: torch.Tensor) -> float:
    return (images == others).flatten(1).all(1).float().mean().item()


def test_draws_follow_from_all_of_seed_epoch_and_rank():
    """On a CPU too, whose generator looks at 32 bits of its seed only."""
    cases = [(1, 0, 0), (42, 0, 0), (2**32 - 1, 0, 0), (42, 1, 0), (42, 0, 1), (1, 42, 0), (4, 2, 0), (42, 0, 65)]
    generators = [torch.Generator().manual_seed(train.draw_seed(*numbers)) for numbers in cases]
    assert len({tuple(torch.rand(4, generator=generator).tolist()) for generator in generators}) == len(cases)


def test_order_and_augmentation_follow_from_the_seed(epoch_of):
    images, order, loss = epoch_of()
    assert sorted(order) == list(range(400)) != order
    assert loss == pytest.approx(images.mean().item(), abs=1e-5)  # the mean over all steps
    again, again_order, _ = epoch_of()
    assert order == again_order and torch.equal(images, again)
    assert order != epoch_of(seed=43)[1]


def test_order_changes_with_the_epoch(epoch_of):
    orders = [epoch_of(epoch)[1] for epoch in range(3)]
    assert len(set(map(tuple, orders))) == 3


def test_augmentation_differs_between_ranks_and_epochs(epoch_of, monkeypatch):
    images, order, _ = epoch_of(rank=0)
    other_images, other_order, _ = epoch_of(rank=1)  # the same share of the data, the draws of another rank
    assert order == other_order
    assert share_of_equal_images(images, other_images) < 0.03  # one in 162 is equal by chance
    monkeypatch.setattr(torch.utils.data.DistributedSampler, "set_epoch", lambda self, epoch: None)
    next_images, next_order, _ = epoch_of(rank=0, epoch=1)  # the same order, the draws of another epoch
    assert order == next_order
    assert share_of_equal_images(images, next_images) < 0.03


def test_loader_workers_change_nothing(epoch_of):
    images, order, _ = epoch_of(epoch=2, workers=0)
    worker_images, worker_order, _ = epoch_of(epoch=2, workers=2)
    assert order == worker_order and torch.equal(images, worker_images)


def test_ranks_share_the_images_out(epoch_of):
    orders = [epoch_of(share=share, shares=2)[1] for share in (0, 1)]
    assert [len(order) for order in orders] == [200, 200]
    assert sorted(orders[0] + orders[1]) == list(range(400))


# ----------------------------------------------------------------------------------------------------------- counting


@pytest.mark.parametrize("total", [300, 1234])
def test_count_correct_is_exact(total):
    torch.manual_seed(0)
    model = build_model()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):  # statistics of its own, so that eval mode is what counts right
            module.running_mean.uniform_(-0.1, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    images = random_images(total)
    model.eval()
    with torch.no_grad():
        answers = torch.cat([model(to_float(batch)).argmax(dim=1) for batch in images.split(617)])
    wrong = torch.arange(total) % 7 == 0
    labels = torch.where(wrong, (answers + 1) % 10, answers)
    correct = count_correct(model.state_dict(), images, labels, torch.device("cpu"))
    assert correct == total - int(wrong.sum())


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 7])
def test_evaluate_counts_each_image_once_at_any_world_size(coordinator, monkeypatch, world_size):
    images, labels = torch.arange(10000), torch.arange(10000) % 10
    counted = []

    def count(state, images, labels, device):
        counted.append(images)
        return int((labels < 8).sum())

    monkeypatch.setattr(train, "count_correct", count)
    ranks = [SimpleNamespace(rank=rank, world_size=world_size) for rank in range(world_size)]
    assert sum(train.evaluate({}, images, labels, rank) for rank in ranks) == 8000
    assert torch.equal(torch.cat(counted).sort().values, images)
    assert max(map(len, counted)) - min(map(len, counted)) <= 1
