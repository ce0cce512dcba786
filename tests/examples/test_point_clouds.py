"""examples/point_clouds.py: groups of points, and models with the published names."""

import copy

import numpy as np
import point_clouds
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from point_cloud_files import TINY
from points.grouping import farthest_points, group_points, nearest_points, normalize
from points.models import PointTransformer, PointViT, load_point_bert

import timm_moe


@settings(max_examples=25)
@given(st.integers(1, 3), st.integers(1, 30), st.data())
def test_each_point_is_the_farthest_from_those_before(clouds, num_points, data):
    count = data.draw(st.integers(1, num_points))
    points = torch.rand(clouds, num_points, 3, generator=torch.Generator().manual_seed(num_points))
    chosen = farthest_points(points, count)
    assert chosen.shape == (clouds, count)
    for cloud, indices in zip(points, chosen.tolist(), strict=True):
        assert indices[0] == 0
        assert len(set(indices)) == count
        distances = torch.cdist(
            cloud[None], cloud[None], compute_mode="donot_use_mm_for_euclid_dist"
        )[0]
        for place in range(1, count):
            to_chosen = distances[:, indices[:place]].amin(1)
            torch.testing.assert_close(to_chosen[indices[place]], to_chosen.max())


def test_groups_are_the_nearest_points_seen_from_their_center():
    points = torch.rand(2, 40, 3)
    groups, centers = group_points(points, 5, 6)
    for cloud in range(2):
        for group, center in zip(groups[cloud], centers[cloud], strict=True):
            nearest = sorted(
                points[cloud].tolist(), key=lambda point: sum((torch.tensor(point) - center) ** 2)
            )[:6]
            places = sorted((group + center).tolist())
            torch.testing.assert_close(torch.tensor(places), torch.tensor(sorted(nearest)))


def test_neighbors_far_from_the_origin():
    points = torch.tensor([0.0, 1, 2, 3, 4, 5])[None, :, None] * torch.tensor([2**-7, 0, 0]) + 300
    points = torch.cat([points, points + 50], 1)
    assert nearest_points(points.repeat(1, 3, 1), points[:, 2:3], 3)[0, 0].remainder(
        12
    ).tolist() == [2, 2, 2]


def test_normalized_clouds():
    points = normalize(torch.rand(3, 20, 3) * 7 + 5)
    torch.testing.assert_close(points.mean(1), torch.zeros(3, 3), atol=1e-5, rtol=0)
    torch.testing.assert_close(points.norm(dim=-1).amax(1), torch.ones(3))
    assert torch.equal(normalize(torch.full((1, 4, 3), 2.0)), torch.zeros(1, 4, 3))


@pytest.mark.parametrize(
    ("points", "sentence"),
    [
        (torch.rand(1, 7, 3), r"8 points .*7\."),
        (torch.rand(7, 3), r"\(clouds, points, coordinates\), not \(7, 3\)"),
        (
            torch.tensor([0.0, 1, torch.nan]).expand(2, 9, 3),
            "Cloud 0 .*not finite",
        ),
    ],
)
def test_clouds_that_are_refused(points, sentence):
    with pytest.raises(ValueError, match=sentence):
        PointTransformer(5, **TINY)(points)


def test_groups_of_more_points_than_there_are():
    with pytest.raises(ValueError, match=r"16 points .*10\."):
        group_points(torch.rand(1, 10, 3), 4, 16)
    assert nearest_points(torch.rand(1, 10, 3), torch.rand(1, 4, 3), 10).shape == (1, 4, 10)


def block_shapes(prefix, depth, qkv_bias):
    one = {
        "norm1.weight": (384,),
        "norm1.bias": (384,),
        "attn.qkv.weight": (1152, 384),
        "attn.proj.weight": (384, 384),
        "attn.proj.bias": (384,),
        "norm2.weight": (384,),
        "norm2.bias": (384,),
        "mlp.fc1.weight": (1536, 384),
        "mlp.fc1.bias": (1536,),
        "mlp.fc2.weight": (384, 1536),
        "mlp.fc2.bias": (384,),
    } | ({"attn.qkv.bias": (1152,)} if qkv_bias else {})
    return {
        f"{prefix}.{index}.{name}": shape for index in range(depth) for name, shape in one.items()
    }


