"""How each backward operator is written in forward operators, so that a traced gradient can leave torch.

torchlib knows no backward operators. A rule here is a decomposition that `trace` applies while it records autograd's
work: convolutions stay convolutions (never ConvTranspose, which TensorRT 11 has no bf16 tactic for), pooling becomes
reshapes and sums, norms take their statistics in float32 whatever the precision around them. Only gradients with
respect to activations exist: weights are frozen, and a rule that is asked for a weight's gradient refuses.

Shapes: B batch, C channels, H W input size, h w output size, G groups.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch.utils._python_dispatch import _disable_current_modes

from engine.errors import ModelError

aten = torch.ops.aten
Rule = Callable[..., Any]
Pair = list[int] | tuple[int, ...]

# torch's own decompositions, where they end in plain arithmetic.
BORROWED = (
    aten.tanh_backward,
    aten.sigmoid_backward,
    aten.silu_backward,
    aten.gelu_backward,
    aten.elu_backward,
    aten.mish_backward,
    aten.hardtanh_backward,
    aten.hardswish_backward,
    aten.hardsigmoid_backward,
    aten.log_sigmoid_backward,
    aten.glu_backward,
    aten._prelu_kernel_backward,
    aten._softmax_backward_data,
    aten._log_softmax_backward_data,
    aten.native_layer_norm_backward,
)


class UnsupportedOperator(ModelError):
    """A network uses an operator whose gradient has no rule."""


def convolution_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Any,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    transposed: bool,
    output_padding: Pair,
    groups: int,
    output_mask: list[bool],
) -> tuple[Tensor | None, None, None]:
    """The input's gradient: a convolution of stride 1 with flipped kernels whose input and output channels are swapped.

    Constant folding turns the flipped kernels into weights. A dilated convolution with a stride first puts zeros
    between the gradient's rows and columns.
    """
    if output_mask[1] or output_mask[2]:
        raise UnsupportedOperator(
            "The weights of a convolution require a gradient; freeze the network before exporting."
        )
    if transposed or grad.ndim != 4:
        raise UnsupportedOperator("Only 2-D convolutions that are not transposed have an exportable gradient.")
    if not output_mask[0]:
        return None, None, None
    if tuple(stride) != (1, 1) and tuple(dilation) == (1, 1):
        return strided_backward(grad, x, weight, stride, padding, groups), None, None
    outputs, inputs, *kernel = weight.shape
    flipped = weight.reshape(groups, outputs // groups, inputs, *kernel).transpose(1, 2)
    flipped = flipped.reshape(groups * inputs, outputs // groups, *kernel).flip((2, 3))
    low = [d * (k - 1) - p for d, k, p in zip(dilation, kernel, padding, strict=True)]
    # Rows and columns of the input that a strided convolution's last window does not reach get a gradient of zero.
    missed = [
        size - ((out - 1) * s - 2 * p + d * (k - 1) + 1)
        for size, out, s, p, d, k in zip(x.shape[2:], grad.shape[2:], stride, padding, dilation, kernel, strict=True)
    ]
    spread = insert_zeros(grad, stride)
    high = [a + m - (s - 1) for a, m, s in zip(low, missed, stride, strict=True)]
    if low == high and min(low) >= 0:
        return aten.convolution(spread, flipped, None, [1, 1], low, dilation, False, [0, 0], groups), None, None
    spread = aten.constant_pad_nd(spread, [low[1], high[1], low[0], high[0]], 0.0)
    return aten.convolution(spread, flipped, None, [1, 1], [0, 0], dilation, False, [0, 0], groups), None, None


def strided_backward(grad: Tensor, x: Tensor, weight: Tensor, stride: Pair, padding: Pair, groups: int) -> Tensor:
    """The same for a stride: one small convolution gives all pixels of a place as channels, which are then laid out.

    Pixel i·s + a of the input meets the gradient's place i + m with the kernel's tap a + p - m·s. Zeros between the
    gradient's places would cost s² times the multiplications, nearly all of them with zeros.
    """
    b, (H, W) = grad.shape[0], x.shape[2:]
    outputs, inputs, *kernel = weight.shape
    first = [-((k - 1 - p) // s) for k, p, s in zip(kernel, padding, stride, strict=True)]  # of all m
    last = [(s - 1 + p) // s for p, s in zip(padding, stride, strict=True)]
    taps = [high - low + 1 for low, high in zip(first, last, strict=True)]
    places = [-(-size // s) for size, s in zip((H, W), stride, strict=True)]
    before = [high * s - p for high, s, p in zip(last, stride, padding, strict=True)]
    after = [s * n - k - a for s, n, k, a in zip(stride, taps, kernel, before, strict=True)]
    whole = aten.constant_pad_nd(weight, [before[1], after[1], before[0], after[0]], 0.0)
    split = whole.reshape(groups, outputs // groups, inputs, taps[0], stride[0], taps[1], stride[1]).flip((3, 5))
    pixels = split.permute(0, 2, 4, 6, 1, 3, 5)
    pixels = pixels.reshape(groups * inputs * stride[0] * stride[1], outputs // groups, *taps)
    low = [-m for m in first]
    high = [n + m - size for n, m, size in zip(places, last, grad.shape[2:], strict=True)]
    if low != high or min(low) < 0:
        grad, low = aten.constant_pad_nd(grad, [low[1], high[1], low[0], high[0]], 0.0), [0, 0]
    made = aten.convolution(grad, pixels, None, [1, 1], low, [1, 1], False, [0, 0], groups)
    tiles = made.reshape(b, groups * inputs, *stride, *places).permute(0, 1, 4, 2, 5, 3)
    picture = tiles.reshape(b, groups * inputs, places[0] * stride[0], places[1] * stride[1])
    return picture if picture.shape[2:] == x.shape[2:] else picture[:, :, :H, :W]


def insert_zeros(x: Tensor, stride: Pair) -> Tensor:
    """[B, C, h, w] to [B, C, h·s, w·s]: s - 1 zeros after every row and column."""
    if tuple(stride) == (1, 1):
        return x
    b, c, h, w = x.shape
    spread = aten.constant_pad_nd(x.reshape(b, c, h, 1, w, 1), [0, stride[1] - 1, 0, 0, 0, stride[0] - 1], 0.0)
    return spread.reshape(b, c, h * stride[0], w * stride[1])


def upsample_nearest2d_backward(
    grad: Tensor, output_size: Pair, input_size: Pair, scales_h: float | None = None, scales_w: float | None = None
) -> Tensor:
    """Every tile of the gradient, summed: an average pool times the tile's size, which `fold` turns into one stride."""
    rows, columns = output_size[0] // input_size[2], output_size[1] // input_size[3]
    if (rows * input_size[2], columns * input_size[3]) != tuple(output_size):
        raise UnsupportedOperator("Nearest upsampling by a factor that is no integer has no exportable gradient.")
    return aten.avg_pool2d(grad, [rows, columns], [rows, columns]) * float(rows * columns)


