"""``slapo.utils.common.get_hooks``."""

from torch import nn

import slapo
from slapo.utils.common import get_hooks


def repr_of(module: object, args: object, output: object) -> None:
    repr(output)


def test_hooks_by_mode_in_the_order_they_run() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    sch = slapo.create_schedule(module)
    assert get_hooks(module) == {"fwd_pre": [], "fwd_post": [], "bwd_post": []}
    sch.sync("fwd_post", print).sync("fwd_post", repr_of).sync("bwd_post", "all_reduce")
    hooks = get_hooks(module)
    assert (hooks["fwd_pre"], hooks["fwd_post"]) == ([], [print, repr_of])
    assert len(hooks["bwd_post"]) == 1
