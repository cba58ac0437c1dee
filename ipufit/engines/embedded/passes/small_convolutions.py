"""Convolutions with few positions as matrix products.

Near the end of a network on small pictures a convolution has few positions and many weights. Torch
takes several times as long for it as for the product that it is, and multiplies weights that lie
over padding at every position: of a 3 x 3 kernel on a single value all but one.
"""

from __future__ import annotations

import functools
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ipufit.engines.embedded.passes.cpu_kernels import agree
from ipufit.engines.embedded.passes.simplify import value_of
from ipufit.engines.embedded.timing import fastest
from ipufit.tracing.capture import capture
from ipufit.utils import tree

_aten = torch.ops.aten

# With more positions or fewer weights torch's own are as fast.
_MOST_POSITIONS, _FEWEST_WEIGHTS = 8, 2**16

# The ways: as recorded, by products with all weights, and with those that see more than padding.
_CONVOLUTION, _ALL, _SEEING = "convolution", "all", "seeing"


def convolve_by_products(graph: fx.Graph) -> int:
    """Replace convolutions, and their backward, where products are faster; how many."""
    count = 0
    recorded: Dict[str, fx.Graph] = {}
    for node in list(graph.nodes):
        products = _BY_PRODUCTS.get(node.target)
        if products is None or not _has_few_positions(node):
            continue
        sources = [arg for arg in node.args if isinstance(arg, fx.Node)]
        settings = node.args[len(sources) :]
        shapes = [tuple(source.meta["val"].shape) for source in sources]
        is_backward = node.target is not _aten.convolution.default
        ways: Dict[str, Callable[..., Sequence[Optional[Tensor]]]] = {
            _CONVOLUTION: functools.partial(_results, node.target, settings),
            _ALL: functools.partial(_results, functools.partial(products, False), settings),
        }
        # Of a single position of the kernel, nothing can be left out.
        if shapes[1 + is_backward][2:] != (1, 1):
            seeing = functools.partial(products, True)
            ways[_SEEING] = functools.partial(_results, seeing, settings)
        key = (str(node.target), shapes, settings, *ways)
        way = fastest(key, functools.partial(_on_random_tensors, ways, shapes))
        if way == _CONVOLUTION:
            continue
        if str(key) not in recorded:
            recorded[str(key)] = capture(ways[way], list(map(torch.empty, shapes))).graph
        inputs = (each for each in recorded[str(key)].nodes if each.op == "placeholder")
        with graph.inserting_before(node):
            results = graph.graph_copy(recorded[str(key)], dict(zip(inputs, sources)))
        assert isinstance(results, list)
        for user in list(node.users) if is_backward else [node]:
            user.replace_all_uses_with(results[user.args[1] if is_backward else 0])
            graph.erase_node(user)
        if is_backward:
            graph.erase_node(node)
        count += 1
    return count


def _has_few_positions(node: fx.Node) -> bool:
    """Tell whether a convolution, or the backward of one, may be faster by products."""
    is_forward = node.target is _aten.convolution.default
    values = [value_of(each) for each in (node.args[:2] if is_forward else node.args[1:3])]
    values.append(value_of(node if is_forward else node.args[0]))
    if not all(value is not None and _is_plain(value) for value in values):
        return False
    _, weight, outputs = values
    assert weight is not None
    assert outputs is not None
    transposed, _, groups = node.args[6:9] if is_forward else node.args[7:10]
    if groups != 1 or transposed:
        return False
    return outputs.shape[2:].numel() <= _MOST_POSITIONS and weight.numel() >= _FEWEST_WEIGHTS


def _is_plain(value: Tensor) -> bool:
    alike = value.dtype is torch.float32 and value.device.type == "cpu"
    return alike and value.dim() == 4 and value.is_contiguous()


def _results(
    way: Callable[..., Union[Tensor, Sequence[Optional[Tensor]]]],
    settings: Sequence[object],
    *tensors: Tensor,
) -> Sequence[Optional[Tensor]]:
    """Return all results of an operator for tensors and the settings behind them."""
    results = way(*tensors, *settings)
    return [results] if isinstance(results, Tensor) else list(results)


