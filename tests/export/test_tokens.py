"""Each pass keeps what a graph computes, for every batch, and leaves the operators that it promises to leave."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.prior import SD3Network
from engine.runtime.onnx_runtime import open_session
from export.trace import trace
from export.translate import translate
from tests.engine.test_prior import transformer

WIDTH = 8


def weights(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def simplified(function: Callable[..., Tensor], *examples: Tensor, free: list[bool]) -> str:
    """The code of a graph that computes what the function does, at the batch it was traced with and at another."""
    graph = trace(function, examples, free, gradient=False)
    larger = [torch.cat([x, 2 * x + 1, x.cos()]) if batch else x for x, batch in zip(examples, free, strict=True)]
    for inputs in (examples, larger):
        torch.testing.assert_close(graph(*inputs), function(*inputs), rtol=1e-5, atol=1e-5)
    return str(graph.code)


def test_what_follows_from_the_timestep_alone_is_computed_once() -> None:
    matrix, bias = weights(1, WIDTH), weights(WIDTH)

    def function(x: Tensor, t: Tensor) -> Tensor:
        embedding = F.silu(t.expand(len(x))[:, None] @ matrix + bias)  # [B, WIDTH]
        return x * embedding[:, None]

    code = simplified(function, torch.randn(2, 5, WIDTH), torch.tensor(0.7), free=[True, False])
    assert "sym_size" not in code.replace("sym_size_int = None", "")  # nothing asks for the batch any more


def test_constants_of_every_sample_fold_away() -> None:
    """A null prompt, repeated for the batch and embedded, is a constant that is added."""
    tokens, matrix = weights(1, 3, 4), weights(4, WIDTH)
    code = simplified(lambda x: x + tokens.expand(len(x), -1, -1) @ matrix, torch.randn(2, 3, WIDTH), free=[True])
    assert "mm" not in code and "expand" not in code


def test_values_of_one_sample_are_repeated_where_they_have_to_be() -> None:
    """Joined along the tokens, one repeated value and one per sample have to have the same batch."""
    tokens = weights(1, 3, WIDTH)
    code = simplified(lambda x: torch.cat([x, tokens.expand(len(x), -1, -1)], 1), torch.randn(2, 2, WIDTH), free=[True])
    assert code.count("aten.expand") == 1


def test_linear_maps_of_one_input_are_one() -> None:
    maps = [nn.Linear(WIDTH, width).requires_grad_(False) for width in (4, 6, 2)]
    code = simplified(lambda x: torch.cat([m(x).sin() for m in maps], -1), torch.randn(2, 3, WIDTH), free=[True])
    assert code.count("aten.addmm") == 1 and code.count("aten.split_with_sizes") == 1


def test_a_linear_map_of_a_part_is_one_product_of_rows() -> None:
    """Of a tensor with gaps torch records a batch of products with a repeated matrix."""
    layer = nn.Linear(WIDTH, 4).requires_grad_(False)
    code = simplified(lambda x: layer(x[:, :2]), torch.randn(3, 5, WIDTH), free=[True])
    assert code.count("aten.addmm") == 1 and "bmm" not in code and "expand" not in code


def test_a_norm_takes_the_scale_and_the_shift() -> None:
    def function(x: Tensor, scale: Tensor) -> Tensor:
        return F.layer_norm(x, [WIDTH]) * (1 + scale) + 2 * scale

    code = simplified(function, torch.randn(2, 3, WIDTH), torch.randn(1, 1, WIDTH), free=[True, False])
    assert "None, None" not in code and code.count("aten.mul") == 1  # 2·scale, of one row


def test_a_scale_that_differs_between_samples_stays_outside_the_norm() -> None:
    function: Callable[..., Tensor] = lambda x, s: F.layer_norm(x, [WIDTH]) * s + s  # noqa: E731
    code = simplified(function, torch.randn(2, 3, WIDTH), torch.randn(2, 1, WIDTH), free=[True, True])
    assert "None, None" in code


def test_attention_is_two_products_and_one_transpose_of_all_heads() -> None:
    maps = [nn.Linear(WIDTH, WIDTH).requires_grad_(False) for _ in range(3)]

    def function(x: Tensor) -> Tensor:
        q, k, v = (m(x).view(len(x), -1, 2, WIDTH // 2).transpose(1, 2) for m in maps)
        return F.scaled_dot_product_attention(q, k, v)

    code = simplified(function, torch.randn(2, 5, WIDTH), free=[True])
    assert code.count("aten.matmul") == 2 and "bmm" not in code
    assert code.count("aten.transpose") == 2  # of all heads, and of the keys


def test_two_streams_are_joined_once() -> None:
    streams = [[nn.Linear(WIDTH, WIDTH).requires_grad_(False) for _ in range(3)] for _ in range(2)]

    def function(x: Tensor, c: Tensor) -> Tensor:
        parts = [
            [m(y).view(len(y), -1, 2, WIDTH // 2).transpose(1, 2) for m in maps]
            for y, maps in zip((x, c), streams, strict=True)
        ]
        q, k, v = (torch.cat(pair, dim=2) for pair in zip(*parts, strict=True))
        return F.scaled_dot_product_attention(q, k, v)

    code = simplified(function, torch.randn(2, 5, WIDTH), torch.randn(2, 3, WIDTH), free=[True, True])
    assert code.count("aten.cat") == 1 and code.count("aten.addmm") == 2


def test_activations_between_linear_maps_work_on_rows() -> None:
    layers = nn.Sequential(nn.Linear(WIDTH, 4), nn.GELU("tanh"), nn.Linear(4, WIDTH)).requires_grad_(False)
    code = simplified(lambda x: x + layers(x), torch.randn(2, 3, WIDTH), free=[True])
    assert code.count("aten.reshape") == 2  # to rows, and back at the end


def test_a_reshape_that_only_looks_the_same_at_one_batch_stays() -> None:
    """[B, 2] to [2, B] keeps the shape of two samples and of no other number."""
    code = simplified(lambda x: x.reshape(2, -1).T * 1.5, torch.randn(2, 2), free=[True])
    assert "aten.reshape" in code


@pytest.mark.parametrize("free", [False, True])
def test_a_small_sd3_in_few_operators(free: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = transformer(pooled=10)
    network = SD3Network(model, torch.randn(1, 3, 16), torch.randn(1, 10)).eval().requires_grad_(False)
    examples = (torch.randn(2, 4, 8, 8), torch.tensor(500.0))
    graph = trace(network, examples, [free, False], gradient=False)
    program = translate(graph, examples, [free, False], ["z", "t"], ["v"])
    program.save(str(tmp_path / "graph.onnx"))
    z = torch.randn(3 if free else 2, 4, 8, 8)
    (found,) = open_session((tmp_path / "graph.onnx").read_bytes()).run(
        None, {"z": z.numpy(), "t": examples[1].numpy()}
    )
    torch.testing.assert_close(torch.from_numpy(found), network(z, examples[1]), rtol=1e-4, atol=1e-5)
    kinds = [node.op_type for node in program.model.graph]
    # Both embeddings of the timestep, all modulations at once; per layer two streams of queries and outputs, and their
    # feed-forwards; the last layer drops one stream's; the output.
    assert kinds.count("Gemm") == 3 + 2 * 2 + (2 + 4) + (1 + 2) + 1
    assert kinds.count("MatMul") == 4 and kinds.count("Unsqueeze") <= 1
