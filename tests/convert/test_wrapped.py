"""A model is converted before it is wrapped.

It loads the checkpoints of models with the same expert layers.
"""

import copy
import io
import pickle

import pytest
import timm
import torch
from common import SMALL_VIT
from processes import run_ranks
from timm.utils import ModelEmaV3
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import timm_moe


def vit():
    return timm.create_model("vit_tiny_patch16_224", **SMALL_VIT)


class Classifier(nn.Module):
    def __init__(self, wrapper):
        super().__init__()
        self.backbone, self.head = wrapper(vit()), nn.Linear(5, 2)

    def forward(self, x):
        return self.head(self.backbone(x))


def with_compiled_block(model):
    model.blocks[1] = torch.compile(model.blocks[1])
    return model


@pytest.mark.parametrize(
    ("wrapper", "name"),
    [
        (nn.DataParallel, "DataParallel"),
        (torch.compile, "OptimizedModule"),
        (AveragedModel, "AveragedModel"),
        (ModelEmaV3, "ModelEmaV3"),
        (with_compiled_block, "OptimizedModule"),
    ],
)
@pytest.mark.first_case
def test_a_wrapped_model_is_refused(wrapper, name):
    for model in (wrapper(vit()), Classifier(wrapper)):
        before = dict(model.named_modules())
        with pytest.raises(ValueError, match=f"wrapped already, by {name},"):
            timm_moe.convert_to_moe(model)
        assert dict(model.named_modules()) == before


def test_what_is_wrapped_beside_the_experts_may_stay():
    model = nn.ModuleDict(dict(teacher=nn.DataParallel(nn.Linear(2, 2)), student=vit()))
    assert len(timm_moe.moe_layers(timm_moe.convert_to_moe(model))) == 2


def refusals(rank, folder):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=1
    )
    ddp, sharded = DistributedDataParallel(vit()), vit()
    fsdp = FullyShardedDataParallel(vit(), use_orig_params=True, device_id=torch.device("cpu"))
    fully_shard(sharded)
    models = dict(ddp=ddp, around=Classifier(DistributedDataParallel), fsdp=fsdp)
    models |= dict(sharded=sharded, compiled=torch.compile(ddp))
    for name, model in models.items():
        with pytest.raises(ValueError, match="wrapped already"):
            raise AssertionError(f"{name} was converted: {timm_moe.convert_to_moe(model)}")
    torch.distributed.destroy_process_group()


@pytest.mark.ci
def test_wrappers_of_several_processes_are_refused(tmp_path):
    run_ranks(refusals, [str(tmp_path)], 1)


# --- loading


def convert(layers, router="top_k", **options):
    return timm_moe.convert_to_moe(vit(), moe_layers=layers, router=router, **options)


COPIES = {
    "itself": lambda model: model,
    "deep copy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "saved whole": lambda model: torch.load(io.BytesIO(saved(model)), weights_only=False),
    "part of another": lambda model: nn.ModuleDict(dict(backbone=model)),
    "compiled": torch.compile,
}


def saved(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("way", "router", "strict"),
    [
        *((way, "top_k", True) for way in COPIES),
        ("itself", "random", False),
        ("itself", "top_k", False),
    ],
)
@pytest.mark.first_case
def test_a_checkpoint_with_other_expert_layers_is_refused(way, router, strict):
    model, fewer, more = (COPIES[way](convert(layers, router)) for layers in ("1,3", "3", "1,2,3"))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"none in .*blocks\.1\.mlp.*moe_layers"):
        model.load_state_dict(fewer.state_dict(), strict=strict)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(RuntimeError, match=r"size mismatch for .*blocks.2.mlp"):
        model.load_state_dict(more.state_dict(), strict=strict)
    model.load_state_dict(COPIES[way](convert("1,3", router)).state_dict(), strict=strict)
    model.load_state_dict(COPIES[way](vit()).state_dict(), strict=strict)  # sparse upcycling


def test_layers_of_two_conversions_are_one_set():
    model = timm_moe.convert_to_moe(convert("1"), moe_layers="3", router="top_k")
    with pytest.raises(RuntimeError, match=r"none in blocks\.3\.mlp\.fc1\.weight"):
        model.load_state_dict(convert("1").state_dict())
    dense = timm_moe.to_dense(model)
    assert not {
        **dense._forward_pre_hooks,
        **dense._load_state_dict_pre_hooks,
        **dense.blocks[1]._forward_pre_hooks,
    }
    assert vars(dense).keys() == vars(vit()).keys()


def test_a_model_that_was_converted_inside_another_is_dense_as_a_whole():
    """Nothing of this package is left in it, which torch.save would name and TorchScript calls."""
    outer = timm_moe.convert_to_moe(nn.ModuleDict(dict(backbone=vit())))
    dense = timm_moe.to_dense(outer.backbone)
    assert b"timm_moe" not in saved(dense)
    assert all(
        vars(part).keys() == vars(stock).keys() and not part._forward_pre_hooks
        for part, stock in zip(dense.modules(), vit().modules(), strict=True)
    )
