"""Images, and a model as Trainer and Lightning want it, for the tests of several trainers."""

import torch
from torch import nn


class Images(torch.utils.data.Dataset):
    """So many images of noise, of five classes."""

    def __init__(self, number):
        self.number = number

    def __len__(self):
        return self.number

    def __getitem__(self, index):
        pixels = torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(index))
        return {"pixel_values": pixels, "labels": index % 5}


class Classifier(nn.Module):
    """What Trainer asks of a model, around one that maps images to logits."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, pixel_values, labels=None):
        outputs = self.model(pixel_values)
        logits = getattr(outputs, "logits", outputs)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def lightning_classifier(model):
    """A ``LightningModule`` that trains a model as a :class:`Classifier` does."""
    import lightning

    class LightningClassifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch, batch_idx):
            return Classifier(self.model)(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return LightningClassifier()
