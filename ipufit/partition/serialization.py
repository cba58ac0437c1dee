"""Embedding and Linear in parts: what torch's compute, with less memory at a time.

A layer becomes serialised by taking on another class, so that it stays the object that it is, in
its place. Where the weight itself is cut, its parts are parameters; ``state_dict`` still has it
whole, under its own name.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Iterator, List, Literal, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ipufit.errors import ConfigurationError, shown
from ipufit.partition.partition import BLOCK
from ipufit.utils.error_collector import at_least, one_of
from ipufit.utils.poptorch_sdk import begin_block, sdk_in_use

MatMulCut = Literal["output_channels", "reducing_dim", "input_channels"]
# By what of a Linear is cut, the name of PopTorch's MatMulSerializationMode for it.
_SDK_MODES: Dict[MatMulCut, str] = {
    "output_channels": "OutputChannels",
    "reducing_dim": "ReducingDim",
    "input_channels": "InputChannels",
}


@dataclasses.dataclass(frozen=True)
class Serialization:
    """How a layer is divided into parts: by ``factor`` or by ``splits_per_ipu``.

    Attributes:
        factor: the number of parts, which stay on the layer's IPU.
        splits_per_ipu: the number of parts on each IPU of the pipeline, such as [0, 2, 2]; IPUs
            with parts must be neighbours.
        mode: for a Linear, what is divided: "output_channels" (rows of the weight), "reducing_dim"
            (its columns) or, only with a factor, "input_channels" (rows of the input).
    """

    factor: Optional[int] = None
    splits_per_ipu: Optional[Sequence[int]] = None
    mode: MatMulCut = "output_channels"


@dataclasses.dataclass(frozen=True)
class Parts:
    """Parts of a serialised layer, in normal form.

    Attributes:
        count: number of parts.
        per_ipu: how many lie on each IPU; None where they stay together.
        mode: of a Linear, what is cut.
    """

    count: int
    per_ipu: Optional[Tuple[int, ...]]
    mode: MatMulCut

    @property
    def is_whole(self) -> bool:
        """True if nothing is cut, and nothing has a place."""
        return self.count == 1 and self.per_ipu is None

    @property
    def dim(self) -> int:
        """Dimension of the weight that is cut."""
        return 1 if self.mode == "reducing_dim" else 0

    @property
    def of_weight(self) -> int:
        """Into how many parts the weight is cut."""
        return 1 if self.mode == "input_channels" else self.count

    def ipu_of(self, part: int) -> Optional[int]:
        """The IPU on which a part lies; None where it is that of the layer."""
        if self.per_ipu is None:
            return None
        return [ipu for ipu, count in enumerate(self.per_ipu) for _ in range(count)][part]

    @property
    def ipus(self) -> Tuple[int, ...]:
        """The IPUs on which parts lie; empty where they stay together."""
        return tuple(ipu for ipu, count in enumerate(self.per_ipu or ()) if count)

    def begins(self, part: int) -> bool:
        """True if this is the first part on its IPU."""
        return self.per_ipu is not None and (
            part == 0 or self.ipu_of(part) != self.ipu_of(part - 1)
        )

    def describe(self) -> str:
        """Write the number of parts as the user did."""
        if self.per_ipu is not None:
            return f"splits_per_ipu={list(self.per_ipu)}"
        return f"factor={self.count}"


WHOLE = Parts(1, None, "output_channels")


def parts_of(layer: str, setting: Any) -> Parts:
    """Check what was said of a layer: a factor, a list of splits per IPU, or a Serialization.

    Raises:
        ConfigurationError: it says nothing, two things, or what can't work.
    """
    if isinstance(setting, (list, tuple)):
        setting = Serialization(splits_per_ipu=setting)
    elif not isinstance(setting, Serialization):
        setting = Serialization(factor=setting)
    factor, splits, mode = setting.factor, setting.splits_per_ipu, setting.mode
    if (factor is None) == (splits is None):
        came = "neither" if factor is None else f"factor={factor} and splits_per_ipu={splits}"
        raise ConfigurationError(
            f"either factor or splits_per_ipu sets the number of parts of {layer!r}, got {came}. "
            "Pass factor to keep all parts on one IPU, splits_per_ipu to spread them over IPUs."
        )
    one_of(f"the mode of {layer!r}", mode, MatMulCut)
    if splits is not None:
        counts = _splits(layer, splits)
        if mode == "input_channels":
            raise ConfigurationError(
                f"splits_per_ipu of {layer!r} places parts of the weight, but "
                "mode='input_channels' cuts the input and leaves the weight whole. Pass a factor, "
                "or another mode."
            )
        return Parts(sum(counts), counts, mode)
    name, also = f"the number of parts of {layer!r}", " or a list of splits per IPU"
    return Parts(at_least(name, factor, 1, also, "Pass for example 4, or [2, 2]."), None, mode)


def _splits(layer: str, splits: object) -> Tuple[int, ...]:
    def refused(rule: str, cure: str) -> ConfigurationError:
        return ConfigurationError(
            f"the splits per IPU of {layer!r} must {rule}, got {shown(splits)}. {cure}"
        )

    if not isinstance(splits, (list, tuple)) or not all(
        isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in splits
    ):
        raise refused(
            "be a list of numbers of at least 0, one for each IPU", "Pass for example [2, 2]."
        )
    if not any(splits):
        raise refused("have at least one part on some IPU", "Leave the layer out to keep it whole.")
    moved = side_by_side(splits)
    if moved != list(splits):
        raise refused(
            "be on neighbouring IPUs, without a zero between them",
            f"Move them together, such as {moved}.",
        )
    return tuple(splits)


def side_by_side(splits: Sequence[int]) -> List[int]:
    """Move the parts on each IPU together, to where the first ones are."""
    counts = [count for count in splits if count]
    first = splits.index(counts[0])
    return [0] * first + counts + [0] * (len(splits) - first - len(counts))


class Serialized(nn.Module):
    """Base class of serialised layers, with the parts that each is cut into.

    Attributes:
        parts: into what it is cut in training.
        inference_parts: the same in inference, which may cut the same weight in other places.
        title: its name in the module that was serialised.
        by_config: whether a configuration said so.
    """

    parts: Parts
    inference_parts: Parts
    title: str
    by_config: bool
    dim = 0

    def extra_repr(self) -> str:
        """Extend the text of torch's layer by the parts that it is cut into."""
        return f"{super().extra_repr()}, {self.cuts()}"

    def cuts(self) -> str:
        """Into what it is cut, as the user wrote it."""
        text = self.parts.describe()
        if self.inference_parts == self.parts:
            return text
        return f"{text}, inference {self.inference_parts.describe()}"

    def parts_in(self, training: bool) -> Parts:
        """Choose the parts of training, or of inference."""
        return self.parts if training else self.inference_parts

    def pieces(self) -> List[nn.Parameter]:
        """Parameters that make up the weight."""
        return [self.weight]  # type: ignore[list-item]

    def piece_names(self) -> List[str]:
        """Names of the parameters that make up the weight."""
        return ["weight"]

    def places(self, training: bool) -> Dict[str, Tuple[int, ...]]:
        """The IPUs on which each parameter of the weight is needed; empty without places."""
        parts, names = self.parts_in(training), self.piece_names()
        if parts.per_ipu is None:
            return {}
        if parts.dim != self.dim and len(names) > 1:
            return dict.fromkeys(names, parts.ipus)
        ipus_by_name = {}
        for place, name in enumerate(names):
            # Part i is [i / count, (i + 1) / count) of the weight, and so is a parameter.
            first = place * parts.count // len(names)
            last = ((place + 1) * parts.count - 1) // len(names)
            ipus = {parts.ipu_of(part): None for part in range(first, last + 1)}
            ipus_by_name[name] = tuple(ipu for ipu in ipus if ipu is not None)
        return ipus_by_name

    def _begun(self) -> Iterator[Tuple[int, Tensor]]:
        """Each part of the weight in turn; on an IPU a block begins with the first of each IPU."""
        parts = self.parts_in(self.training)
        weights = _in_parts(self.pieces(), self.dim, parts)
        for part in range(parts.of_weight):
            if parts.begins(part):
                begin_block(f"{BLOCK}{self.title}/{part}", parts.ipu_of(part))
            yield part, next(weights)


