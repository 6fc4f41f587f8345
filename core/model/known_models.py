"""Records of models on disk, made by a first load, from which later processes build them without transformers.

A record is kept only if the plain decoder (plain_decoder.py), over the tensors of the files, computes the logits of the
model's own code and calls attention with equal arguments. It is valid for these files, this precision and these
versions. The record of the embedded model is part of the package.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from graftlm.core.config import EngineConfig
from graftlm.core.fusion.linears import Fusions, pack_quantised
from graftlm.core.model.embedded import sprout_folder
from graftlm.core.model.gguf.folder import listed_gguf
from graftlm.core.model.plain_decoder import PlainConfig, PlainDecoder, Rotations, Unlike
from graftlm.kernels import disk_cache
from graftlm.kernels.cpu.mapped_files import MappedFiles

if TYPE_CHECKING:
    from torch import nn

    from graftlm.core.loaded_model import LoadedModel
    from graftlm.core.model.qualify import Reference
    from graftlm.core.model.remembered.load_record import LoadRecord
    from graftlm.core.model.remembered.packed_weights import PackedWeights

FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Model types whose code in transformers the plain decoder follows: a short probe cannot show every difference."""

ROTATIONS = frozenset({"default", "linear", "llama3", "yarn"})
"""Kinds of rotary embeddings whose frequencies do not depend on the sequence."""

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-3}
"""Relative error of logits, which are mostly equal to the bit."""

_KEPT = 64
"""The number of records that the cache folder keeps."""

_HEAD = "lm_head.weight"


@dataclass(frozen=True)
class KnownModel:
    """The record of a model: the findings of its first load.

    config         transformers' configuration, defaults included
    dtype          of the parameters
    tied           whether the head is the embedding
    eos_token_ids  of the generation config
    """

    config: dict[str, Any]
    dtype: str
    tied: bool
    eos_token_ids: tuple[int, ...]
    rotations: Rotations

    @classmethod
    def of(cls, source: str, loaded: LoadedModel, reference: Reference, config: EngineConfig) -> KnownModel | None:
        """Return the record of a model that transformers has just read from `source`; None if it cannot have one."""
        if not _may_be_known(source, config) or loaded.device.type != "cpu" or loaded.dtype not in TOLERANCE:
            return None
        from graftlm.core.model.remembered.packed_weights import PackedWeights

        try:
            known = cls._described(source, loaded)
            if listed_gguf(source) is not None:
                packed = PackedWeights.of(loaded.model)  # shared: a second copy would double the memory of a load
                plain = known.read(source, packed)
                if packed is None:
                    pack_quantised(plain, Fusions(), config.activations)
                return known if _same(plain, loaded, reference) else None
            files = dict(known._described_tensors(source))
            own: Any = loaded.model
            plain = known._decoder({name: tensor for name, tensor in own.state_dict().items() if name in files})
            return known if _same_files(plain, files) and _same(plain, loaded, reference) else None
        except (Unlike, OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError):
            return None  # later processes build it with transformers too

    @property
    def described(self) -> PlainConfig:
        return PlainConfig(self.config)

    @classmethod
    def _described(cls, source: str, loaded: LoadedModel) -> KnownModel:
        from graftlm.core.text.tokenizer import ends_of

        own: Any = loaded.model
        described = json.loads(loaded.hf_config.to_json_string(use_diff=False))
        for name in ("_name_or_path", "transformers_version"):  # neither affects the computation
            described.pop(name, None)
        kind = (described.get("rope_parameters") or {}).get("rope_type")
        if described.get("model_type") not in FAMILIES or kind not in ROTATIONS:
            raise Unlike(f"it is a {described.get('model_type')} with rotations of kind {kind}")
        rotary = own.model.rotary_emb
        tied = bool(described.get("tie_word_embeddings"))
        if listed_gguf(source) is None:
            tied = own.get_output_embeddings().weight is own.get_input_embeddings().weight
        eos = getattr(own.generation_config, "eos_token_id", None)
        return cls(
            described,
            str(loaded.dtype).removeprefix("torch."),
            tied,
            tuple(ends_of(eos)),
            Rotations(tuple(rotary.inv_freq.tolist()), float(rotary.attention_scaling)),
        )

    def read(self, source: str, packed: PackedWeights | None = None) -> PlainDecoder:
        """Return the model, its weights mapped from the files of `source`, or those of an earlier load.

        Raises Unlike, OSError, and the errors of safetensors.
        """
        if packed is not None:
            state = packed.state
            decoder = self._decoder({name: x for name, x in state.items() if not (self.tied and name == _HEAD)})
            packed.put(decoder)
            return decoder
        gguf = listed_gguf(source)
        if gguf is None:
            return self._decoder(self._tensors(source))
        from graftlm.core.model.gguf.weights import matrices, tensors
        from graftlm.core.model.quantised.held import HeldWeights

        held = HeldWeights.of_names(torch.device("cpu"), self._dtype, matrices(gguf))
        decoder = self._decoder(dict(tensors(gguf, self._dtype, held)))
        held.put(decoder, tied=self.tied)
        return decoder

    def _decoder(self, state: dict[str, torch.Tensor]) -> PlainDecoder:
        return PlainDecoder(self.config, state, self.rotations, tied=self.tied, eos_token_ids=self.eos_token_ids)

    def _tensors(self, source: str) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for file, names in self._files(source):
            mapped: MappedFiles | None = None
            for name in names:
                read = file.get_tensor(name)
                tensors[name] = read.to(self._dtype)
                if tensors[name] is not read:  # else a file of another precision stays in memory beside its copy
                    mapped = mapped or MappedFiles()
                    mapped.release(read)
        return tensors

    def _described_tensors(self, source: str) -> Iterator[tuple[str, FileTensor]]:
        """Yield the names of the tensors in the files of `source`, each with its compared part."""
        for file, names in self._files(source):
            for name in names:
                part = file.get_slice(name)
                shape = tuple(part.get_shape())
                first = part[:1] if shape else file.get_tensor(name)
                yield name, FileTensor(shape, first.to(self._dtype))

    def _files(self, source: str) -> Iterator[tuple[Any, list[str]]]:
        """Yield the open files of `source`, each with the names of the tensors that the model uses."""
        from safetensors import safe_open

        folder = Path(source)
        index = folder / "model.safetensors.index.json"
        names = {"model.safetensors"}
        if index.is_file():
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        for name in sorted(names):
            with safe_open(str(folder / name), framework="pt") as file:
                yield file, [key for key in file.keys() if not (self.tied and key == _HEAD)]  # noqa: SIM118

    @property
    def _dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    def keep(self, source: str, config: EngineConfig) -> None:
        """Write the record for later processes, if there is a cache folder."""
        path = _path(source, config)
        if path is not None:
            text = json.dumps(asdict(self), sort_keys=True)
            disk_cache.save_arrays(path, {"record": np.frombuffer(text.encode(), np.uint8)})
            disk_cache.trim(path.parent, _KEPT)

    @classmethod
    def parsed(cls, text: str) -> KnownModel:
        found = json.loads(text)
        rotations = Rotations(tuple(found["rotations"]["frequencies"]), found["rotations"]["factor"])
        return cls(found["config"], found["dtype"], found["tied"], tuple(found["eos_token_ids"]), rotations)


