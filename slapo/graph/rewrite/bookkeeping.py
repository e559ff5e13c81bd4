"""Names for new submodules, and the removal of those that no graph needs any more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch.fx as fx
from torch import nn

from slapo.wrapper import innermost


def graphs_of(gm: fx.GraphModule) -> tuple[fx.GraphModule, ...]:
    """List the graphs of a module: its own, and those for other kinds of calls.

    Parameters
    ----------
    gm : torch.fx.GraphModule
        A module that may have variants: graph modules that share its submodules, parameters and
        buffers. Then its attribute ``graphs`` is the tuple of all, itself first.

    Returns
    -------
    tuple of torch.fx.GraphModule
        `gm` comes first.
    """
    graphs = getattr(gm, "graphs", None)
    # A traced module also has the attributes of the user's, which may use the name otherwise.
    return graphs if isinstance(graphs, tuple) and graphs and graphs[0] is gm else (gm,)


def check_stem(name: str) -> None:
    """Refuse what cannot be part of an attribute's name, by a ``ValueError``."""
    if not name.isidentifier():
        raise ValueError(
            f"name={name!r} cannot name a submodule; use letters, digits and underscores"
        )


def first_free_name(module: nn.Module, name: str) -> str:
    """Choose the name of a new submodule: ``<name>_<k>`` with the first free k from 0.

    Parameters
    ----------
    module : torch.nn.Module
        The parent.
    name : str
        Stem of the name.

    Returns
    -------
    str
        A name that no child, parameter, buffer or attribute of `module` has.

    Raises
    ------
    ValueError
        If `name` cannot be part of an attribute's name.

    Examples
    --------
    >>> first_free_name(nn.Module(), "FusedModule")
    'FusedModule_0'
    """
    check_stem(name)
    k = 0
    # The children are asked first because N rewrites ask for N names.
    while f"{name}_{k}" in module._modules or hasattr(module, f"{name}_{k}"):
        k += 1
    return f"{name}_{k}"


def drop_unused(gm: fx.GraphModule, targets: Iterable[str]) -> list[str]:
    """Remove submodules that no graph of a module needs any more.

    A submodule stays if a node calls it, calls a module that it is part of, or calls or reads
    something in it. The module object and its parameters live on wherever else they are held. Of a
    view nothing is removed: ask its owner, whose graphs the view does not know.

    Parameters
    ----------
    gm : torch.fx.GraphModule
        The owner of graphs and submodules; see :func:`graphs_of`. Operations that a checkpoint
        has moved into a view of `gm` count too.
    targets : iterable of str
        Paths of the submodules in question.

    Returns
    -------
    list of str
        The paths that were removed.

    Examples
    --------
    >>> gm = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    >>> drop_unused(gm, ["0", "1"])
    []
    """
    asked = [] if is_view(gm) else list(dict.fromkeys(targets))
    owners = (*graphs_of(gm), *_views_of(gm)) if asked else ()
    removed = []
    for target in asked:
        if _has(gm, target) and not any(_needs(owner.graph, gm, target) for owner in owners):
            gm.delete_submodule(target)
            removed.append(target)
    return removed


def calls_of(gm: fx.GraphModule, target: str) -> list[fx.Node]:
    """List the calls of a submodule in all graphs of a module and in its views.

    Parameters
    ----------
    gm : torch.fx.GraphModule
        The owner of graphs and submodules.
    target : str
        Path of the submodule.

    Returns
    -------
    list of torch.fx.Node
        The ``call_module`` nodes.

    Examples
    --------
    >>> calls_of(fx.symbolic_trace(nn.Sequential(nn.ReLU())), "0")
    [_0]
    """
    owners = (*graphs_of(gm), *_views_of(gm))
    return [n for o in owners for n in o.graph.find_nodes(op="call_module", target=target)]


def is_view(gm: fx.GraphModule) -> bool:
    """Whether a module runs operations on the state of another, in which it stands itself.

    Examples
    --------
    >>> is_view(fx.symbolic_trace(nn.Sequential(nn.ReLU())))
    False
    """
    return any(child is not None and innermost(child) is gm for child in gm._modules.values())


def _views_of(gm: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """Yield the modules that run operations on the state of `gm`."""
    for child in gm._modules.values():
        view = innermost(child) if child is not None else None
        if isinstance(view, fx.GraphModule) and view is not gm and view._modules is gm._modules:
            yield view


def _has(gm: fx.GraphModule, path: str) -> bool:
    try:
        gm.get_submodule(path)
    except AttributeError:
        return False
    return True


def _needs(graph: fx.Graph, gm: fx.GraphModule, path: str) -> bool:
    """Tell whether a graph calls a module, one around it, or something in it, or reads from it."""
    atoms = path.split(".")
    around = [".".join(atoms[:length]) for length in range(1, len(atoms) + 1)]
    if any(graph.find_nodes(op="call_module", target=p, sort=False) for p in around):
        return True
    # Most modules have no children, so that nothing in them can be called.
    ops = ("get_attr", "call_module") if gm.get_submodule(path)._modules else ("get_attr",)
    inner = (str(n.target) for op in ops for n in graph.find_nodes(op=op, sort=False))
    return any(p == path or p.startswith(f"{path}.") for p in inner)
