"""Check, on any number of processes, that train.py evaluates each image once, and trains on almost all.

    torchrun … tests/count_images.py
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import eval
import train

TOTAL, BATCH_SIZE = 10_001, 16  # a prime number: no number of processes divides it


def numbered_images(train: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Images that nobody looks at, with their numbers for labels."""
    return torch.zeros(TOTAL, 3, 1, 1, dtype=torch.uint8), torch.arange(TOTAL)


def main() -> None:
    coordinator = train.launch(seed=1)
    world_size = coordinator.world_size

    counted = []
    train.count_correct = lambda state, images, labels, device: counted.extend(labels.tolist()) or len(labels)
    total = train.evaluate({}, *numbered_images(False), coordinator)
    assert total == TOTAL
    assert sorted(sum(train.gather(counted), [])) == list(range(TOTAL))

    eval.synthetic_data = numbered_images
    args = argparse.Namespace(synthetic=True, batch_size=BATCH_SIZE, seed=1)
    loader = train.build_dataloader(args, train.build_booster("torch_ddp").plugin, coordinator)
    shares = train.gather([number for _, labels in loader for number in labels.tolist()])
    assert {len(share) for share in shares} == {len(loader) * BATCH_SIZE}, "each process makes the same steps"
    assert len(set(sum(shares, []))) > TOTAL - world_size * BATCH_SIZE, "at most one batch per process is lost"

    coordinator.print_on_master(f"{world_size} processes evaluated {total} images, once each")


if __name__ == "__main__":
    main()
    train.finish()
