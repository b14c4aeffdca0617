"""Trace: what the heads of one generation read. The waist of the project: metal writes it, everything else reads it.

On disk a trace is a directory of plain `.npy` files and a `manifest.json` that is written last, so a directory without
one is incomplete. Arrays are head-major, memory-mapped on reading, and never pickled.

head = layer * heads_per_layer + i is a query head; kv_head = layer * kv_per_layer + i // group is where its KV lives.
Decode step t feeds token n_prompt - 1 + t, sees the positions 0 .. n_prompt - 1 + t, and emits token n_prompt + t:
the last prompt token is the first logged step. A page is 16 consecutive tokens.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np

from wakekv.errors import InputError, TraceError
from wakekv.files import difference, entries, refuse_taken, sha256

FORMAT, VERSION = "wakekv-trace", 1
PAGE, SINKS, LOCAL, PROMPT_ROWS = 16, 4, 32, 32  # tokens a page; sink positions; local window; last prompt rows kept

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class Trace:
    """One logged generation (the paper's section 4, completed). Arrays may be memory-mapped: treat them as read-only.

    The masses and the entropy come from the whole row in float32, not from its top k. A head of a sliding-window layer
    has weight 0 outside its window; `manifest["model"]["windows"]` says how far each layer sees.
    """

    manifest: dict[str, Any]
    tokens: Array  # int32 [n_prompt + n_steps]: the prompt, then what was emitted
    choice: Array  # int32 [step]: the model's own argmax; what was emitted, when greedy
    positions: Array  # uint16 or uint32 [head, step, k]: ascending; padded at the end with the dtype's maximum
    weights: Array  # float16 [head, step, k]: attention weight at `positions`; padding 0
    top: Array  # as positions [head, step]: where the largest weight is, decided in float32, ties to the lowest
    needle_mass: Array  # float32 [head, step]: weight on the needle, 0 without one
    sink_mass: Array  # float32 [head, step]: weight on positions 0..3 outside the needle
    local_mass: Array  # float32 [head, step]: on the context's last 32 positions outside the needle and the sinks
    entropy: Array  # float32 [head, step], nats
    prompt_pages: (
        Array  # float16 [head, 32, prompt_page]: page weights of the last 32 prefilled rows; missing rows 0, first
    )
    key_means: (
        Array  # float16 [kv_head, page, head_dim]: mean post-RoPE key of every page, the last one of what it holds
    )

    @property
    def n_heads(self) -> int:
        return self.positions.shape[0]

    @property
    def n_kv_heads(self) -> int:
        return self.key_means.shape[0]

    @property
    def n_layers(self) -> int:
        return self.manifest["model"]["n_layers"]

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.n_heads // self.n_kv_heads

    @property
    def n_prompt(self) -> int:
        return self.manifest["n_prompt"]

    @property
    def n_steps(self) -> int:
        return self.positions.shape[1]

    @property
    def k(self) -> int:
        return self.positions.shape[2]

    @property
    def needle(self) -> list[list[int]]:
        """Token spans [start, stop) of the needle; empty where the prompt has none."""
        return self.manifest["prompt"]["needle"]

    @property
    def emitted(self) -> Array:
        """int32 [step]: the token that each step emitted."""
        return self.tokens[self.n_prompt :]

    @property
    def layer(self) -> Array:
        """int [head]: the layer of each query head."""
        return np.arange(self.n_heads) // (self.n_heads // self.n_layers)


NAMES = tuple(f.name for f in fields(Trace) if f.name != "manifest")


def position_dtype(n_tokens: int) -> np.dtype[Any]:
    """uint16 below 65,536 tokens, uint32 from there on; the maximum is kept free for padding."""
    return np.dtype(np.uint16 if n_tokens < 1 << 16 else np.uint32)


def layout(manifest: dict[str, Any]) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
    """The dtype and shape every array must have, by the manifest's sizes. KeyError, TypeError or ValueError if those
    are amiss: counts from 1, query heads in equal groups by layer and by KV head, needles within the prompt."""
    model, n_prompt, steps, k = manifest["model"], manifest["n_prompt"], manifest["n_steps"], manifest["k"]
    sizes = {name: model[name] for name in ("n_layers", "n_heads", "n_kv_heads", "head_dim")}
    sizes |= {"n_prompt": n_prompt, "n_steps": steps, "k": k}
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise ValueError(f"{name} is {size!r}, not a whole number from 1 up")
    heads, tokens = model["n_heads"], n_prompt + steps
    if heads % model["n_kv_heads"] or model["n_kv_heads"] % model["n_layers"]:
        raise ValueError(
            f"{heads} heads are no equal groups of {model['n_kv_heads']} KV heads and {model['n_layers']} layers"
        )
    for start, stop in manifest["prompt"]["needle"]:
        if not 0 <= start < stop <= n_prompt:
            raise ValueError(f"the needle {[start, stop]} does not lie within {n_prompt} prompt tokens")
    position, read = position_dtype(tokens), (heads, steps, k)
    shapes = {
        "tokens": ("int32", (tokens,)),
        "choice": ("int32", (steps,)),
        "positions": (position, read),
        "weights": ("float16", read),
        "top": (position, read[:2]),
        **dict.fromkeys(("needle_mass", "sink_mass", "local_mass", "entropy"), ("float32", read[:2])),
        "prompt_pages": ("float16", (heads, PROMPT_ROWS, -(-n_prompt // PAGE))),
        "key_means": ("float16", (model["n_kv_heads"], -(-(tokens - 1) // PAGE), model["head_dim"])),
    }
    return {name: (np.dtype(dtype), shape) for name, (dtype, shape) in shapes.items()}


def open_trace(path: str | Path) -> Trace:
    """The trace in directory `path`, memory-mapped. TraceError if it is missing, incomplete, foreign or misshapen."""
    path = Path(path)
    manifest = read_manifest(path)
    arrays = {}
    for name, (dtype, shape) in _layout_of(path, manifest).items():
        try:
            array = np.load(path / f"{name}.npy", mmap_mode="r", allow_pickle=False)
        except FileNotFoundError:
            raise TraceError(f"{path}: {name}.npy is missing; record it again") from None
        except (ValueError, EOFError, OSError, TokenError) as error:  # the last is numpy's, of some damaged heads
            raise TraceError(f"{path}: {name}.npy cannot be read ({error}); record it again") from None
        if (array.dtype, array.shape) != (dtype, shape):
            raise TraceError(
                f"{path}: {name}.npy is {array.dtype} {list(array.shape)}, not {dtype} {list(shape)}; record it again"
            )
        arrays[name] = array
    return Trace(manifest, **arrays)


def save_trace(trace: Trace, path: str | Path) -> Path:
    """Write `trace` to the new directory `path`, all or nothing. InputError if that is taken, or an array misshapen."""
    path = refuse_taken(path)
    try:
        expected = layout(trace.manifest)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"the manifest lacks or garbles an entry ({error!r}): see a trace that was recorded") from None
    for name, (dtype, shape) in expected.items():
        array = getattr(trace, name)
        if (array.dtype, array.shape) != (dtype, shape):
            raise InputError(f"{name} is {array.dtype} {list(array.shape)}, a trace needs {dtype} {list(shape)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.mkdir()
    try:
        for name in NAMES:
            write_array(part, name, [np.ascontiguousarray(getattr(trace, name))], *expected[name])
        write_manifest(part, trace.manifest)
        return publish(part, path)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def verify(path: str | Path) -> None:
    """Compare every byte in directory `path` with its manifest. TraceError names the first file that does not match."""
    path = Path(path)
    manifest = read_manifest(path)
    _layout_of(path, manifest)
    if (path / "manifest.json").read_bytes() != _dumps(manifest).encode() or manifest.get("sha256") != _own(manifest):
        raise TraceError(f"{path}: manifest.json was changed after it was written; record it again")
    there = {p.name for p in path.iterdir()} - {"manifest.json"}
    if found := difference(path, manifest["files"], there):
        way = "record it again" if found[0] in manifest["files"] else "remove it"
        raise TraceError(f"{path}: {' '.join(found)}; {way}")
    open_trace(path)


def read_manifest(path: str | Path) -> dict[str, Any]:
    """The manifest of the trace in directory `path`. TraceError if there is none that this version can read."""
    path = Path(path)
    if not path.is_dir():
        raise TraceError(f"no trace at {path}: record one with `python -m wakekv record`")
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        _dumps(manifest).encode()  # what cannot be written cannot have been: NaN, half a surrogate
    except FileNotFoundError:
        raise TraceError(
            f"{path}: manifest.json is missing, so it is incomplete or no trace; record it again"
        ) from None
    except (ValueError, RecursionError, OSError) as error:
        raise TraceError(f"{path}: manifest.json is not JSON ({error}); record it again") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise TraceError(f"{path}: manifest.json is not that of a {FORMAT}; name one, or record it again")
    if manifest.get("version") != VERSION:
        version = manifest.get("version")
        raise TraceError(f"{path}: manifest.json has version {version!r}, not {VERSION} as here; record it again")
    return manifest


# The steps of writing, shared with the recorder: arrays into a .part directory, the manifest, one rename.


def write_array(part: Path, name: str, blocks: Iterable[Array], dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    """`part/name.npy`, block after block along the first axis, so that a large array never has to fit in memory."""
    with open(part / f"{name}.npy", "wb") as file:
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        for block in blocks:
            file.write(np.ascontiguousarray(block, dtype).data)
        file.flush()
        os.fsync(file.fileno())


def write_manifest(part: Path, manifest: dict[str, Any]) -> None:
    """`part/manifest.json`: `manifest` with the hash of every array, and of itself. It makes the directory a trace."""
    manifest = {"format": FORMAT, "version": VERSION, **manifest, "files": dict(_entries(part, manifest))}
    manifest["sha256"] = _own(manifest)
    with open(part / "manifest.json.new", "w", encoding="utf-8") as file:
        file.write(_dumps(manifest))
        file.flush()
        os.fsync(file.fileno())
    os.replace(part / "manifest.json.new", part / "manifest.json")


def publish(part: Path, path: Path, drop: Iterable[str] = ()) -> Path:
    """Rename the finished directory `part` to `path`, less the working files `drop`."""
    for name in drop:
        (part / name).unlink(missing_ok=True)
    refuse_taken(path)
    os.rename(part, path)
    return path


def _entries(part: Path, manifest: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, (dtype, shape) in layout(manifest).items():
        file = part / f"{name}.npy"
        entry = {"sha256": sha256(file), "dtype": dtype.name, "shape": list(shape), "bytes": file.stat().st_size}
        yield file.name, entry


def _layout_of(path: Path, manifest: dict[str, Any]) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
    try:
        expected, named = layout(manifest), set(entries(manifest))
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(f"{path}: manifest.json lacks or garbles an entry ({error!r}); record it again") from None
    odd = sorted(named ^ {f"{name}.npy" for name in NAMES})
    if odd:
        raise TraceError(f"{path}: manifest.json and the format disagree about {odd[0]!r}; record it again")
    return expected


def _dumps(manifest: dict[str, Any]) -> str:
    return json.dumps(manifest, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _own(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(_dumps({k: v for k, v in manifest.items() if k != "sha256"}).encode()).hexdigest()
