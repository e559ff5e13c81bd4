"""The two layers of a transformer's feed-forward block, each with what follows it."""

from __future__ import annotations

from torch import Tensor, nn

from slapo.op.fused_bias import Activation
from slapo.op.linear import LinearWithAct, LinearWithDropout


class FusedMLP(nn.Module):
    """``dropout(fc_out(act(fc_in(x))))``, with biases added along with what follows them.

    Parameters
    ----------
    hidden_size
        Features of the input and of the output.
    intermediate_size
        Features in between.
    orig_act
        The activation: a name as configurations of Transformers have it, such as ``"gelu_new"``, a
        function or a module.
    resid_pdrop
        Probability of the dropout at the end.
    use_torchscript
        Run the second bias and the dropout by TorchScript.

    Examples
    --------
    >>> import torch
    >>> FusedMLP(4, 16, "gelu_new", resid_pdrop=0.1)(torch.ones(2, 3, 4)).shape
    torch.Size([2, 3, 4])
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        orig_act: str | Activation,
        resid_pdrop: float,
        use_torchscript: bool = False,
    ) -> None:
        super().__init__()
        self.fc_in = LinearWithAct(hidden_size, intermediate_size, orig_act)
        self.fc_out = LinearWithDropout(
            intermediate_size, hidden_size, p=resid_pdrop, use_torchscript=use_torchscript
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        """``(..., hidden_size)`` -> the same."""
        output: Tensor = self.fc_out(self.fc_in(hidden_states))
        return output
