"""Train routed experts in a loop of your own, on scikit-learn's digits.

Usage: python examples/routed_loop.py [EPOCHS]

In a clone, pip install ".[demo]" brings what it needs.
"""

import sys

import timm
import torch
from torch import nn

import timm_moe
from timm_moe.analysis.demo import SMALL_VIT, load_images


def main(epochs: int = 10) -> None:
    torch.manual_seed(0)
    (images, labels), (test_images, test_labels) = load_images()
    # Here each expert draws its own weights. By default those of V-MoE start equal.
    experts = dict(num_experts=8, moe_layers="last-2", expert_init="independent")
    model = timm.create_model("vmoe_s32", **experts, **SMALL_VIT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    for epoch in range(epochs):
        model.train()
        for batch in torch.randperm(len(images)).split(64):
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            # Routers need one addition: their losses of this forward.
            timm_moe.add_router_losses(model, loss).backward()
            optimizer.step()
        model.eval()
        with torch.inference_mode():
            accuracy = (model(test_images).argmax(1) == test_labels).float().mean().item()
        print(f"epoch {epoch + 1}: top-1 {100 * accuracy:.1f} %")
        for name, summary in timm_moe.routing_summary(model, reset=True).items():
            print(f"  {name}: {summary}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
