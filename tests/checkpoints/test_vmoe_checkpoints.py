"""Official V-MoE checkpoints.

They are small files that google-research/vmoe @ 942a78bc wrote (jax 0.10.2, flax 0.12.8), with the
logits of its own model. data/vmoe/README.md says how they were made.
"""

import re
import shutil
import time
from contextlib import suppress

import msgpack
import numpy as np
import pytest
import timm
import torch
from common import DATA
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import timm_moe
from timm_moe.checkpoints.vmoe import import_checkpoint, model_from_flax, state_dict_from_flax
from timm_moe.checkpoints.vmoe_format import read_arrays, tile
from timm_moe.models.registered import weightless
from timm_moe_cli import main

FOLDER = DATA / "vmoe"
FORMATS = ["vmoe_tiny", "vmoe_tiny_trainstate", "vmoe_tiny_old_trainstate", "vmoe_tiny_bf16"]


@pytest.fixture(scope="module")
def expected():
    return {
        name: torch.from_numpy(array) for name, array in np.load(FOLDER / "expected.npz").items()
    }


@pytest.fixture
def copy(tmp_path):
    """The prefix of a copy of the three-shard checkpoint, to be damaged."""
    for file in FOLDER.glob("vmoe_tiny.*"):
        shutil.copy(file, tmp_path)
    return tmp_path / "vmoe_tiny"


def load(imported, folder, **kwargs):
    timm_moe.export_moe(imported, folder)
    return timm.create_model(f"local-dir:{folder}", pretrained=True, **kwargs).eval()


@pytest.mark.parametrize("name", FORMATS)
def test_imported_checkpoint_gives_the_jax_models_logits(name, expected, tmp_path):
    folder = tmp_path / "vmoe"
    imported = import_checkpoint(FOLDER / name)
    logits = expected["vmoe_tiny_bf16_logits" if "bf16" in name else "vmoe_tiny_logits"]
    images = expected["images_NHWC"].permute(0, 3, 1, 2)
    torch.testing.assert_close(load(imported, folder)(images), logits, rtol=0, atol=1e-4)


def test_with_dropping_too(expected, tmp_path):
    model = load(
        import_checkpoint(FOLDER / "vmoe_tiny"),
        tmp_path / "vmoe",
        eval_capacity_factor=1.05,
        group_images=2,
    )
    logits = model(expected["images_NHWC"].permute(0, 3, 1, 2))
    torch.testing.assert_close(logits, expected["vmoe_tiny_c105_logits"], rtol=0, atol=1e-4)
    assert not torch.allclose(logits, expected["vmoe_tiny_logits"], atol=0.01)


def test_the_command_prints_the_line_that_loads_the_file(expected, tmp_path, capsys):
    file = tmp_path / "vmoe"
    assert main(["import-vmoe", str(FOLDER / "vmoe_tiny.index"), str(file)]) == 0
    out = capsys.readouterr().out
    assert "Wrote 16,951 parameters of a vmoe_s32" in out
    assert "top_k is 2 unless you state it" in out
    assert "how its images were cropped either: config.json has timm's crop_pct, 0.875" in out
    line = re.search(r"timm\.create_model\(.*\)", out)[0]
    images = expected["images_NHWC"].permute(0, 3, 1, 2)
    model = eval(line, {"timm": timm}).eval()
    torch.testing.assert_close(model(images), expected["vmoe_tiny_logits"], rtol=0, atol=1e-4)
    assert main(["import-vmoe", str(FOLDER / "vmoe_tiny"), str(file)]) == 1
    assert "is not empty; pass --overwrite" in capsys.readouterr().err
    assert main(["import-vmoe", str(FOLDER / "vmoe_tiny"), str(file), "--overwrite"]) == 0


def test_an_import_states_what_is_known_of_its_images():
    """The reference's crops differ: the whole image after fine-tuning, 224 of 256 pixels before."""
    cfg = import_checkpoint(FOLDER / "vmoe_tiny").pretrained_cfg
    assert [*cfg["mean"], *cfg["std"], cfg["interpolation"]] == [*[0.5] * 6, "bilinear"]
    assert "crop_pct" not in cfg