def avg_pool2d_backward(
    grad: Tensor,
    x: Tensor,
    kernel: Pair,
    stride: Pair,
    padding: Pair,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor: int | None,
) -> Tensor:
    """Nearest upsampling for tiles; the adjoint of a depthwise convolution for windows that overlap."""
    kernel, padding = _pair(kernel), _pair(padding)
    stride = _pair(stride) if len(stride) else kernel
    if ceil_mode:
        raise UnsupportedOperator("Average pooling with ceil_mode has no exportable gradient.")
    area = divisor or kernel[0] * kernel[1]
    channels = x.shape[1]
    tiles = kernel == stride and padding == (0, 0)
    if tiles and all(size % k == 0 for size, k in zip(x.shape[2:], kernel, strict=True)):
        # Divided before it is spread: there `fold` finds the convolution that takes the division over.
        return aten.upsample_nearest2d(grad / float(area), list(x.shape[2:]), float(kernel[0]), float(kernel[1]))
    if padding != (0, 0) and not count_include_pad and divisor is None:
        with _disable_current_modes():
            ones = torch.ones(1, 1, int(x.shape[2]), int(x.shape[3]))
            counts = torch.nn.functional.avg_pool2d(ones, kernel, stride, padding, count_include_pad=True) * area
        grad, area = grad / counts.to(grad.dtype), 1
    with _disable_current_modes():
        weight = torch.full((int(channels), 1, *kernel), 1.0 / area, dtype=grad.dtype)
    mask = [True, False, False]
    return convolution_backward(grad, x, weight, None, stride, padding, (1, 1), False, (0, 0), channels, mask)[0]  # type: ignore[return-value]