def norm_shapes(name, width):
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def point_bert_shapes():
    """List the shapes of ModelNet40's classifier in Julie-tang00/Point-BERT."""
    shapes = {"cls_token": (1, 1, 384), "cls_pos": (1, 1, 384)} | norm_shapes("norm", 384)
    linear = {
        "encoder.first_conv.0": (128, 3, 1),
        "encoder.first_conv.3": (256, 128, 1),
        "encoder.second_conv.0": (512, 512, 1),
        "encoder.second_conv.3": (256, 512, 1),
        "reduce_dim": (384, 256),
        "pos_embed.0": (128, 3),
        "pos_embed.2": (384, 128),
        "cls_head_finetune.0": (256, 768),
        "cls_head_finetune.3": (40, 256),
    }
    for name, shape in linear.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    for name, width in (("encoder.first_conv.1", 128), ("encoder.second_conv.1", 512)):
        shapes |= norm_shapes(name, width)
        shapes |= {
            f"{name}.running_mean": (width,),
            f"{name}.running_var": (width,),
            f"{name}.num_batches_tracked": (),
        }
    return shapes | block_shapes("blocks.blocks", 12, qkv_bias=False)


def pix4point_shapes():
    """List the shapes of S3DIS's encoder in guochengqian/openpoints.

    The prefix ``encoder.`` is left out.
    """
    shapes = {"cls_token": (1, 1, 384), "cls_pos": (1, 1, 384)} | norm_shapes("norm", 384)
    for name, shape in {"pos_embed.0.0": (128, 3), "pos_embed.1": (384, 128)}.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    for stage, (wide, width) in enumerate([(10, 192), (195, 384)]):
        at = f"patch_embed.convs.{stage}"
        shapes |= {
            f"{at}.0.0.0.weight": (width, wide, 1, 1),
            f"{at}.0.1.0.weight": (width, width, 1, 1),
        }
        shapes |= {f"{at}.0.1.0.bias": (width,), f"{at}.1.0.0.weight": (2 * width, 2 * width, 1, 1)}
        shapes |= {f"{at}.1.1.0.weight": (width, 2 * width, 1, 1)}
        shapes |= norm_shapes(f"{at}.0.0.1", width) | norm_shapes(f"{at}.1.0.1", 2 * width)
        shapes |= norm_shapes(f"{at}.1.1.1", width)
    return shapes | block_shapes("blocks", 12, qkv_bias=True)


@pytest.mark.parametrize(
    ("model_class", "expected"),
    [(PointTransformer, point_bert_shapes()), (PointViT, pix4point_shapes())],
)
def test_published_names(model_class, expected):
    with torch.device("meta"):
        state = model_class().state_dict()
    assert {name: tuple(value.shape) for name, value in state.items()} == expected


@torch.no_grad()
def fill(model):
    """The weights with which points.npz was computed."""
    rng = np.random.RandomState(0)  # numpy keeps its draws for good
    for name, tensor in sorted(model.state_dict().items()):
        if tensor.is_floating_point():
            drawn = torch.from_numpy(rng.standard_normal(tensor.shape))
            drawn /= tensor[0].numel() ** 0.5 if tensor.dim() > 1 else 1
            tensor.copy_(drawn.abs() + 0.5 if name.endswith("running_var") else drawn)
    return model.eval()


@torch.no_grad()
def test_outputs_of_the_published_code(golden):
    """points.npz is from the published models at these sizes.

    Their CUDA sampling is replaced by farthest_points.
    """
    expected = golden("points")
    torch.testing.assert_close(
        fill(PointTransformer(5, **TINY))(expected["points"]), expected["logits"]
    )
    _, tokens = fill(PointViT(width=48, depth=2, num_heads=3, group_size=4))(
        expected["points"], expected["features"]
    )
    torch.testing.assert_close(tokens, expected["tokens"], atol=1e-5, rtol=1e-4)


def checkpoint(tmp_path, state, **changes):
    """A file as Point-BERT's code writes it."""
    metrics = {"acc": torch.tensor(92.4)}
    file = {
        "base_model": state,
        "optimizer": {},
        "epoch": 7,
        "metrics": metrics,
        "best_metrics": metrics,
        **changes,
    }
    torch.save(
        {name: value for name, value in file.items() if value is not None},
        tmp_path / "ckpt-best.pth",
    )
    return tmp_path / "ckpt-best.pth"


def test_a_fine_tuned_checkpoint_loads_whole(tmp_path):
    source, model = fill(PointTransformer(5, **TINY)), PointTransformer(5, **TINY).eval()
    path = checkpoint(
        tmp_path, {f"module.{name}": value for name, value in source.state_dict().items()}
    )
    assert load_point_bert(model, path) == []
    points = torch.rand(2, 20, 3)
    assert torch.equal(model(points), source(points))