def find(source: str, config: EngineConfig) -> KnownModel | None:
    """Return the record of the model in a folder, for this precision; None if there is none."""
    if not _may_be_known(source, config):
        return None
    if Path(source) == sprout_folder() and config.dtype in ("auto", "bfloat16") and not config.strict:
        return KnownModel.parsed(EMBEDDED.read_text(encoding="utf-8"))
    path = _path(source, config)
    kept = disk_cache.load_arrays(path) if path is not None else None
    return KnownModel.parsed(kept["record"].tobytes().decode()) if kept is not None else None


def read_known(source: str, config: EngineConfig, record: LoadRecord) -> PlainDecoder | None:
    """Return the model in a folder, built without transformers; None if there is no valid record of it."""
    known = find(source, config)
    try:
        return known.read(source, record.weights()) if known is not None else None
    except Exception:  # transformers reports the error in the files
        return None


def learn(source: str, loaded: LoadedModel, reference: Reference, config: EngineConfig) -> Callable[[], None] | None:
    """Test whether later processes can build a model by its record. -> a function that keeps the record

    Must run before any module of the model is replaced.
    """
    if isinstance(loaded.model, PlainDecoder):
        return None
    known = KnownModel.of(source, loaded, reference, config)
    return partial(known.keep, source, config) if known is not None else None


EMBEDDED = sprout_folder().with_name("sprout_known") / "model.json"
"""The record of the embedded model; tests/core/model/test_known_models.py compares it with a new one."""


def _may_be_known(source: str, config: EngineConfig) -> bool:
    return os.path.isdir(source) and config.quantization is None and not config.trust_remote_code


def _path(source: str, config: EngineConfig) -> Path | None:
    from graftlm.core.model.fingerprint import model_fingerprint

    folder = disk_cache.private_folder("known-models")
    return folder / f"{model_fingerprint(source, config)}-{_versions()}.record" if folder is not None else None


@functools.cache
def _versions() -> str:
    """Return a digest of all versions that a record depends on, this code included."""
    named = [disk_cache.version_of(name) for name in ("torch", "transformers", "safetensors")]
    digest = hashlib.blake2b(repr(named).encode(), digest_size=6)
    for name in ("plain_decoder.py", "known_models.py"):
        digest.update(Path(__file__).with_name(name).read_bytes())
    return digest.hexdigest()


class FileTensor(NamedTuple):
    """The compared part of a tensor in a file: its shape and its first row, in the model's precision."""

    shape: tuple[int, ...]
    first_row: torch.Tensor


def _same_files(plain: nn.Module, files: dict[str, FileTensor]) -> bool:
    """Return True if files and loaded model agree in names, shapes, dtypes and the first row of each tensor."""
    own = plain.state_dict()
    if set(own) - {_HEAD} != set(files) - {_HEAD}:
        return False
    return all(
        own[name].shape == found.shape
        and own[name].dtype == found.first_row.dtype
        and torch.equal(own[name][:1], found.first_row)
        for name, found in files.items()
    )


@torch.inference_mode()
def _same(plain: PlainDecoder, loaded: LoadedModel, reference: Reference) -> bool:
    """Return True if attention calls, rotations of far positions, and logits of both are equal."""
    from graftlm.core.model.qualify import discover

    if discover(plain, loaded.device).layers != discover(loaded.model, loaded.device).layers:
        return False
    own: Any = loaded.model
    positions = torch.tensor([[0, 1, 1_000, loaded.max_model_len - 1]])
    x = plain.model.norm.weight[None, None]
    turned = zip(plain.model.rotary_emb(x, positions), own.model.rotary_emb(x, positions), strict=True)
    if not all(torch.equal(mine, theirs) for mine, theirs in turned):
        return False
    logits = torch.cat([plain(torch.tensor([tokens])).logits[0] for tokens in reference.sequences])
    error = float((logits.float() - reference.logits.float()).norm() / reference.logits.float().norm())
    return error <= TOLERANCE[loaded.dtype]
