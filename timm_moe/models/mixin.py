"""The mixin that turns a stock timm class into a model class with expert layers."""

import inspect
import logging
from typing import Any, ClassVar, NamedTuple

from torch import nn

from ..convert.convert import convert_to_moe
from ..convert.dense import swapped_for_dense
from ..convert.expert_layers import expert_biases, moe_layers
from ..convert.hooks import add_hooks
from ..convert.registry import moe_options, nearest_option
from ..convert.unseen_optimizer import count_forward
from ..integrations.timm import require_installed
from ..layers import begin_forward
from ..model_config import RATES, change_pretrained_cfg

_logger = logging.getLogger(__name__)

_LEFT_OUT = (
    "%s expert layers are in blocks that this feature extractor leaves out: take later "
    "out_indices, or place the experts by moe_layers."
)
#: Options that concern loading or training, not the architecture that an exported model must state.
_NOT_ARCHITECTURE = (
    "pretrained_cfg",
    "pretrained_cfg_overlay",
    "pretrained_model_args",
    "pretrained_strict",
    "cache_dir",
    "features_only",
    "out_indices",
    "feature_cls",
    "device",
    "dtype",
    "weight_init",
)


class StockForm(NamedTuple):
    """The model without experts as which weights are exported.

    Attributes:
        architecture: its registered name.
        args: further arguments that ``timm.create_model`` needs for it.
    """

    architecture: str
    args: dict[str, Any]


