"""The smallest true world for the baselines: pixels are latents, data is Gaussian, and the network is its exact answer.

Every network and every filter is linear here, so gradients through whole chains have closed forms.
"""

from typing import Any

import torch
from torch import Tensor

from engine.counterfactual import CounterfactualSet
from engine.methods import METHODS, AnySettings
from engine.methods.search import MethodSettings, Tally, Try
from engine.prior import Prior
from engine.trajectory import Originals
from tests.engine.test_loop import Sides, gaussian_prior, images

BASELINES = [name for name in METHODS if name != "sce-lite-hq"]
SHORT: dict[str, dict[str, Any]] = {
    "sce-lite-hq": {
        "steps": 8,
        "strength": 0.75,
        "eta": 0.15,
        "normalise": True,
        "tau": 0.3,
        "blur": 1.0,
        "margin": None,
        "micro_batch": 1,
    },
    "dime": {"steps": 12, "strength": 0.5, "guidance": (20.0, 60.0)},
    "fastdime": {"steps": 12, "strength": 0.5, "guidance": (20.0, 60.0)},
    "fastdime-2": {"steps": 12, "strength": 0.5, "guidance": (20.0, 60.0)},
    "fastdime-2+": {"steps": 12, "strength": 0.5, "guidance": (20.0, 60.0)},
    "ace": {"steps": 10, "strength": 0.3, "iterations": (12,), "step_size": 0.05, "dilation": 3},
    "sce": {"steps": 20, "strength": 0.2, "iterations": (12,), "rate": 20.0, "dilation": 3, "threshold": 0.5},
    "diffeocf": {"iterations": (40,), "rate": 0.05},
    "dive": {"iterations": (20, 60), "rate": 0.05},
}


def short(name: str, **changes: Any) -> AnySettings:
    """A method's settings with few steps, one sample per network call, and some of them changed."""
    return METHODS[name].defaults.changed(**{**SHORT[name], "micro_batch": 1, **changes})


def run(name: str, x0: Tensor, prior: Prior | None = None, **options: Any) -> list[CounterfactualSet]:
    """Counterfactuals of pictures by a method on the Gaussian world."""
    settings = options.pop("settings", None) or short(name)
    prior = prior or gaussian_prior(flow=False)
    return METHODS[name](prior, Sides(), Sides(10.0), x0, [1] * len(x0), settings, **options)


def one_try(prior: Prior, x0: Tensor, settings: MethodSettings, source: Any = None) -> Try:
    """A try at pictures outside of any search."""
    path = prior.path(settings.steps, settings.strength, x0.shape[2], x0.shape[3])
    y = torch.ones(len(x0), dtype=torch.long)
    return Try(
        prior=prior,
        path=path,
        source=source,
        f=Sides(),
        settings=settings,
        originals=Originals(x0, prior.encode(x0), y, None),
        closed=torch.zeros_like(x0[:, :1]),
        seeds=tuple(range(len(x0))),
        ks=range(1),
        value=1.0,
        watch=lambda step, steps: None,
        perceptual=None,
        tally=Tally.of(len(x0)),
    )


__all__ = ["BASELINES", "SHORT", "Sides", "gaussian_prior", "images", "one_try", "run", "short"]
