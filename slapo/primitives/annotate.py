"""``.annotate(param_name, key, value)``."""

from __future__ import annotations

import difflib
from typing import Any

from slapo.history import warn_caller
from slapo.node import Node
from slapo.primitives.base import Primitive
from slapo.primitives.wrapping import check_own_tensor
from slapo.sharding.state import make_sharding, shards_of
from slapo.sharding.tags import PARTIAL_GRAD
from slapo.wrapper import innermost


class AnnotatePrimitive(Primitive, name="annotate"):
    """Tag a parameter with an attribute that survives every replacement of the tensor.

    ``mod.weight --> mod.weight`` with ``mod.weight.<key> == value``, also after sharding,
    replacement of the tensor and materialization.

    The tag ``partial_grad`` (True) has a meaning of its own: it sums the parameter's gradient over
    the group. Use it for replicated parameters that see only a part of the input on each rank. That
    part may be tokens (a layer norm with sequence parallelism) or heads (Qwen3's ``q_norm``).
    ``sequence_parallel`` is its older name.

    Parameters
    ----------
    param_name
        A parameter of the module itself.
    key
        Attribute name.
    value
        Any value.

    Raises
    ------
    ValueError
        If the module has no such parameter, or if the key is not a valid attribute name or is
        already an attribute of tensors.
    TypeError
        If ``partial_grad`` is neither True nor False.

    Examples
    --------
    >>> import torch, slapo
    >>> sch = slapo.create_schedule(torch.nn.Linear(2, 2))
    >>> sch.annotate("weight", "replicated", True).mod.weight.replicated
    True
    """

    @staticmethod
    def apply(sch: Node, /, param_name: str, key: str, value: Any) -> Node:
        check_own_tensor(sch, param_name)
        module = innermost(sch.mod)
        param = module._parameters.get(param_name)
        if param is None:
            known = [name for name, p in module._parameters.items() if p is not None]
            raise ValueError(
                f"{type(module).__name__} has no parameter {param_name!r} of its own; "
                f"it has {known}"
            )
        # A tag such as "grad" or "data" would overwrite what autograd and optimizers read.
        if type(key) is not str or not key.isidentifier() or hasattr(type(param), key):
            raise ValueError(
                f"key {key!r} cannot be a tag; choose an attribute name that tensors do not have "
                "already"
            )
        if key in PARTIAL_GRAD and not isinstance(value, bool):
            raise TypeError(f"{key} is {value!r}; pass True or False")
        if key not in PARTIAL_GRAD and difflib.get_close_matches(key, PARTIAL_GRAD, 1, cutoff=0.85):
            warn_caller(
                f"annotate: the unknown tag {key!r} is spelled like 'partial_grad', which sums the "
                "parameter's gradient over the ranks; write 'partial_grad' if you mean that"
            )
        spec = shards_of(module).get(param_name)
        if key in PARTIAL_GRAD and value and spec is not None and spec.world_size > 1:
            raise ValueError(
                f"{param_name!r} is sharded along axis {spec.axis}: each rank has a different "
                "slice, with a complete gradient; leave this call out"
            )
        make_sharding(module, sch.group).tag(module, param_name, key, value)
        sch.metadata.param_tags.setdefault(param_name, {})[key] = value
        # The root's metadata lists all tags of the model by key.
        name = f"{sch.model_path}.{param_name}".lstrip(".")
        sch.get_top_schedule().metadata.param_tags.setdefault(key, {})[name] = value
        return sch
