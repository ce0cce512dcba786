"""What tests of several trainers share: a model as Trainer and Lightning want it, and how far its experts are apart."""

import torch
from torch import nn

import timm_moe


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
    """A ``LightningModule`` that trains a :class:`Classifier`."""
    import lightning

    class LightningClassifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.classifier = Classifier(model)

        def training_step(self, batch, batch_idx):
            return self.classifier(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return LightningClassifier()


def spread(model):
    """Largest distance of a weight of an expert from the mean of the experts."""
    layers = timm_moe.moe_layers(model).values()
    return max((w - w.mean(0)).abs().max().item() for layer in layers for _, w in layer.named_expert_parameters())
