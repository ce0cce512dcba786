"""Dense prediction by token-routed ViMoE on scenes of digits: python examples/segmentation.py [EPOCHS [SEED]]

As in the paper (arXiv 2410.15732, table 5), a linear layer on the last feature map tells the class of every pixel. With
DINOv2's weights and a loader of ADE20K's 518 x 518 crops (150 classes, the rest 255), a training step would be

    backbone = timm.create_model(
        "vimoe_s14_shared", pretrained=True, features_only=True, out_indices=[-1], img_size=518,
        routing_unit="token", aux_loss_weight=0.001,
    )
    head = nn.Conv2d(384, 150, 1)
    logits = nn.functional.interpolate(head(backbone(images)[-1]), 518, mode="bilinear")  # from 37 x 37
    loss = nn.functional.cross_entropy(logits, labels, ignore_index=255) + timm_moe.auxiliary_loss(backbone)

Here all is small and from scratch; every variant gets the same scenes. It needs the extras demo and evaluate.
"""

import sys
import time

import timm
import torch
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy, MulticlassJaccardIndex

import timm_moe
from timm_moe.demo import load_images

CANVAS, DIGIT, CLASSES, BACKGROUND, STEPS_PER_EPOCH = 16, 8, 11, 10, 75
SIZE = dict(img_size=CANVAS, patch_size=2, in_chans=1, embed_dim=64, depth=4, num_heads=4, mlp_ratio=2, init_values=1.0)
TOKENS = dict(routing_unit="token", aux_loss_weight=0.001)
VARIANTS = {
    "dense": ("vit_small_patch14_dinov2", {}),
    "ViMoE": ("vimoe_s14", TOKENS),
    "ViMoE, shared expert": ("vimoe_s14_shared", TOKENS),
}


class Segmenter(nn.Module):
    """Maps images (B, 1, H, W) to logits (B, CLASSES, H, W)."""

    def __init__(self, name: str, **options):
        super().__init__()
        self.backbone = timm.create_model(name, features_only=True, out_indices=[-1], **SIZE, **options)
        self.head = nn.Conv2d(self.backbone.feature_info.channels()[-1], CLASSES, 1)

    def forward(self, images: Tensor) -> Tensor:
        return nn.functional.interpolate(self.head(self.backbone(images)[-1]), images.shape[2:], mode="bilinear")


def compose(digits: Tensor, labels: Tensor, scenes: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two digits at random places, multiples of 4 pixels, per scene: images (N, 1, H, W) and their pixels' classes."""
    images, classes = torch.full((scenes, CANVAS, CANVAS), -1.0), torch.full((scenes, CANVAS, CANVAS), BACKGROUND)
    for scene in range(scenes):
        for digit in torch.randint(len(digits), (2,), generator=generator):
            top, left = 4 * torch.randint((CANVAS - DIGIT) // 4 + 1, (2,), generator=generator)
            place = (scene, slice(top, top + DIGIT), slice(left, left + DIGIT))
            ink = digits[digit, 0] > -0.5  # of [-1, 1]; the ink of a digit covers what lies below
            images[place][ink], classes[place][ink] = digits[digit, 0][ink], labels[digit]
    return images[:, None], classes


@torch.inference_mode()
def evaluate(model: nn.Module, images: Tensor, classes: Tensor) -> list[float]:
    """Pixel accuracy, and intersection over union of all scenes' pixels, averaged over the classes; in percent."""
    metrics = [MulticlassAccuracy(CLASSES, average="micro"), MulticlassJaccardIndex(CLASSES)]
    predicted = model.eval()(images).argmax(1)
    return [100 * metric(predicted, classes).item() for metric in metrics]


def main(epochs: int = 10, seed: int = 0) -> None:
    torch.set_num_threads(1)  # models as small as these only lose time to a second thread
    train_digits, test_digits = load_images()
    test_scenes = compose(*test_digits, 300, torch.Generator().manual_seed(1))
    table = [f"{'':<22}{'parameters':>12}{'pixel accuracy':>16}{'mean IoU':>10}{'seconds':>9}"]
    for variant, (name, options) in VARIANTS.items():
        torch.manual_seed(seed)
        generator = torch.Generator().manual_seed(seed)
        model = Segmenter(name, **options)
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=epochs * STEPS_PER_EPOCH)
        start = time.perf_counter()
        for epoch in range(epochs):
            model.train()
            for _ in range(STEPS_PER_EPOCH):
                images, classes = compose(*train_digits, 16, generator)
                loss = nn.functional.cross_entropy(model(images), classes) + timm_moe.auxiliary_loss(model)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
            accuracy, iou = evaluate(model, *test_scenes)
            print(f"{variant}, epoch {epoch + 1}: pixel accuracy {accuracy:.1f} %, mean IoU {iou:.1f} %", flush=True)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        seconds = time.perf_counter() - start
        table.append(f"{variant:<22}{parameters:>12,}{accuracy:>16.1f}{iou:>10.1f}{seconds:>9.0f}")
    print("", *table, sep="\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
