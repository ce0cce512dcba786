"""Padding tokens change nothing: not what tokens give, nor capacities, losses and loads."""

from functools import partial

import pytest
import timm
import torch
from common import SMALL_VIT
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import timm_moe
from timm_moe.convert.expert_layers import expert_parameters
from timm_moe.convert.hooks import note_padding
from timm_moe.training.router_losses import routing_summary

OPTIONS = dict(
    router="top_k",
    num_experts=4,
    top_k=2,
    capacity_factor=1.0,
    batch_priority=True,
    moe_layers="every-1",
)
NAFLEX = dict(
    embed_dim=32, depth=2, num_heads=2, patch_size=8, num_classes=5, pos_embed_grid_size=(4, 4)
)


def naflex(tokens, padded):
    """Two images as patches, of which the second has three tokens less, and room for more."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, tokens, 192, generator=generator)
    places = torch.stack([torch.arange(tokens) // 4, torch.arange(tokens) % 4], -1).expand(
        2, -1, -1
    )
    valid = torch.arange(tokens).expand(2, -1) < torch.tensor([[tokens], [tokens - 3]])
    room = (0, 0, 0, padded)
    return dict(
        patches=nn.functional.pad(x, room, value=7.0),
        patch_coord=nn.functional.pad(places, room),
        patch_valid=nn.functional.pad(valid, room[2:], value=False),
    )


def randomised(model):
    torch.manual_seed(1)
    for layer in timm_moe.moe_layers(model).values():
        for parameter in layer.parameters():
            nn.init.normal_(parameter, std=0.5)
    return model


def naflex_vit(**options):
    model = timm.create_model("naflexvit_base_patch16_gap", **NAFLEX)
    return randomised(timm_moe.convert_to_moe(model, **{**OPTIONS, **options}))


def ewa_naflex_vit():
    model = timm.create_model("naflexvit_base_patch16_gap", **NAFLEX)
    return randomised(timm_moe.convert_to_moe(model, moe_layers="every-1"))


def assert_same(model, short, padded):
    """Compare outputs, losses, loads and gradients of two forwards that differ in padding alone."""
    results = []
    for forward in (short, padded):
        torch.manual_seed(2)
        model.zero_grad()
        output = forward(model)
        if model.training:
            (output.square().sum() + timm_moe.auxiliary_loss(model)).backward()
        gradients = [stacked.grad for stacked in expert_parameters(model).values()]
        statistics = {
            path: vars(summary) for path, summary in routing_summary(model, reset=True).items()
        }
        results.append((output, gradients, statistics))
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    "options", [{}, dict(shared_expert=True), dict(capacity_factor="none", aux_loss="importance")]
)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.first_case
def test_naflexvit(options, training):
    model = naflex_vit(eval_capacity_factor=0.8, **options).train(training)
    assert_same(model, lambda model: model(naflex(9, 0)), lambda model: model(naflex(9, 20)))


def encoder(batch_first, **options):
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=batch_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return randomised(
        timm_moe.convert_to_moe(model, **{**OPTIONS, "eval_capacity_factor": 0.8, **options})
    )


def padded_by(number, batch_first, kind=torch.bool):
    """Run an encoder on three sequences of six tokens and padding."""
    x = torch.randn(3, 6, 16, generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(3, 6 + number, dtype=torch.bool)
    mask[:, 6:] = True
    mask = mask if kind is torch.bool else torch.zeros(mask.shape).masked_fill(mask, -torch.inf)

    def forward(model):
        tokens = nn.functional.pad(x, (0, 0, 0, number), value=9.0)
        if batch_first:
            return model(tokens, src_key_padding_mask=mask)[:, :6]
        return model(tokens.transpose(0, 1), src_key_padding_mask=mask).transpose(0, 1)[:, :6]

    return forward


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("batch_first", "kind"), [(True, torch.bool), (False, torch.bool), (True, torch.float)]
)
def test_an_encoder_of_torch(batch_first, kind, training):
    model = encoder(batch_first).train(training)
    assert_same(model, padded_by(0, batch_first, kind), padded_by(3, batch_first, kind))


@pytest.mark.parametrize(
    "options", [dict(router="soft"), dict(router="expert_choice"), dict(group_images=1)]
)
def test_routers_of_images_refuse_tokens_before_images(options):
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32), 2, enable_nested_tensor=False
    )
    options = {"router": "top_k", **options}
    with pytest.raises(ValueError, match=r"layers\.1\.linear1 .*images.*batch_first=True"):
        timm_moe.convert_to_moe(model, num_experts=2, **options)
    assert not timm_moe.moe_layers(model)


@pytest.mark.parametrize(
    "options", [dict(ensemble="partitioning", ensemble_size=2), dict(router="top_k", top_k=1)]
)
def test_other_routers(options):
    assert_same(encoder(True, **options), padded_by(0, True), padded_by(5, True))


def test_random_partitions_are_of_tokens():
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
    model = timm_moe.convert_to_moe(
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), moe_layers="every-1"
    )
    rows = []
    for layer in timm_moe.moe_layers(model).values():
        layer.router.register_forward_hook(
            lambda _, inputs, routing: rows.append(routing.offsets.tolist())
        )
    padded_by(6, True)(model.train())
    assert rows == [[5, 10, 14, 18]] * 2


def test_in_eval_mode_padding_is_what_the_mean_of_the_experts_makes_of_it():
    """A model that averages all tokens gives what its dense form gives."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = randomised(timm_moe.convert_to_moe(model, moe_layers="every-1")).eval()
    x, is_padding = torch.randn(2, 5, 16), torch.arange(5).expand(2, -1) > 2
    actual, expected = (
        each(x, src_key_padding_mask=is_padding) for each in (model, timm_moe.to_dense(model))
    )
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("options", [{}, dict(group_images=1)])
def test_without_capacities_rows_of_padding_are_as_all_others_in_eval_mode(options):
    """A mean over all tokens has them too, as in the dense model."""
    model = encoder(True, eval_capacity_factor="none", **options).eval()
    (layer, *_) = timm_moe.moe_layers(model).values()
    x = torch.randn(2, 5, 16)
    layer.padding = torch.arange(5).expand(2, -1) > 2
    torch.testing.assert_close(layer(x), layer(x))