def serialized_layers(module: nn.Module) -> Iterator[Serialized]:
    """Yield the layers of a module that are serialised."""
    return (layer for layer in module.modules() if isinstance(layer, Serialized))


def _in_parts(pieces: Sequence[Tensor], dim: int, parts: Parts) -> Iterator[Tensor]:
    """The weight in parts, of which each is made when it is asked for.

    Args:
        pieces: what the weight is in ``dim``, of one size.
        dim: see above.
        parts: what is wanted.
    """
    count = parts.of_weight
    if len(pieces) == 1:
        yield from pieces[0].chunk(count, parts.dim)
    elif count == len(pieces) and parts.dim == dim:
        yield from pieces
    elif parts.dim != dim:
        for part in range(count):
            yield torch.cat([piece.chunk(count, parts.dim)[part] for piece in pieces], dim)
    else:
        stored = pieces[0].shape[dim]
        size = stored * len(pieces) // count
        for start in range(0, size * count, size):
            cuts = []
            for place, piece in enumerate(pieces):
                low = max(start - place * stored, 0)
                high = min(start + size - place * stored, stored)
                if low < high:
                    cuts.append(piece.narrow(dim, low, high - low))
            yield cuts[0] if len(cuts) == 1 else torch.cat(cuts, dim)


class CutWeight(Serialized):
    """A layer whose weight is several parameters, "weight_0", "weight_1", ...

    Attributes:
        dim: the dimension of the weight that is cut.
        dense: the parameter that they were, without data until it comes back.
    """

    dense: Tuple[nn.Parameter]

    @property
    def weight(self) -> Tensor:
        """The whole weight, as a new tensor. A change of it changes no part."""
        return torch.cat([*self.pieces()], self.dim)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse to set the weight, which is several parameters."""
        if name == "weight":
            raise ConfigurationError(
                f"the weight of a serialized layer must be set in its parts, {self._named()}, got "
                f"one weight for {self.title!r}. Call ipufit.partition.to_dense(module), set it, "
                "and serialise and compile again."
            )
        super().__setattr__(name, value)

    def _named(self) -> str:
        names = self.piece_names()
        return f"{names[0]!r} to {names[-1]!r}" if len(names) > 1 else repr(names[0])

    def pieces(self) -> List[nn.Parameter]:
        """Parameters that the weight is cut into."""
        return [getattr(self, name) for name in self.piece_names()]

    def piece_names(self) -> List[str]:
        """Names of the parameters that the weight is cut into."""
        return [f"weight_{part}" for part in range(self.parts.count)]

    def _save_to_state_dict(
        self, destination: Dict[str, object], prefix: str, keep_vars: bool
    ) -> None:
        layer_state: Dict[str, Tensor] = {}
        super()._save_to_state_dict(layer_state, prefix, keep_vars)
        pieces = [layer_state.pop(prefix + name) for name in self.piece_names()]
        destination[prefix + "weight"] = torch.cat(pieces, self.dim)
        destination.update(layer_state)

    def _load_from_state_dict(
        self,
        state_dict: Dict[str, Tensor],
        prefix: str,
        local_metadata: object,
        strict: bool,
        missing_keys: List[str],
        unexpected_keys: List[str],
        error_msgs: List[str],
    ) -> None:
        layer_state = {key: value for key, value in state_dict.items() if key.startswith(prefix)}
        key = prefix + "weight"
        whole = layer_state.pop(key, None)
        pieces = self.pieces()
        if whole is not None:
            shape = list(pieces[0].shape)
            shape[self.dim] *= len(pieces)
            if list(whole.shape) != shape:
                error_msgs.append(
                    f"size mismatch for {key}: the state has {tuple(whole.shape)}, the module "
                    f"{tuple(shape)}."
                )
                whole = self.weight.detach()
            chunks = whole.chunk(len(pieces), self.dim)
            layer_state.update(zip((prefix + name for name in self.piece_names()), chunks))
        missing: List[str] = []
        super()._load_from_state_dict(
            layer_state, prefix, local_metadata, strict, missing, unexpected_keys, error_msgs
        )
        cut = {prefix + name for name in self.piece_names()}
        if cut.intersection(missing):
            missing_keys.append(key)
        missing_keys += [name for name in missing if name not in cut]


class SerializedLookup(Serialized, nn.Embedding):
    """``nn.Embedding`` with one table, looked up in one part of it after the other."""

    def forward(self, input: Tensor) -> Tensor:
        """Look up rows like ``nn.Embedding``."""
        total: Optional[Tensor] = None
        last = self.parts_in(self.training).count - 1
        for part, table in self._begun():
            if not last:
                return F.embedding(input, table, self.padding_idx)
            rows = table.shape[0]
            local = input - part * rows
            # What is in no part is left to the first or the last, which refuse it as torch does.
            inside = local < rows if part < last else local >= 0
            if 0 < part < last:
                inside = inside & (local >= 0)
            # What is in another part reads row 0 here, and leaves no trace: neither in the sum nor
            # in the gradient, whatever that row holds.
            looked_up = F.embedding(
                torch.where(inside, local, 0), table, self._padding_of(part, rows)
            )
            looked_up = torch.where(inside.unsqueeze(-1), looked_up, 0.0)
            total = looked_up if total is None else total + looked_up
        assert total is not None
        return total

    def _padding_of(self, part: int, rows: int) -> Optional[int]:
        """Index, in one part of the table, of the row that gets no gradient."""
        if self.padding_idx is None or self.padding_idx // rows != part:
            return None
        return self.padding_idx % rows


class SerializedEmbedding(CutWeight, SerializedLookup):  # type: ignore[override]
    """``nn.Embedding`` as several smaller tables, looked up one after the other."""


class SerializedLinear(Serialized, nn.Linear):
    """``nn.Linear`` whose product is computed in parts, one after another, with one weight."""

    def forward(self, input: Tensor) -> Tensor:
        """Multiply like ``nn.Linear``."""
        sdk, parts = sdk_in_use(), self.parts_in(self.training)
        if parts.count == 1:
            return F.linear(input, next(self._begun())[1], self.bias)
        result: Tensor
        if sdk is not None and parts.per_ipu is None and len(self.pieces()) == 1:
            mode = getattr(sdk.MatMulSerializationMode, _SDK_MODES[parts.mode])
            result = sdk.serializedMatMul(input, self.weight.t(), mode, parts.count)
        else:
            result = self._in_parts(input, parts)
        return result if self.bias is None else result + self.bias

    def _in_parts(self, input: Tensor, parts: Parts) -> Tensor:
        if parts.mode == "output_channels":
            return torch.cat([F.linear(input, rows) for _, rows in self._begun()], -1)
        if parts.mode == "input_channels":
            flat = input.reshape(-1, input.shape[-1])
            _, weight = next(self._begun())
            products = [F.linear(rows, weight) for rows in flat.tensor_split(parts.count)]
            return torch.cat(products).reshape(*input.shape[:-1], self.out_features)
        columns = input.reshape(-1, input.shape[-1]).chunk(parts.count, -1)
        total: Optional[Tensor] = None
        for part, weight in self._begun():
            # A product that is added at once is never there beside its sum.
            rest = columns[part]
            total = F.linear(rest, weight) if total is None else total.addmm(rest, weight.t())
        assert total is not None
        return total.reshape(*input.shape[:-1], self.out_features)


class SplitProjection(CutWeight, SerializedLinear):  # type: ignore[override]
    """``nn.Linear`` as several smaller ones, which may lie on several IPUs."""
