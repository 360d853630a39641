"""MobileNet-v2: torchvision's, from weights in a file or none, with BatchNorm at clients or averaged."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from asyncfed import Scenario, ScenarioError, run
from asyncfed.data import ClientData, client_data
from asyncfed.data.torchvision_import import import_torchvision
from asyncfed.mobilenet import mobilenet_v2
from asyncfed.problems import from_module, personalized
from asyncfed.protocols import HGP, PDBO, SGP, FedAvg, LocalSteps
from topologies import fully_connected, star

CLIENTS = 3
NARROW = 0.1


def narrow() -> torch.nn.Module:
    return mobilenet_v2(4, width=NARROW)


def data() -> ClientData:
    generator = np.random.default_rng(0)
    y = np.arange(24) % 4
    x = generator.normal(size=(24, 3, 32, 32)) + y[:, None, None, None] / 4
    return client_data((x.astype("float32"), y), clients=CLIENTS, seed=1)


def size(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_it_is_torchvisions_with_another_last_layer() -> None:
    assert size(mobilenet_v2(1000)) == 3_504_872  # as published
    assert size(mobilenet_v2(10)) == 3_504_872 - 990 * 1281
    theirs = import_torchvision("torchvision.models").mobilenet_v2(
        weights=None, num_classes=4, width_mult=NARROW
    )
    ours = narrow().eval()
    theirs.load_state_dict(ours.state_dict())
    images = torch.randn(2, 3, 40, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(ours(images), theirs.eval()(images))
    assert ours(images).shape == (2, 4)


def test_torchs_random_state_says_what_is_drawn_and_stays_where_it_is() -> None:
    before = torch.get_rng_state()
    first, again = narrow(), narrow()
    assert torch.equal(torch.get_rng_state(), before)
    assert all(map(torch.equal, first.parameters(), again.parameters()))
    problem = from_module(narrow, data())
    begun = [problem.init_inner(torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    name = "features.3.conv.0.0.weight"
    assert torch.equal(begun[0][name], begun[1][name])  # type: ignore[index]
    assert not torch.equal(begun[0][name], begun[2][name])  # type: ignore[index]


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_weights_come_from_a_file_and_another_head_stays_as_drawn(suffix: str, tmp_path: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        saved = mobilenet_v2(7, width=NARROW).state_dict()
    for name, value in saved.items():
        if name.endswith("running_mean"):
            value += 0.5
    path = tmp_path / f"weights{suffix}"
    if suffix == ".pth":
        without = {name: value for name, value in saved.items() if not name.endswith("num_batches_tracked")}
        torch.save(without, path)
    else:
        save_file(saved, path)
    same = mobilenet_v2(7, path, NARROW).state_dict()
    assert all(torch.equal(same[name], value) for name, value in saved.items())
    other = mobilenet_v2(4, str(path), NARROW).state_dict()
    for name, value in saved.items():
        if name.startswith("features"):
            assert torch.equal(other[name], value)
    assert torch.equal(other["classifier.1.weight"], narrow().state_dict()["classifier.1.weight"])


class _Harmful:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("written",)


def test_files_that_hold_no_such_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ScenarioError, match=r"there is no file nowhere\.pth with weights; .* leave out"):
        mobilenet_v2(4, "nowhere.pth")
    for name in ("text.pth", "text.safetensors"):
        Path(name).write_text("no weights at all")
        with pytest.raises(ScenarioError, match=rf"{name} cannot be read as weights .* give a \.safetensors"):
            mobilenet_v2(4, name)
    torch.save({"features": _Harmful()}, "harmful.pth")
    with pytest.raises(ScenarioError, match=r"harmful\.pth cannot be read as weights"):
        mobilenet_v2(4, "harmful.pth")
    assert not Path("written").exists()
    Path("folder.pth").mkdir()
    with pytest.raises(ScenarioError, match=r"folder\.pth cannot be read as weights .*directory"):
        mobilenet_v2(4, "folder.pth")
    torch.save([torch.zeros(2)], "list.pth")
    with pytest.raises(ScenarioError, match=r"list\.pth holds no state_dict"):
        mobilenet_v2(4, "list.pth")
    state = narrow().state_dict()
    torch.save(state, "narrow.pth")
    with pytest.raises(
        ScenarioError, match=r"another width: features\.0\.0\.weight has the shape \(8, 3, 3, 3\)"
    ):
        mobilenet_v2(4, "narrow.pth")
    torch.save(state | {"extra": torch.zeros(1)}, "more.pth")
    with pytest.raises(ScenarioError, match=r"not those of a mobilenet_v2: 'extra' is not one of them"):
        mobilenet_v2(4, "more.pth", NARROW)
    torch.save({name: value for name, value in state.items() if "features.2" not in name}, "fewer.pth")
    with pytest.raises(ScenarioError, match=r"'features\.2\.conv\.0\.0\.weight' is missing"):
        mobilenet_v2(4, "fewer.pth", NARROW)


def test_what_cannot_be_a_network_is_refused() -> None:
    with pytest.raises(ScenarioError, match="mobilenet_v2: classes is 0"):
        mobilenet_v2(0)
    with pytest.raises(ScenarioError, match=r"width is 9; it must be a number in \[0\.1, 4\]"):
        mobilenet_v2(4, width=9)


@pytest.mark.parametrize("kept", ["local", "averaged", "frozen"])
def test_clients_train_it_and_its_statistics_stay_travel_or_rest(kept: Any, tmp_path: Path) -> None:
    problem = from_module(narrow, data(), buffers=kept)
    protocol = FedAvg(1, LocalSteps(0.05, epochs=1, batch=4))
    result = run(
        Scenario(problem=problem, topology=star(CLIENTS), protocol=protocol),
        out=tmp_path / "run",
        progress=False,
    )
    models = [result.model(client=client) for client in range(CLIENTS)]
    module = narrow()
    module.load_state_dict(models[1])
    assert torch.isfinite(module.eval()(data().test.tensors[0])).all()
    begun = problem.init_inner(torch.Generator().manual_seed(0))
    assert not torch.equal(models[0]["features.0.0.weight"], begun["features.0.0.weight"])  # type: ignore[index]
    means = [model["features.0.1.running_mean"] for model in models]
    moved, alike = means[0].abs().max() > 0, torch.equal(means[0], means[1])
    assert (bool(moved), alike) == {
        "local": (True, False),
        "averaged": (True, True),
        "frozen": (False, True),
    }[kept]


def test_pdbo_gives_each_client_a_last_layer_of_its_own_on_a_body_in_common(tmp_path: Path) -> None:
    problem = from_module(narrow, data(), outer="classifier", buffers="frozen")
    protocol = PDBO(SGP(1, 0.02, batch=4), HGP(1), outer_steps=1, outer_lr=0.5)
    scenario = Scenario(problem=problem, topology=fully_connected(CLIENTS), protocol=protocol)
    result = run(scenario, out=tmp_path / "run", progress=False)
    heads = result.final["outer"]
    assert heads.shape == (CLIENTS, 4 * 1280 + 4)
    assert (heads[0] != heads[1]).any()
    assert torch.isfinite(heads).all()


def test_ensembles_and_label_weights_of_it_are_refused() -> None:
    with pytest.raises(
        ScenarioError, match=r"MobileNetV2 has buffers \(features\.0\.1\.running_mean\).*from_module"
    ):
        personalized("mobilenet", data(), narrow(), 4, personalize="mtl+da")
    dropping = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Dropout(0.1), torch.nn.Linear(3072, 4))
    with pytest.raises(
        ScenarioError, match=r"Sequential has dropout \(1\), and a personalized problem is of"
    ):
        personalized("dropping", data(), dropping, 4, personalize="mtl")
    assert personalized("resting", data(), dropping.eval(), 4, personalize="mtl").name == "resting-mtl"
