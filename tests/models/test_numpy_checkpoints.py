"""Google's NumPy checkpoints of ViTs, which timm writes into a model's parameters itself."""

import numpy as np
import pytest
import timm
import torch
from common import make_model
from families import SMALL

from timm_moe import moe_layers


def google_names(model):
    """Return the weights of a ViT as Google's files have them."""
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    heads = model.blocks[0].attn.num_heads

    def pair(theirs, ours, last="kernel"):
        value = weights[f"{ours}.weight"]
        return {
            f"{theirs}/{last}": value.T if value.ndim == 2 else value,
            f"{theirs}/bias": weights[f"{ours}.bias"],
        }

    file = {
        "cls": weights["cls_token"],
        "embedding/kernel": weights["patch_embed.proj.weight"].transpose(2, 3, 1, 0),
        "embedding/bias": weights["patch_embed.proj.bias"],
        "Transformer/posembed_input/pos_embedding": weights["pos_embed"],
        **pair("Transformer/encoder_norm", "norm", "scale"),
        **pair("head", "head"),
    }
    for number in range(len(model.blocks)):
        theirs, ours = f"Transformer/encoderblock_{number}", f"blocks.{number}"
        attention = f"{theirs}/MultiHeadDotProductAttention_1"
        width = weights[f"{ours}.norm1.weight"].shape[0]
        qkv = weights[f"{ours}.attn.qkv.weight"].reshape(3, width, width)
        bias = weights[f"{ours}.attn.qkv.bias"].reshape(3, heads, -1)
        for name, kernel, offset in zip(("query", "key", "value"), qkv, bias, strict=True):
            file[f"{attention}/{name}/kernel"] = kernel.T.reshape(width, heads, -1)
            file[f"{attention}/{name}/bias"] = offset
        out = weights[f"{ours}.attn.proj.weight"]
        file[f"{attention}/out/kernel"] = out.T.reshape(heads, -1, width)
        file[f"{attention}/out/bias"] = weights[f"{ours}.attn.proj.bias"]
        file |= pair(f"{theirs}/LayerNorm_0", f"{ours}.norm1", "scale")
        file |= pair(f"{theirs}/LayerNorm_2", f"{ours}.norm2", "scale")
        file |= pair(f"{theirs}/MlpBlock_3/Dense_0", f"{ours}.mlp.fc1")
        file |= pair(f"{theirs}/MlpBlock_3/Dense_1", f"{ours}.mlp.fc2")
    return file


@pytest.fixture
def files(tmp_path):
    """The same dense weights as a NumPy checkpoint and as a state dict."""
    dense = make_model("vit_tiny_patch16_224")
    np.savez(tmp_path / "dense.npz", **google_names(dense))
    torch.save(dense.state_dict(), tmp_path / "dense.pth")
    return tmp_path / "dense.npz", tmp_path / "dense.pth"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit_tiny_ewa_moe", {}),
        ("vit_tiny_moe", dict(gate_mode="renorm", capacity_factor="none")),
        ("vit_tiny_moe", dict(shared_expert=True, shared_init="zero_out")),
        ("vit_tiny_moe", dict(expert_width=0.5)),
        ("vit_tiny_moe", dict(expert_init="drop")),
        ("vmoe_pbe_b16", dict(num_experts=4)),
    ],
)
def test_it_makes_the_experts_that_a_state_dict_makes(name, options, files, caplog):
    models = []
    for file in files:
        torch.manual_seed(0)
        model = make_model(name, **options)
        caplog.clear()
        torch.manual_seed(1)
        timm.models.load_checkpoint(model, str(file))
        assert ("routers are untrained" in caplog.text) == (name != "vit_tiny_ewa_moe")
        models.append(model)
    numpy, torch_file = (dict(model.named_parameters()) for model in models)
    for key, value in numpy.items():
        if "router" in key:  # They have initial weights.
            continue
        if options.get("expert_init") == "drop" and ".mlp." in key:
            continue
        torch.testing.assert_close(value, torch_file[key])
    if options.get("expert_init") == "drop":
        dense = torch.load(files[1])
        for path, layer in moe_layers(models[0]).items():
            is_kept = (layer.fc1.weight == dense[f"{path}.fc1.weight"]).all(2)
            assert is_kept.float().mean(1).tolist() == [0.5] * 4


def test_a_widenet_refuses_it(files):
    with pytest.raises(RuntimeError, match="shares its networks"):
        timm.models.load_checkpoint(make_model("widenet_b", mlp_ratio=4), str(files[0]))


def test_a_model_whose_stock_class_reads_none_says_so(files):
    swin = timm.create_model(
        "swin_tiny_patch4_window7_224_ewa_moe", **SMALL["swin_tiny_patch4_window7_224"]
    )
    with pytest.raises(NotImplementedError, match="SwinTransformer"):
        timm.models.load_checkpoint(swin, str(files[0]))
