"""Rules of operations along a dimension: sums, softmax, norms, attention, lookups."""

from __future__ import annotations

from torch import Tensor

from slapo.sharding.groups import share_of
from slapo.verify.placement.call import Call, OperationCall, rule_for
from slapo.verify.placement.place import MASKED, PARTIAL_SUM, WHOLE, Place

_SUMS = ("sum", "mean", "nansum")
#: Operations that reduce a dimension.
REDUCTIONS: tuple[str, ...] = (*_SUMS, "amax", "amin", "max", "min", "any", "all", "prod", "argmax")
REDUCTIONS += ("argmin", "logsumexp", "var", "std", "var_mean", "std_mean", "topk", "sort", "norm")
REDUCTIONS += ("linalg_vector_norm", "median")


@rule_for(*REDUCTIONS)
def reduced(call: Call) -> Place:
    """A sum over slices is a summand; other reductions need all of their dimensions."""
    place, dims = call.places[0], call.dims()
    # Not `mean`: each rank divides by the length of its slice, and those means do not add up.
    if call.name == "sum" and place.is_slice and place.dim in dims:
        return PARTIAL_SUM
    place = call.slicewise(dims, is_linear=call.name in _SUMS)
    if place.is_slice and call.outs[0].ndim < call.tensors[0].ndim:
        place = place.along(place.dim - sum(dim < place.dim for dim in dims))
    return place


# --- slice by slice ------------------------------------------------------------------------------
#: Operations on each matrix of a batch.
_OF_MATRICES: tuple[str, ...] = ("linalg_solve_triangular", "linalg_inv_ex")
_OF_MATRICES += ("linalg_cholesky_ex", "linalg_matrix_exp")
_LINEAR_ALONG: tuple[str, ...] = ("cumsum", "flip", "roll", "unfold", "unfold_backward")
_LINEAR_ALONG += ("_fft_r2c", "_fft_c2c", "_fft_c2r")
#: Operations along the dimensions that their arguments name.
ALONG: tuple[str, ...] = ("_softmax", "_safe_softmax", "_log_softmax", "softmax", "log_softmax")
ALONG += ("_softmax_backward_data", "_log_softmax_backward_data", "cumprod", "logcumsumexp")
ALONG += ("cummax", "cummin", *_LINEAR_ALONG)
_RESIZED: tuple[str, ...] = ("upsample_nearest", "_upsample_nearest_exact", "upsample_linear")
_RESIZED += ("upsample_bilinear", "upsample_bicubic", "upsample_trilinear")
_RESIZED += ("reflection_pad", "replication_pad")
#: Name -> number of pixel dimensions; derivatives have longer names.
PIXELS = {
    **{f"{kind}_pool{dims}d": dims for kind in ("avg", "max") for dims in (1, 2, 3)},
    **{f"max_pool{dims}d_with_indices": dims for dims in (2, 3)},
    **{f"max_unpool{dims}d": dims for dims in (2, 3)},
    **{f"_adaptive_avg_pool{dims}d": dims for dims in (2, 3)},
    **{f"adaptive_max_pool{dims}d": dims for dims in (2, 3)},
    **{f"fractional_max_pool{dims}d": dims for dims in (2, 3)},
    **{f"{kind}{dims}d": dims for kind in _RESIZED for dims in (1, 2, 3)},
    **{f"_upsample_{kind}2d_aa": 2 for kind in ("bilinear", "bicubic")},
}
#: Operation -> number of last dimensions that it mixes.
LAST = {
    **dict.fromkeys(("tril", "triu", *_OF_MATRICES), 2),
    **PIXELS,
    **{f"{name}_backward": dims for name, dims in PIXELS.items()},
    "view_as_complex": 1,
    "view_as_real": 0,
}
#: Prefixes of those that are linear.
_LINEAR = (*_LINEAR_ALONG, "tri", "avg_pool", "_adaptive_avg_pool", "view_as")
_LINEAR += (*_RESIZED, "_upsample_bi")


