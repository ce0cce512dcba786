"""The conversion of a model: feed-forward networks of chosen blocks become expert layers."""

import logging
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ..layers import EwaMlp, MoeMlp
from ..layers.checks import check_integer
from ..layers.functional import has_hooks
from ..layers.probe import probe
from ..schedules import check_share_rate, get_schedule
from .blocks import put, select_blocks
from .check import check_weights, drops_of_images
from .expert_layers import described
from .find import Modules, find_networks
from .hooks import add_hooks
from .registry import MakeRouter, RouterSpec, get_spec, split_options
from .split import has_images_first
from .wrappers import ModelT, refuse_wrapped

_logger = logging.getLogger(__name__)


def convert_to_moe(
    model: ModelT,
    num_experts: int = 4,
    moe_layers: str | int | Iterable[int] | None = None,
    router: str | RouterSpec | MakeRouter = "random",
    expert_init: str = "same",
    share_rate: float | None = None,
    share_schedule: str | None = None,
    *,
    modules: Modules | None = None,
    expert_dropout: float | None = None,
    **options: Any,
) -> ModelT:
    """Replace the feed-forward networks of some blocks of a model by expert layers, in place.

    A line of the log says what was replaced.

    Args:
        model: a model of timm (ViT, DeiT, Swin, ...), Hugging Face transformers or torchvision, a
            model with layers of ``nn.TransformerEncoderLayer``, or any other model if ``modules``
            names its networks.
        num_experts: E, the number of experts in each layer.
        moe_layers: the blocks, counted from 0 over the whole model by their feed-forward networks:
            a block with two of them counts twice (TNT, DaViT, MaxViT, parallel ViTs), so that
            ``"every-2"`` takes its second one. ``"every-n"``: blocks n-1, 2n-1, ...; ``"last-n"``:
            the last n odd blocks, as in V-MoE; ``"tail-n"``: the last n blocks; or block numbers,
            as ``"1,3,5"`` or as integers. By default ``"every-2"``, or all networks that
            ``modules`` names. A block whose network cannot become experts counts too: a rule
            leaves it as it is, with a warning; its number is an error.
        router: ``"random"``, the random partition of EWA; ``"top_k"``, learned routing as in V-MoE;
            ``"expert_choice"``, where each expert chooses its tokens; ``"soft"``, where experts
            compute mixtures of an image's tokens (Soft MoE); the name of a router registered by
            :func:`timm_moe.register_router`; a :class:`timm_moe.RouterSpec`; or a callable
            ``(dim, num_experts)`` -> :class:`timm_moe.layers.Router`.
        expert_init: ``"same"`` copies the weights of the dense network into every expert (sparse
            upcycling). ``"independent"``, for training from scratch, keeps them in the first expert
            and draws the others at their mean and standard deviation. ``"drop"`` copies them and
            draws half of the hidden units of each expert again (Drop-Upcycling).
        share_rate: how far the experts are averaged after each optimizer step, in [0, (E - 1) / E].
            By default 0.3 for random partitions; routed experts are averaged only if this or
            ``share_schedule`` is given (Early EWA).
        share_schedule: course of the share rate over training: ``"linear"`` (default for random
            partitions), ``"constant"``, ``"early"`` (default for routed experts) or ``"late"``.
        modules: the feed-forward networks, if they are unknown or you mean others: a regular
            expression that matches their names, a list of names, or a predicate
            ``(name, module) -> bool``. ``moe_layers`` then counts these. Each must treat every row
            independently; a few rows are run to check it.
        expert_dropout: rate of the dropout inside the experts; by default the dense network's.
        options: options of the router and of its layer, as follows.

    Of ``router="soft"``:
        slots_per_expert: mixtures of an image's tokens that each expert computes.

    Of ``router="expert_choice"``:
        capacity_factor, noise_std, gate_mode, group_images: see
            :class:`timm_moe.layers.ExpertChoiceRouter`.

    Of ``router="top_k"``, ``"expert_choice"`` and routers of other packages:
        shared_expert: add an expert without a gate that every token passes through (ViMoE).
        shared_init: its initial weights: ``"pretrained"``, a copy of the dense network, or
            ``"zero_out"``, so that it adds nothing.
        expert_width: hidden width of an expert as a fraction 1 / M of the dense network's
            (fine-grained experts): expert e is the part e % M of the dense network. There is no
            averaging then.

    Of ``router="top_k"``:
        top_k, noise_std, capacity_factor, eval_capacity_factor, capacity_multiple,
            capacity_rounding, batch_priority, group_images, gate_mode: see
            :class:`timm_moe.layers.TopKRouter`. Write ``"none"`` for no capacity, as timm's
            ``create_model`` drops options that are None.
        aux_loss: the routers' losses, ``"importance"``, ``"load"``, ``"balance"``,
            ``"balance_top_k"``, ``"local_entropy"``, ``"global_entropy"`` (LIMoE) or several joined
            by ``+``.
        aux_loss_weight: weight of their mean in the training loss, summed over the layers; 0 for
            none. In your own loop, add :func:`timm_moe.auxiliary_loss`.
        z_loss_weight: weight of the loss against large logits, 0.001 in ST-MoE; 0 for none.
        balance: what balances the experts. ``"loss"``: the losses of ``aux_loss``. ``"bias"``: in
            their place a bias on the gates, for the choice alone, which moves by ``bias_rate`` at
            each optimizer step (arXiv 2408.15664).
        score: the gates. ``"softmax"`` or ``"sigmoid"`` of products with the rows, or ``"cosine"``:
            the softmax of scaled cosines (Swin-MoE).
        route_scale: factor of all gates.
        routing_unit: ``"token"``, or ``"image"``: all tokens of an image follow its class token,
            the first (ViMoE).
        ensemble_size: M, members among which the experts are divided (pBE); 1 for no ensemble.
        ensemble: kind of ensemble. ``"pbe"``: each image is in the batch M times, and each member's
            tokens choose among its experts. The others are ablations. ``"tiling"``: as ``"pbe"``,
            but every member has all experts, and members differ by noise alone, also in eval mode.
            ``"partitioning"``: each image is in the batch once, and each token chooses K experts of
            each part. ``"multi_head"``: M = K, and in the last layer the k-th choice of each token
            goes to the k-th member. All but ``"partitioning"`` need a model that repeats the images
            and separates the members' outputs, as ``vmoe_pbe_*`` do.

    Returns:
        The same model.

    Raises:
        ValueError: if an option or its value does not suit the router; if the router does not suit
            the input of a network; if the model has no block that can be converted, or is wrapped
            (DDP, torch.compile, ...: convert first); if a network that ``modules`` names cannot be
            converted (it mixes rows, holds buffers, is used twice, ...). The model is then
            unchanged.
        TypeError: if no router has an option of that name, or what routes is no ``Router``.
    """
    spec = get_spec(router)
    check_integer("num_experts", num_experts, 1)
    router_options, layer_options = split_options(spec, options)
    if spec.check is not None:
        spec.check(model, router_options)
    if share_schedule is not None:
        get_schedule(share_schedule)
    layer_options |= dict(expert_init=expert_init, expert_dropout=expert_dropout)

    chosen = _chosen_networks(model, moe_layers, modules)
    last = list(chosen)[-1]
    layers: dict[str, MoeMlp] = {}
    for path, ffn in chosen.items():
        factory = spec.last_factory if path == last and spec.last_factory else spec.factory
        weight = next(module.weight for module in ffn.modules() if isinstance(module, nn.Linear))
        with torch.device(weight.device):
            own_router = factory(probe(ffn).width, num_experts, **router_options)
        layer = spec.layer(ffn, own_router, **layer_options)
        layer.router.to(weight.dtype)
        if layer.num_experts != num_experts:
            raise ValueError(
                f"router={spec.name!r} has {layer.num_experts} experts in {path}, not num_experts="
                f"{num_experts}: let its factory pass num_experts on."
            )
        if not layer.are_copies_of(ffn):
            raise ValueError(
                f"The layer of router={spec.name!r} makes experts of another network than {path}, "
                "so no dense checkpoint would fit: let it pass this network on."
            )
        _set_averaging(layer, share_rate, share_schedule)
        if layer.router.needs_whole_images and not has_images_first(model, path):
            raise ValueError(
                "This router needs the tokens of whole images, but the first dimension of the "
                f"input of {path} is not images: name other moe_layers, take another router or, in "
                "torch's encoder layers, batch_first=True."
            )
        layers[path] = layer

    # Nothing is replaced before all layers are built, so that an error leaves the model unchanged.
    for path, layer in layers.items():
        ffn = chosen[path]
        layer.path = path
        layer.replaced = tuple(weakref.ref(parameter) for parameter in ffn.parameters())
        layer.train(ffn.training)
        put(model, path, ffn, layer)
    add_hooks(model, layers.values())
    _warn_of_differences(chosen)
    if not hasattr(model, "stock_class"):  # A model that is made by its name needs no word.
        _logger.info(f"{type(model).__name__} has {described(layers.values())}")
    return model


