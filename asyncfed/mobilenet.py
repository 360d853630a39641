"""MobileNet-v2 (Sandler et al. 2018) as torchvision has it, with a linear layer to the classes at hand.

    problem = from_module(lambda: mobilenet_v2(10), data, buffers="local")       # drawn from the run's seed
    problem = from_module(mobilenet_v2(10, "mobilenet.pth"), data, buffers="averaged")

It has BatchNorm, whose running statistics are buffers, and dropout. So it is a module for `from_module`,
where one says what becomes of the former, and no text for problems that know parameters alone. Layers keep
torchvision's names (`features.…`, `classifier.1`), so that its weights can be loaded, and ours there.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from asyncfed.checks import PathLike, Range, checked
from asyncfed.data.torchvision_import import import_torchvision
from asyncfed.errors import ScenarioError
from asyncfed.models import Width
from asyncfed.reading import open_regular
from asyncfed.room import require_room

_HEAD = ("classifier.1.weight", "classifier.1.bias")
_FEATURES = 1280  # that the head looks at, or more where the network is wider


@checked
def mobilenet_v2(
    classes: Width, weights: PathLike | None = None, width: Annotated[float, Range(0.1, 4)] = 1.0
) -> nn.Module:
    """MobileNet-v2 for images of three colours (2,236,682 parameters with 10 classes).

    Parameters
    ----------
    classes
        Outputs of the linear layer that stands at the end in place of torchvision's 1,000.
    weights
        A file with its state_dict, such as torchvision's: a .safetensors, or what torch.save wrote (nothing
        but tensors is read of it). Where that has another number of classes, the last layer stays as drawn.
        None: everything is drawn as torchvision draws it.
    width
        A factor of all its numbers of channels.

    It is drawn from torch's random state, which stays where it is: `from_module` sets that by a run's seed.
    """
    require_room(
        8.0 * classes * _FEATURES * max(1.0, width), f"a mobilenet_v2 of {classes:,} classes", "give fewer"
    )
    models = import_torchvision("torchvision.models")
    with torch.random.fork_rng(devices=[]):
        module: nn.Module = models.mobilenet_v2(weights=None, num_classes=classes, width_mult=width)
    if weights is not None:
        module.load_state_dict(_fitting(module.state_dict(), Path(weights)))
    return module


def _fitting(own: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """The tensors of the file by name, and those of our own head where its head is another one."""
    found = _read(path)
    counters = {name for name in own if name.endswith("num_batches_tracked")}  # older files have none
    missing = [name for name in own if name not in found and name not in counters and name not in _HEAD]
    unknown = [name for name in found if name not in own]
    if missing or unknown:
        what = f"{missing[0]!r} is missing" if missing else f"{unknown[0]!r} is not one of them"
        raise ScenarioError(
            f"the weights in {path} are not those of a mobilenet_v2: {what}; give a state_dict of "
            "torchvision's mobilenet_v2"
        )
    if any(name not in found or found[name].shape != own[name].shape for name in _HEAD):
        found |= {name: own[name] for name in _HEAD}
    for name, value in own.items():
        if name in found and found[name].shape != value.shape:
            raise ScenarioError(
                f"the weights in {path} are of another width: {name} has the shape "
                f"{tuple(found[name].shape)}, here {tuple(value.shape)}; give the width that they have"
            )
    return own | found


def _read(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        with open_regular(path) as file:
            found: Any = (
                load_file(path)
                if path.suffix == ".safetensors"
                else torch.load(file, map_location="cpu", weights_only=True)
            )
    except FileNotFoundError as error:
        raise ScenarioError(
            f"there is no file {path} with weights; give its path, or leave out `weights` to draw them"
        ) from error
    except (SafetensorError, pickle.UnpicklingError, OSError, RuntimeError, ValueError, LookupError) as error:
        raise ScenarioError(
            f"{path} cannot be read as weights ({str(error).splitlines()[0]:.200}); give a .safetensors, or "
            "what torch.save(module.state_dict(), path) wrote"
        ) from error
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise ScenarioError(
            f"{path} holds no state_dict, which is tensors by name; write one with "
            "torch.save(module.state_dict(), path)"
        )
    return dict(found)
