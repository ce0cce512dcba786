"""Images on the device are augmented as timm augments them on the CPU; train.py trains the same."""

import math
import os
import random
import sys
from collections import Counter

import numpy as np
import pytest
import timm
import timm.data.loader
import torch
from common import ROOT
from PIL import Image
from processes import run_new
from scipy.stats import ks_2samp
from timm.data import (
    FastCollateMixup,
    RandomResizedCropAndInterpolation,
    auto_augment,
    create_loader,
    create_transform,
)
from timm.data.dataset import ImageDataset
from timm.data.random_erasing import RandomErasing
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import hflip, pil_to_tensor, resized_crop
from train_script import SCRIPTS, needs_scripts, summary

from studies import augment, device_images
from studies.device_images import Augmentation, DeviceLoader

SIZE = (16, 20)
MEAN, STD = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
BILINEAR, BICUBIC = Image.Resampling.BILINEAR, Image.Resampling.BICUBIC
COLORS = [
    ("AutoContrast", auto_augment.auto_contrast, ()),
    ("Equalize", auto_augment.equalize, ()),
    ("Invert", auto_augment.invert, ()),
    ("PosterizeOriginal", auto_augment.posterize, (4, 5, 6, 7, 8)),
    ("Solarize", auto_augment.solarize, (0, 76, 128, 255, 256)),
    ("Brightness", auto_augment.brightness, (0.6, 1, 1.31)),
    ("Color", auto_augment.color, (0.1, 0.82, 1, 1.72)),
    ("Contrast", auto_augment.contrast, (0.1, 1.54, 1.9)),
    ("Sharpness", auto_augment.sharpness, (0.1, 1, 1.36)),
]
GEOMETRY = [
    ("Rotate", auto_augment.rotate, (-27, -9, 6, 24)),
    ("ShearX", auto_augment.shear_x, (-0.15, 0.15)),
]


@pytest.fixture(scope="module")
def pictures():
    """A picture of one color, one of few values, one of noise, and smooth ones."""
    rng = np.random.default_rng(0)
    height, width = SIZE
    y, x = np.mgrid[:height, :width][..., None]
    arrays = [
        np.full((height, width, 3), 7),
        200 * ((x + y) % 2) + [0, 10, 20],
        rng.integers(0, 256, (*SIZE, 3)),
    ]
    for _ in range(9):
        wave = np.sin(rng.normal(0, 0.3, 3) * x + rng.normal(0, 0.3, 3) * y + rng.normal(0, 3, 3))
        arrays.append(128 + rng.uniform(20, 127) * wave)
    return [Image.fromarray(array.astype(np.uint8)) for array in arrays]


def tensors(pictures):
    return torch.stack([pil_to_tensor(picture) for picture in pictures])


def full(number, value):
    return torch.full((number,), float(value), dtype=torch.float64)


@pytest.mark.parametrize(("name", "function", "arguments"), COLORS)
def test_colors_are_pillows(pictures, name, function, arguments):
    for argument in arguments or (0,):
        expected = [function(picture, *([argument] if arguments else [])) for picture in pictures]
        changed = augment.COLORS[name](tensors(pictures), full(len(pictures), argument))
        assert torch.equal(changed, tensors(expected)), argument


@pytest.mark.parametrize(("name", "function", "arguments"), GEOMETRY)
@pytest.mark.parametrize("interpolation", [BILINEAR, BICUBIC])
def test_rotations_and_shears_are_pillows(pictures, name, function, arguments, interpolation):
    fill, number = (129, 124, 112), len(pictures)
    for argument in arguments:
        expected = [
            function(picture, argument, fillcolor=fill, resample=interpolation)
            for picture in pictures
        ]
        matrices = augment.GEOMETRY[name](full(number, argument), *SIZE)
        is_bicubic = torch.full((number,), interpolation == BICUBIC)
        moved = augment.affine(
            tensors(pictures), matrices, is_bicubic, torch.tensor(fill, dtype=torch.uint8)
        )
        assert torch.equal(moved, tensors(expected)), argument