def max_pool2d_with_indices_backward(
    grad: Tensor,
    x: Tensor,
    kernel: Pair,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    ceil_mode: bool,
    indices: Tensor,
) -> Tensor:
    """Each window's gradient goes to its first maximum, found again offset by offset: no scatter, no index tensor."""
    kernel, padding, dilation = _pair(kernel), _pair(padding), _pair(dilation)
    stride = _pair(stride) if len(stride) else kernel
    if ceil_mode or dilation != (1, 1):
        raise UnsupportedOperator("Max pooling with ceil_mode or dilation has no exportable gradient.")
    (h, w), (H, W) = grad.shape[2:], x.shape[2:]
    lowest = torch.finfo(x.dtype).min
    padded = aten.constant_pad_nd(x, [padding[1], padding[1], padding[0], padding[0]], lowest)
    rows, columns = padded.shape[2:]
    offsets = [(a, b) for a in range(kernel[0]) for b in range(kernel[1])]

    def window(a: int, b: int) -> Tensor:
        return padded[:, :, a : a + (h - 1) * stride[0] + 1 : stride[0], b : b + (w - 1) * stride[1] + 1 : stride[1]]

    largest = window(0, 0)
    for a, b in offsets[1:]:
        largest = torch.maximum(largest, window(a, b))
    open_ = torch.ones_like(grad)
    total = None
    for a, b in offsets:
        hit = (window(a, b) == largest).to(grad.dtype) * open_
        open_ = open_ - hit
        spread = insert_zeros(grad * hit, stride)
        right, bottom = columns - b - w * stride[1], rows - a - h * stride[0]
        moved = aten.constant_pad_nd(spread, [b, right, a, bottom], 0.0)
        total = moved if total is None else total + moved
    assert total is not None
    return total[:, :, padding[0] : padding[0] + H, padding[1] : padding[1] + W]


def adaptive_avg_pool2d(x: Tensor, size: Pair) -> Tensor:
    """Plain average pooling where the sizes divide."""
    kernel = _tiles(x, size)
    return aten.avg_pool2d(x, kernel, kernel)


def adaptive_avg_pool2d_backward(grad: Tensor, x: Tensor) -> Tensor:
    """The same, backwards."""
    kernel = _tiles(x, grad.shape[2:])
    return avg_pool2d_backward(grad, x, kernel, kernel, [0, 0], False, True, None)


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Eval-mode batch norm as scale and shift; `fold` moves the scale into the convolution before it."""
    if training:
        raise UnsupportedOperator("Batch norm is in training mode; call eval() before exporting.")
    scale = _batch_norm_scale(weight, var, eps)
    shift = -mean.float() * scale if bias is None else bias.float() - mean.float() * scale
    empty = x.new_zeros(0)
    return x * _per_channel(scale, x) + _per_channel(shift, x), empty, empty


def batch_norm_no_training(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The operator that torch records for batch norm outside training."""
    return batch_norm(x, weight, bias, mean, var, False, momentum, eps)


def batch_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    var: Tensor,
    save_mean: Tensor | None,
    save_rstd: Tensor | None,
    training: bool,
    eps: float,
    output_mask: list[bool],
) -> tuple[Tensor | None, None, None]:
    """The gradient times the scale."""
    if training or output_mask[1] or output_mask[2]:
        raise UnsupportedOperator("Batch norm has to be frozen and in eval mode before exporting.")
    return grad * _per_channel(_batch_norm_scale(weight, var, eps), grad), None, None


def group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, N: int, C: int, HxW: int, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Group norm with statistics in float32; also gives what its gradient needs."""
    values = x.float().reshape(N, groups, -1)
    mean = values.mean(dim=2, keepdim=True)
    centred = values - mean
    rstd = (centred.square().mean(dim=2, keepdim=True) + eps).rsqrt()
    out = (centred * rstd).reshape(x.shape)
    if weight is not None:
        out = out * _per_channel(weight.float(), out)
    if bias is not None:
        out = out + _per_channel(bias.float(), out)
    return out.to(x.dtype), mean.reshape(N, groups), rstd.reshape(N, groups)


def group_norm_forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, N: int, C: int, HxW: int, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Group norm whose gradient is not wanted stays one operator, in float32."""
    if x.dtype == torch.float32:
        return NotImplemented
    weight, bias = (None if p is None else p.float() for p in (weight, bias))
    out, mean, rstd = aten.native_group_norm(x.float(), weight, bias, N, C, HxW, groups, eps)
    return out.to(x.dtype), mean, rstd


