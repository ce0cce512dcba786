"""Networks whose weights come from adapters, hooks or parametrizations.

They are refused, whatever finds the network.
"""

import pytest
import timm
import torch
from common import SMALL_VIT
from torch import nn
from torch.nn.utils import parametrizations, prune, remove_weight_norm

import timm_moe


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.net = (
            nn.Linear(8, 8),
            nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)),
        )

    def forward(self, x):
        return x + self.net(self.attn(x))


def vit():
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", **{**SMALL_VIT, "depth": 2})


def of_transformers():
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    return transformers.ViTModel(transformers.ViTConfig(**sizes, image_size=32, patch_size=8))


#: A model, its arguments of the conversion, and its first networks' parts that are changed.
ROADS = {
    "timm": (vit, {}, "blocks.1.mlp.fc1"),
    "timm, named": (vit, dict(modules=r"blocks\.1\.mlp"), "blocks.1.mlp.fc1"),
    "transformers": (of_transformers, {}, "layers.1.mlp.fc1"),
    "torch": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 2),
        {},
        "layers.1.linear1",
    ),
    "own": (lambda: nn.Sequential(Block(), Block()), dict(modules=r"1\.net"), "1.net.0"),
}


def adapted(model, part, **options):
    peft = pytest.importorskip("peft", minversion="0.17")
    config = peft.LoraConfig(**{"target_modules": [part], "init_lora_weights": False, **options})
    return peft.get_peft_model(model, config).base_model.model


def changed(change):
    def change_part(model, part):
        change(model.get_submodule(part))
        return model

    return change_part


HOW = {
    "LoRA": (adapted, r"has adapters.*merge_and_unload"),
    "weight norm by hooks": (changed(nn.utils.weight_norm), r"WeightNorm.*remove_weight_norm"),
    "spectral norm by hooks": (
        changed(nn.utils.spectral_norm),
        r"SpectralNorm.*remove_spectral_norm",
    ),
    "pruned": (
        changed(lambda part: prune.l1_unstructured(part, "weight", 0.5)),
        r"L1Unstructured.*prune\.remove",
    ),
    "pruned bias": (
        changed(lambda part: prune.random_unstructured(part, "bias", 0.5)),
        r"prune\.remove",
    ),
    "weight norm": (
        changed(parametrizations.weight_norm),
        r"is parametrized.*remove_parametrizations",
    ),
    "spectral norm": (
        changed(parametrizations.spectral_norm),
        r"is parametrized.*remove_parametrizations",
    ),
}


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.first_case
def test_computed_weights_are_refused_by_name(road, how):
    make, options, part = ROADS[road]
    change, message = HOW[how]
    model = change(make(), part)
    before = [(name, type(module)) for name, module in model.named_modules()]
    with pytest.raises(ValueError, match=rf"^{part} .*{message}"):
        timm_moe.convert_to_moe(model, **options)
    assert [(name, type(module)) for name, module in model.named_modules()] == before


def test_a_network_that_is_saved_beside_adapters_is_refused():
    model = adapted(vit(), "qkv", modules_to_save=["mlp"])
    with pytest.raises(ValueError, match=r"^blocks\.1\.mlp has adapters.*merge_and_unload"):
        timm_moe.convert_to_moe(model)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_other_places_may_have_them_and_the_remedy_helps():
    model, images = vit().eval(), torch.randn(2, 3, SMALL_VIT["img_size"], SMALL_VIT["img_size"])
    nn.utils.weight_norm(model.blocks[0].mlp.fc1)
    nn.utils.weight_norm(model.blocks[1].attn.qkv)
    nn.utils.weight_norm(model.blocks[1].mlp.fc1)
    expected = model(images)
    with pytest.raises(ValueError, match=r"^blocks\.1\.mlp\.fc1 "):
        timm_moe.convert_to_moe(model)
    remove_weight_norm(model.blocks[1].mlp.fc1)
    timm_moe.convert_to_moe(model)
    torch.testing.assert_close(model(images), expected)
