"""One resumable, deterministic training loop for every embedded model.

A batch is a function of (seed, step) alone, so a run that was killed goes on from its last checkpoint to the same
weights. Checkpoints are safetensors, written to a temporary name and renamed.
"""

import copy
import math
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

CHECKPOINT_EVERY = 100
EMA_DECAY = 0.998


def generator(seed: int, step: int) -> torch.Generator:
    """A random generator of its own for each step."""
    return torch.Generator().manual_seed(seed * 1_000_003 + step)


def learning_rate(step: int, cycles: tuple[int, ...], peak: float, warmup: int = 100) -> float:
    """Per cycle a linear warm-up, then a cosine to zero; later cycles peak at half the height."""
    for index, steps in enumerate(cycles):
        if step < steps or index == len(cycles) - 1:
            break
        step -= steps
    if index > 0:
        peak /= 2
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def fit(
    model: nn.Module,
    loss: Callable[[nn.Module, int], Tensor],
    *,
    cycles: tuple[int, ...],
    peak_rate: float,
    checkpoint: Path,
    title: str,
    weight_decay: float = 1e-4,
) -> nn.Module:
    """Trains `model` with AdamW on `loss(model, step)` and returns its exponential moving average, in eval mode.

    `cycles` are the lengths of the learning rate's cycles; training takes as many steps as they have together.
    """
    steps = sum(cycles)
    average = copy.deepcopy(model).eval().requires_grad_(False)
    optimiser = torch.optim.AdamW(model.parameters(), lr=peak_rate, betas=(0.9, 0.99), weight_decay=weight_decay)
    start = _resume(checkpoint, model, average, optimiser)
    model.train()
    bar = tqdm(range(start, steps), desc=title, initial=start, total=steps, unit="step", mininterval=5)
    running = 0.0
    for step in bar:
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(step, cycles, peak_rate)
        value = loss(model, step)
        optimiser.zero_grad(set_to_none=True)
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        decay = min(EMA_DECAY, (step + 1) / (step + 10))
        _follow(average, model, decay)
        running = 0.98 * running + 0.02 * value.item() if step > start else value.item()
        if (step + 1) % CHECKPOINT_EVERY == 0 or step + 1 == steps:
            bar.set_postfix(loss=f"{running:.4f}")
            _save(checkpoint, step + 1, model, average, optimiser)
    return average


@torch.no_grad()
def _follow(average: nn.Module, model: nn.Module, decay: float) -> None:
    for kept, new in zip(average.parameters(), model.parameters(), strict=True):
        kept.lerp_(new, 1 - decay)
    for statistic, newer in zip(average.buffers(), model.buffers(), strict=True):
        statistic.copy_(newer)


def _save(path: Path, step: int, model: nn.Module, average: nn.Module, optimiser: torch.optim.AdamW) -> None:
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    tensors |= {f"average.{name}": tensor for name, tensor in average.state_dict().items()}
    for name, parameter in model.named_parameters():
        state = optimiser.state.get(parameter)
        if state:
            tensors[f"first.{name}"], tensors[f"second.{name}"] = state["exp_avg"], state["exp_avg_sq"]
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".partial")
    save_file({name: t.detach().clone().contiguous() for name, t in tensors.items()}, temporary, {"step": str(step)})
    temporary.replace(path)


def _resume(path: Path, model: nn.Module, average: nn.Module, optimiser: torch.optim.AdamW) -> int:
    """Loads a checkpoint if there is one and returns the step to go on from."""
    if not path.exists():
        return 0
    with safe_open(path, "pt") as file:
        step = int(file.metadata()["step"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - safe_open is not a mapping
    for prefix, module in (("model.", model), ("average.", average)):
        module.load_state_dict({k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)})
    for name, parameter in model.named_parameters():
        if f"first.{name}" in tensors:
            optimiser.state[parameter] = {
                "step": torch.tensor(float(step)),
                "exp_avg": tensors[f"first.{name}"],
                "exp_avg_sq": tensors[f"second.{name}"],
            }
    return step
