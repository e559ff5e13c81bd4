"""What a call gives that stands for several subgraphs."""

from __future__ import annotations

from typing import Any

from slapo.errors import SlapoError


def result_at(results: Any, index: int, count: int) -> Any:
    """One of the `count` results of a call; the operation that rewrites put into graphs for that.

    A bare ``results[index]`` would take a row of a tensor for a result.

    Raises
    ------
    SlapoError
        If it did not return so many.

    Examples
    --------
    >>> result_at(("query", "key", "value"), 1, 3)
    'key'
    """
    are_several = isinstance(results, (tuple, list))
    if are_several and len(results) == count:
        return results[index]
    what = f"{len(results)} results" if are_several else f"one {type(results).__name__}"
    raise SlapoError(
        f"a replacement of {count} subgraphs side by side returns a tuple of {count} results, "
        f"one for each in their order; it returned {what}"
    )