def test_imported_weights_can_be_trained_and_resized(tmp_path):
    """The pretrained road of timm: another head, other image size."""
    imported = import_checkpoint(FOLDER / "vmoe_tiny")
    model = load(imported, tmp_path / "vmoe", num_classes=3, img_size=24).train()
    (model(torch.randn(2, 3, 24, 24)).square().mean() + timm_moe.auxiliary_loss(model)).backward()
    state = read_arrays(FOLDER / "vmoe_tiny")
    assert torch.equal(
        model.blocks[1].mlp.fc1.weight, state["Encoder/encoderblock_1/Moe/Mlp/Dense_0/kernel"].mT
    )


def flax_params(**shape):
    """Arrays of a registered model's size, all zero and never allocated."""
    with weightless():
        model = timm.create_model(
            "vmoe_b16", num_experts=8, moe_layers="every-2", num_classes=21843, pre_logits=True
        )
    zero, dim, depth, heads = torch.zeros(()), 768, 12, 12
    arrays = {
        "cls": (1, 1, dim),
        "embedding/kernel": (16, 16, 3, dim),
        "embedding/bias": (dim,),
        "Encoder/posembed_input/pos_embedding": (1, 197, dim),
        "Encoder/encoder_norm/scale": (dim,),
        "Encoder/encoder_norm/bias": (dim,),
        "pre_logits/kernel": (dim, dim),
        "pre_logits/bias": (dim,),
        "head/kernel": (dim, 21843),
        "head/bias": (21843,),
    }
    for block in range(depth):
        path = f"Encoder/encoderblock_{block}"
        for norm in ("LayerNorm_0", "LayerNorm_1"):
            arrays |= {f"{path}/{norm}/scale": (dim,), f"{path}/{norm}/bias": (dim,)}
        for part in ("query", "key", "value"):
            arrays[f"{path}/SelfAttention/{part}/kernel"] = (dim, heads, dim // heads)
            arrays[f"{path}/SelfAttention/{part}/bias"] = (heads, dim // heads)
        arrays |= {
            f"{path}/SelfAttention/out/kernel": (heads, dim // heads, dim),
            f"{path}/SelfAttention/out/bias": (dim,),
        }
        experts = (8,) if block % 2 else ()
        mlp = f"{path}/Moe/Mlp" if block % 2 else f"{path}/Mlp"
        arrays |= {
            f"{mlp}/Dense_0/kernel": (*experts, dim, 3072),
            f"{mlp}/Dense_0/bias": (*experts, 3072),
        }
        arrays |= {
            f"{mlp}/Dense_1/kernel": (*experts, 3072, dim),
            f"{mlp}/Dense_1/bias": (*experts, dim),
        }
        if block % 2:
            arrays[f"{path}/Moe/Router/dense/kernel"] = (dim, 8)
    return {
        f"params/{path}": zero.to("meta").expand(shape) for path, shape in arrays.items()
    }, model


def test_the_published_b16_is_recognised():
    """There are more than ten blocks, with experts in every other.

    The sizes are those of vmoe_b16_imagenet21k_randaug_strong.
    """
    params, model = flax_params()
    state_dict = state_dict_from_flax(params)
    assert {name: tensor.shape for name, tensor in state_dict.items()} == {
        name: tensor.shape for name, tensor in model.state_dict().items()
    }
    assert model_from_flax(params) == (
        "vmoe_b16",
        dict(
            num_classes=21843,
            num_experts=8,
            moe_layers="1,3,5,7,9,11",
            pre_logits=True,
            act_layer="gelu_tanh",
        ),
    )


def test_numpy_arrays_with_and_without_params_before_their_paths():
    arrays = {path: array.numpy() for path, array in read_arrays(FOLDER / "vmoe_tiny").items()}
    plain = state_dict_from_flax(arrays)
    prefixed = state_dict_from_flax({f"params/{path}": array for path, array in arrays.items()})
    assert all(torch.equal(tensor, prefixed[name]) for name, tensor in plain.items())


def test_the_callers_arrays_are_copied():
    arrays = {path: array.numpy() for path, array in read_arrays(FOLDER / "vmoe_tiny").items()}
    before = arrays["head/bias"].copy()
    state_dict_from_flax(arrays)["head.bias"].add_(1)
    assert np.array_equal(arrays["head/bias"], before)


def test_arrays_of_grey_images_without_a_classifier():
    arrays = read_arrays(FOLDER / "vmoe_tiny")
    arrays["embedding/kernel"] = arrays["embedding/kernel"][:, :, :1]
    of_classifier = [path for path in arrays if path.startswith(("head/", "pre_logits/"))]
    for path in of_classifier:
        del arrays[path]
    name, args = model_from_flax(arrays)
    assert (args["in_chans"], args["num_classes"], args["pre_logits"]) == (1, 0, False)
    timm.create_model(name, **args).load_state_dict(state_dict_from_flax(arrays))


EXPERT = "Encoder/encoderblock_1/Moe/Mlp/Dense_0/kernel"
POSITIONS = "Encoder/posembed_input/pos_embedding"
QUERY = "Encoder/encoderblock_2/SelfAttention/query/kernel"
ROUTER = "Encoder/encoderblock_3/Moe/Router/dense/kernel"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda arrays: arrays.pop("Encoder/encoderblock_2/LayerNorm_1/bias"),
            "has no array Encoder/encoderblock_2/L",
        ),
        (lambda arrays: arrays.pop(ROUTER), f"has no array {ROUTER}"),
        (
            lambda arrays: arrays.update({"head/scale": torch.ones(7)}),
            "head/scale has no place",
        ),
        (
            lambda arrays: arrays.update({"MapHead/probe": torch.ones(7)}),
            "MapHead/probe has no place",
        ),
        (
            lambda arrays: arrays.update({"head/kernel": torch.ones(7)}),
            r"other shapes .*: head/kernel \(7,",
        ),
        (
            lambda arrays: arrays.update({ROUTER: torch.ones(16, 2, 2)}),
            "other shapes",
        ),
        (
            lambda arrays: [arrays.pop(path) for path in list(arrays) if "/Moe/" in path],
            "a plain vision transformer",
        ),
        (
            lambda arrays: [arrays.pop(path) for path in list(arrays) if "encoderblock" in path],
            "no encoder blocks",
        ),
        (lambda arrays: arrays.clear(), "no encoder blocks"),
        (lambda arrays: arrays.update({EXPERT: torch.ones(16, 32)}), "other shapes"),
        (
            lambda arrays: arrays.update({EXPERT: torch.ones(3, 16, 32)}),
            "fits no V-MoE: blocks.1.mlp.fc1",
        ),
        (lambda arrays: arrays.update({POSITIONS: torch.ones(())}), "other shapes"),
        (
            lambda arrays: arrays.update({POSITIONS: torch.ones(1, 10**15, 0)}),
            "pos_embedding is empty",
        ),
        (
            lambda arrays: arrays.update({EXPERT: torch.ones(10**6, 0, 32)}),
            "Dense_0/kernel is empty",
        ),
        (
            lambda arrays: arrays.update({QUERY: torch.ones(16, 4, 4)}),
            "other shapes",
        ),
        (
            lambda arrays: arrays.update({"head": {"kernel": torch.ones(1)}}),
            "flat mapping",
        ),
    ],
)
@pytest.mark.first_case
def test_other_arrays_than_a_v_moes(change, message):
    arrays = read_arrays(FOLDER / "vmoe_tiny")
    change(arrays)
    with pytest.raises(ValueError, match=message):
        state_dict_from_flax(arrays)


