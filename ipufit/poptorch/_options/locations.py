"""Options about the memory of tensors. There is one memory on this engine."""

from __future__ import annotations

from typing import Optional

from ipufit.poptorch._options.group import OptionGroup, need_type

__all__ = ["TensorLocationSettings", "_TensorLocationOptions"]


class TensorLocationSettings(OptionGroup):
    """Memory in which one kind of tensor is stored.

    Every setter refuses another type with an AssertionError.
    """

    def minElementsForOffChip(self, min_elements: int) -> TensorLocationSettings:
        """Store tensors of fewer elements on the chip."""
        return self._keep("minElementsForOffChip", min_elements, int)

    def minElementsForReplicatedTensorSharding(self, min_elements: int) -> TensorLocationSettings:
        """Do not shard tensors of fewer elements over replicas."""
        return self._keep("minElementsForReplicatedTensorSharding", min_elements, int)

    def useOnChipStorage(self, use: Optional[bool] = True) -> TensorLocationSettings:
        """Store tensors on the chip (True), off it (False), or where the compiler likes (None)."""
        if use is None:
            self.deleteIfExists("onChip")
            return self
        return self._keep("onChip", use, bool)

    def useReplicatedTensorSharding(self, use: bool = True) -> TensorLocationSettings:
        """Shard tensors over replicas, for weights and optimizer states."""
        return self._keep("useReplicatedTensorSharding", use, bool)

    def useIOTilesToLoad(self, use: bool = True) -> TensorLocationSettings:
        """Load through the tiles reserved for transfers."""
        return self._keep("useIOTilesToLoad", use, bool)

    def useIOTilesToStore(self, use: bool = True) -> TensorLocationSettings:
        """Store through the tiles reserved for transfers."""
        return self._keep("useIOTilesToStore", use, bool)

    def _keep(self, option: str, value: object, kind: type) -> TensorLocationSettings:
        need_type(option, value, kind)
        self.createOrSet(**{option: int(value)})  # type: ignore[call-overload]  # a bool or an int
        return self


class _TensorLocationOptions(OptionGroup):
    """Memory of each kind of tensor: ``options.TensorLocations``.

    Settings are copied: a later change of them is not seen. Another type than
    ``TensorLocationSettings`` is an AssertionError.
    """

    def numIOTiles(self, num_tiles: int) -> _TensorLocationOptions:
        """Set the number of tiles of each IPU that are reserved for transfers.

        Raises:
            AssertionError: not an int, or not an even number in 32 ... 192.
        """
        need_type("numIOTiles", num_tiles, int)
        if not 32 <= num_tiles <= 192 or num_tiles % 2:
            raise AssertionError(
                "numIOTiles must be an even number between 32 and 192. "
                f"Got {num_tiles}; the nearest is {2 * round(min(max(num_tiles, 32), 192) / 2)}."
            )
        self.createOrSet(numIOTiles=num_tiles)
        return self

    def setActivationLocation(self, location: TensorLocationSettings) -> _TensorLocationOptions:
        """Set the memory of activations."""
        return self._place("location_activation", location)

    def setWeightLocation(self, location: TensorLocationSettings) -> _TensorLocationOptions:
        """Set the memory of weights."""
        return self._place("location_weight", location)

    def setOptimizerLocation(self, location: TensorLocationSettings) -> _TensorLocationOptions:
        """Set the memory of optimizer states."""
        return self._place("location_optimizer", location)

    def setAccumulatorLocation(self, location: TensorLocationSettings) -> _TensorLocationOptions:
        """Set the memory of gradient accumulators."""
        return self._place("location_accumulator", location)

    def _place(self, option: str, location: object) -> _TensorLocationOptions:
        need_type(option, location, TensorLocationSettings)
        assert isinstance(location, TensorLocationSettings)
        self.createOrSet(**{option: location.toDict()})
        return self
