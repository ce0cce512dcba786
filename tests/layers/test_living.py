"""Objects that the package finds without a reference to them."""

import copy
import sys
import threading

import pytest
import torch
from timm.layers import Mlp
from torch import nn

from timm_moe.layers import EwaMlp, RandomPartition
from timm_moe.layers.living import living, register, unregister


def test_the_list_of_living_objects_bears_threads():
    class Item:
        pass

    class Other(Item):
        pass

    kept = [Item() for _ in range(3)]
    for item in kept:
        register(item)
    late = Other()
    register(late)
    assert living(Item) == [*kept, late]
    assert living(Other) == [late]
    register(kept[0])  # becomes the last
    unregister(kept[1])
    unregister(kept[1])
    del late
    assert living(Item) == [kept[2], kept[0]]
    added = [[Item() for _ in range(300)] for _ in range(4)]
    threads = [
        threading.Thread(target=lambda items=items: [register(item) for item in items])
        for items in added
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        seen = living(Item)
        assert len(set(map(id, seen))) == len(seen)
    assert {id(item) for items in added for item in items} <= {id(item) for item in living(Item)}


@pytest.mark.ci
def test_models_may_be_copied_while_another_thread_trains():
    layer = EwaMlp(Mlp(2, 2), RandomPartition(2))
    copies = []
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    thread = threading.Thread(
        target=lambda: copies.extend(copy.deepcopy(layer) for _ in range(300))
    )
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        while thread.is_alive():
            optimizer.step()
    finally:
        thread.join()
        sys.setswitchinterval(interval)
    assert len(copies) == 300
