"""The roofline model counts what closed forms say, and is never taken for a measurement."""

import csv
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.roofline import H100, Device, Work, count, main, measured, resnet_18, sd3_medium, step_calls


def test_counts_are_the_closed_forms() -> None:
    with torch.device("meta"):
        layer, x = nn.Linear(30, 50).half(), torch.zeros(8, 30, dtype=torch.half)
        conv, image = nn.Conv2d(4, 6, 3, padding=1, bias=False), torch.zeros(2, 4, 16, 16, requires_grad=True)
    work = count(lambda: layer(x), layer)
    assert work == Work(flops=2 * 8 * 30 * 50, activation_bytes=2 * 8 * (30 + 50), weight_bytes=2 * 31 * 50)
    conv.requires_grad_(False)
    forward = 2 * 2 * 16 * 16 * 6 * 4 * 9
    assert count(lambda: conv(image), conv).flops == forward
    # The gradient with respect to the input alone is one convolution more, not two.
    assert count(lambda: torch.autograd.grad(conv(1.0 * image).sum(), image), conv).flops == 2 * forward


def test_attention_keeps_its_scores_on_the_chip() -> None:
    """Two products forward, five backward; queries, keys, values and outputs move, the square of the tokens never."""
    heads, tokens, width = 2, 1024, 64
    shape = (1, heads, tokens, width)
    q, k, v = (torch.zeros(shape, dtype=torch.half, device="meta", requires_grad=True) for _ in range(3))
    product, tensor, row_sums = 2 * heads * tokens**2 * width, 2 * heads * tokens * width, 4 * heads * tokens
    forward = count(lambda: F.scaled_dot_product_attention(q, k, v))
    assert forward.flops == 2 * product
    assert forward.activation_bytes == pytest.approx(4 * tensor + row_sums, abs=64)  # a few bytes of random state
    both = count(lambda: torch.autograd.grad(F.scaled_dot_product_attention(q, k, v).sum(), (q, k, v)))
    assert both.flops == 7 * product
    assert both.activation_bytes < forward.activation_bytes + 8 * tensor + row_sums + 64 < heads * tokens**2 * 2


def test_the_floor_is_the_larger_of_both_and_weights_are_read_once_per_batch() -> None:
    device = Device("unit", flops=10.0, bandwidth=1.0)
    assert Work(100, 1, 0).seconds(device, 1) == 10.0
    assert Work(10, 1, 8).seconds(device, 1) == 9.0
    assert Work(10, 1, 8).seconds(device, 8) == 2.0


@pytest.mark.slow
def test_sd3_medium_at_128_pixels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two thousand million parameters; 64 image and 154 text tokens through them give 300 GFLOP."""
    prior, guide = sd3_medium(), resnet_18()
    transformer = prior.network.model
    assert sum(p.numel() for p in transformer.parameters()) == pytest.approx(2.03e9, rel=0.02)  # type: ignore[union-attr]
    tokens, width = 64 + 154, 1536
    network = count(step_calls(prior, guide, 128)[0], prior.network)
    # Per layer: query, key, value and output (4 w²) and the feed-forward (8 w²) of every token, and attention itself.
    dense = 24 * (2 * tokens * 12 * width**2 + 4 * tokens**2 * width)
    assert network.flops == pytest.approx(dense, rel=0.05)
    file = tmp_path / "roofline.csv"
    assert main(["--resolutions", "128", "--csv", str(file), "--measure"]) == 0
    (row,) = csv.DictReader(file.read_text().splitlines())
    assert row["kind"] == "model, not measured" and row["device"] == H100.name
    assert float(row["guidance_gflop"]) == pytest.approx(313, rel=0.1)
    out = capsys.readouterr().out
    assert out.startswith("MODEL, not a measurement")
    if not torch.cuda.is_available():
        assert "torch sees no CUDA device" in out
        assert measured(128, 1)["measured"] is False
