"""Hugging Face folders: their tensors by name, and the conversion to a model's tensors."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slapo.errors import SlapoError
from slapo.logger import get_logger
from slapo.weights.files import TensorFile
from slapo.weights.pieces import Box, Pieced, index_of
from slapo.weights.provenance import Original

logger = get_logger("slapo")

INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
ADAPTERS = "adapter_model.safetensors"
#: The file that completes a step of engine.save.
MANIFEST = "checkpoint.json"


class Folder:
    """Tensors of a folder or file, as a context manager; raises SlapoError if inconsistent."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._open = ExitStack()
        #: files of torch.save, which are loaded in full
        self._loaded: dict[str, Tensor] = {}
        self._file_of: dict[str, TensorFile] = {}
        try:
            self._find()
        except BaseException:
            self._open.close()
            raise

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors read so far."""
        files = {id(file): file for file in self._file_of.values()}
        return sum(file.bytes_read for file in files.values())

    def leaves(self) -> dict[str, Pieced]:
        """Return each tensor as a leaf."""
        stored = {n: (file.shape(n), file.dtype(n)) for n, file in self._file_of.items()}
        stored |= {name: (t.shape, t.dtype) for name, t in self._loaded.items()}
        return {n: Pieced.leaf(n, shape, dtype) for n, (shape, dtype) in stored.items()}

    def read(self, name: str, box: Box) -> Tensor:
        """Return the values in a box."""
        if name in self._loaded:
            return self._loaded[name][index_of(box)]
        return self._file_of[name].read(name, box)

    def config(self) -> dict[str, Any]:
        """Return the content of ``config.json``, or ``{}``."""
        path = self.path / "config.json"
        if self.path.is_file() or not path.is_file():
            return {}
        return _json(path)

    def _find(self) -> None:
        if self.path.is_file():
            self._add([self.path])
        elif not self.path.is_dir():
            raise SlapoError(
                f"{self.path} is neither a folder nor a file; pass a folder written by "
                "save_pretrained, or one already downloaded: nothing is downloaded here"
            )
        elif (self.path / MANIFEST).is_file():
            raise SlapoError(
                f"{self.path} is a step of engine.save; load it with engine.load, or pass a "
                "folder of slapo.save_pretrained"
            )
        elif (self.path / INDEX).is_file():
            self._add_index(_json(self.path / INDEX))
        elif (self.path / WEIGHTS).is_file():
            self._add([self.path / WEIGHTS])
        else:
            self._add(self._others())

    def _others(self) -> list[Path]:
        """Return files without an index: safetensors of any name, else those of ``torch.save``."""
        for pattern in ("*.safetensors", "pytorch_model*.bin"):
            found = sorted(self.path.glob(pattern))
            if found:
                return found
        has = sorted(path.name for path in self.path.iterdir())[:8]
        raise SlapoError(
            f"{self.path} holds no weights, neither *.safetensors nor pytorch_model*.bin; it has "
            f"{has or 'nothing'}"
        )

    def _add_index(self, index: Any) -> None:
        where = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(where, dict):
            raise SlapoError(f"{self.path / INDEX} has no weight_map; save the folder again")
        files = sorted(set(where.values()))
        gone = [name for name in files if not (self.path / name).is_file()]
        if gone:
            raise SlapoError(f"{self.path}: the index names {gone[:3]}, which do not exist")
        self._add([self.path / name for name in files])
        lacking = [name for name in where if name not in self._file_of]
        extra = [name for name in self._file_of if name not in where]
        if lacking or extra:
            what = f"lack {lacking[:3]}" if lacking else f"also have {extra[:3]}"
            raise SlapoError(f"{self.path}: the index does not match its files, which {what}")

    def _add(self, paths: list[Path]) -> None:
        old = sorted(self.path.glob("pytorch_model*.bin"))
        if old and paths[0] not in old:
            logger.info("%s also has %s; reading the safetensors", self.path, old[0].name)
        for path in paths:
            if path.suffix == ".safetensors":
                file = self._open.enter_context(TensorFile(path))
                self._file_of |= dict.fromkeys(file.names(), file)
            else:
                self._loaded |= _loaded(path)


def _loaded(path: Path) -> dict[str, Tensor]:
    """Load a file of ``torch.save``, without running code in it."""
    try:
        # mmap: each rank touches only the pages of its own boxes.
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise SlapoError(
            f"{path} does not hold only tensors ({type(error).__name__}: {str(error)[:200]}); "
            "code in it is not run: save the model as safetensors"
        ) from None
    if not isinstance(found, dict) or not all(isinstance(v, Tensor) for v in found.values()):
        raise SlapoError(f"{path} holds no state dict of tensors; save the model as safetensors")
    return found


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise SlapoError(f"{path} is damaged: {error}") from None


class Found:
    """The tensors in a folder for a model.

    `originals` maps names in the model to their pieces in the folder. `missing` has names of the
    model that the folder lacks, and `unexpected` the reverse.
    """

    def __init__(self, folder: Folder, original: Original) -> None:
        self.folder, self._original = folder, original
        self._check_family(original)
        leaves = folder.leaves()
        if original.is_of_transformers:
            self.originals, info = _converted(original, leaves)
        else:
            self.originals = {n: t for n, t in leaves.items() if n in original.tensors}
            info = {"unexpected_keys": leaves.keys() - original.tensors - original.ties.keys()}
        for name, first in original.ties.items():
            if name in self.originals:
                # The folder may name a tied tensor by a later name than this model's first one.
                self.originals.setdefault(first, self.originals[name])
        self._check_ties(original)
        self.originals = {n: t for n, t in self.originals.items() if n in original.tensors}
        self.missing = sorted(original.tensors.keys() - self.originals)
        self.unexpected = sorted(info["unexpected_keys"])
        self._check_shapes(original, info.get("mismatched_keys", ()))

    def take_generation_config(self) -> Any:
        """Return the folder's generation config, which becomes the model's, or None."""
        path = self.folder.path / "generation_config.json"
        if not self._original.is_of_transformers or not path.is_file():
            return None
        from transformers import GenerationConfig  # optional package

        found = GenerationConfig.from_pretrained(self.folder.path)
        self._original.generation_config = found
        return found

    def read(self, name: str, box: Box) -> Tensor:
        """Return the values in a box of the model's tensor."""
        return self.originals[name].part(box).read(self.folder.read)

    def missing_in_its_class(self) -> list[str]:
        """Return the tensors that the folder lacks for the class that it was saved from."""
        names = self.folder.config().get("architectures")
        if not names:
            return []
        import transformers  # optional package

        cls = getattr(transformers, names[0], None)
        if cls is None or cls is self._original.cls:
            return self.missing if cls is not None else []
        saved = replace(self._original, cls=cls)
        _, info = _converted(saved, self.folder.leaves())
        return sorted(info["missing_keys"])

    def _check_family(self, original: Original) -> None:
        config = self.folder.config()
        quantized = config.get("quantization_config")
        if quantized:
            raise SlapoError(
                f"{self.folder.path} holds weights quantized by "
                f"{quantized.get('quant_method', 'some method')!r}, which cannot be sharded; "
                "pass unquantized weights"
            )
        family = getattr(original.config, "model_type", None)
        other = config.get("model_type")
        if original.is_of_transformers and other is not None and other != family:
            raise SlapoError(
                f"{self.folder.path} holds a model of family {other!r}, but this one is of "
                f"{family!r} ({original.cls.__name__}); make the model from this folder's config"
            )

    def _check_ties(self, original: Original) -> None:
        """Refuse two different values for one tensor of the model."""
        for name, first in original.ties.items():
            one, two = (self.originals.get(each) for each in (name, first))
            # Equal pieces have one source; comparing values would read both tensors in full.
            if one is None or two is None or one.pieces == two.pieces:
                continue
            read = self.folder.read
            if one.shape != two.shape or not torch.equal(one.read(read), two.read(read)):
                raise SlapoError(
                    f"{self.folder.path} has two values for {first!r} and {name!r}, which are "
                    "one tensor in this model; make the model without tied weights, or save "
                    "equal ones"
                )

    def _besides(self, wrong: Collection[str]) -> str:
        missing = [name for name in self.missing if name not in wrong]
        lacks = f"; it lacks {missing[:3]}" if missing else ""
        return lacks + (f"; it also has {self.unexpected[:3]}" if self.unexpected else "")

    def _check_shapes(self, original: Original, mismatched: Any) -> None:
        wrong = {name: (tuple(disk), tuple(here)) for name, disk, here in mismatched}
        for name, tensor in self.originals.items():
            if tensor.shape != original.tensors[name][0]:
                wrong[name] = (tuple(tensor.shape), tuple(original.tensors[name][0]))
        if wrong:
            shown = [f"{n} is {disk}, not {here}" for n, (disk, here) in sorted(wrong.items())[:3]]
            more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise SlapoError(
                f"{self.folder.path} holds a model of different sizes: "
                f"{'; '.join(shown)}{more}{self._besides(wrong)}; make the model from this "
                "folder's config"
            )