def test_recomputation_sees_the_mask():
    """Two forwards wait for their backward, which repeats each with its own mask."""
    model = encoder(True)
    results = []
    for call in (
        lambda layer, *args, **kwargs: layer(*args, **kwargs),
        partial(checkpoint, use_reentrant=False),
    ):
        x = torch.randn(3, 9, 16, generator=torch.Generator().manual_seed(0))
        loss = 0.0
        for tokens in (6, 4):
            mask = (torch.arange(9) >= tokens).expand(3, 9)
            loss = (
                loss
                + call(model.layers[0], x, src_key_padding_mask=mask)[:, :tokens].square().sum()
            )
        model.zero_grad()
        loss.backward()
        results.append([stacked.grad for stacked in expert_parameters(model.layers[0]).values()])
    torch.testing.assert_close(*results)


def loss_of_two_batches(model, use_reentrant=None):
    """Add the losses of two batches, and checkpoint each layer alone if asked to.

    They have as many tokens in other places. Both forwards are done before one is repeated.
    """
    layers = timm_moe.moe_layers(model).values()
    if use_reentrant is not None:
        for layer in layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=use_reentrant)
    torch.manual_seed(2)
    images = naflex(9, 4)
    swapped = {name: tensor.flip(0) for name, tensor in images.items()}
    losses = [
        model(batch).square().sum() + timm_moe.auxiliary_loss(model) for batch in (images, swapped)
    ]
    return losses[0] + losses[1]


@pytest.mark.parametrize("options", [{}, dict(shared_expert=True), None])
@pytest.mark.first_case
def test_recomputation_of_a_layer_alone_sees_the_mask_of_its_call(options):
    model = ewa_naflex_vit() if options is None else naflex_vit(**options)
    results = []
    for use_reentrant in (None, False):
        model.zero_grad()
        loss_of_two_batches(model, use_reentrant).backward()
        results.append([stacked.grad for stacked in expert_parameters(model).values()])
    torch.testing.assert_close(*results)


def test_a_layer_that_left_padding_out_before_is_compiled_whole():
    model = ewa_naflex_vit()
    model(naflex(9, 4))
    layer = model.blocks[0].mlp
    x = torch.randn(2, 6, 32)
    assert torch.compile(layer, fullgraph=True, backend="eager")(x).shape == x.shape


def test_recomputation_of_a_layer_alone_is_refused_where_its_call_is_not_known():
    loss = loss_of_two_batches(ewa_naflex_vit(), use_reentrant=True)
    with pytest.raises(RuntimeError, match=r"blocks\.\d\.mlp .*: checkpoint the block\."):
        loss.backward()


