"""Image-level experts in a trained network, with and without a shared expert (ViMoE, table 7)."""

from timm_moe.analysis.paired import BETTER, UNCLEAR, WORSE

from ..deploy import Export
from ..study import Arm, Finding, Study, Training, Use, compare, slug
from .scratch import DENSE
from .settings import RAND_AUGMENT, SMALL_FURTHER, paper, small

IMAGE_LEVEL = ("router=top_k", "routing_unit=image", "num_experts=8", "share_rate=0")


PLACES = {"tail-2": "the last two blocks", "every-1": "every block"}
KINDS = {
    "no shared expert": (),
    "shared expert": ("shared_expert=True",),
    "no shared expert and no gate": ("gate_mode=one",),
}
#: The dense network, not the average of its weights.
HERE = (Use("start", DENSE, Export()),)
#: With experts in 2 and in 12 of 12 blocks.
PAPER = {
    ("no shared expert", "tail-2"): "91.3",
    ("no shared expert", "every-1"): "52.9",
    ("shared expert", "tail-2"): "91.5 to 91.7",
    ("shared expert", "every-1"): "91.5 to 91.7",
}


def arms(uses: tuple[Use, ...], options: tuple[str, ...]) -> tuple[Arm, ...]:
    return (
        Arm("dense, trained on", Training("vimoe-dense", "dense", (), options, uses), paper="91.3"),
        *(
            Arm(
                f"{kind}, in {place}",
                Training(
                    f"vimoe-{where}-{slug(kind)}",
                    "ewa",
                    (f"moe_layers={where}", *IMAGE_LEVEL, *kwargs),
                    options,
                    uses,
                ),
                Export(("--moe",)),
                paper=PAPER.get((kind, where), ""),
            )
            for where, place in PLACES.items()
            for kind, kwargs in KINDS.items()
        ),
    )


#: DINOv2's weights, at 224 pixels.
DINOV2 = (
    *("--pretrained", "--img-size", "224", *RAND_AUGMENT, "--mixup", "0.8", "--cutmix", "1.0"),
    *(
        "--smoothing",
        "0.1",
        "--reprob",
        "0.25",
        "--drop-path",
        "0.1",
        "--opt",
        "adamw",
        "--layer-decay",
        "0.65",
    ),
    *(
        "--lr",
        "3e-4",
        "--weight-decay",
        "0.3",
        "-b",
        "1024",
        "--epochs",
        "100",
        "--warmup-epochs",
        "3",
    ),
    *("--sched-on-updates", "--checkpoint-hist", "1", "--amp", "--amp-dtype", "bfloat16"),
)

#: All arms with experts.
IN_BLOCKS = tuple(f"{kind}, in {place}" for place in PLACES.values() for kind in KINDS)
WITHOUT, WITH = "no shared expert, in every block", "shared expert, in every block"

FINDINGS = (
    Finding(
        "Over three seeds, experts in every block are 0.43 points worse without a shared expert "
        "(0.03 to 0.83), which is not clear after Holm's correction. With one there is no clear "
        "difference from dense training. The shared expert gains 0.37 points. It is a second "
        "network for each token, so this model computes nearly half more than the dense one.",
        (
            *compare((WITHOUT,), WORSE, ("dense, trained on",)),
            *compare((WITH,), UNCLEAR, ("dense, trained on",)),
            *compare((WITH,), BETTER, (WITHOUT,)),
        ),
    ),
    Finding(
        "Without shared expert and gate there is no clear difference from dense training or from "
        "the model with the gate: whether there is a loss, and why, stays open. The paper's "
        "collapse, from 91.3 to 52.9 %, does not occur.",
        compare(
            ("no shared expert and no gate, in every block",),
            UNCLEAR,
            ("dense, trained on", WITHOUT),
        ),
        quoted=("91.3", "52.9"),
    ),
    Finding(
        "In the last two blocks no kind of experts shows a clear difference from dense training.",
        compare(
            [f"{kind}, in the last two blocks" for kind in KINDS], UNCLEAR, ("dense, trained on",)
        ),
    ),
)

STUDY = Study(
    name="vimoe",
    title="ViMoE: shared expert and gate",
    question=(
        "Eight image-level experts begin as copies: does the shared expert prevent a collapse that "
        "the gate causes?"
    ),
    source="ViMoE (arXiv 2410.15732), table 7, DINOv2 ViT-S/14 on CIFAR-100",
    sizes={
        "small": small(
            arms(HERE, ("--initial-checkpoint", "{start}/model.safetensors", *SMALL_FURTHER)),
            range(3),
            findings=FINDINGS,
        ),
        "paper": paper(
            arms((), ()),
            range(3),
            setting="vimoe-paper",
            models={"dense": "vit_small_patch14_dinov2", "ewa": "vit_small_patch14_dinov2_ewa_moe"},
            kwargs=("img_size=224",),
            options=DINOV2,
        ),
    },
    pairs=((WITH, "no shared expert and no gate, in every block"),),
)
