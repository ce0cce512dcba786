"""EWA in fine-tuning of a trained network on other classes (EWA, table 4)."""

from timm_moe.analysis.paired import BETTER, UNCLEAR

from ..deploy import Export
from ..study import Arm, Finding, Images, Study, Training, Use, compare
from .settings import PAPER_OPTIONS, RAND_AUGMENT, paper, small

#: The small size starts from a dense network of the other 80 classes, the paper's from ImageNet
#: weights of the Hub.
OTHER_CLASSES = Training("dense-on-80", "dense", images="images-of-80")
HERE = (Use("start", OTHER_CLASSES, Export()),)
SGD = ("--opt", "momentum", "--lr", "0.01", "--weight-decay", "0")
FURTHER = (
    *SGD,
    "--pretrained-path",
    "{start}/model.safetensors",
    "--epochs",
    "20",
    "--warmup-epochs",
    "2",
)
#: 5,000 steps of 128 images, 500 of them warm-up.
FROM_HUB = (*SGD, "--epochs", "13", "--warmup-epochs", "1")

EMA = ("--model-ema", "--model-ema-decay", "0.98")


def arms(uses: tuple[Use, ...], options: tuple[str, ...]) -> tuple[Arm, ...]:
    def tuned(
        name: str,
        model: str,
        *kwargs: str,
        callback: str = "",
        more: tuple[str, ...] = (),
        draw: int = 0,
    ) -> Training:
        stated = ("--pretrained", *options, *more)
        return Training(name, model, kwargs, stated, uses, "images-of-20", callback, draw)

    dense = tuned("tuned-dense", "dense", more=EMA)
    return (
        Arm("dense", dense, paper="90.22"),
        Arm("dense, weight EMA", dense, Export(("--use-ema",))),
        Arm("dense, another draw", tuned("tuned-dense-again", "dense", draw=1)),
        Arm(
            "dense, learning rate / 4 in the converted networks",
            tuned("tuned-lr-over-4", "dense", callback="lr_divided=every-2/4"),
        ),
        Arm("EWA, linear", tuned("tuned-linear", "ewa"), paper="90.67"),
        Arm("EWA, constant", tuned("tuned-constant", "ewa", "share_schedule=constant")),
        Arm("EWA, late", tuned("tuned-late", "ewa", "share_schedule=late")),
        Arm("experts never averaged, their mean", tuned("tuned-never", "ewa", "share_rate=0")),
    )


#: The last twenty classes of the alphabet are kept for the fine-tuning.
PARTS = {
    "images-of-80": Images(classes=(0, 80), train=(0, 100)),
    "images-of-20": Images(classes=(80, None), train=(0, 100)),
}

SCHEDULES = ("EWA, linear", "EWA, constant", "EWA, late")

FINDINGS = (
    Finding(
        "EWA shows no clear difference from dense training with any of three schedules. The "
        "intervals are two points wide (-1.93 to +0.40 in all); the paper's gain is 0.45.",
        compare(SCHEDULES, UNCLEAR, ("dense",)),
        quoted=("0.45",),
    ),
    Finding(
        "Linear averaging shows no clear difference from no averaging.",
        compare(("EWA, linear",), UNCLEAR, ("experts never averaged, their mean",)),
    ),
    Finding(
        "All arms are fine-tuned by SGD with momentum and without weight decay, as in the paper. "
        "Study adamw has the optimizer of all commands on these pages.",
        compare(("EWA, linear",), UNCLEAR, ("dense",)),
    ),
    Finding(
        "Two draws of dense training, with another seed for head, images and drop path, lie 0.47 "
        "points apart on average (standard deviation of the difference: 0.42).",
        compare(("dense, another draw",), UNCLEAR, ("dense",)),
        quoted=("0.47", "0.42"),
    ),
    Finding(
        "A quarter of the learning rate in the converted networks gains 0.12 points (0.01 to "
        "0.23). After Holm's correction over the study's seven comparisons this is not clear.",
        compare(("dense, learning rate / 4 in the converted networks",), BETTER, ("dense",)),
    ),
)

STUDY = Study(
    name="finetuning",
    title="EWA in fine-tuning",
    question=(
        "Does EWA help a network that has learned 80 classes and is fine-tuned by SGD on 20 others?"
    ),
    source="EWA (arXiv 2308.06093), table 4, ViT-S from ImageNet to CIFAR-100",
    sizes={
        "small": small(arms(HERE, FURTHER), images=PARTS, findings=FINDINGS),
        "paper": paper(
            arms((), FROM_HUB),
            setting="finetuning-paper",
            images={"images-of-20": Images()},
            options=(*PAPER_OPTIONS, *RAND_AUGMENT),
            models={"dense": "vit_small_patch16_224", "ewa": "vit_small_ewa_moe"},
        ),
    },
    pairs=tuple(
        ("EWA, linear", rival)
        for rival in (
            "dense, weight EMA",
            "dense, another draw",
            "dense, learning rate / 4 in the converted networks",
        )
    ),
)