def mixed_dims(call: OperationCall) -> set[int]:
    """The dimensions along which an operation does not work slice by slice."""
    ndim, normalized = call.tensors[0].ndim, call.get("normalized_shape")
    last = LAST.get(call.name) if normalized is None else len(normalized)
    return call.dims() if last is None else {*range(ndim - last, ndim)}


@rule_for(*ALONG, *LAST)
def by_slices(call: Call) -> Place:
    """Slice by slice along the dimensions that it does not mix."""
    return call.slicewise(mixed_dims(call), call.name.startswith(_LINEAR))


@rule_for("diagonal")
def diagonal(call: Call) -> Place:
    """The rule for slices along other dimensions is not written yet."""
    return call.slicewise(range(call.tensors[0].ndim), is_linear=True)


@rule_for("_linalg_check_errors")
def check_of_matrices(call: Call) -> list[Place]:
    """It only reads this rank's matrices."""
    return []


# --- norms ---------------------------------------------------------------------------------------
@rule_for("native_layer_norm", "_fused_rms_norm", "rms_norm")
@rule_for("native_layer_norm_backward", "_fused_rms_norm_backward")
def norm(call: Call) -> list[Place]:
    """Slices along the other dimensions; gradients of the weights are then partial."""
    count = len(call.get("normalized_shape"))
    rows = [p for t, p in zip(call.tensors, call.places, strict=True) if t.ndim > count]
    weights = [p for t, p in zip(call.tensors, call.places, strict=True) if t.ndim <= count]
    first = rows[0]
    if any(place.is_partial for place in rows):
        raise call.misfit("it is not linear, and its input is a partial sum")
    if not (first.is_slice and first.dim < call.tensors[0].ndim - count):
        raise call.misfit("it needs all of the normalized dimensions on one rank")
    if not all(place.same(first) for place in rows) or not all(p.is_whole for p in weights):
        raise call.misfit("its inputs have different placements")
    # Each rank sums the gradients of the weights over its own rows only.
    return [first if out.ndim > count else PARTIAL_SUM for out in call.outs]


@rule_for("native_batch_norm", "cudnn_batch_norm", "_native_batch_norm_legit", "miopen_batch_norm")
@rule_for("_native_batch_norm_legit_no_training", "_batch_norm_with_update")
@rule_for("native_batch_norm_backward", "cudnn_batch_norm_backward", "batch_norm_backward")
def batch_norm(call: Call) -> list[Place]:
    """Slices along the channels, together with all per-channel tensors."""
    first = call.places[0]
    if not (first.is_slice and first.dim == 1):
        raise call.misfit(
            "its statistics run over the batch and the pixels: only channels may be sliced"
        )
    return _by_channels(call)


def _by_channels(call: Call) -> list[Place]:
    first = call.places[0]
    for tensor, place in zip(call.tensors, call.places, strict=True):
        if tensor.numel() and not place.same(first.anew(0 if tensor.ndim == 1 else 1)):
            raise call.misfit("the channels and the per-channel tensors have different placements")
    return [first.anew(0 if out.ndim == 1 else 1) for out in call.outs]


@rule_for("native_group_norm", "native_group_norm_backward")
def group_norm(call: Call) -> list[Place]:
    """Slices of complete groups of channels, or of the batch."""
    first = call.places[0]
    if first.is_slice and first.dim == 1:
        return _by_channels(call)
    if not (first.is_slice and first.dim == 0):
        raise call.misfit("it needs whole groups of channels on one rank, and no partial sums")
    if not all(p.same(first) or p.is_whole for p in call.places):
        raise call.misfit("its inputs have different placements")
    ndim = call.tensors[0].ndim
    return [first if out.ndim in (2, ndim) else PARTIAL_SUM for out in call.outs]


#: Prefix of torch's attention functions, forward and backward. The kernels below them, such as
#: `_flash_attention_forward`, take tokens before heads, and have no rule.
ATTENTION = "_scaled_dot_product"