def transform(**options):
    options = {"auto_augment": "original", "interpolation": "random", **options}
    return create_transform(
        (3, *SIZE), is_training=True, mean=MEAN, std=STD, use_prefetcher=True, **options
    )


def replay(picture, number, draw, fill):
    """Do with Pillow what was drawn for an image."""
    modes = {True: InterpolationMode.BICUBIC, False: InterpolationMode.BILINEAR}
    picture = resized_crop(
        picture, *draw.boxes[number].tolist(), SIZE, modes[bool(draw.is_bicubic[number])]
    )
    picture = hflip(picture) if draw.is_flipped[number] else picture
    functions = {
        name: (function, bool(arguments)) for name, function, arguments in (*COLORS, *GEOMETRY)
    }
    for change in draw.changes:
        for place in (change.chosen == number).nonzero().flatten():
            function, has_argument = functions[change.name]
            value = change.values[place].item()
            argument = int(value) if change.name in ("PosterizeOriginal", "Solarize") else value
            resample = BICUBIC if change.is_bicubic[place] else BILINEAR
            picture = function(
                picture, *([argument] if has_argument else []), fillcolor=fill, resample=resample
            )
    return picture


@pytest.mark.parametrize("options", [{}, {"auto_augment": None, "color_jitter": 0.4}])
def test_a_whole_draw_is_what_pillow_does_with_it(pictures, options):
    augmentation = Augmentation(transform(**options), torch.Generator().manual_seed(0))
    pictures = pictures * 40
    draw = augmentation.draw(len(pictures), SIZE)
    of_policy = {*augment.COLORS, *augment.GEOMETRY} - {"Brightness"}
    drawn = {change.name for change in draw.changes if len(change.chosen)}
    assert drawn == ({"Brightness", "Color", "Contrast"} if options else of_policy)
    expected = [
        replay(picture, number, draw, augmentation.fill) for number, picture in enumerate(pictures)
    ]
    assert torch.equal(augmentation.apply(tensors(pictures), draw), tensors(expected))


def test_operations_and_their_arguments_are_as_frequent_as_in_timm():
    number = 20_000
    policy = transform().transforms[2]
    counted = Counter()
    for operation in {id(op): op for operations in policy.policy for op in operations}.values():
        operation.aug_fn = lambda image, *arguments, name=operation.name, **_: (
            counted.update([(name, float(arguments[0]) if arguments else 0.0)]) or image
        )
    random.seed(0)
    for _ in range(number):
        policy(None)
    draw = Augmentation(transform(), torch.Generator().manual_seed(0)).draw(number, SIZE)
    drawn = Counter(
        (change.name, value) for change in draw.changes for value in change.values.tolist()
    )
    assert set(drawn) == set(counted)
    for key, count in counted.items():
        assert abs(drawn[key] - count) < 5 * math.sqrt(2 * count), key
    for change in draw.changes:
        if change.name in augment.GEOMETRY:
            assert 0.4 < change.is_bicubic.float().mean() < 0.6


def test_the_two_operations_of_a_policy_follow_each_other():
    draw = Augmentation(transform(), torch.Generator().manual_seed(0)).draw(20_000, SIZE)
    names = [[] for _ in range(20_000)]
    for change in draw.changes:
        for number in change.chosen.tolist():
            names[number].append(change.name)
    counts = Counter(tuple(of_one) for of_one in names)
    chances = Counter()
    for first, second in transform().transforms[2].policy:
        for both in ((first, second), (first,), (second,), ()):
            chance = math.prod(op.prob if op in both else 1 - op.prob for op in (first, second))
            chances[tuple(op.name for op in both)] += chance / 25
    for key, chance in chances.items():
        expected = 20_000 * chance
        assert abs(counts[key] - expected) <= 5 * math.sqrt(expected), key
    assert set(counts) <= {key for key, chance in chances.items() if chance}


