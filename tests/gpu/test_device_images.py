"""Images that the studies keep and augment on a GPU."""

import random

import pytest
import torch
from devices import waits
from timm.data import FastCollateMixup, create_transform
from torch.utils.data import DataLoader, Dataset

pytest.importorskip("scipy")

from studies import device_images


class Images(Dataset):
    """Noise of 16 pixels, with the transforms of timm's training loaders."""

    def __init__(self):
        self.images = torch.randint(
            256, (128, 3, 16, 16), generator=torch.Generator().manual_seed(0)
        ).to(torch.uint8)
        options = {"auto_augment": "original", "interpolation": "random", "use_prefetcher": True}
        self.transform = create_transform((3, 16, 16), is_training=True, **options)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, number):
        return self.images[number], number % 5


@pytest.fixture
def loader(device, monkeypatch):
    monkeypatch.setattr(device_images, "pil_to_tensor", None)  # the images are tensors
    mixup = FastCollateMixup(1.0, 1.0, num_classes=5)
    random.seed(0)
    return device_images.DeviceLoader(
        DataLoader(Images(), 16, shuffle=True, drop_last=True, collate_fn=mixup),
        device=torch.device(device),
        re_prob=0.25,
        re_mode="pixel",
    )


def test_images_are_augmented_as_on_the_cpu(device, loader):
    images = Images().images
    draw = loader.augmentation.draw(len(images), (16, 16))
    there = loader.augmentation.apply(images.to(device), draw).cpu()
    differ = (there.int() - loader.augmentation.apply(images, draw).int()).abs()
    assert (differ > 0).float().mean() < 1e-3  # a GPU's sine may be rounded otherwise


def test_only_the_first_of_many_batches_waits_for_the_device(device, loader):
    batches = iter(loader)
    image, target = next(batches)
    assert (image.device.type, target.device.type) == (device, device)
    with waits(device, 0):
        rest = list(batches)
    assert len(rest) == 7
    assert all(image.isfinite().all() for image, _ in rest)
