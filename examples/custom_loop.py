"""Train EWA in a loop of your own: python examples/custom_loop.py DATA_DIR [EPOCHS [BATCH_SIZE]]

DATA_DIR holds small images, such as CIFAR-100's, in train/<class>/ and validation/<class>/.
The progress bar needs tqdm.
"""

import sys

import timm
import torch
from timm.data import create_dataset, create_loader, resolve_model_data_config
from torch import nn
from tqdm import tqdm

import timm_moe


def main(data_dir: str, epochs: int = 5, batch_size: int = 128) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # timm takes the whole folder where a split is missing, so the folders are named.
    train_set = create_dataset("", root=f"{data_dir}/train", is_training=True)
    validation_set = create_dataset("", root=f"{data_dir}/validation")
    model = timm.create_model(
        "vit_xtiny_ewa_moe", num_classes=len(train_set.reader.class_to_idx)
    ).to(device)
    config = resolve_model_data_config(model)
    common = dict(batch_size=batch_size, num_workers=2, use_prefetcher=False, **config)
    train_loader = create_loader(train_set, is_training=True, scale=(0.5, 1.0), **common)
    validation_loader = create_loader(validation_set, **common)

    total_updates = epochs * len(train_loader)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total_updates)
    # EWA needs this line only: from here on an averaging follows each optimizer.step().
    averaging = timm_moe.start_averaging(model, optimizer, total_updates)

    for epoch in range(epochs):
        model.train()
        progress = tqdm(train_loader, desc=f"epoch {epoch + 1}/{epochs}")
        for images, labels in progress:
            loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            progress.set_postfix(
                {"loss": f"{loss.item():.3f}", "share rate": f"{averaging.share_rate:.3f}"}
            )
        model.eval()  # evaluates the mean of the experts, as exported
        with torch.inference_mode():
            correct = sum(
                (model(x.to(device)).argmax(1).cpu() == y).sum().item()
                for x, y in validation_loader
            )
        print(f"top-1 {100 * correct / len(validation_set):.2f} %")

    print(timm_moe.export_dense(model, "exported", overwrite=True))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