@pytest.mark.parametrize(
    ("prefix", "error", "message"),
    [
        ("none", FileNotFoundError, r"no .*none\.index"),
        ("gs://vmoe_checkpoints/vmoe_s32", ValueError, r"vmoe_checkpoints/vmoe_s32 .*\.index"),
    ],
)
def test_bad_names(copy, prefix, error, message):
    prefix = prefix if prefix.startswith("gs:") else copy.with_name(prefix)
    with pytest.raises(error, match=message):
        import_checkpoint(prefix)


def test_an_output_that_cannot_be_is_told_of_before_the_checkpoint_is_read(copy, capsys):
    assert main(["import-vmoe", "none", str(copy.with_name("vmoe_tiny.index") / "out")]) == 1
    assert "vmoe_tiny.index is a file" in capsys.readouterr().err


@pytest.mark.parametrize("inside", ["", "state"])
@pytest.mark.parametrize("given", ["", "manifest.ocdbt"])
def test_a_checkpoint_of_orbax_is_refused_by_name(tmp_path, inside, given):
    folder = tmp_path / "ckpt_7" / inside
    folder.mkdir(parents=True)
    (folder / "manifest.ocdbt").write_bytes(b"ocdbt")
    prefix = folder / given if given else tmp_path / "ckpt_7"
    with pytest.raises(ValueError, match=r"orbax \(manifest\.ocdbt\).*state_dict_from_flax"):
        read_arrays(prefix)