@pytest.mark.parametrize(
    "wrap",
    [
        checkpoint_wrapper,
        pytest.param(partial(torch.compile, backend="eager"), marks=pytest.mark.ci),
    ],
)
def test_experts_in_a_wrapper_see_the_mask(wrap):
    model = naflex_vit()
    for block in model.blocks:
        block.mlp = wrap(block.mlp)
    assert_same(model, lambda model: model(naflex(9, 0)), lambda model: model(naflex(9, 20)))


def test_a_mask_is_of_one_call():
    """In eval mode EWA needs none; a later training call must not find it."""
    model = ewa_naflex_vit()
    model.eval()(naflex(9, 4))
    layer = model.train().blocks[0].mlp
    assert layer(torch.ones(2, 13 + model.num_prefix_tokens, 32)).any(-1).all()


def test_a_shared_expert_leaves_padding_out():
    model = naflex_vit(shared_expert=True)
    rows = []
    model.blocks[0].mlp.shared.register_forward_hook(
        lambda _, inputs, output: rows.append(output[..., 0].numel())
    )
    model(naflex(9, 4))
    assert rows == [9 + 6 + 2 * model.num_prefix_tokens]


def test_images_that_are_counted_whole_cannot_have_padding():
    with pytest.raises(
        ValueError, match=r"padding.*layers\.0\.linear1 .*'top_k' without group_images.*'soft'"
    ):
        padded_by(3, True)(encoder(True, group_images=1).train())
    padded_by(0, True)(encoder(True, group_images=1).train())


def test_an_image_that_is_routed_as_a_whole_takes_its_padding_along():
    model = timm.create_model("vit_tiny_patch16_224", **SMALL_VIT)
    options = dict(router="top_k", routing_unit="image", num_experts=4)
    (layer, *_) = timm_moe.moe_layers(timm_moe.convert_to_moe(model, **options)).values()
    x = torch.randn(3, 5, SMALL_VIT["embed_dim"])
    expected = layer(x)
    layer.padding = torch.arange(5).expand(3, -1) > 2
    torch.testing.assert_close(layer(x), expected)


def test_a_mask_that_cannot_be_read_is_told():
    model = encoder(True)
    with pytest.warns(UserWarning, match="'src_key_padding_mask' .* str"):
        note_padding(
            model.layers[0],
            (),
            {"src_key_padding_mask": "mask"},
            masks={"src_key_padding_mask": 2},
        )


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))


class Named(Block):
    def forward(self, x, key_padding_mask=None):
        return x + self.net(x)


class Attending(Block):
    def forward(self, x, attention_mask=None):
        return x + self.net(x)


class AsTorchs(Block):
    """A block whose masks have the order of ``nn.MultiheadAttention``."""

    def forward(self, x, key_padding_mask=None, attn_mask=None):
        return x + self.net(x)


class Unknown(Block):
    def forward(self, x, mask=None):
        return x + self.net(x)


def test_masks_of_own_blocks():
    x, mask = torch.randn(2, 6, 8), (torch.arange(6) > 3).expand(2, 6)
    named, unknown = (
        timm_moe.convert_to_moe(block(), **OPTIONS, modules=["net"]) for block in (Named, Unknown)
    )
    assert torch.equal(named.train()(x, key_padding_mask=mask)[mask], x[mask])
    with pytest.warns(UserWarning, match="'mask' of a Unknown, .*key_padding_mask"):
        unknown.train()(x, mask)


@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float])
def test_a_mask_of_tokens_is_read_in_every_type(dtype):
    x, is_token = torch.randn(2, 6, 8), (torch.arange(6) < 4).expand(2, 6)
    model = timm_moe.convert_to_moe(Attending(), **OPTIONS, modules=["net"]).train()
    y = model(x, attention_mask=is_token.to(dtype))
    assert torch.equal(y[~is_token], x[~is_token])


def attention(is_token, lowest):
    """A mask (B, 1, N, N) that is added to the attention."""
    return torch.where(is_token, 0.0, lowest)[:, None, None, :].expand(-1, 1, 6, 6)


IS_TOKEN = (torch.arange(6) < 4).expand(2, 6)


