"""Embedding and Linear in parts: what torch's compute, with less memory at a time.

A layer becomes serialised by taking on another class, so that it stays the object that it is, in
its place. Where the weight itself is cut, its parts are parameters; ``state_dict`` still has it
whole, under its own name.
"""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ipufit.parallel.partition import BLOCK
from ipufit.parallel.serialization import Parts
from ipufit.parallel.tracing import begin_block, sdk_in_use

__all__ = ["CutWeight", "Serialized", "SerializedEmbedding", "SerializedLinear", "SplitProjection"]

_MODES = {
    "output_channels": "OutputChannels",
    "reducing_dim": "ReducingDim",
    "input_channels": "InputChannels",
}


class Serialized(nn.Module):
    """What all serialised layers have.

    Attributes:
        parts: into what it is cut.
        title: its name in the module that was serialised.
    """

    parts: Parts
    title: str

    def extra_repr(self) -> str:
        """What torch's layer says, and into what it is cut."""
        return f"{super().extra_repr()}, {self.parts.describe()}"


class CutWeight(Serialized):
    """A layer whose weight is several parameters, "weight_0", "weight_1", ...

    Attributes:
        dim: the dimension of the weight that is cut.
        dense: the parameter that they were, without data until it comes back.
    """

    dim: int
    dense: Tuple[nn.Parameter]

    @property
    def weight(self) -> Tensor:
        """The whole weight, as a new tensor. A change of it changes no part."""
        return torch.cat([*self.pieces()], self.dim)

    def pieces(self) -> List[nn.Parameter]:
        """The parts of the weight."""
        return [getattr(self, name) for name in self.piece_names()]

    def piece_names(self) -> List[str]:
        """Names of their parameters."""
        return [f"weight_{part}" for part in range(self.parts.count)]

    def _begun(self) -> Iterator[Tuple[int, nn.Parameter]]:
        """Each part in turn; on an IPU a block begins with the first of each IPU."""
        for part, piece in enumerate(self.pieces()):
            if self.parts.begins(part):
                begin_block(f"{BLOCK}{self.title}/{part}", self.parts.ipu_of(part))
            yield part, piece

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        own: Dict[str, Any] = {}
        super()._save_to_state_dict(own, prefix, keep_vars)
        pieces = [own.pop(prefix + name) for name in self.piece_names()]
        destination[prefix + "weight"] = torch.cat(pieces, self.dim)
        destination.update(own)

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: List[str],
        unexpected_keys: List[str],
        error_msgs: List[str],
    ) -> None:
        own = {key: value for key, value in state_dict.items() if key.startswith(prefix)}
        key = prefix + "weight"
        whole = own.pop(key, None)
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
            own.update(zip((prefix + name for name in self.piece_names()), chunks))
        missing: List[str] = []
        super()._load_from_state_dict(
            own, prefix, local_metadata, strict, missing, unexpected_keys, error_msgs
        )
        cut = {prefix + name for name in self.piece_names()}
        if cut.intersection(missing):
            missing_keys.append(key)
        missing_keys += [name for name in missing if name not in cut]


class SerializedEmbedding(CutWeight, nn.Embedding):  # type: ignore[override]
    """``nn.Embedding``, looked up in one part of the table after the other."""

    def forward(self, input: Tensor) -> Tensor:
        """As ``nn.Embedding``."""
        total: Optional[Tensor] = None
        for part, piece in self._begun():
            rows = piece.shape[0]
            local = input - part * rows
            inside = (local >= 0) & (local < rows)
            # What is in another part reads row 0 here, and leaves no trace: neither in the sum nor
            # in the gradient, whatever that row holds.
            found = F.embedding(torch.where(inside, local, 0), piece, self._padding_of(part, rows))
            found = torch.where(inside.unsqueeze(-1), found, 0.0)
            total = found if total is None else total + found
        assert total is not None
        return total

    def _padding_of(self, part: int, rows: int) -> Optional[int]:
        """The row of this part that gets no gradient."""
        if self.padding_idx is None or self.padding_idx // rows != part:
            return None
        return self.padding_idx % rows


class SplitProjection(CutWeight, nn.Linear):  # type: ignore[override]
    """``nn.Linear`` as several smaller ones, which may lie on several IPUs."""

    def forward(self, input: Tensor) -> Tensor:
        """As ``nn.Linear``."""
        if self.dim == 0:
            result = torch.cat([F.linear(input, piece) for _, piece in self._begun()], -1)
        else:
            columns = input.chunk(self.parts.count, -1)
            products = [F.linear(columns[part], piece) for part, piece in self._begun()]
            result = products[0]
            for product in products[1:]:
                result = result + product
        return result if self.bias is None else result + self.bias


class SerializedLinear(Serialized, nn.Linear):
    """``nn.Linear`` whose product is computed in parts, one after another, with one weight."""

    def forward(self, input: Tensor) -> Tensor:
        """As ``nn.Linear``."""
        sdk = sdk_in_use()
        if sdk is None:
            result = self._in_parts(input)
        else:
            mode = getattr(sdk.MatMulSerializationMode, _MODES[self.parts.mode])
            result = sdk.serializedMatMul(input, self.weight.t(), mode, self.parts.count)
        return result if self.bias is None else result + self.bias

    def _in_parts(self, input: Tensor) -> Tensor:
        count = self.parts.count
        if self.parts.mode == "output_channels":
            return torch.cat([F.linear(input, rows) for rows in self.weight.chunk(count)], -1)
        if self.parts.mode == "input_channels":
            flat = input.reshape(-1, input.shape[-1])
            products = [F.linear(rows, self.weight) for rows in flat.tensor_split(count)]
            return torch.cat(products).reshape(*input.shape[:-1], self.out_features)
        pairs = zip(input.chunk(count, -1), self.weight.chunk(count, 1))
        products = [F.linear(columns, weight) for columns, weight in pairs]
        result = products[0]
        for product in products[1:]:
            result = result + product
        return result
