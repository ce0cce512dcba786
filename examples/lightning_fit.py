"""Train experts with Lightning, on scikit-learn's digits.

Usage: python examples/lightning_fit.py [EPOCHS]

In a clone, pip install ".[demo,lightning]" brings what it needs.
"""

import sys

import lightning
import timm
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import timm_moe
from timm_moe.analysis.demo import SMALL_VIT, load_images
from timm_moe.integrations.lightning import ExpertCallback


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = timm.create_model("vit_tiny_ewa_moe", **SMALL_VIT)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return nn.functional.cross_entropy(self.model(images), labels)

    def validation_step(self, batch, batch_idx):  # evaluates the mean of the experts, as exported
        images, labels = batch
        self.log("top-1", (self.model(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3, weight_decay=0.05)


def main(epochs: int = 10) -> None:
    lightning.seed_everything(0)
    train_set, test_set = (TensorDataset(*split) for split in load_images())
    module = Classifier()
    # Experts need the callback only.
    trainer = lightning.Trainer(max_epochs=epochs, callbacks=[ExpertCallback()], logger=False)
    trainer.fit(module, DataLoader(train_set, 64, shuffle=True), DataLoader(test_set, 250))
    print({name: round(value.item(), 3) for name, value in trainer.callback_metrics.items()})
    print(timm_moe.export_dense(module.model, "exported", overwrite=True))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