def test_a_missing_shard(copy):
    copy.with_name("vmoe_tiny.data-00001-of-00003").unlink()
    with pytest.raises(FileNotFoundError, match=r"vmoe_tiny\.data-00001-of-00003 is missing"):
        import_checkpoint(copy)


def test_shards_of_another_checkpoint(copy):
    first, second = (copy.with_name(f"vmoe_tiny.data-0000{shard}-of-00003") for shard in (0, 1))
    first.write_bytes(second.read_bytes())
    with pytest.raises(
        ValueError, match=r"vmoe_tiny\.data-00000-of-00003 is damaged, .*another index"
    ):
        import_checkpoint(copy)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    suffix=st.sampled_from(["index", "data-00000-of-00003", "data-00002-of-00003"]),
    fraction=st.floats(0, 0.9999),
)
def test_truncated_files(copy, suffix, fraction):
    original = (FOLDER / f"vmoe_tiny.{suffix}").read_bytes()
    damaged = copy.with_name(f"vmoe_tiny.{suffix}")
    damaged.write_bytes(original[: int(fraction * len(original))])
    try:
        with pytest.raises(ValueError, match=f"{suffix} is "):
            import_checkpoint(copy)
    finally:
        damaged.write_bytes(original)


@pytest.mark.ci
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_bytes_never_crash(copy, data):
    """What the index says is checked; the values of the weights carry no checksum."""
    original = (FOLDER / "vmoe_tiny.index").read_bytes()
    content = bytearray(original)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    copy.with_name("vmoe_tiny.index").write_bytes(content)
    with suppress(ValueError, OSError):
        found = import_checkpoint(copy).state_dict()
        expected = state_dict_from_flax(read_arrays(FOLDER / "vmoe_tiny"))
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def packed(*bounds):
    return msgpack.packb([msgpack.packb([start, stop, step]) for start, stop, step in bounds])


def claims(count=3, slices=None, shards=None):
    """Return the index with another number of shards, or other slices or shards of "cls".

    The array has the shape (1, 1, 16).
    """
    index = msgpack.unpackb((FOLDER / "vmoe_tiny.index").read_bytes(), strict_map_key=False)
    index["shard_count"] = count
    info, *whole = msgpack.unpackb(index["index"]["cls"].data)
    index["index"]["cls"] = msgpack.ExtType(
        8, msgpack.packb([info, slices or whole[0], shards or whole[1]])
    )
    return msgpack.packb(index)


ONE = (0, 1, None)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (claims(0), "index is damaged"),
        (claims(-1), "index is damaged"),
        (claims(2), "index is damaged"),
        (claims(3.0), "index is damaged"),
        (
            b"\x82\xabshard_count\x03\xa5index" + b"\x81\xa1x" * 1000 + b"\x80",
            "index is (truncated or )?damaged",
        ),
        (msgpack.packb({"shard_count": 1, "index": {}}), "index is damaged"),
        (claims(10**9), "data-00000-of-1000000000 is missing"),
        (claims(shards=[9]), "index is damaged"),
        (claims(shards=[-1]), "index is damaged"),
        (claims(slices=[packed((0, 1, 2), (0, 1, 2), (0, 16, 2))]), "index is damaged"),
        (  # they overlap and leave a hole
            claims(
                slices=[packed(ONE, ONE, (0, 8, None)), packed(ONE, ONE, (4, 12, None))],
                shards=[0, 1],
            ),
            "index is damaged",
        ),
    ],
)
def test_an_index_that_claims_what_is_not_so(copy, index, message):
    copy.with_name("vmoe_tiny.index").write_bytes(index)
    with pytest.raises((ValueError, OSError), match=message):
        import_checkpoint(copy)


def write_sliced(folder, rows, step=None, type_of_chunks="float32"):
    """A checkpoint of one array, cut into so many slices that go around its three shards."""
    slices = [packed((row, row + 1, step), (0, 2, step)) for row in range(rows)]
    info = msgpack.packb([[rows, 2], "float32"])
    leaf = msgpack.ExtType(8, msgpack.packb([info, slices, [row % 3 for row in range(rows)]]))
    folder.joinpath("a.index").write_bytes(msgpack.packb({"shard_count": 3, "index": {"x": leaf}}))
    for shard in range(3):
        of_shard = []
        for row in range(shard, rows, 3):
            content = np.float32([row, -row]).tobytes()
            chunk = msgpack.ExtType(1, msgpack.packb([[1, 2], type_of_chunks, content]))
            of_shard.append([[chunk], msgpack.ExtType(6, slices[row])])
        content = {"__msgpack_array_chunk_a87ca2__": True, "0": of_shard}
        folder.joinpath(f"a.data-0000{shard}-of-00003").write_bytes(msgpack.packb(content))


