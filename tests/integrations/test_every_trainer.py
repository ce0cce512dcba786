"""Every kind of model in every trainer.

It is trained on real images, resumed, made dense, and opened without this package.
"""

import copy
import json

import pytest
import timm
import torch
import torchvision
from common import ROOT
from foreign_loop import Classifier, lightning_classifier
from own_model import OwnModel
from processes import run_code
from torch import nn
from torch.utils.data import DataLoader, Dataset

import timm_moe
from timm_moe.analysis.demo import load_images
from timm_moe.callbacks import add_router_losses, start_averaging

transformers = pytest.importorskip("transformers")
lightning = pytest.importorskip("lightning")
from timm_moe.integrations import lightning as for_lightning  # noqa: E402
from timm_moe.integrations import transformers as for_trainer  # noqa: E402

pytestmark = [pytest.mark.ci]

TIMM = dict(img_size=8, patch_size=2, num_classes=10, embed_dim=32, depth=2, num_heads=2)
HF = dict(
    image_size=8,
    patch_size=2,
    num_labels=10,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
)
#: What the experts of each become one network by; of the first and the third that network is the
#: model.
ROUTERS = {"random": "average", "top_k": "sum", "expert_choice": "average", "soft": "average"}


def converted(model, router, **options):
    return timm_moe.convert_to_moe(model, router=router, expert_init="independent", **options)


MODELS = {
    "timm by name": lambda router: timm.create_model(
        **(
            dict(model_name="vit_tiny_moe")
            if router == "top_k"
            else dict(model_name="vit_tiny_ewa_moe", router=router)
        ),
        **TIMM,
    ),
    "timm converted": lambda router: converted(
        timm.create_model("vit_tiny_patch16_224", **TIMM), router
    ),
    "transformers' ViT": lambda router: converted(
        transformers.ViTForImageClassification(transformers.ViTConfig(**HF, intermediate_size=64)),
        router,
    ),
    "transformers' DINOv2": lambda router: converted(
        transformers.Dinov2ForImageClassification(transformers.Dinov2Config(**HF, mlp_ratio=2)),
        router,
    ),
    "torchvision's ViT": lambda router: converted(
        torchvision.models.VisionTransformer(8, 2, 2, 2, 32, 64, num_classes=10), router
    ),
    "own model": lambda router: converted(OwnModel(), router, modules=r"blocks\.\d\.feed_forward"),
}
#: How each is opened where this package is not.
OPEN = """
import json, sys, torch
sys.path.insert(0, sys.argv[2])
results = {}
for folder, kind in json.loads(sys.argv[1]):
    if kind.startswith("timm"):
        import timm
        model = timm.create_model(f"local-dir:{folder}", pretrained=True)
    elif kind.startswith("transformers"):
        import transformers
        model = transformers.AutoModelForImageClassification.from_pretrained(folder)
    else:
        import torchvision
        from own_model import OwnModel
        from safetensors.torch import load_file
        build = torchvision.models.VisionTransformer
        model = OwnModel() if kind == "own model" else build(8, 2, 2, 2, 32, 64, num_classes=10)
        model.load_state_dict(load_file(f"{folder}/model.safetensors"))
    images, expected = torch.load(f"{folder}/expected.pt")
    outputs = model.eval()(images)
    difference = (getattr(outputs, "logits", outputs) - expected).abs().max().item()
    assert difference <= 1e-6, (folder, difference)
assert "timm_moe" not in sys.modules
"""


class Digits(Dataset):
    """48 of scikit-learn's images of digits."""

    def __init__(self):
        (images, labels), _ = load_images()
        self.images, self.labels = images[:48].expand(-1, 3, -1, -1).contiguous(), labels[:48]

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return {"pixel_values": self.images[index], "labels": self.labels[index]}


def make(kind, router):
    torch.manual_seed(0)
    return MODELS[kind](router)


# Each trains for four steps and keeps what it needs to go on after two; or goes on from there.


def by_trainer(model, folder, resume):
    module = model if hasattr(model, "config") else Classifier(model)
    args = transformers.TrainingArguments(
        str(folder / ("resumed" if resume else "whole")),
        max_steps=4,
        save_steps=2,
        per_device_train_batch_size=12,
        learning_rate=1e-2,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = transformers.Trainer(
        module, args, train_dataset=Digits(), callbacks=[for_trainer.ExpertCallback()]
    )
    trainer.train(resume_from_checkpoint=str(folder / "whole/checkpoint-2") if resume else None)


def by_lightning(model, folder, resume):
    torch.manual_seed(1)
    keep = lightning.pytorch.callbacks.ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = lightning.Trainer(
        max_epochs=2,
        limit_train_batches=2,
        default_root_dir=folder,
        accelerator="cpu",
        callbacks=[for_lightning.ExpertCallback(), *([] if resume else [keep])],
        **quiet,
    )
    loader = DataLoader(Digits(), 12, shuffle=True)
    trainer.fit(
        lightning_classifier(model), loader, ckpt_path=folder / "epoch=0.ckpt" if resume else None
    )


def by_own_loop(model, folder, resume):
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    done = 0
    if resume:
        saved = torch.load(folder / "saved.pt")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["random"])
        done = 2
    averaging = start_averaging(model, optimizer, 4, done)
    data, model = Digits(), model.train()
    for step in range(done, 4):
        if step == 2:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "random": torch.get_rng_state(),
            }
            torch.save(state, folder / "saved.pt")
        batch = slice(12 * step, 12 * step + 12)
        outputs = model(data.images[batch])
        loss = nn.functional.cross_entropy(getattr(outputs, "logits", outputs), data.labels[batch])
        add_router_losses(model, loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    if averaging is not None:
        assert averaging.updates == 4
        averaging.remove()


TRAINERS = {"Trainer": by_trainer, "Lightning": by_lightning, "own loop": by_own_loop}
CELLS = [(kind, router, trainer) for kind in MODELS for router in ROUTERS for trainer in TRAINERS]


@pytest.fixture(scope="module")
def exported():
    """Folders of exports with the kind of model in each, in the order in which they come to be."""
    return []


@pytest.mark.parametrize(("kind", "router", "trainer"), CELLS)
@pytest.mark.filterwarnings("ignore")
def test_a_cell(kind, router, trainer, tmp_path, exported):
    train = TRAINERS[trainer]
    whole = make(kind, router)
    start = copy.deepcopy(whole.state_dict())
    train(whole, tmp_path, resume=False)
    assert any(not torch.equal(start[name], tensor) for name, tensor in whole.state_dict().items())
    resumed = make(kind, router)
    train(resumed, tmp_path, resume=True)
    for name, expected in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], expected), name
    images = Digits().images[:3]
    options = {} if kind.startswith(("timm", "transformers")) else {"example_inputs": images}
    export = timm_moe.export_dense(whole, tmp_path / "dense", ROUTERS[router], **options)
    dense = timm_moe.to_dense(whole, ROUTERS[router]).eval()
    with torch.no_grad():
        outputs = dense(images)
        if router == "random":
            whole_outputs = whole.eval()(images)
            pairs = zip(*(getattr(o, "logits", o) for o in (outputs, whole_outputs)), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)
    torch.save((images, getattr(outputs, "logits", outputs)), export.path / "expected.pt")
    exported.append((str(export.path), kind))


def test_all_of_them_are_opened_without_this_package(exported):
    assert exported, "run this test together with the cells before it"
    arguments = (json.dumps(exported), ROOT / "tests")
    modules = ("timm", "transformers.pipelines")
    done = run_code(OPEN, *arguments, modules=modules, autoload="0")
    assert done.returncode == 0, done.stderr