def group_norm_backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    N: int,
    C: int,
    HxW: int,
    groups: int,
    output_mask: list[bool],
) -> tuple[Tensor | None, None, None]:
    """rstd·(g - mean(g) - n·mean(g·n)) in float32, with n the normalised input and g the weighted gradient."""
    if output_mask[1] or output_mask[2]:
        raise UnsupportedOperator(
            "The weights of a group norm require a gradient; freeze the network before exporting."
        )
    rstd = rstd.reshape(N, groups, 1)
    n = (x.float().reshape(N, groups, -1) - mean.reshape(N, groups, 1)) * rstd
    g = grad.float()
    if weight is not None:
        g = g * _per_channel(weight.float(), g)
    g = g.reshape(N, groups, -1)
    inner = g - g.mean(dim=2, keepdim=True) - n * (g * n).mean(dim=2, keepdim=True)
    return (inner * rstd).reshape(x.shape).to(x.dtype), None, None


def softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """Softmax of half-precision scores, in float32."""
    if x.dtype == torch.float32:
        return NotImplemented
    return aten._softmax(x.float(), dim, False).to(torch.float32 if half_to_float else x.dtype)


def safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Plain softmax: rows of scores that are all -inf, which this operator guards against, need a mask, and none is."""
    return aten._softmax(x.float(), dim, False).to(dtype or x.dtype)


def softplus(x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    """max(x, 0) + log(1 + exp(-|beta·x|)) / beta: nothing can overflow, and every part of it is a fast operator.

    ONNX's Softplus runs element by element on a CPU, at eight times the cost.
    """
    return torch.relu(x) + torch.log1p(torch.exp(x.abs() * -float(beta))) * (1.0 / float(beta))


def softplus_backward(grad: Tensor, x: Tensor, beta: float, threshold: float) -> Tensor:
    """g·sigmoid(beta·x): beyond the threshold it rounds to g anyway, and nothing can overflow."""
    return grad * torch.sigmoid(x * beta)


def leaky_relu_backward(grad: Tensor, x: Tensor, slope: float, is_result: bool) -> Tensor:
    """g·(slope + (1 - slope)·1[x > 0]); the sign of the result is the sign of x."""
    return grad * ((x > 0).to(grad.dtype) * (1.0 - slope) + slope)


def threshold_backward(grad: Tensor, x: Tensor, threshold: float) -> Tensor:
    """The gradient where x exceeds the threshold, as a product: a mask of zeros and ones costs one pass."""
    return grad * (x > threshold).to(grad.dtype)


def nll_loss_forward(
    log_p: Tensor, y: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Minus the target's log-probability, per sample."""
    if reduction != 0 or weight is not None:
        raise UnsupportedOperator("Only the unreduced, unweighted cross-entropy is exported.")
    return -(log_p * _one_hot(y, log_p)).sum(dim=1), log_p.new_zeros(())