@pytest.mark.parametrize(
    ("masks", "padding"),
    [
        (dict(key_padding_mask=~IS_TOKEN), ~IS_TOKEN),
        (dict(key_padding_mask=torch.where(IS_TOKEN, 0.0, -1e9)), ~IS_TOKEN),
        (dict(attn_mask=attention(IS_TOKEN, -torch.inf)), ~IS_TOKEN),
        (dict(attn_mask=attention(IS_TOKEN, -1e4)), ~IS_TOKEN),
        (dict(attn_mask=attention(IS_TOKEN, torch.finfo(torch.float16).min)), ~IS_TOKEN),
        (dict(attn_mask=attention(IS_TOKEN, -100.0)), torch.zeros_like(IS_TOKEN)),  # a bias
        (
            dict(
                key_padding_mask=~IS_TOKEN,
                attn_mask=attention(IS_TOKEN.flip(1), -1e4),
            ),
            ~(IS_TOKEN & IS_TOKEN.flip(1)),
        ),
        (
            dict(key_padding_mask=~IS_TOKEN, attn_mask=torch.zeros(8, 6, 6)),  # of 4 heads
            ~IS_TOKEN,
        ),
        (dict(key_padding_mask=~IS_TOKEN, attn_mask=torch.zeros(6, 6)), ~IS_TOKEN),
    ],
)
def test_masks_by_value_and_beside_each_other(masks, padding):
    model = timm_moe.convert_to_moe(AsTorchs(), **OPTIONS, modules=["net"]).train()
    x = torch.randn(2, 6, 8)
    y = model(x, **masks)
    assert torch.equal(y[padding], x[padding])
    assert not (y == x).all(-1)[~padding].any()


TEXT = dict(
    hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=64
)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("is_left", [False, True])
def test_text_of_transformers(attention, is_left):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(num_key_value_heads=2, **TEXT)
    model = transformers.LlamaModel._from_config(config, attn_implementation=attention)
    model = randomised(timm_moe.convert_to_moe(model.train(), **OPTIONS))
    ids = torch.randint(64, (2, 6), generator=torch.Generator().manual_seed(0))

    def padded(number):
        room = (number, 0) if is_left else (0, number)
        mask = nn.functional.pad(torch.ones_like(ids), room)
        words = dict(
            input_ids=nn.functional.pad(ids, room), position_ids=(mask.cumsum(1) - 1).clamp(min=0)
        )
        return lambda model: model(**words, attention_mask=mask).last_hidden_state[mask.bool()]

    assert_same(model, padded(0), padded(5))


def test_images_of_transformers():
    transformers = pytest.importorskip("transformers")
    sizes = {name: value for name, value in TEXT.items() if name != "vocab_size"}
    model = transformers.Siglip2VisionModel(
        transformers.Siglip2VisionConfig(num_patches=16, patch_size=4, **sizes)
    )
    model = randomised(timm_moe.convert_to_moe(model.train(), **OPTIONS))
    x = torch.randn(2, 9, 48, generator=torch.Generator().manual_seed(0))

    def padded(number):
        mask = nn.functional.pad(torch.ones(2, 9, dtype=torch.int), (0, number))
        patches = nn.functional.pad(x, (0, 0, 0, number), value=3.0)
        shapes = torch.tensor([[3, 3], [3, 3]])
        return lambda model: (
            model(patches, pixel_attention_mask=mask, spatial_shapes=shapes).pooler_output
        )

    assert_same(model, padded(0), padded(7))


def test_the_mask_of_a_call_that_failed_is_not_the_next_ones(monkeypatch):
    model = naflex_vit().train()
    (layer, *_) = timm_moe.moe_layers(model).values()
    x = torch.randn(2, 6, 32)
    expected = layer(x)
    layer.padding = torch.zeros(2, 6, dtype=torch.bool)
    layer.padding[1, 3:] = True
    with monkeypatch.context() as patch:
        patch.setattr(type(layer), "compute", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            layer(x)
    torch.testing.assert_close(layer(x), expected)


def test_the_mask_of_a_block_that_failed_is_not_the_next_ones():
    """It failed before it called its experts, as in its attention."""
    options = {**OPTIONS, "capacity_factor": "none"}
    model = timm_moe.convert_to_moe(Named(), **options, modules=["net"]).train()
    x = torch.randn(2, 6, 8)
    failure = model.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(x, key_padding_mask=~IS_TOKEN)
    failure.remove()
    assert not (model(x) == x).all(-1).any()
