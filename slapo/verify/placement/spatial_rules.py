"""Rules of operations on the pixels of each channel: pooling, resizing."""

from __future__ import annotations

from slapo.verify.placement.call import Call, rule_for
from slapo.verify.placement.place import PARTIAL_SUM, Place

_RESIZED: tuple[str, ...] = ("upsample_nearest", "_upsample_nearest_exact", "upsample_linear")
_RESIZED += ("upsample_bilinear", "upsample_bicubic", "upsample_trilinear")
_RESIZED += ("reflection_pad", "replication_pad")
#: Name -> number of pixel dimensions; derivatives have longer names.
_PIXELS = {
    **{f"{kind}_pool{dims}d": dims for kind in ("avg", "max") for dims in (1, 2, 3)},
    **{f"max_pool{dims}d_with_indices": dims for dims in (2, 3)},
    **{f"_adaptive_avg_pool{dims}d": dims for dims in (2, 3)},
    **{f"adaptive_max_pool{dims}d": dims for dims in (2, 3)},
    **{f"fractional_max_pool{dims}d": dims for dims in (2, 3)},
    **{f"{kind}{dims}d": dims for kind in _RESIZED for dims in (1, 2, 3)},
}
#: Operations that are linear in their input.
_LINEAR = ("avg_pool", "_adaptive_avg_pool", *_RESIZED)


def by_channels(call: Call) -> list[Place]:
    """Slices along the batch or the channels."""
    pixels = _PIXELS[call.name.removesuffix("_backward")]
    first = next(place for place in call.places if not place.is_whole)
    if first.is_partial and call.name.startswith(_LINEAR):
        return [PARTIAL_SUM] * len(call.outs)
    if not first.is_slice:
        raise call.misfit("it is not linear, and its input is a partial sum")
    if first.dim >= call.outs[0].ndim - pixels:
        raise call.misfit("it mixes pixels, which are sharded")
    if not all(place.same(first) for place in call.places):
        raise call.misfit("its inputs have different placements")
    return [first] * len(call.outs)


rule_for(*_PIXELS, *(f"{name}_backward" for name in _PIXELS))(by_channels)
