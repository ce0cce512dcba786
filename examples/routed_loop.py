"""Train routed experts in a loop of your own, on scikit-learn's digits.

Usage: python examples/routed_loop.py [EPOCHS]
"""

import sys

import timm
import torch
from torch import nn

import timm_moe
from timm_moe.analysis.demo import load_images

SIZE = dict(
    img_size=8,
    patch_size=2,
    in_chans=1,
    num_classes=10,
    embed_dim=64,
    depth=4,
    num_heads=4,
    mlp_ratio=2,
)


def main(epochs: int = 10) -> None:
    torch.manual_seed(0)
    (images, labels), (test_images, test_labels) = load_images()
    model = timm.create_model("vmoe_s32", num_experts=8, moe_layers="last-2", **SIZE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    for epoch in range(epochs):
        model.train()
        for batch in torch.randperm(len(images)).split(64):
            # Routers need one addition: their losses of this forward.
            loss = nn.functional.cross_entropy(
                model(images[batch]), labels[batch]
            ) + timm_moe.auxiliary_loss(model)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.inference_mode():
            accuracy = (model(test_images).argmax(1) == test_labels).float().mean().item()
        print(f"epoch {epoch + 1}: top-1 {100 * accuracy:.1f} %")
        for name, summary in timm_moe.routing_summary(model, reset=True).items():
            print(f"  {name}: {summary}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
