"""What ranks of the engines' benchmark import, once for all of them: DeepSpeed takes seconds."""

import importlib
import importlib.util
import os

# It chooses its device when it is imported; these ranks are on a CPU.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
for _name in (
    "deepspeed",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
):
    if importlib.util.find_spec(_name.partition(".")[0]) is not None:
        importlib.import_module(_name)
