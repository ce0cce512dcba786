"""Another version of timm.

One records no arguments, another lacks or renames what some models need.
"""

import functools
import json
from tempfile import TemporaryDirectory

import pytest
import timm
import torch
from common import SMALL_VIT
from processes import run_code
from timm.models import model_entrypoint

from timm_moe.export.export import export_moe
from timm_moe.integrations import timm as hooks
from timm_moe.model_config import model_input_size, records_arguments, untold_args
from timm_moe.models.registered import registered_models

#: Takes modules and classes from timm before the package is imported. Then it lists what is
#: registered, trains and exports.
WITHOUT = """
import json, sys, timm, torch, warnings
for gone in sys.argv[2:]:
    module, _, name = gone.partition(".")
    if name:
        delattr(sys.modules[f"timm.models.{module}"], name)
    else:
        sys.modules[f"timm.models.{module}"] = None
        delattr(timm.models, module)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import timm_moe, timm_moe.cli
from timm_moe.models.registered import registered_models
size = dict(img_size=32, embed_dim=32, num_heads=2, depth=2)
model = timm.create_model("vit_tiny_moe", **size, routing_unit="image")
(model(torch.randn(2, 3, 32, 32)).sum() + timm_moe.auxiliary_loss(model)).backward()
timm_moe.export_dense(timm.create_model("vit_tiny_ewa_moe", **size), sys.argv[1])
told = [str(warning.message) for warning in caught if "timm_moe.models" in str(warning.message)]
print(json.dumps([sorted(registered_models()), told]))
"""


def without(*gone):
    """The models that are left, and what a warning says."""
    with TemporaryDirectory() as folder:
        made = f"{folder}/dense"
        done = run_code(WITHOUT, made, *gone, autoload="0", modules=("torch",))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def of(*modules):
    """The registered models of these modules of timm_moe.models."""
    names = {f"timm_moe.models.{module}" for module in modules}
    return {name for name in registered_models() if model_entrypoint(name).__module__ in names}


@pytest.mark.ci
def test_modules_that_timm_lacks_take_their_families_alone():
    families = (
        "gemma4_vit",
        "tiny_vit",
        "vitamin",
        "tnt",
        "hiera",
        "nest",
        "beit",
        "eva",
        "mvitv2",
        "naflexvit",
    )
    left, told = without(*families)
    lost = of(*(f"ewa.{family}" for family in families))
    assert len(lost) > 50
    assert set(left) == set(registered_models()) - lost
    assert told == []


@pytest.mark.ci
def test_classes_of_another_name_take_no_models():
    left, told = without(
        *(
            "gemma4_vit.Gemma4GatedMlp",
            "tiny_vit.NormMlp",
            "vitamin.GeGluMlp",
            "tnt.Block",
            "hiera.Hiera",
            "beit.Beit",
            "naflexvit.NaFlexVitCfg",
        )
    )
    assert set(left) == set(registered_models())
    assert told == []


@pytest.mark.parametrize(
    ("module", "others"),
    [("pit", ["small_data"]), ("swin_transformer", ["small_data", "swin_moe"])],
)
@pytest.mark.ci
def test_models_with_names_of_their_own_are_missing_with_a_warning(module, others):
    left, told = without(module)
    assert set(left) == set(registered_models()) - of(f"ewa.{module}", *others)
    assert len(told) == len(others)
    for message, name in zip(told, others, strict=True):
        assert f"timm_moe.models.{name} are missing" in message


def test_names_that_timm_and_torch_announce_to_remove_are_not_needed():
    code = """
import sys, timm, timm.scheduler, timm.utils
del timm.scheduler.PlateauLRScheduler, timm.utils.ModelEma
del sys.modules["torch.nn.utils.weight_norm"].WeightNorm
import timm_moe
"""
    done = run_code(code, autoload="0")
    assert done.returncode == 0, done.stderr


def test_a_timm_that_lacks_what_is_needed_is_named():
    code = """
import timm, timm.utils
del timm.utils.adaptive_clip_grad
import timm_moe
"""
    done = run_code(code, autoload="0")
    told = f"timm_moe does not fit timm {timm.__version__} and torch {torch.__version__}: "
    assert told in done.stderr.splitlines()[-1]
    assert "adaptive_clip_grad" in done.stderr.splitlines()[-1]


def test_a_scheduler_with_a_step_of_its_own_is_followed(monkeypatch):
    class Newer(timm.scheduler.CosineLRScheduler):
        def step(self, epoch, metric=None):
            self.optimizer.param_groups[0]["lr"] = 0.1

    monkeypatch.setattr(timm.scheduler, "Newer", Newer, raising=False)
    wrapped = [(owner, name) for owner, name, _ in hooks._wrapped_methods()]
    assert wrapped.count((Newer, "step")) == 1
    assert (Newer, "step_update") not in wrapped


@pytest.fixture
def older(monkeypatch):
    """Make ``timm.create_model`` one that records nothing, and the package know that."""
    create = hooks.create_model

    @functools.wraps(create)
    def forgetful(*args, **kwargs):
        model = create(*args, **kwargs)
        vars(model).pop("_model_args", None)
        return model

    monkeypatch.setattr(hooks, "create_model", forgetful)
    monkeypatch.setattr(timm, "create_model", hooks._create_model)
    for module in ("timm_moe.model_config", "timm_moe.export.formats"):
        monkeypatch.setattr(f"{module}.records_arguments", lambda: False)


def test_arguments_are_recorded_only_where_timm_does_not():
    assert hasattr(timm.create_model, "__wrapped__") is not records_arguments()


def test_recorded_arguments_are_those_of_the_call_and_of_the_folder(older, tmp_path):
    model = timm.create_model(
        "vit_tiny_moe", num_experts=3, drop_path_rate=0.1, in_chans=None, **SMALL_VIT
    ).eval()
    stated = {"num_experts": 3, **SMALL_VIT}
    assert untold_args(model) == {**stated, "num_classes": model.num_classes}
    export_moe(model, tmp_path / "moe")
    config = json.loads((tmp_path / "moe/config.json").read_text())
    assert config["model_args"]["num_experts"] == 3
    assert config["pretrained_cfg"]["input_size"] == [3, 32, 32]
    loaded = timm.create_model(
        f"local-dir:{tmp_path / 'moe'}", pretrained=True, drop_rate=0.1
    ).eval()
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(loaded(images), model(images))
    export_moe(loaded, tmp_path / "again")
    assert (
        json.loads((tmp_path / "again/config.json").read_text())["model_args"]
        == config["model_args"]
    )


def test_an_older_timm_is_told_the_size_that_a_model_has(older):
    grey = timm.create_model("vit_tiny_patch16_224", in_chans=1, **SMALL_VIT)
    dynamic = timm.create_model("vit_tiny_patch16_224", dynamic_img_size=True, **SMALL_VIT)
    swin = timm.create_model(
        "swin_tiny_patch4_window7_224_ewa_moe", img_size=64, embed_dim=12, depths=(1, 1, 1, 1)
    )
    assert model_input_size(grey) == (1, 32, 32)
    assert model_input_size(dynamic) == (3, 224, 224)
    assert model_input_size(swin) == (3, 64, 64)
