"""Swin-MoE checkpoints.

The files are synthetic ones of several processes in the published layout, made small. Outputs are
compared with a slow reference that computes with those files' own arrays.
"""

import math
import re

import pytest
import timm
import torch
from swin_moe_files import (
    CLASSES,
    DEPTHS,
    DOUBLE,
    GRIDS,
    HEADS,
    IMAGE,
    PATCH,
    WIDTH,
    coordinates,
    files_of,
    whole_model,
    windows_of,
    write,
)
from timm.models.swin_transformer import SwinTransformerBlock
from torch.nn.functional import gelu, layer_norm

import timm_moe
from timm_moe.checkpoints.swin_moe import import_checkpoint, model_of
from timm_moe.layers import CosineRouter, MoeMlp
from timm_moe.models.swin_moe import VARIANTS
from timm_moe_cli import main

# --- the reference: one window, one token, one expert at a time


def attend(rest, block, heads, x, region):
    """Attention inside one window: x (n, n, D), to places of the same region."""
    n, dim = x.shape[0], x.shape[2]
    tokens = x.reshape(n * n, dim)
    qkv = tokens @ rest[f"{block}.attn.qkv.weight"].T + rest[f"{block}.attn.qkv.bias"]
    q, k, v = (part.reshape(n * n, heads, -1) for part in qkv.split(dim, 1))
    hidden = (
        coordinates(n) @ rest[f"{block}.attn.cpb_mlp.0.weight"].T
        + rest[f"{block}.attn.cpb_mlp.0.bias"]
    )
    biases = hidden.relu() @ rest[f"{block}.attn.cpb_mlp.2.weight"].T
    out = torch.zeros_like(v)
    for head in range(heads):
        for i in range(n * n):
            scores = k[:, head] @ q[i, head] / (dim // heads) ** 0.5
            of_i = [
                biases[i // n - j // n + n - 1, i % n - j % n + n - 1, head] for j in range(n * n)
            ]
            is_far = region.flatten() != region.flatten()[i]
            out[i, head] = (scores + torch.stack(of_i)).masked_fill(is_far, -torch.inf).softmax(
                0
            ) @ v[:, head]
    out = (
        out.reshape(n * n, dim) @ rest[f"{block}.attn.proj.weight"].T
        + rest[f"{block}.attn.proj.bias"]
    )
    return out.reshape(n, n, dim)


def feed_forward(rest, experts, block, token):
    if block not in experts:
        hidden = gelu(rest[f"{block}.mlp.fc1.weight"] @ token + rest[f"{block}.mlp.fc1.bias"])
        return rest[f"{block}.mlp.fc2.weight"] @ hidden + rest.get(f"{block}.mlp.fc2.bias", 0)
    gate = f"{block}.mlp._moe_layer.gates.0."
    if f"{gate}wg.weight" in rest:
        logits = rest[f"{gate}wg.weight"] @ token
    else:
        projected = (
            rest[f"{gate}cosine_projector.weight"] @ token + rest[f"{gate}cosine_projector.bias"]
        )
        columns = rest[f"{gate}sim_matrix"]
        logits = (
            projected
            @ columns
            / projected.norm()
            / columns.norm(dim=0)
            * rest[f"{gate}temperature"].exp()
        )
    gates, whole = logits.softmax(0), experts[block]
    e = int(gates.argmax())
    return gates[e] * (gelu(whole["fc1_w"][e] @ token + whole["fc1_bias"][e]) @ whole["fc2_w"][e])


def normalised(rest, name, x):
    return layer_norm(x, x.shape[-1:], rest[f"{name}.weight"], rest[f"{name}.bias"])


def reference(rest, experts, image):
    """Logits of one image (3, IMAGE, IMAGE)."""
    x = torch.zeros(GRIDS[0], GRIDS[0], WIDTH, dtype=DOUBLE)
    for i in range(GRIDS[0]):
        for j in range(GRIDS[0]):
            patch = image[:, i * PATCH : (i + 1) * PATCH, j * PATCH : (j + 1) * PATCH]
            x[i, j] = (rest["patch_embed.proj.weight"] * patch).sum((1, 2, 3)) + rest[
                "patch_embed.proj.bias"
            ]
    x = normalised(rest, "patch_embed.norm", x)
    for layer, depth in enumerate(DEPTHS):
        for number in range(depth):
            block = f"layers.{layer}.blocks.{number}"
            inside, attended = normalised(rest, f"{block}.norm1", x), torch.zeros_like(x)
            for rows, columns, region in windows_of(layer, number % 2):
                place = rows[:, None], columns
                attended[place] = attend(rest, block, HEADS[layer], inside[place], region)
            x = x + attended
            tokens = normalised(rest, f"{block}.norm2", x).flatten(0, 1)
            x = x + torch.stack(
                [feed_forward(rest, experts, block, token) for token in tokens]
            ).view_as(x)
        if layer < 3:
            merged = torch.cat([x[i::2, j::2] for j in (0, 1) for i in (0, 1)], -1)
            reduction = rest[f"layers.{layer}.downsample.reduction.weight"]
            x = normalised(rest, f"layers.{layer}.downsample.norm", merged) @ reduction.T
    return rest["head.weight"] @ normalised(rest, "norm", x).mean((0, 1)) + rest["head.bias"]


@pytest.fixture
def in_double():
    """The arrays of the files here are of this type, and so are the models that are made."""
    torch.set_default_dtype(DOUBLE)
    yield
    torch.set_default_dtype(torch.float32)


def assert_equal_to_reference(imported, rest, experts):
    images = torch.randn(
        2, 3, IMAGE, IMAGE, generator=torch.Generator().manual_seed(1), dtype=DOUBLE
    )
    expected = torch.stack([reference(rest, experts, image) for image in images])
    torch.testing.assert_close(imported.eval()(images), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("cosine", [False, True])
@pytest.mark.parametrize(("num_experts", "ranks"), [(2, 8), (8, 4), (4, 4), (4, 1)])
@pytest.mark.first_case
def test_imported_files_give_the_references_outputs(
    num_experts, ranks, cosine, in_double, tmp_path
):
    """Hidden units cut over four processes, one expert in each, two in each, all in one."""
    rest, experts = whole_model(num_experts, cosine)
    imported = import_checkpoint(write(tmp_path, rest, experts, ranks))
    assert_equal_to_reference(imported, rest, experts)
    layers = timm_moe.moe_layers(imported)
    found = {path: layer.num_experts for path, layer in layers.items()}
    assert found == {"layers.2.blocks.1.mlp": num_experts, "layers.3.blocks.0.mlp": num_experts}


def test_one_file_of_all_experts(in_double, tmp_path):
    rest, experts = whole_model(4)
    master, parts = files_of(rest, experts, 1)
    torch.save({"model": master | parts[0]}, tmp_path / "swin.pth.global")
    imported = import_checkpoint(tmp_path / "swin")
    assert_equal_to_reference(imported, rest, experts)


@pytest.mark.parametrize("fc2_bias", [False, True])
@pytest.mark.parametrize("suffix", [".pth.global", ".pth"])
@pytest.mark.first_case
def test_a_dense_file_becomes_a_swin_of_timm(suffix, fc2_bias, in_double, tmp_path):
    rest, _ = whole_model(fc2_bias=fc2_bias)
    torch.save({"model": rest}, tmp_path / f"dense{suffix}")
    imported = import_checkpoint(tmp_path / f"dense{suffix}")
    assert_equal_to_reference(imported, rest, {})
    assert type(imported) is timm.models.SwinTransformer


def test_the_command_prints_the_line_that_loads_the_file(tmp_path, capsys):
    prefix, file = write(tmp_path, *whole_model(4, cosine=True), 4), tmp_path / "out"
    assert main(["import-swin-moe", f"{prefix}.pth.master", str(file)]) == 0
    out = capsys.readouterr().out
    assert "parameters of a swin_moe_small_patch4_window12_192_8e to" in out
    assert "top_k is 1 unless you state it" in out
    model = eval(re.search(r"timm\.create_model\(.*\)", out)[0], {"timm": timm}).eval()
    x = torch.randn(1, 3, IMAGE, IMAGE)
    torch.testing.assert_close(model(x), import_checkpoint(prefix).eval()(x))
    assert main(["import-swin-moe", str(prefix), str(file)]) == 1
    assert "is not empty; pass --overwrite" in capsys.readouterr().err
    assert main(["import-swin-moe", str(prefix), str(file), "--overwrite"]) == 0


@pytest.mark.parametrize("experts", [4, None])
def test_an_import_states_the_images_of_the_reference(tmp_path, caplog, experts):
    """timm has another crop for Swin without experts."""
    if experts:
        prefix = write(tmp_path, *whole_model(experts, cosine=True), experts)
    else:
        prefix = tmp_path / "dense"
        torch.save({"model": whole_model()[0]}, tmp_path / "dense.pth.global")
    cfg = import_checkpoint(prefix).pretrained_cfg
    assert (cfg["crop_pct"], cfg["interpolation"]) == (0.875, "bicubic")
    assert tuple(cfg["mean"]) == (0.485, 0.456, 0.406)
    assert "is a guess" not in caplog.text


def test_a_dense_file_has_no_word_about_experts(tmp_path, capsys):
    torch.save({"model": whole_model()[0]}, tmp_path / "dense.pth.global")
    assert main(["import-swin-moe", str(tmp_path / "dense"), str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "top_k" not in out
    assert (
        eval(re.search(r"timm\.create_model\(.*\)", out)[0], {"timm": timm}).num_classes == CLASSES
    )


def test_imported_weights_can_be_trained_with_other_classes(tmp_path):
    imported = import_checkpoint(write(tmp_path, *whole_model(4), 2))
    timm_moe.export_moe(imported, tmp_path / "out")
    model = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True, num_classes=3)
    (
        model(torch.randn(2, 3, IMAGE, IMAGE)).square().mean() + timm_moe.auxiliary_loss(model)
    ).backward()
    assert torch.equal(
        model.layers[2].blocks[1].mlp.fc1.weight,
        imported.layers[2].blocks[1].mlp.fc1.weight,
    )


def of_size(name, num_experts):
    """Find a registered model by the shapes that its published files would have."""
    with torch.device("meta"):
        model = timm.create_model(name, num_experts=num_experts, num_classes=21841)
        rest = {
            "patch_embed.proj.weight": model.patch_embed.proj.weight,
            "head.weight": model.head.fc.weight,
        }
        for path, block in model.named_modules():
            if isinstance(block, SwinTransformerBlock):
                window = block.window_size[0]
                rest[f"{path}.attn.cpb_mlp.2.weight"] = torch.empty(block.attn.num_heads, 512)
                rest[f"{path}.attn.relative_coords_table"] = torch.empty(
                    1, 2 * window - 1, 2 * window - 1, 2
                )
                if block.attn_mask is not None:
                    rest[f"{path}.attn_mask"] = block.attn_mask
                if isinstance(block.mlp, MoeMlp):
                    gate, dim = f"{path}.mlp._moe_layer.gates.0", block.attn.dim
                    is_cosine = isinstance(block.mlp.router, CosineRouter)
                    part, shape = (
                        ("sim_matrix", (256, num_experts))
                        if is_cosine
                        else ("wg.weight", (num_experts, dim))
                    )
                    rest[f"{gate}.{part}"] = torch.empty(*shape)
                else:
                    rest[f"{path}.mlp.fc1.weight"] = block.mlp.fc1.weight
    return rest


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.ci
def test_the_published_sizes_are_recognised(name):
    num_experts = VARIANTS[name].args["num_experts"]
    blocks = dict(moe_layers="5,7,9,11,13,15,17,19,21,23", num_classes=21841)
    assert model_of(of_size(name, num_experts)) == (name, blocks)
    other, kwargs = model_of(of_size(name, 64))
    assert kwargs == {"num_experts": 64, **blocks} | (
        {"score": "cosine"} if "cosine" in name else {}
    )
    assert other.startswith(name.partition("_192")[0])


# --- what is refused, with nothing written


def change(file, edit):
    content = torch.load(file)
    edit(content["model"])
    torch.save(content, file)


def remove(name):
    return lambda model: model.pop(name)


GATE = "layers.2.blocks.1.mlp._moe_layer.gates.0.wg.weight"
EXPERT = "layers.2.blocks.1.mlp._moe_layer.experts.batched_fc1_w"
BIAS = "layers.2.blocks.1.mlp._moe_layer.experts.batched_fc2_bias"


@pytest.mark.parametrize(
    ("suffix", "edit", "message"),
    [
        ("master", remove("norm.bias"), r"array norm\.bias is missing"),
        ("master", remove("patch_embed.proj.weight"), "other names or shapes"),
        ("master", remove("layers.0.blocks.0.attn.relative_coords_table"), "other names or shapes"),
        ("master", remove(GATE), f"array {re.escape(EXPERT)[:-2]}.* no place"),
        ("master", lambda model: model.clear(), "other names or shapes"),
        (
            "master",
            lambda model: model.update(absolute_pos_embed=torch.ones(1)),
            "absolute_pos_embed has no place",
        ),
        (
            "master",
            lambda model: model.update({BIAS: torch.ones(1, 1, 32)}),
            "fc2_bias is not zero",
        ),
        (
            "master",
            lambda model: model.update({GATE: torch.ones(8, 32)}),
            r"4 \.rank files .*8 experts of 128",
        ),
        (
            "master",
            lambda model: model["norm.bias"].fill_(math.nan),
            r"array norm\.bias .*NaN",
        ),
        (
            "master",
            lambda model: model.update({"layers.9999999999.blocks.0.x": torch.ones(1)}),
            "other names or shapes",
        ),
        ("master", lambda model: model.update({"norm.bias": "text"}), "swin.pth.master has no "),
        ("rank2", remove(EXPERT), "rank2 and .*rank0 .*different checkpoints"),
        (
            "rank1",
            lambda model: model.update({EXPERT: torch.ones(1, 128, 31)}),
            "rank1 and .*rank0 .*different checkpoints",
        ),
        (
            "rank1",
            lambda model: model.update({"more": torch.ones(1)}),
            "rank1 and .*rank0 .*different checkpoints",
        ),
        (
            "master",
            lambda model: model.update({"norm.bias": torch.ones(64, dtype=torch.bool)}),
            "holds norm.bias as",
        ),
        ("rank3", lambda model: model[EXPERT].fill_(math.inf), r"fc1\.weight .*NaN"),
    ],
)
@pytest.mark.first_case
def test_other_arrays_than_a_swin_moes(suffix, edit, message, tmp_path):
    prefix = write(tmp_path, *whole_model(4), 4)
    change(f"{prefix}.pth.{suffix}", edit)
    with pytest.raises(ValueError, match=message):
        import_checkpoint(prefix)


@pytest.mark.parametrize("num_experts", [2, 4, 8])
def test_files_of_processes_that_are_missing(num_experts, tmp_path):
    prefix = write(tmp_path, *whole_model(num_experts), 4)
    (tmp_path / "swin.pth.rank3").unlink()
    with pytest.raises(ValueError, match=rf"3 \.rank files .*{num_experts} experts of 128"):
        import_checkpoint(prefix)
    (tmp_path / "swin.pth.rank1").unlink()
    with pytest.raises(FileNotFoundError, match=r"swin\.pth\.rank1 is missing: .*swin\.pth"):
        import_checkpoint(prefix)
    (tmp_path / "swin.pth.rank2").unlink()
    (tmp_path / "swin.pth.rank0").unlink()
    with pytest.raises(FileNotFoundError, match=r"swin.pth.rank0 is missing"):
        import_checkpoint(prefix)
    (tmp_path / "swin.pth.master").unlink()
    with pytest.raises(FileNotFoundError, match=r"no .*swin\.pth\.master"):
        import_checkpoint(prefix)
    assert not list(tmp_path.iterdir())


def test_files_of_others_in_the_folder_do_not_matter(tmp_path):
    prefix = write(tmp_path, *whole_model(4), 4)
    for name in ("9", "other.pth.rank9", "swin.pth.rank9.bak", "swin.pth.rank"):
        (tmp_path / name).touch()
    import_checkpoint(prefix)
    (tmp_path / "swin.pth.rank999999999").touch()
    with pytest.raises(FileNotFoundError, match=r"swin.pth.rank4 is missing"):
        import_checkpoint(prefix)


@pytest.mark.parametrize("processes", [2, 4])
def test_a_file_that_was_copied_over_another(tmp_path, processes):
    prefix = write(tmp_path, *whole_model(4), processes)
    first = (tmp_path / "swin.pth.rank0").read_bytes()
    (tmp_path / f"swin.pth.rank{processes - 1}").write_bytes(first)
    with pytest.raises(ValueError, match=r"\.rank files .*layers\.2\.blocks\.1: .*copied"):
        import_checkpoint(prefix)


def test_a_bias_in_the_files_of_the_processes_is_refused(tmp_path):
    prefix = write(tmp_path, *whole_model(4), 4)
    for rank in range(4):
        change(f"{prefix}.pth.rank{rank}", lambda model: model.update({BIAS: torch.ones(1, 1, 32)}))
    with pytest.raises(ValueError, match="fc2_bias is not zero"):
        import_checkpoint(prefix)


def test_files_of_grey_images_without_a_classifier_by_the_name_of_one_of_them(in_double, tmp_path):
    rest, experts = whole_model(4)
    rest["patch_embed.proj.weight"] = rest["patch_embed.proj.weight"][:, :1]
    del rest["head.weight"], rest["head.bias"]
    model = import_checkpoint(f"{write(tmp_path, rest, experts, 4)}.pth.rank0")
    assert model.num_classes == 0
    assert model(torch.randn(1, 1, IMAGE, IMAGE)).shape == (1, 8 * WIDTH)


def test_files_of_another_run_with_other_experts(tmp_path):
    prefix = write(tmp_path, *whole_model(4), 4)
    write(tmp_path, *whole_model(8), 4, name="other")
    (tmp_path / "swin.pth.rank3").write_bytes((tmp_path / "other.pth.rank3").read_bytes())
    with pytest.raises(ValueError, match=r"rank3 and .*rank0 .*different checkpoints"):
        import_checkpoint(prefix)


class Code:
    def __reduce__(self):
        return print, ("run",)


def test_a_file_that_runs_code(tmp_path, capsys):
    prefix = write(tmp_path, *whole_model(4), 4)
    torch.save({"model": {}, "config": Code()}, f"{prefix}.pth.rank1")
    with pytest.raises(ValueError, match=r"rank1 runs code .*builtins\.print\."):
        import_checkpoint(prefix)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("length", [0, 100, 5000])
def test_a_truncated_file(length, tmp_path):
    prefix = write(tmp_path, *whole_model(4), 4)
    file = tmp_path / "swin.pth.rank1"
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(ValueError, match=r"rank1 is (empty|damaged or not)"):
        import_checkpoint(prefix)


def test_files_that_a_run_resumes_from_have_no_master(tmp_path):
    """Each process then writes what all share beside its experts."""
    rest, experts = whole_model(cosine=True, num_experts=4)
    prefix = write(tmp_path, rest, experts, ranks=2)
    first = import_checkpoint(prefix).state_dict()
    master, parts = files_of(rest, experts, 2)
    for rank, part in enumerate(parts):
        torch.save({"model": {**master, **part}, "epoch": 3}, tmp_path / f"own.pth.rank{rank}")
    second = import_checkpoint(tmp_path / "own").state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_more_than_ten_processes_are_in_the_order_of_their_numbers(tmp_path):
    made = []
    for ranks in (1, 16):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        prefix = write(folder, *whole_model(4), ranks)
        made.append(import_checkpoint(prefix).state_dict())
    assert made[0].keys() == made[1].keys()
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])