def nll_loss_backward(
    grad: Tensor,
    log_p: Tensor,
    y: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Tensor:
    """-g at the target's place."""
    return -_one_hot(y, log_p) * grad[:, None]


def rsub(x: Tensor, other: float, alpha: float = 1) -> Tensor:
    """other - alpha·x, as torchlib knows it: the derivatives of tanh and sigmoid are written with it."""
    return aten.add.Scalar(aten.neg(x) if alpha == 1 else aten.mul.Scalar(x, -alpha), other)


def slice_backward(grad: Tensor, sizes: Pair, dim: int, start: int, end: int, step: int) -> Tensor:
    """The gradient between zeros."""
    if step != 1:
        raise UnsupportedOperator("A slice with a step has no exportable gradient.")
    size, dim = sizes[dim], dim % len(sizes)
    start = min(max(start + size if start < 0 else start, 0), size)
    pads = [0, 0] * (len(sizes) - 1 - dim) + [start, size - start - grad.shape[dim]]
    return aten.constant_pad_nd(grad, pads, 0.0)


def select_backward(grad: Tensor, sizes: Pair, dim: int, index: int) -> Tensor:
    """The gradient as the only row that is not zero."""
    dim = dim % len(sizes)
    index = index + sizes[dim] if index < 0 else index
    return slice_backward(grad.unsqueeze(dim), sizes, dim, index, index + 1, 1)


def resize_rules(forward: Any, backward: Any) -> dict[Any, Rule]:
    """Separable resizing as two products with constant matrices, and its gradient with the transposed ones.

    The matrices are read off the operator itself, applied to unit vectors, so that every mode is exact.
    """

    def matrix(before: int, after: int, flags: tuple[Any, ...]) -> Tensor:
        with _disable_current_modes():
            units = torch.eye(before).reshape(1, before, before, 1)
            return forward(units, [after, 1], *flags)[0, :, :, 0].T.contiguous()  # [after, before]

    def resize(x: Tensor, output_size: Pair, *flags: Any) -> Tensor:
        rows = matrix(int(x.shape[2]), int(output_size[0]), _without_scales(flags))
        columns = matrix(int(x.shape[3]), int(output_size[1]), _without_scales(flags))
        return rows.to(x.dtype) @ x @ columns.T.to(x.dtype)

    def resize_backward(grad: Tensor, output_size: Pair, input_size: Pair, *flags: Any) -> Tensor:
        rows = matrix(int(input_size[2]), int(output_size[0]), _without_scales(flags))
        columns = matrix(int(input_size[3]), int(output_size[1]), _without_scales(flags))
        return rows.T.to(grad.dtype) @ grad @ columns.to(grad.dtype)

    return {forward: resize, backward: resize_backward}


def _without_scales(flags: tuple[Any, ...]) -> tuple[Any, ...]:
    """align_corners alone: scales would only repeat the sizes."""
    return flags[:1]


def _pair(value: Pair) -> tuple[int, int]:
    return (value[0], value[0]) if len(value) == 1 else (value[0], value[1])


def _tiles(x: Tensor, size: Pair) -> list[int]:
    if any(int(a) % int(b) for a, b in zip(x.shape[2:], size, strict=True)):
        raise UnsupportedOperator("Adaptive pooling to a size that does not divide its input cannot be exported.")
    return [int(a) // int(b) for a, b in zip(x.shape[2:], size, strict=True)]


def _batch_norm_scale(weight: Tensor | None, var: Tensor, eps: float) -> Tensor:
    scale = (var.float() + eps).rsqrt()
    return scale if weight is None else weight.float() * scale


def _per_channel(values: Tensor, like: Tensor) -> Tensor:
    """[C] as [1, C, 1, …] in the precision of `like`."""
    return values.reshape([1, -1, *([1] * (like.ndim - 2))]).to(like.dtype)


def _one_hot(y: Tensor, like: Tensor) -> Tensor:
    with _disable_current_modes():
        classes = torch.arange(int(like.shape[1]))
    return (y[:, None] == classes).to(like.dtype)


RULES: dict[Any, Rule] = {
    **get_decompositions(BORROWED),
    aten.convolution_backward.default: convolution_backward,
    aten.upsample_nearest2d_backward.default: upsample_nearest2d_backward,
    aten.avg_pool2d_backward.default: avg_pool2d_backward,
    aten.max_pool2d_with_indices_backward.default: max_pool2d_with_indices_backward,
    aten._adaptive_avg_pool2d.default: adaptive_avg_pool2d,
    aten._adaptive_avg_pool2d_backward.default: adaptive_avg_pool2d_backward,
    aten.native_batch_norm.default: batch_norm,
    aten._native_batch_norm_legit_no_training.default: batch_norm_no_training,
    aten.native_batch_norm_backward.default: batch_norm_backward,
    aten.native_group_norm.default: group_norm,
    aten.native_group_norm_backward.default: group_norm_backward,
    aten._softmax.default: softmax,
    aten._safe_softmax.default: safe_softmax,
    aten.softplus.default: softplus,
    aten.softplus_backward.default: softplus_backward,
    aten.leaky_relu_backward.default: leaky_relu_backward,
    aten.threshold_backward.default: threshold_backward,
    aten.nll_loss_forward.default: nll_loss_forward,
    aten.nll_loss_backward.default: nll_loss_backward,
    aten.rsub.Scalar: rsub,
    aten.slice_backward.default: slice_backward,
    aten.select_backward.default: select_backward,
    **resize_rules(aten.upsample_bilinear2d.default, aten.upsample_bilinear2d_backward.default),
    **resize_rules(aten._upsample_bilinear2d_aa.default, aten._upsample_bilinear2d_aa_backward.default),
    **resize_rules(aten.upsample_bicubic2d.default, aten.upsample_bicubic2d_backward.default),
    **resize_rules(aten._upsample_bicubic2d_aa.default, aten._upsample_bicubic2d_aa_backward.default),
}

FORWARD_RULES: dict[Any, Rule] = {**RULES, aten.native_group_norm.default: group_norm_forward}
"""For graphs without a gradient: norms stay whole."""