class MoeMixin:
    """Base of the model classes with expert layers.

    The constructor builds the stock model and converts it. It takes the arguments of the stock
    class and the options of :func:`timm_moe.convert_to_moe` but ``modules``. Subclasses are written
    ``class MoeX(MoeMixin, X)`` and name ``X`` as their ``stock_class``.

    Attributes:
        ffn_modules: the feed-forward networks, where this package does not find them: a regular
            expression or a list of names, as ``modules`` of ``convert_to_moe``. All of them become
            experts by default.
        stock_form: the stock model that the exported weights belong to; None if timm's factory did
            not make the model.
    """

    stock_class: ClassVar[type[nn.Module]]
    ffn_modules: ClassVar[str | list[str] | None] = None
    stock_form: StockForm | None = None

    def __init__(self, *args: Any, **kwargs: Any):
        require_installed()
        names = moe_options(kwargs.get("router", "random"))
        taken = constructor_arguments(self.stock_class).intersection(names)
        if taken:
            stock = self.stock_class.__name__
            raise ValueError(
                f"{min(taken)} is an option of the router and an argument of {stock}: rename the "
                "former."
            )
        options = {name: kwargs.pop(name) for name in names if name in kwargs}
        try:
            super().__init__(*args, **kwargs)
        except TypeError as error:
            mistyped = [
                name for name in kwargs if f"unexpected keyword argument '{name}'" in str(error)
            ]
            if not mistyped:
                raise
            raise TypeError(f"{error}{nearest_option(mistyped[0])}") from error
        # In training from scratch the experts start with different weights, as in the paper.
        # Loading a dense checkpoint makes them equal.
        options.setdefault("expert_init", "independent")
        convert_to_moe(self, modules=self.ffn_modules, **options)  # type: ignore[type-var]

    def init_weights(self: Any, *args: Any, **kwargs: Any) -> None:
        """Initialise as the stock class does; experts and routers are as in a new model then.

        Raises:
            AttributeError: if the stock class has no such method.
        """
        init_weights = getattr(super(), "init_weights", None)
        if init_weights is None:
            raise AttributeError(
                f"{self.stock_class.__name__} has no init_weights(): make the model where its "
                "weights are to be, or load weights."
            )
        with swapped_for_dense(self):
            init_weights(*args, **kwargs)

    def load_pretrained(self: Any, *args: Any, **kwargs: Any) -> None:
        """Load a file of another library, such as Google's ``.npz``, as the stock class does.

        It writes into the parameters, so it gets those of a dense model. The experts then become
        copies or parts of these, as from any dense checkpoint.

        Raises:
            NotImplementedError: if the stock class reads no such files.
        """
        load = getattr(super(), "load_pretrained", None)
        if load is None:
            raise NotImplementedError(f"{self.stock_class.__name__} loads no NumPy checkpoint.")
        with swapped_for_dense(self):
            load(*args, **kwargs)
            weights = self.state_dict()
        self.load_state_dict(weights)

    def forward_intermediates(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Return features as the stock class does."""
        # features_only=True calls this method directly, so the model's forward hook does not run.
        begin_forward(self)
        count_forward(self)
        return super().forward_intermediates(*args, **kwargs)  # type: ignore[misc]

    def prune_intermediate_layers(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Remove blocks as the stock class does, and warn if some have experts."""
        experts = len(moe_layers(self))
        indices = super().prune_intermediate_layers(*args, **kwargs)  # type: ignore[misc]
        lost = experts - len(moe_layers(self))
        if lost:
            _logger.warning(_LEFT_OUT, f"{lost} of {experts}")
        return indices

    def no_weight_decay(self: Any) -> set[str]:
        """Return the names of parameters without weight decay: the stock model's, experts' biases.

        Under layer decay timm recognises a bias by its single dimension, but the experts' biases
        have two.
        """
        of_stock = getattr(super(), "no_weight_decay", set)  # Some families lack the method.
        return {*of_stock(), *expert_biases(self)}

    def restore_stock_class(self: Any) -> None:
        """Turn into an instance of the stock class.

        :func:`timm_moe.to_dense` calls this once the experts are gone.
        """
        self.__class__ = self.stock_class
        state_as_stock(self)


def constructor_arguments(known_class: type) -> frozenset[str]:
    """Return the names of the arguments of a class's constructor and its bases' constructors."""
    constructors: list[Any] = [
        vars(base)["__init__"] for base in known_class.__mro__ if "__init__" in vars(base)
    ]
    parameters = [
        parameter
        for init in constructors
        for parameter in inspect.signature(init).parameters.values()
    ]
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return frozenset(parameter.name for parameter in parameters if parameter.kind not in variadic)


def architecture_args(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that the exported dense model needs.

    Options of experts and of loading are left out, and drop rates.
    """
    dropped = {*moe_options(kwargs.get("router", "random")), *_NOT_ARCHITECTURE}
    return {
        name: value
        for name, value in kwargs.items()
        if name not in dropped and not name.endswith(RATES)
    }


def note_dense_form(model: nn.Module, architecture: str, kwargs: dict[str, Any]) -> None:
    """Note on a model with experts the name and the arguments of its dense form.

    A feature extractor has no dense form, since it is never exported. One that holds the stages
    without their model (timm's FeatureListNet) gets the hooks of that model. If no stage with
    experts is left, a warning says so.

    Args:
        model: a new model, or timm's feature extractor around it.
        architecture: registered name of the dense form.
        kwargs: arguments of the new model, of which the dense form needs some.
    """
    if isinstance(model, MoeMixin):
        model.stock_form = StockForm(architecture, architecture_args(kwargs))
    elif not any(isinstance(module, MoeMixin) for module in model.modules()):
        layers = moe_layers(model)
        if layers:
            add_hooks(model, layers.values())
        else:
            _logger.warning(_LEFT_OUT, "All")


def state_as_stock(model: nn.Module) -> None:
    """Give a dense model the name and the arguments of its ``stock_form``, if it has one."""
    form = vars(model).pop("stock_form", None)
    if form is not None:
        change_pretrained_cfg(model, architecture=form.architecture)
        _note_args(model, form.args)


def _note_args(model: Any, args: dict[str, Any]) -> None:
    """Note on a dense model the arguments by which timm makes it.

    timm's ``create_model`` notes a model's arguments so, ``set_input_size`` and
    ``reset_classifier`` note their changes, and timm reads them when the model is saved.

    Args:
        model: the model, of the class that timm makes.
        args: its arguments at creation. Of those that timm has noted, the class may not take all.
    """
    noted = architecture_args(getattr(model, "_model_args", None) or {})
    taken = constructor_arguments(type(model)).union(args)
    own = {name: value for name, value in noted.items() if name in taken}
    model._model_args = {**args, **own}


def moe_class(stock_class: type[nn.Module], module: str) -> Any:
    """Make ``Moe<Class>``, the class with expert layers, for the module of this name."""
    name = stock_class.__name__
    namespace = {
        "__module__": module,
        "__doc__": f"{name} with expert layers.",
        "stock_class": stock_class,
    }
    return type(f"Moe{name}", (MoeMixin, stock_class), namespace)
