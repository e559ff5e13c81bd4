"""Private names of torch that this package uses, in one place.

Tested on torch 2.11, 2.13 and 2.15. None has a public counterpart: ``torch.export`` keeps no
guards, and ``torch.compile`` returns no graph to rewrite.
"""

from torch import overrides
from torch._dynamo import config as dynamo_config
from torch._dynamo import output_graph, trace_rules
from torch._dynamo import utils as dynamo_utils
from torch._dynamo.convert_frame import CaptureOutput, fullgraph_capture
from torch._dynamo.guards import CheckFunctionManager, GuardBuilder
from torch._dynamo.variables import builder
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch._subclasses.fake_tensor import fake_tensor_tls as fake_tls
from torch.fx.experimental import _config as shape_config
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.fx.node import _side_effectful_functions as side_effects
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes as modes_off
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

#: Raised on fake tensors if the sizes of a result depend on values.
BY_VALUE = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
)

__all__ = [
    "BY_VALUE",
    "CaptureOutput",
    "CheckFunctionManager",
    "DeviceContext",
    "FakeTensor",
    "FakeTensorMode",
    "GuardBuilder",
    "PythonReferenceAnalysis",
    "ShapeEnv",
    "builder",
    "detect_fake_mode",
    "dynamo_config",
    "dynamo_utils",
    "fake_tls",
    "fullgraph_capture",
    "modes_off",
    "output_graph",
    "overrides",
    "shape_config",
    "side_effects",
    "sympy_interp",
    "trace_rules",
]