def test_of_a_pretrained_checkpoint_all_but_the_head_is_loaded(tmp_path):
    source, model = fill(PointTransformer(5, **TINY)), PointTransformer(5, **TINY)
    mask = {
        f"transformer_q.{name}": torch.zeros(1)
        for name in ("mask_token", "lm_head.weight", "cls_head.0.weight")
    }
    body = {
        name: value
        for name, value in source.state_dict().items()
        if not name.startswith("cls_head_finetune")
    }
    state = mask | {
        f"transformer_{part}.{name}": value for part in "qk" for name, value in body.items()
    }
    path = checkpoint(
        tmp_path,
        {f"module.{name}": value for name, value in state.items()} | {"module.queue": mask},
    )
    head = load_point_bert(model, path)
    assert head == [
        f"cls_head_finetune.{layer}.{part}" for layer in (0, 3) for part in ("weight", "bias")
    ]
    for name, value in model.state_dict().items():
        assert torch.equal(value, source.state_dict()[name]) == (name not in head)


class Harmful:
    def __reduce__(self):
        return print, ("ran",)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda state: state.pop("norm.bias"),
            r"1 tensors: .*norm\.bias .*None, .*\(48",
        ),
        (
            lambda state: state.update(more=torch.zeros(2)),
            r"of more .*\(2,\), .*None",
        ),
        (
            lambda state: state.update(cls_pos=torch.zeros(3)),
            r"of cls_pos .*\(3,\), .*model",
        ),
        (
            lambda state: state.update(cls_pos=Harmful()),
            "no checkpoint .*running code",
        ),
    ],
)
def test_checkpoints_that_do_not_fit(tmp_path, capsys, change, sentence):
    state = PointTransformer(5, **TINY).state_dict()
    change(state)
    model = PointTransformer(5, **TINY)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=sentence):
        load_point_bert(model, checkpoint(tmp_path, state))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert "ran" not in capsys.readouterr().out


def test_files_that_are_no_checkpoints(tmp_path):
    with pytest.raises(ValueError, match="neither of the entries"):
        load_point_bert(PointTransformer(5, **TINY), checkpoint(tmp_path, None))
    (tmp_path / "text.pth").write_text("text")
    with pytest.raises(ValueError, match=r"text\.pth is no checkpoint"):
        load_point_bert(PointTransformer(5, **TINY), tmp_path / "text.pth")


@pytest.mark.parametrize("kind", ["classifier", "encoder"])
def test_experts_become_the_dense_model_again(kind):
    points, features = torch.rand(2, 64, 3), torch.rand(2, 64, 7)
    inputs = (points,) if kind == "classifier" else (points, features)
    small = dict(width=48, depth=2, num_heads=3)
    model = PointTransformer(5, **TINY) if kind == "classifier" else PointViT(group_size=4, **small)
    names, kinds = list(model.state_dict()), [type(module) for module in model.modules()]
    timm_moe.convert_to_moe(model, expert_init="independent")
    blocks = "blocks.blocks" if kind == "classifier" else "blocks"
    assert list(timm_moe.moe_layers(model)) == [f"{blocks}.1.mlp"]
    dense = timm_moe.to_dense(model.eval())
    assert list(dense.state_dict()) == names
    assert [type(module) for module in dense.modules()] == kinds
    last = lambda out: out[-1] if isinstance(out, tuple) else out  # noqa: E731
    with torch.no_grad():
        assert (last(dense(*inputs)) - last(model(*inputs))).abs().max() == 0.0


def test_the_variants_of_a_seed():
    """They differ only in their experts, which follow the paper's section 6."""
    settings = {"training": {"model": TINY}, "share_rate": 0.3}
    models = {
        name: point_clouds.make_model(name, 1, 5, settings, None) for name in point_clouds.VARIANTS
    }
    dense = models["dense"].state_dict()
    for name, model in models.items():
        same = [
            key
            for key, value in model.state_dict().items()
            if key in dense and value.shape == dense[key].shape
        ]
        assert len(dense) - len(same) == (0 if name == "dense" else 4)
        assert all(torch.equal(model.state_dict()[key], dense[key]) for key in same)
    other = point_clouds.make_model("dense", 2, 5, settings, None).state_dict()
    assert not torch.equal(other["reduce_dim.weight"], dense["reduce_dim.weight"])
    layers = {name: list(timm_moe.moe_layers(model).values()) for name, model in models.items()}
    assert not layers["dense"]
    ((ewa,), (naive,), (early,)) = (layers[name] for name in ("ewa", "naive", "early-ewa"))
    assert (ewa.share_rate, ewa.share_schedule, early.share_rate, early.share_schedule) == (
        0.3,
        "linear",
        0.3,
        "early",
    )
    assert not naive.share_rate
    for layer in (naive, early):
        router = layer.router
        assert (router.num_experts, router.top_k, router.noise_std) == (4, 1, 0)
        assert (router.capacity_factor, router.eval_capacity_factor) == (1.2, None)
        assert router.loss_weights == {"balance": 0.01}
