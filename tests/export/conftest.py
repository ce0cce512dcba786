"""Shared by the tests of exports and pushes: checkpoints, and a Hub with its client."""

import argparse
import re

import pytest
import timm
import torch
from common import OPTIONS, SMALL_VIT
from hub_client import READ_TOKEN, TOKEN, Worker, client_environment
from hub_server import hub_server


@pytest.fixture
def checkpoint(ewa_vit, tmp_path):
    """What train.py saves."""
    args = argparse.Namespace(
        model="vit_tiny_ewa_moe",
        num_classes=5,
        model_kwargs=OPTIONS,
        img_size=32,
        mean=[0.1, 0.2, 0.3],
        crop_pct=0.5,
    )
    ema = {name: tensor / 2 for name, tensor in ewa_vit.state_dict().items()}
    state = {
        "epoch": 1,
        "arch": args.model,
        "args": args,
        "state_dict": ewa_vit.state_dict(),
        "state_dict_ema": ema,
    }
    torch.save(state, tmp_path / "model_best.pth.tar")
    return tmp_path / "model_best.pth.tar"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """What train.py leaves of an EWA model and of a routed one, each after two epochs."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("runs of somebody")
    for name in ("vit_tiny_ewa_moe", "vit_tiny_moe"):
        model = timm.create_model(name, **SMALL_VIT, num_experts=3)
        args = argparse.Namespace(
            model=name,
            num_classes=5,
            model_kwargs={**OPTIONS, "num_experts": 3},
            data_dir="/home/somebody/images",
            dataset="torch/cifar100",
            epochs=2,
            batch_size=64,
            opt="adamw",
            lr=1e-3,
            eval_metric="top1",
            model_ema=False,
            resume="/home/somebody/a run/last.pth.tar",
            kd_model_name="local-dir:/home/somebody/teacher",
            kd_temperature=1.0,
            mixup=0.0,
        )
        ema = {key: value / 2 for key, value in model.state_dict().items()}
        state = {
            "epoch": 1,
            "arch": name,
            "args": args,
            "state_dict": model.state_dict(),
            "state_dict_ema": ema,
        }
        (folder / name).mkdir()
        torch.save({**state, "metric": 51.25}, folder / name / "last.pth.tar")
        rows = [
            "epoch,train_loss,eval_loss,eval_top1,eval_top5,lr",
            "0,4,3.5,33,70,0.1",
            "1,3,2.5,51.25,81.5,0.05",
        ]
        (folder / name / "summary.csv").write_text("\n".join(rows) + "\n")
    return {name: folder / name / "last.pth.tar" for name in ("vit_tiny_ewa_moe", "vit_tiny_moe")}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with hub_server(tmp_path_factory.mktemp("hub")) as server:
        server.tokens = {TOKEN: ("user", "write"), READ_TOKEN: ("user", "read")}
        yield server


@pytest.fixture(scope="module")
def process(server, tmp_path_factory):
    folder = tmp_path_factory.mktemp("client")
    worker = Worker(folder, client_environment(folder, server.url))
    yield worker
    worker.stop()
    written = [*folder.rglob("*"), *server.folder.rglob("*")]
    leaks = [
        file
        for file in written
        if file.is_file() and re.search(rb"hf_\w*Secret", file.read_bytes())
    ]
    assert not leaks, "the token is in a file or an output"


@pytest.fixture
def hub(process, server):
    """The client, and a server without repositories."""
    server.reset()
    return process