def _converted(
    original: Original, leaves: Mapping[str, Pieced]
) -> tuple[dict[str, Pieced], dict[str, Any]]:
    """Map names in the model to pieces of leaves, by Transformers' own conversion."""
    made: Any = original.cls
    with _quiet():
        model, info = made.from_pretrained(
            None,
            config=original.config,
            # Leaves stand for the tensors of the state dict, so that the renames, merges and
            # transposes of Transformers' loader are recorded in their pieces.
            state_dict=dict(leaves),
            # Errors of sizes are collected here and reported with the folder's other differences.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    tensors = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    return {name: t for name, t in tensors if isinstance(t, Pieced)}, info


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Transformers' report of missing keys, which the result contains."""
    from transformers.utils import logging  # optional package

    level, shows_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shows_bars:
            logging.enable_progress_bar()


def skeleton_of(original: Original) -> nn.Module:
    """Build the original model on meta."""
    made: Any = original.cls
    try:
        with torch.device("meta"):
            model: nn.Module = made(original.config)
    except Exception as error:
        raise SlapoError(
            f"{made.__name__} cannot be created from its config alone ({type(error).__name__}: "
            f"{error}), as from_pretrained does; let its __init__ take the config"
        ) from error
    return model


def on_disk(original: Original, dtypes: Mapping[str, torch.dtype]) -> dict[str, Pieced]:
    """Return name in the folder -> pieces of the model's tensors."""
    leaves = {
        name: Pieced.leaf(name, shape, dtypes.get(name, dtype))
        for name, (shape, dtype) in original.tensors.items()
    }
    if has_adapters(original, dtypes):
        return _adapters_on_disk(original, leaves)
    if original.adapters:
        # After merge_and_unload() no rank holds adapters, but origins still have PEFT's names of
        # the layers.
        merged = {n: leaf for n, leaf in leaves.items() if n in dtypes}
        leaves = {n.replace(".base_layer.", "."): leaf for n, leaf in merged.items()}
    if not original.is_of_transformers:
        return leaves
    from transformers.core_model_loading import revert_weight_conversion

    model: Any = skeleton_of(original)
    known = model.state_dict()
    # Otherwise from_pretrained() of the new folder would fail, or initialize them at random.
    unlike = [n for n, t in leaves.items() if n not in known or known[n].shape != t.shape]
    if unlike:
        raise SlapoError(
            f"save_pretrained: {unlike[:3]} are not in a {original.cls.__name__} that "
            "from_pretrained would create from this config; save before changing the model, as "
            "with adapters, or update the config"
        )
    left_out = {*model.all_tied_weights_keys, *(model._keys_to_ignore_on_save or ())}
    kept = {name: leaf for name, leaf in leaves.items() if name not in left_out}
    found: dict[str, Pieced] = revert_weight_conversion(model, kept)
    return found


def has_adapters(original: Original, held: Collection[str]) -> bool:
    """Return whether the ranks hold PEFT adapters, which `merge_and_unload` would remove."""
    return bool(original.adapters) and any(".lora_" in name for name in held)


def _adapters_on_disk(original: Original, leaves: dict[str, Pieced]) -> dict[str, Pieced]:
    """Return only the adapters, by PEFT's names in a file."""
    adapters = original.adapters or {}
    ((name, config), *others) = adapters.items()
    if others or getattr(config, "modules_to_save", None):
        raise SlapoError(
            f"save_pretrained: the model has the adapters {list(adapters)} with "
            f"modules_to_save={getattr(config, 'modules_to_save', None)}, but only a single LoRA "
            "adapter can be written; engine.save keeps all"
        )
    prefix = "base_model.model."  # the schedule may be for the base model inside
    own = {key.removeprefix(prefix): leaf for key, leaf in leaves.items() if ".lora_" in key}
    # PEFT's files omit the adapter's name; a magnitude (DoRA) used to be a plain parameter.
    short = (re.sub(rf"(\.lora_\w+)\.{re.escape(name)}", r"\1", key) for key in own)
    short = (re.sub(r"(magnitude_vector)\.weight$", r"\1", key) for key in short)
    return {f"{prefix}{key}": leaf for key, leaf in zip(short, own.values(), strict=True)}
