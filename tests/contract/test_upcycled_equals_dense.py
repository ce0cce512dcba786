"""Promise: experts that are made of a dense checkpoint are copies of its network, and give it back.

Where the gates of a row sum to one and nothing is dropped, the model computes what the dense one
does; where gates scale the experts, it does not.
"""

import pytest
import timm
import torch
from common import FAMILIES, SMALL_VIT, families

import timm_moe

#: Options by which the gates of a row sum to one, and no choice is dropped.
WHOLE = {
    "random partition": {},
    "top-1": dict(gate_mode="renorm", aux_loss_weight=0.01),
    "top-2, capacity": dict(gate_mode="renorm", eval_capacity_factor="none"),
    "top-2, nothing dropped": dict(gate_mode="renorm"),
    "sigmoid, bias": {},
    "V-MoE": dict(gate_mode="renorm", eval_capacity_factor="none"),
    "image-level": dict(gate_mode="renorm", eval_capacity_factor="none"),
    "pBE": dict(gate_mode="renorm", eval_capacity_factor="none"),
}


def make(name, **further):
    model, options = FAMILIES[name]
    options = {**SMALL_VIT, "num_experts": 4, **options, **further}
    return timm.create_model(model, **options).eval()


@pytest.mark.parametrize("name", families())
def test_every_expert_is_a_copy_and_the_dense_model_comes_back(name):
    model = make(name)
    dense = timm_moe.to_dense(make(name))
    with torch.no_grad():
        for parameter in dense.parameters():
            parameter.normal_()
    model.load_state_dict(dense.state_dict())
    if name != "fine-grained":  # whose experts are parts of the network
        for parameter in timm_moe.expert_parameters(model).values():
            assert (parameter == parameter[0]).all()
    again = timm_moe.to_dense(model).state_dict()
    assert again.keys() == dense.state_dict().keys()
    for path, tensor in dense.state_dict().items():
        torch.testing.assert_close(again[path], tensor, rtol=1e-6, atol=1e-6, msg=path)


def outputs(name, images, **options):
    """Return log-probabilities of an upcycled model, and those of its dense one."""
    model = make(name, **options)
    dense = timm_moe.to_dense(make(name, **options)).eval()
    for parameter in dense.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.load_state_dict(dense.state_dict())
    # Ensembles give log-probabilities.
    return model(images).log_softmax(-1), dense(images).log_softmax(-1)


@pytest.mark.parametrize("name", families(WHOLE))
def test_it_computes_what_the_dense_model_does(name, images):
    actual, expected = outputs(name, images, **WHOLE[name])
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["top-1", "V-MoE"])
def test_with_probabilities_as_gates_it_computes_something_else(name, images):
    actual, expected = outputs(name, images, **{**WHOLE[name], "gate_mode": "prob"})
    assert (actual - expected).abs().max() > 1e-3