def _warn_of_differences(networks: Mapping[str, nn.Module]) -> None:
    """Warn of what networks, by their names in the model, did in another way than experts do."""
    hooked = [path for path, ffn in networks.items() if any(map(has_hooks, ffn.modules()))]
    if hooked:
        _logger.warning(
            "%s has hooks, and the experts have copies of them, which get the rows of each expert "
            "and cannot be removed: put hooks on the expert layer, after the conversion.",
            hooked[0],
        )
    dropping = [name for path, ffn in networks.items() for name in drops_of_images(path, ffn)]
    if dropping:
        _logger.warning(
            "%s dropped whole images in training, and drops single tokens in experts: move it out "
            "of the network, into its block.",
            dropping[0],
        )


def _set_averaging(layer: MoeMlp, share_rate: float | None, share_schedule: str | None) -> None:
    """Set how the experts of a layer are averaged; None leaves what the layer's class says."""
    if share_schedule is not None:
        layer.share_rate = layer.share_rate or EwaMlp.share_rate
        layer.share_schedule = share_schedule
    if share_rate is not None:
        layer.share_rate = share_rate
    check_share_rate(layer.share_rate, layer.num_experts, parts=layer.parts)


def _chosen_networks(
    model: nn.Module, moe_layers: str | int | Iterable[int] | None, modules: Modules | None
) -> dict[str, nn.Module]:
    """Find the networks of the chosen blocks by name.

    Raises:
        ValueError: if there are none, or one of them is wrapped, has computed weights, or is an
            expert layer already.
    """
    networks = find_networks(model, modules)
    if not any(isinstance(network, nn.Module) for network in networks.values()):
        raise ValueError(
            f"{type(model).__name__} has no numbered block with an mlp of linear layers that could "
            "become experts, as convolutions and a norm over the image (ConvNeXt V2) cannot; name "
            "other feed-forward networks by modules=..., or by ffn_modules in a MoeMixin class"
        )
    if moe_layers is None:
        moe_layers = "every-2" if modules is None else "every-1"

    paths = list(networks)
    blocks = select_blocks(moe_layers, len(paths))
    selected = {paths[block]: networks[paths[block]] for block in blocks}
    chosen = {path: ffn for path, ffn in selected.items() if isinstance(ffn, nn.Module)}
    is_rule = isinstance(moe_layers, str) and "-" in moe_layers
    for path, ffn in selected.items():
        if isinstance(ffn, str) and not (is_rule and chosen):
            raise ValueError(ffn)
        if isinstance(ffn, MoeMlp):
            raise ValueError(
                f"{path} is an expert layer already: convert a model once, or name other blocks by "
                "moe_layers."
            )
        refuse_wrapped(model, path)
        if isinstance(ffn, nn.Module):
            check_weights(path, ffn)
    return chosen