def _on_random_tensors(
    ways: Mapping[str, Callable[..., object]], shapes: Sequence[Sequence[int]]
) -> Dict[str, Callable[[], object]]:
    """Give the ways that compute the same of tensors with these shapes."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    calls = {name: functools.partial(way, *tensors) for name, way in ways.items()}
    expected = tree.tensors(calls[_CONVOLUTION]())
    return {
        name: call
        for name, call in calls.items()
        if all(map(agree, expected, tree.tensors(call())))
    }


class _Kernel:
    """The kernel of a convolution as a matrix.

    Args:
        cuts: whether weights that see nothing but padding are left out, which takes a copy.
        pictures: shape (samples, channels, height, width).
        weight: shape (outputs, channels, height, width).
        stride: for height and width, as the others.
        padding: on each side.
        dilation: of the kernel.

    Attributes:
        positions: height and width of the outputs.
        weight: shape (outputs, channels * height * width).
    """

    def __init__(
        self,
        cuts: bool,
        pictures: Tensor,
        weight: Tensor,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
    ) -> None:
        sides = zip(pictures.shape[2:], weight.shape[2:], stride, padding, dilation)
        along = (_part(cuts, *side) for side in sides)
        (top, bottom, above, rows), (left, right, beside, columns) = along
        self.positions = (rows, columns)
        height, width = weight.shape[2:]
        self._cut = [-left, right - width, -top, bottom - height]
        part = F.pad(weight, self._cut) if any(self._cut) else weight
        self._shape = part.shape
        self.weight = part.reshape(len(part), -1)
        self._sizes = tuple(pictures.shape[2:])
        self._settings = tuple(
            tuple(each) for each in (part.shape[2:], dilation, (above, beside), stride)
        )

    def patches(self, pictures: Tensor) -> Tensor:
        """Return what each position sees, shape (samples * positions, weights of an output)."""
        columns = F.unfold(pictures, *self._settings)
        return columns.transpose(1, 2).reshape(-1, self.weight.shape[1])

    def pictures(self, patches: Tensor) -> Tensor:
        """Return the sums over all positions of what is of each value of the pictures."""
        rows, columns = self.positions
        by_sample = patches.view(-1, rows * columns, patches.shape[1]).transpose(1, 2)
        return F.fold(by_sample, self._sizes, *self._settings)

    def whole(self, part: Tensor) -> Tensor:
        """Return weights with zeros where the kernel sees nothing but padding."""
        weight = part.view(self._shape)
        return F.pad(weight, [-each for each in self._cut]) if any(self._cut) else weight


def _part(
    cuts: bool, size: int, length: int, stride: int, padding: int, dilation: int
) -> Tuple[int, int, int, int]:
    """Find the part of a kernel, along one side, that is computed with.

    Returns:
        Its begin and end, the padding that it needs, and the number of positions.
    """
    count = (size + 2 * padding - dilation * (length - 1) - 1) // stride + 1
    seeing = [
        index
        for index in range(length)
        if any(0 <= at * stride + index * dilation - padding < size for at in range(count))
    ]
    begin, end = (seeing[0], seeing[-1] + 1) if seeing else (0, length)
    less = padding - begin * dilation
    same = (size + 2 * less - dilation * (end - begin - 1) - 1) // stride + 1 == count
    return (begin, end, less, count) if cuts and same and less >= 0 else (0, length, padding, count)


def _convolution(
    cuts: bool,
    pictures: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    *_: object,
) -> Tensor:
    """Compute ``aten.convolution``."""
    kernel = _Kernel(cuts, pictures, weight, stride, padding, dilation)
    patches, matrix = kernel.patches(pictures), kernel.weight.t()
    product = patches @ matrix if bias is None else torch.addmm(bias, patches, matrix)
    by_position = product.view(len(pictures), *kernel.positions, len(weight))
    return by_position.permute(0, 3, 1, 2).contiguous()


def _convolution_backward(
    cuts: bool,
    gradient: Tensor,
    pictures: Tensor,
    weight: Tensor,
    bias_sizes: Optional[Sequence[int]],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    mask: Sequence[bool],
) -> List[Optional[Tensor]]:
    """Compute ``aten.convolution_backward``."""
    kernel = _Kernel(cuts, pictures, weight, stride, padding, dilation)
    by_position = gradient.permute(0, 2, 3, 1).reshape(-1, len(weight))
    of_pictures, of_weight, of_bias = mask
    return [
        kernel.pictures(by_position @ kernel.weight) if of_pictures else None,
        kernel.whole(by_position.t() @ kernel.patches(pictures)) if of_weight else None,
        by_position.sum(0) if of_bias else None,
    ]


_BY_PRODUCTS: Dict[object, Callable[..., Union[Tensor, Sequence[Optional[Tensor]]]]] = {
    _aten.convolution.default: _convolution,
    _aten.convolution_backward.default: _convolution_backward,
}
