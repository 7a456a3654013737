"""Load a checkpoint without any of train.py's workarounds, and save it again as the next epoch.

    torchrun … tests/planted.py double tests/reference.py gemini FOLDER EPOCH

Only ColossalAI's own Booster touches the files: each plugin loads what train.py saved, and train.py what it saves.
"""

import sys

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from colossalai.nn.optimizer import HybridAdam
from torch import nn
from torch.optim.lr_scheduler import MultiStepLR

from eval import build_model

name, folder, epoch = sys.argv[1], sys.argv[2], int(sys.argv[3])
colossalai.launch_from_torch(verbose=False)
if name == "low_level_zero":
    plugin = LowLevelZeroPlugin(initial_scale=2**5)
else:
    plugin = GeminiPlugin(initial_scale=2**5) if name == "gemini" else TorchDDPPlugin()
booster = Booster(plugin=plugin, mixed_precision="fp16" if name == "torch_ddp_fp16" else None)
model = build_model()
optimizer = HybridAdam(model.parameters(), lr=1e-3)
lr_scheduler = MultiStepLR(optimizer, milestones=[20, 40, 60, 80], gamma=1 / 3)
model, optimizer, _, _, lr_scheduler = booster.boost(model, optimizer, nn.CrossEntropyLoss(), lr_scheduler=lr_scheduler)
booster.load_model(model, f"{folder}/model_{epoch}.pth")
booster.load_optimizer(optimizer, f"{folder}/optimizer_{epoch}.pth")
booster.load_lr_scheduler(lr_scheduler, f"{folder}/lr_scheduler_{epoch}.pth")
lr_scheduler.step()
booster.save_model(model, f"{folder}/model_{epoch + 1}.pth")
booster.save_optimizer(optimizer, f"{folder}/optimizer_{epoch + 1}.pth")
booster.save_lr_scheduler(lr_scheduler, f"{folder}/lr_scheduler_{epoch + 1}.pth")