def attention(call: Call) -> list[Place]:
    """Slices of batch or heads, the same for query, key, value and related tensors.

    A mask may be replicated, and so may key and value heads shared by the heads of a block. Each
    rank then returns a partial gradient for them.
    """
    blocks = next((place.blocks for place in call.places if place.is_slice), ())
    big = [
        (tensor, place)
        for tensor, place in zip(call.tensors, call.places, strict=True)
        if tensor.ndim >= 3 and not _is_shared(call, tensor, place, blocks)
    ]
    first = big[0][1]
    if any(place.is_partial for _, place in big):
        raise call.misfit("it is not linear, and its input is a partial sum")
    # Of batch, heads, tokens and features: slices of tokens would attend to themselves only.
    if not first.is_slice or first.dim > 1 or not all(p.same(first) for _, p in big):
        shown = ", ".join(str(place) for _, place in big)
        raise call.misfit(f"query, key and value have different placements: {shown}")
    found = [first if out.ndim >= 3 else WHOLE for out in call.outs]
    for index, name in enumerate(("query", "key", "value") if "backward" in call.name else ()):
        given = call.place(name)
        if given is not None and given.is_whole:
            found[index] = PARTIAL_SUM
    return found


def _is_shared(call: Call, tensor: Tensor, place: Place, blocks: tuple[int, ...]) -> bool:
    """Return True if all heads (a mask), or the heads of a block, share a replicated tensor."""
    constant = place.is_uniform(tensor, 1)
    # With one key head per block, the operation gives each block its own. The comparison of sizes
    # checks that one process has as many heads and does not repeat them.
    if len({*blocks}) == 1:
        of_keys = any(tensor is call.get(name) for name in ("key", "value"))
        constant |= of_keys and tensor.shape[1] == len(blocks)
        constant |= {run for dim, run in place.runs if dim == 1} == {*blocks}
    return place.is_whole and constant


@rule_for("embedding")
def lookup(call: Call) -> list[Place]:
    """Table rows; with a part of the table, tokens must be masked for that part."""
    table, tokens = call.places[:2]
    if table.is_slice and table.dim == 0:
        _check_mask(call, table, tokens)
        return [PARTIAL_SUM]
    if table.is_slice and tokens.is_whole:
        return [table.anew(call.outs[0].ndim - 1)]
    if table.is_whole and tokens.is_slice:
        return [tokens]
    raise call.misfit("the slices of the table and of the tokens do not match")


def _check_mask(call: Call, table: Place, tokens: Place) -> None:
    rows = call.tensors[0].shape[0]
    first = share_of(table.whole_size(rows, call.ranks), call.rank, call.ranks)[0]
    if tokens.kind != MASKED:
        raise call.misfit(
            "the rows of the table are spread over the ranks, and its tokens are not masked: "
            "tokens of other ranks would be looked up here"
        )
    if tokens.rows != (first, rows):
        raise call.misfit(
            f"rank {call.rank} has rows {first} to {first + rows - 1} of the table, and the mask "
            f"keeps tokens {tokens.rows[0]} to {sum(tokens.rows) - 1}"
        )
    if tokens.share != table.share:
        raise call.misfit(
            "the ranks' parts of the table are uneven; pass the total number of rows, as by "
            f"slapo.sharding.masked(..., total={table.whole_size(rows, call.ranks)})"
        )


@rule_for("embedding_dense_backward")
def _lookup_backward(call: Call) -> list[Place]:
    grad, tokens = call.places[:2]
    if tokens.kind == MASKED and grad.is_whole:
        return [tokens.anew(0)]
    if tokens.is_slice and grad.same(tokens):
        return [PARTIAL_SUM]
    if tokens.is_whole and not grad.is_slice:
        return [grad]
    if tokens.is_whole and grad.dim == call.tensors[0].ndim - 1:
        return [grad.anew(1)]
    raise call.misfit("the slices of the gradient and of the tokens do not match")


@rule_for("nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward", "mse_loss", "l1_loss")
def loss(call: Call) -> list[Place]:
    """Raise: a loss of slices is a mean over parts, and such means cannot be added."""
    partial = any(place.is_partial for place in call.places)
    what = "a partial sum" if partial else "a slice"
    raise call.misfit(f"a loss of {what}; gather or reduce the parts before it")