@pytest.mark.parametrize("options", [{}, {"scale": (0.5, 0.9), "ratio": (0.5, 1.9)}])
def test_crops_are_distributed_as_timms(options):
    crop = transform(**options).transforms[0]
    assert isinstance(crop, RandomResizedCropAndInterpolation)
    random.seed(0)
    expected = np.array(
        [crop.get_params(Image.new("RGB", SIZE[::-1]), crop.scale, crop.ratio) for _ in range(8000)]
    )
    draw = Augmentation(transform(**options), torch.Generator().manual_seed(0)).draw(8000, SIZE)
    same_distribution(expected, draw.boxes.numpy())
    assert 0.48 < draw.is_flipped.float().mean() < 0.52
    assert 0.48 < draw.is_bicubic.float().mean() < 0.52


def same_distribution(expected, drawn):
    """Compare tops, lefts, heights, widths, areas and ratios."""
    derived = [
        [*boxes.T, boxes[:, 2] * boxes[:, 3], boxes[:, 2] / boxes[:, 3]]
        for boxes in (expected, drawn)
    ]
    for column, pair in enumerate(zip(*derived, strict=True)):
        assert ks_2samp(*pair).pvalue > 1e-3, column


def test_erasing_is_distributed_as_timms():
    number, erasing = 6000, RandomErasing(0.25, mode="pixel", device="cpu")
    random.seed(0)
    images = erasing(torch.full((number, 3, *SIZE), torch.nan))
    expected = ~images.isnan()
    boxes = device_images.draw_erasing(number, SIZE, erasing, torch.Generator().manual_seed(0))
    images = device_images.erase(
        torch.full((number, 3, *SIZE), torch.nan), boxes, torch.Generator().manual_seed(0)
    )
    erased = ~images.isnan()
    assert torch.equal(erased.any(1), erased.all(1))
    counts = [mask.flatten(1).any(1).sum() for mask in (expected, erased)]
    assert abs(counts[0] - counts[1]) < 5 * math.sqrt(number * 0.25 * 0.75 * 2)
    same_distribution(
        *(np.array([box(mask[0]) for mask in masks if mask.any()]) for masks in (expected, erased))
    )
    noise = images[erased]
    assert abs(noise.mean()) < 0.01
    assert abs(noise.std() - 1) < 0.01


def box(mask):
    rows, columns = mask.any(1).nonzero(), mask.any(0).nonzero()
    assert mask.sum() == len(rows) * len(columns)
    return rows[0].item(), columns[0].item(), len(rows), len(columns)


