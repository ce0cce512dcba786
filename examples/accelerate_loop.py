"""Train experts in an Accelerate loop, on scikit-learn's digits:

accelerate launch examples/accelerate_loop.py [EPOCHS [MODEL]]

MODEL is vit_tiny_ewa_moe by default; vmoe_s32 has routers. Each epoch is saved as a folder in run/.
The next call with the same arguments resumes from the last one. The export is written there too.
In a clone, pip install ".[demo]" accelerate brings what it needs.
"""

import sys
from pathlib import Path

import timm
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import timm_moe
from timm_moe.analysis.demo import SMALL_VIT, load_images


def main(epochs: int = 10, name: str = "vit_tiny_ewa_moe") -> None:
    set_seed(0)  # the same weights and the same order of images in all processes
    accelerator = Accelerator(
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    train_set, (test_images, test_labels) = load_images()
    model = timm.create_model(name, drop_rate=0.1, **SMALL_VIT)
    loader = accelerator.prepare(DataLoader(TensorDataset(*train_set), 32, shuffle=True))
    total_updates = epochs * -(-len(loader) // accelerator.gradient_accumulation_steps)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    # Accelerate steps the scheduler once for each process.
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, total_updates * accelerator.num_processes
    )
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

    # Experts need three calls: start_averaging, add_router_losses and, for a log,
    # expert_statistics. The averaging starts before load_state, which restores its count.
    averaging = timm_moe.start_averaging(model, optimizer, total_updates)
    set_seed(1, device_specific=True)  # each process draws its own partitions
    # Accelerate writes random states last, so a folder with them is whole.
    saved = [
        int(file.parent.name.removeprefix("epoch_"))
        for file in Path("run").glob("epoch_*/random_states_0.pkl")
    ]
    done = max(saved, default=0)
    if done:
        accelerator.load_state(f"run/epoch_{done}")
    for epoch in range(done, epochs):
        model.train()
        loader.set_epoch(epoch)
        for images, labels in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(images), labels)
                accelerator.backward(timm_moe.add_router_losses(model, loss))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        with torch.inference_mode():
            outputs = accelerator.unwrap_model(model)(test_images.to(accelerator.device))
        accuracy = (outputs.argmax(1).cpu() == test_labels).float().mean().item()
        accelerator.print(f"epoch {epoch + 1}: top-1 {100 * accuracy:.1f} %")
        accelerator.print(timm_moe.expert_statistics(model, averaging))
        accelerator.save_state(f"run/epoch_{epoch + 1}")

    if accelerator.is_main_process:
        export = timm_moe.export_dense if "ewa" in name else timm_moe.export_moe
        print(export(accelerator.unwrap_model(model), "run/exported", overwrite=True))
    accelerator.end_training()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]), *sys.argv[2:])