def test_slices_may_state_their_step_of_one(tmp_path):
    write_sliced(tmp_path, 3, step=1)
    (array,) = read_arrays(tmp_path / "a").values()
    assert torch.equal(array, torch.arange(3.0)[:, None] * torch.tensor([1.0, -1.0]))


def test_chunks_of_another_type_of_the_same_size_are_refused(tmp_path):
    write_sliced(tmp_path, 3, type_of_chunks="int32")
    with pytest.raises(ValueError, match="damaged"):
        read_arrays(tmp_path / "a")


@pytest.mark.ci  # the cases above have fewer slices
def test_twenty_thousand_slices(tmp_path):
    """Comparing each with each took more than 100 s."""
    write_sliced(tmp_path, 20_000)
    begin = time.process_time()
    (array,) = read_arrays(tmp_path / "a").values()
    assert time.process_time() - begin < 10
    assert torch.equal(array, torch.arange(20_000.0)[:, None] * torch.tensor([1.0, -1.0]))


boxes = st.integers(1, 3).flatmap(
    lambda dims: st.tuples(
        st.lists(st.integers(1, 4), min_size=dims, max_size=dims),
        st.lists(
            st.lists(
                st.tuples(st.integers(-1, 4), st.integers(0, 5)), min_size=dims, max_size=dims
            ).map(tuple),
            max_size=6,
        ),
    )
)


@settings(max_examples=60)
@given(boxes)
def test_slices_cover_an_array_exactly_once(case):
    """Against an array in which the elements of each slice are counted."""
    shape, parts = case
    count = np.zeros([9] * len(shape), int)
    valid = all(start < stop for part in parts for start, stop in part)
    for part in parts:
        count[tuple(slice(start + 2, stop + 2) for start, stop in part)] += 1
    expected = np.pad(np.ones(shape, int), [(2, 7 - size) for size in shape])
    assert tile(parts, shape) == (valid and np.array_equal(count, expected))


@settings(max_examples=60)
@given(st.data())
def test_gaps_and_overlaps_in_a_tiling_are_found(data):
    """Pieces of an array that was cut at random, then one changed."""
    shape = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    parts = [tuple((0, size) for size in shape)]
    for _ in range(data.draw(st.integers(0, 12))):
        index = data.draw(st.integers(0, len(parts) - 1))
        axis = data.draw(st.integers(0, len(shape) - 1))
        start, stop = parts[index][axis]
        if stop - start > 1:
            middle = data.draw(st.integers(start + 1, stop - 1))
            part = parts.pop(index)
            parts += [
                (*part[:axis], bounds, *part[axis + 1 :])
                for bounds in ((start, middle), (middle, stop))
            ]
    assert tile(parts, shape)
    index = data.draw(st.integers(0, len(parts) - 1))
    axis = data.draw(st.integers(0, len(shape) - 1))
    start, stop = parts[index][axis]
    change = data.draw(
        st.sampled_from(
            [(start - 1, stop), (start + 1, stop), (start, stop + 1), (start, stop - 1)]
        )
    )
    assert not tile([*parts[:index], *parts[index + 1 :]], shape)
    assert not tile([*parts, parts[index]], shape)
    assert not tile(
        [
            *parts[:index],
            (*parts[index][:axis], change, *parts[index][axis + 1 :]),
            *parts[index + 1 :],
        ],
        shape,
    )


def test_shapes_of_no_and_too_many_dimensions():
    assert tile([()], [])
    assert not tile([(), ()], [])
    assert tile([], [0])
    assert tile([], [3, 0])
    assert not tile([], [-1])
    assert not tile([((0, 1.5),)], [1.5])
    with pytest.raises(ValueError, match="dimension"):
        tile([((0, 1),) * 99], [1] * 99)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(copy, value):
    """Bytes that were flipped, or a training that diverged."""
    arrays = read_arrays(FOLDER / "vmoe_tiny")
    weights = arrays["head/bias"].numpy().tobytes()
    for file in copy.parent.glob("vmoe_tiny.data*"):
        content = file.read_bytes()
        file.write_bytes(
            content.replace(weights, np.full(len(weights) // 4, value, np.float32).tobytes())
        )
    with pytest.raises(ValueError, match=r"array head/bias .*NaN"):
        import_checkpoint(copy)