def test_color_jitter_is_distributed_as_torchvisions():
    augmentation = Augmentation(
        transform(auto_augment=None, color_jitter=0.4), torch.Generator().manual_seed(0)
    )
    draw = augmentation.draw(6000, SIZE)
    orders = [[] for _ in range(6000)]
    for change in draw.changes:
        for number in change.chosen.tolist():
            orders[number].append(change.name)
    counts = Counter(tuple(order) for order in orders)
    assert len(counts) == 6
    assert all(850 < count < 1150 for count in counts.values())
    for name in ("Brightness", "Contrast", "Color"):
        values = (
            torch.cat([change.values for change in draw.changes if change.name == name])
            .sort()
            .values
        )
        assert (values - torch.linspace(0.6, 1.4, 6000)).abs().max() < 0.02


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Three classes of noisy images of 16 pixels, each of its own color and stripes."""
    folder, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for split, number in (("train", 80), ("test", 10)):
        for kind, name in enumerate(("first", "second", "third")):
            (folder / split / name).mkdir(parents=True)
            for index in range(number):
                stripes = (
                    40 * np.sin((kind + 1) * np.arange(16) / 2 + rng.uniform(0, 6))[:, None, None]
                )
                pixels = (
                    128 + stripes + rng.normal(0, 40, (16, 16, 3)) + 20 * (np.arange(3) == kind)
                )
                Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(
                    folder / split / name / f"{index:02}.png"
                )
    return folder


#: Transforms whose results are not random.
WHOLE = {"scale": (1, 1), "ratio": (1, 1), "hflip": 0, "color_jitter": None}


def make(images, split="train", seed=0, **options):
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    options = {"is_training": True, "mean": MEAN, "std": STD, "num_workers": 0, **options}
    return create_loader(
        ImageDataset(str(images / split)), (3, 16, 16), 16, device=torch.device("cpu"), **options
    )


@pytest.fixture
def on_device(monkeypatch):
    if timm.__version__.startswith("1.0.28"):
        pytest.skip("this timm's loaders need processes of their own")
    monkeypatch.setattr(timm.data.loader, "PrefetchLoader", timm.data.loader.PrefetchLoader)
    return device_images.put_images_on_the_device


def mixup():
    return FastCollateMixup(1.0, 1.0, prob=0.7, label_smoothing=0.1, num_classes=3)


@pytest.mark.parametrize("collate", [None, mixup])
@pytest.mark.parametrize("options", [WHOLE, {"no_aug": True}])
def test_without_random_transforms_batches_are_timms(
    images, on_device, monkeypatch, collate, options
):
    monkeypatch.setattr(device_images, "CHUNK", 4)
    batches = []
    for _ in range(2):
        loader = make(images, collate_fn=collate and collate(), interpolation="bilinear", **options)
        batches.append([batch for _ in range(3) for batch in loader])
        on_device()
    assert isinstance(loader, DeviceLoader)
    assert len(loader) == 15
    assert len(batches[0]) == len(batches[1]) == 45
    for (image, target), (image_here, target_here) in zip(*batches, strict=True):
        assert torch.equal(image, image_here)
        assert torch.equal(target, target_here)
    if collate:
        loader.mixup_enabled = False  # as train.py does by --mixup-off-epoch
        assert all(target.amax() == target.max(1).values.min() for _, target in loader)


@pytest.mark.ci
def test_batches_of_random_images_have_timms_statistics(images, on_device):
    found = []
    for _ in range(2):
        options = {
            "auto_augment": "original",
            "interpolation": "random",
            "re_prob": 0.25,
            "re_mode": "pixel",
        }
        loader = make(images, **options, collate_fn=mixup())
        pixels = torch.cat([batch for _ in range(6) for batch, _ in loader])
        channels = pixels.transpose(0, 1).flatten(1)
        steps = pixels.diff(dim=3).abs()
        found.append(
            torch.cat(
                [
                    channels.mean(1),
                    channels.std(1),
                    steps.mean((0, 2, 3)),
                    pixels.mean((1, 2, 3)).std()[None],
                ]
            )
        )
        on_device()
    torch.testing.assert_close(*found, atol=0.06, rtol=0)


def test_mixed_and_normalized_images_are_erased(images, on_device):
    on_device()
    whole, erased = (
        torch.cat(
            [
                batch
                for batch, _ in make(
                    images, **WHOLE, collate_fn=mixup(), re_prob=probability, re_mode="pixel"
                )
            ]
        )
        for probability in (0, 1)
    )
    differ = whole != erased
    assert torch.equal(differ.any(1), differ.all(1))
    assert all(max(box(mask[0])[2:]) < 16 for mask in differ)
    assert abs(erased[differ].std() - 1) < 0.05


def test_evaluation_has_timms_batches_in_timms_order(images, on_device):
    batches = []
    for _ in range(2):
        loader = make(images, "test", is_training=False, interpolation="bicubic", crop_pct=0.875)
        batches.append(list(loader))
        on_device()
    assert isinstance(loader, DeviceLoader)
    for (image, target), (image_here, target_here) in zip(*batches, strict=True):
        assert torch.equal(image, image_here)
        assert torch.equal(target, target_here)


def test_training_images_differ_each_time_and_between_seeds(images, on_device):
    on_device()
    loader = make(
        images, auto_augment="original", interpolation="random", re_prob=0.25, re_mode="pixel"
    )
    first, second = ([image for image, _ in loader] for _ in range(2))
    other = [
        image for image, _ in make(images, seed=1, auto_augment="original", interpolation="random")
    ]
    again = make(
        images, auto_augment="original", interpolation="random", re_prob=0.25, re_mode="pixel"
    )
    assert all(
        torch.equal(*pair) for pair in zip(first, (image for image, _ in again), strict=True)
    )
    for one in (second, other):
        assert not torch.equal(first[0], one[0])
    assert all(image.isfinite().all() for image in first)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"train_crop_mode": "rkrc"}, "CenterCropOrPad, ResizeKeepRatio"),
        ({"vflip": 0.5}, "RandomVerticalFlip"),
        ({"grayscale_prob": 0.1}, "RandomGrayscale"),
        ({"color_jitter": (0.1, 0.1, 0.1, 0.1)}, "Hues"),
        ({"auto_augment": "v0"}, "ShearY"),
        ({"auto_augment": "original-mstd0.5"}, "mstd=0.5"),
        ({"auto_augment": "rand-m9"}, "RandAugment"),
        ({"interpolation": "lanczos"}, "lanczos"),
        ({"re_prob": 0.1, "re_mode": "const"}, "erased"),
        ({"re_prob": 0.1, "re_mode": "pixel", "re_count": 2}, "erased"),
        ({"collate_fn": FastCollateMixup(1.0, mode="elem", num_classes=3)}, "collated"),
        ({"ratio": (1.5, 2)}, "ratios"),
    ],
)
def test_what_cannot_be_done_on_the_device_is_refused(images, on_device, options, words):
    on_device()
    with pytest.raises(ValueError, match=words):
        next(iter(make(images, **options)))


def test_images_of_another_size_are_refused(images, on_device):
    on_device()
    with pytest.raises(ValueError, match="16 x 16"):
        next(
            iter(
                create_loader(
                    ImageDataset(str(images / "train")), 32, 16, True, device=torch.device("cpu")
                )
            )
        )


def train(folder, images, *arguments, callbacks=()):
    """Run train.py with callbacks and return its folder."""
    options = (
        *(
            "--model",
            "vit_tiny_ewa_moe",
            "--num-classes",
            3,
            "--img-size",
            16,
            "--drop-path",
            0.2,
            "--seed",
            3,
        ),
        *(
            "--model-kwargs",
            "img_size=16",
            "patch_size=4",
            "embed_dim=24",
            "depth=2",
            "num_heads=2",
            "share_rate=0.3",
        ),
        *(
            "--data-dir",
            images,
            "--val-split",
            "test",
            "-b",
            16,
            "-j",
            0,
            "--device",
            "cpu",
            "--opt",
            "adamw",
        ),
        *(
            "--mixup",
            1,
            "--cutmix",
            1,
            "--mixup-prob",
            0.5,
            "--sched-on-updates",
            "--warmup-epochs",
            0,
        ),
        *("--output", folder, "--experiment", "train", *arguments),
    )
    folder.mkdir()
    script = ["-m", "studies.script", *callbacks, f"{SCRIPTS}/train.py", *map(str, options)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = run_new([sys.executable, *script], cwd=folder, env=env)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return folder / "train"


@pytest.mark.ci
@needs_scripts
def test_train_py_learns_the_same_weights_from_the_same_images(images, tmp_path):
    options = ("--no-aug", "--epochs", 3, "--lr", "3e-3")
    states = [
        torch.load(
            train(tmp_path / name, images, *options, callbacks=callbacks) / "last.pth.tar",
            weights_only=False,
        )
        for name, callbacks in (("host", ()), ("device", ("on_device",)))
    ]
    assert states[0]["epoch"] == 2
    for name, weight in states[0]["state_dict"].items():
        assert torch.equal(weight, states[1]["state_dict"][name]), name
    host, device = (summary(tmp_path / name / "train") for name in ("host", "device"))
    assert host == device


@pytest.mark.ci
@needs_scripts
def test_train_py_learns_as_much_from_random_images(images, tmp_path):
    options = (
        "--scale",
        0.5,
        1,
        "--aa",
        "original",
        "--reprob",
        0.25,
        "--mixup",
        0,
        "--cutmix",
        0,
        "--epochs",
        16,
    )
    losses = {}
    for name, callbacks in (("host", ()), ("device", ("on_device",))):
        epochs = summary(
            train(tmp_path / name, images, *options, "--lr", "3e-3", callbacks=callbacks)
        )
        losses[name] = [float(epoch["train_loss"]) for epoch in epochs]
    assert losses["host"] != losses["device"]
    mean = {name: sum(of_one[-4:]) / 4 for name, of_one in losses.items()}
    assert mean["host"] < losses["host"][0] - 0.3
    assert mean["device"] == pytest.approx(mean["host"], abs=0.2)  # two seeds differ by 0.1
