"""Synthetic files of Swin-MoE's processes, in the published layout, made small."""

import math

import torch

DEPTHS, HEADS, WIDTH, PATCH, IMAGE, WINDOW, CLASSES = (2, 1, 2, 1), (1, 2, 2, 4), 8, 4, 64, 4, 5
GRIDS = [IMAGE // PATCH // 2**layer for layer in range(4)]  # 16, 8, 4, 2
MOE_BLOCKS = ((2, 1), (3, 0))
DOUBLE = torch.float64


def window_of(layer):
    return min(WINDOW, GRIDS[layer])


def windows_of(layer, shifted):
    """Return the windows of a map.

    They are rows and columns, and for each place the region that it may look at.
    """
    n, grid = window_of(layer), GRIDS[layer]
    shift = n // 2 if shifted and n < grid else 0
    for top in range(shift, grid + shift, n):
        for left in range(shift, grid + shift, n):
            rows, columns = torch.arange(top, top + n), torch.arange(left, left + n)
            # Those that came round.
            yield rows % grid, columns % grid, (rows >= grid)[:, None] * 2 + (columns >= grid)


def coordinates(window):
    """Return the reference's coordinates, -8 to 8 in logarithmic steps.

    They are for (2 window - 1) rows and columns of relative positions.
    """
    line = torch.arange(1 - window, window, dtype=DOUBLE) * 8 / (window - 1)
    line = line.sign() * (line.abs() + 1).log2() / math.log2(8)
    return torch.stack(torch.meshgrid(line, line, indexing="ij"), -1)


def whole_model(num_experts=0, cosine=False, fc2_bias=False, seed=0):
    """Return the arrays of a model in the published names.

    Each expert layer's are a dictionary of whole experts.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=DOUBLE) / max(1, shape[-1]) ** 0.5

    def norm(name, width):
        return {f"{name}.weight": 1 + random(width), f"{name}.bias": random(width)}

    rest, experts = (
        {
            "patch_embed.proj.weight": random(WIDTH, 3, PATCH, PATCH),
            "patch_embed.proj.bias": random(WIDTH),
        },
        {},
    )
    rest |= norm("patch_embed.norm", WIDTH)
    for layer, depth in enumerate(DEPTHS):
        dim, window = WIDTH * 2**layer, window_of(layer)
        for number in range(depth):
            block = f"layers.{layer}.blocks.{number}"
            rest |= norm(f"{block}.norm1", dim) | norm(f"{block}.norm2", dim)
            for name, shape in {"qkv": (3 * dim, dim), "proj": (dim, dim)}.items():
                rest |= {
                    f"{block}.attn.{name}.weight": random(*shape),
                    f"{block}.attn.{name}.bias": random(shape[0]),
                }
            rest |= {
                f"{block}.attn.cpb_mlp.0.weight": random(512, 2),
                f"{block}.attn.cpb_mlp.0.bias": random(512),
                f"{block}.attn.cpb_mlp.2.weight": random(HEADS[layer], 512) * 5,
                f"{block}.attn.relative_coords_table": coordinates(window)[None],
                f"{block}.attn.relative_position_index": torch.zeros(
                    window**2, window**2, dtype=torch.long
                ),
            }
            if number % 2 and window < GRIDS[layer]:
                regions = torch.stack(
                    [region.flatten() for _, _, region in windows_of(layer, True)]
                )
                rest[f"{block}.attn_mask"] = torch.where(
                    regions[:, None] == regions[:, :, None], 0.0, -100.0
                )
            if num_experts and (layer, number) in MOE_BLOCKS:
                gate = f"{block}.mlp._moe_layer.gates.0."
                if cosine:
                    rest[f"{gate}cosine_projector.weight"] = random(256, dim)
                    rest[f"{gate}cosine_projector.bias"] = random(256)
                    rest[f"{gate}sim_matrix"] = random(256, num_experts)
                    rest[f"{gate}temperature"] = torch.tensor([1.5], dtype=DOUBLE)
                else:
                    rest[f"{gate}wg.weight"] = random(num_experts, dim) * 3
                experts[block] = {
                    "fc1_w": random(num_experts, 4 * dim, dim),
                    "fc1_bias": random(num_experts, 4 * dim),
                    "fc2_w": random(num_experts, 4 * dim, dim),
                }
            else:
                rest |= {
                    f"{block}.mlp.fc1.weight": random(4 * dim, dim),
                    f"{block}.mlp.fc1.bias": random(4 * dim),
                }
                rest[f"{block}.mlp.fc2.weight"] = random(dim, 4 * dim)
                if fc2_bias:
                    rest[f"{block}.mlp.fc2.bias"] = random(dim)
        if layer < 3:
            rest |= norm(f"layers.{layer}.downsample.norm", 4 * dim)
            rest[f"layers.{layer}.downsample.reduction.weight"] = random(2 * dim, 4 * dim)
    rest |= norm("norm", 8 * WIDTH)
    rest |= {"head.weight": random(CLASSES, 8 * WIDTH), "head.bias": random(CLASSES)}
    return rest, experts


def files_of(rest, experts, ranks):
    """Divide a model as its processes write it.

    All but the experts is there once. Each process has e experts, or units of one.
    """
    master, parts = dict(rest), [{} for _ in range(ranks)]
    for block, whole in experts.items():
        name = f"{block}.mlp._moe_layer.experts.batched_"
        num_experts, hidden, dim = whole["fc1_w"].shape
        cut = max(1, ranks // num_experts)
        for rank, part in enumerate(parts):
            mine = slice(
                rank * num_experts // ranks,
                max(1, num_experts // ranks) + rank * num_experts // ranks,
            )
            units = slice(rank % cut * hidden // cut, (rank % cut + 1) * hidden // cut)
            part[f"{name}fc1_w"] = whole["fc1_w"][mine, units].clone()
            part[f"{name}fc2_w"] = whole["fc2_w"][mine, units].clone()
            part[f"{name}fc1_bias"] = whole["fc1_bias"][mine, None, units].clone()
        # frozen.
        master[f"{name}fc2_bias"] = torch.zeros(
            max(1, num_experts // ranks), 1, dim // cut, dtype=DOUBLE
        )
        master[f"{block}.mlp._moe_layer._num_global_experts"] = torch.tensor(num_experts)
    return master, parts


def write(folder, rest, experts, ranks, name="swin"):
    master, parts = files_of(rest, experts, ranks)
    torch.save({"model": master}, folder / f"{name}.pth.master")
    for rank, part in enumerate(parts):
        torch.save({"model": part}, folder / f"{name}.pth.rank{rank}")
    return folder / name
