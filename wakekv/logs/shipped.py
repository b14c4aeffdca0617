"""Shipped logs: what a recording says of pages, in one small file, enough for every policy that reads no keys.

A log holds 64 positions and weights a head and step; a policy asks only for pages. A shipped log is a zip of plain
arrays that holds, for every query head and step, the pages wanted in their canonical order (ascending weight), exactly;
their weights to within 9 %, as eighths of octaves; the prompt's last rows likewise; and the tokens with their text.
So whatever depends on the order of reads alone (reactive, evict, the optimum, ...) costs what it costs on the whole
log, to the last miss, in query heads. In KV heads, and for policies that weigh what was read, near ties can turn:
on the three shipped logs of gemma3-270m miss rates at 8 to 64 pages moved by less than 0.001 for most and by 0.013 at
most (HeteroCache), against those of the whole logs. What needs positions is not in it: needle scores, wake-ups, churn
by position, pages of another size, fewer than k weights, keys.

Equal logs give equal bytes (under one version of zlib). `manifest.json` beside the files says what each is.
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np

from wakekv.errors import InputError, TraceError
from wakekv.files import difference, entries, replacing, sha256, write_json
from wakekv.logs.demand import UNITS, Demand, demand
from wakekv.logs.sound import of_pages, open_whole, stated
from wakekv.logs.trace import PAGE, Trace, layout

FORMAT, VERSION, SUFFIX = "wakekv-pages", 1, ".npz"
AGAIN = "fetch the repository's again, or pack it again"
MOST_BYTES = 1 << 30  # of a shipped log unpacked
# What reading one raises: TokenError is numpy's word for some damaged heads of arrays, RuntimeError zipfile's for parts
# that seem encrypted, or packed in another way, and json's for what is nested too deep.
BROKEN = (KeyError, ValueError, TypeError, EOFError, OSError, MemoryError, RuntimeError, TokenError)
PER_OCTAVE, LOWEST = 8, -31  # weight codes: eighths of octaves above 2**-31; code 0 is no weight
ARRAYS = {"tokens": "int32", "counts": "uint16", "created": "int32", "page_low": "uint8", "page_high": "uint8",
          "weights": "uint8", "prompt_rows": "uint8"}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Shipped:
    """One generation at page level. `demand(shipped)` (demand.py) is what policies run on.

    manifest  that of the log, without its files: model, prompt, text, sizes, versions, and `log_sha256`, its own hash
    tokens    int32 [n_prompt + n_steps];  pieces: their text, one string a token
    counts    uint16 [head, step]: pages wanted;  created int32 [page], see Demand
    page      uint16 [want]: head by head, step by step, in canonical order
    codes     uint8 [want]: weight codes, ascending within a head's step
    row_codes uint8 [head, row, page]: page weights of the last prompt rows, as codes
    """

    manifest: dict[str, Any]
    tokens: np.ndarray
    pieces: list[str]
    counts: np.ndarray
    created: np.ndarray
    page: np.ndarray
    codes: np.ndarray
    row_codes: np.ndarray

    n_prompt = property(lambda self: self.manifest["n_prompt"])
    n_steps = property(lambda self: self.manifest["n_steps"])
    n_heads = property(lambda self: self.manifest["model"]["n_heads"])
    n_kv_heads = property(lambda self: self.manifest["model"]["n_kv_heads"])
    n_layers = property(lambda self: self.manifest["model"]["n_layers"])
    n_pages = property(lambda self: len(self.created))
    k = property(lambda self: self.manifest["k"])
    needle = property(lambda self: self.manifest["prompt"]["needle"])
    emitted = property(lambda self: self.tokens[self.n_prompt :])

    @property
    def layer(self) -> np.ndarray:
        """int [head]: the layer of each query head."""
        return np.arange(self.n_heads) // (self.n_heads // self.n_layers)

    @cached_property
    def weights(self) -> np.ndarray:
        """float32 [want]: the middle of each code's interval; wants of one head, step and code spread evenly over it,
        in their order, so that weights rise strictly and the canonical order stays what it was."""
        first = np.ones(len(self.codes), bool)  # of the wants that share head, step and code
        first[1:] = self.codes[1:] != self.codes[:-1]
        first[(np.cumsum(self.counts, dtype=np.int64) - self.counts.ravel())[self.counts.ravel() > 0]] = True
        start = np.flatnonzero(first)
        size = np.diff(np.append(start, len(self.codes)))
        place = np.arange(len(self.codes)) - np.repeat(start, size)
        return weight_of(self.codes + (place + 0.5) / np.repeat(size, size) - 0.5)

    def demand(self, unit: str = "head", first_touch: str = "cold", page_tokens: int = PAGE, k: int | None = None):
        """The wants of this log, as `demand` gives them of a whole one. KV heads: the union of the group's, weights
        added. InputError for pages of another size or fewer weights: those need the whole log."""
        if unit not in UNITS:
            raise InputError(f"unit must be one of {', '.join(UNITS)}, not {unit!r}")
        if page_tokens != PAGE or k not in (None, self.k):
            raise InputError(f"a shipped log holds pages of {PAGE} tokens and k = {self.k}: record the log for others")
        rows = np.where(self.row_codes > 0, weight_of(self.row_codes), np.float32(0))
        group = 1 if unit == "head" else self.n_heads // self.n_kv_heads
        made = (self.counts, self.page.astype(np.int32), self.weights) if group == 1 else self._grouped(group)
        counts, page, weight = made
        ends = np.cumsum(counts, dtype=np.int64).reshape(counts.shape)
        return Demand(
            ptr=np.concatenate([np.append(0, ends[:-1, -1])[:, None], ends], axis=1),
            page=page,
            weight=weight,
            created=self.created,
            layer=self.layer[::group].astype(np.int32),
            first_touch=first_touch,
            prompt_rows=rows.reshape(-1, group, *rows.shape[1:]).sum(1) if rows.size else None,
            unit=unit,
        )

    def _grouped(self, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(counts, page, weight) of KV heads."""
        n_units, n_steps, n_pages = self.n_heads // group, self.n_steps, self.n_pages
        counts, pages, weights, at = np.zeros((n_units, n_steps), np.int64), [], [], 0
        for unit in range(n_units):
            step = np.concatenate([np.repeat(np.arange(n_steps), c) for c in self.counts[unit * group :][:group]])
            here, at = slice(at, at + len(step)), at + len(step)
            total = np.bincount(step * n_pages + self.page[here], self.weights[here], n_steps * n_pages)
            distinct = np.flatnonzero(total)
            step, page = np.divmod(distinct, n_pages)
            weight = total[distinct].astype(np.float32)
            order = np.lexsort((page, weight, step))
            counts[unit] = np.bincount(step, minlength=n_steps)
            pages.append(page[order].astype(np.int32))
            weights.append(weight[order])
        return counts, np.concatenate(pages), np.concatenate(weights)


def pack(trace: Trace, pieces: Sequence[str], path: str | Path) -> Path:
    """Write the page level of `trace` to the file `path`, all or nothing. pieces: the text of each of its tokens.

    Raises InputError where the pieces are not one a token, or the log is too long (65,536 pages).
    """
    path, wants = Path(path), demand(trace)
    if len(pieces) != len(trace.tokens):
        raise InputError(f"{len(pieces)} pieces of text for {len(trace.tokens)} tokens: give one a token")
    if wants.n_pages > 1 << 16:
        raise InputError(f"a shipped log holds at most 65,536 pages, not {wants.n_pages:,}")
    manifest = {name: value for name, value in trace.manifest.items() if name not in ("files", "sha256")}
    manifest |= {"format": FORMAT, "version": VERSION, "log_sha256": trace.manifest.get("sha256", "")}
    codes = code(wants.weight)
    arrays = {
        "tokens": np.asarray(trace.tokens, np.int32),
        "counts": np.diff(wants.ptr, axis=1).astype(np.uint16),
        "created": wants.created,
        "page_low": (wants.page & 255).astype(np.uint8),
        "page_high": (wants.page >> 8).astype(np.uint8),
        "weights": np.diff(codes, prepend=np.uint8(0)),  # differences, modulo 256
        "prompt_rows": code(wants.prompt_rows),
    }
    texts = {"manifest.json": manifest, "pieces.json": list(pieces)}
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as part, zipfile.ZipFile(part, "w") as held:
        for name, text in texts.items():
            _put(held, name, json.dumps(text, ensure_ascii=False, indent=1).encode())
        for name, array in arrays.items():
            content = io.BytesIO()
            np.lib.format.write_array(content, np.ascontiguousarray(array), (1, 0), allow_pickle=False)
            _put(held, f"{name}.npy", content.getvalue())
    return path


def open_shipped(path: str | Path) -> Shipped:
    """The shipped log in file `path`. TraceError if it is missing, damaged, foreign or misshapen."""
    path = Path(path)
    if not path.is_file():
        raise TraceError(f"no shipped log at {path}: see artifact/logs, or pack one with `python -m wakekv pack`")
    try:
        with zipfile.ZipFile(path) as held:
            if sum(entry.file_size for entry in held.infolist()) > MOST_BYTES:
                raise ValueError(f"unpacked it has more than {MOST_BYTES:,} bytes")
            manifest, pieces = (json.loads(held.read(f"{name}.json")) for name in ("manifest", "pieces"))
            part = {}
            for name, dtype in ARRAYS.items():
                content = io.BytesIO(held.read(f"{name}.npy"))
                part[name] = np.lib.format.read_array(content, allow_pickle=False)
                if part[name].dtype != dtype:
                    raise ValueError(f"its {name} are {part[name].dtype} instead of {dtype}")
        if (manifest["format"], manifest["version"]) != (FORMAT, VERSION):
            raise ValueError(f"it is not a {FORMAT} of version {VERSION}")
        shapes = layout(manifest)
        stated(manifest)
        page = part["page_low"].astype(np.uint16) | part["page_high"].astype(np.uint16) << 8
    except (*BROKEN, zipfile.BadZipFile, zlib.error) as error:
        said = " ".join(str(error).split())
        raise TraceError(f"{path} is damaged or no shipped log ({said}): {AGAIN}") from None
    codes = np.cumsum(part["weights"], dtype=np.uint8)
    log = Shipped(manifest, part["tokens"], pieces, part["counts"], part["created"], page, codes, part["prompt_rows"])
    n_wants, n_pages = int(log.counts.sum(dtype=np.int64)), -(-len(log.tokens) // PAGE)
    rows = (*shapes["prompt_pages"][1][:2], n_pages)
    have = log.tokens.shape, log.counts.shape, log.row_codes.shape, log.created.shape, page.shape, codes.shape
    need = shapes["tokens"][1], shapes["top"][1], rows, (n_pages,), (n_wants,), (n_wants,)
    if have != need or not isinstance(pieces, list) or len(pieces) != len(log.tokens):
        raise TraceError(f"{path}: its arrays and its manifest disagree about how much there is: {AGAIN}")
    if page.max(initial=0) >= n_pages:
        raise TraceError(f"{path}: it wants page {page.max()} of {n_pages}: {AGAIN}")
    if fault := of_pages(log.counts, page, log.created, log.n_prompt):
        raise TraceError(f"{path}: {fault}: {AGAIN}")
    return log


def open_log(path: str | Path) -> Trace | Shipped:
    """A log, whole (a directory) or shipped (a file), by its path."""
    path = Path(path)
    return open_shipped(path) if path.suffix == SUFFIX and not path.is_dir() else open_whole(path)


def listed(folder: str | Path) -> dict[str, dict[str, Any]]:
    """What FOLDER/manifest.json says of shipped logs, by file name; nothing where there is none. InputError where it is
    damaged, or lists something else, a recorded log's own files for one: what is packed there would take its place."""
    path = Path(folder) / "manifest.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        files = entries(manifest)
    except FileNotFoundError:
        return {}
    except (ValueError, OSError, RecursionError) as error:
        raise InputError(f"{path} is damaged ({error}): remove it, or choose another folder") from None
    if manifest.get("format") != FORMAT:
        raise InputError(f"{path} is not that of shipped logs, and would be lost: choose another folder")
    return files


def describe(folder: str | Path, about: dict[str, dict[str, Any]]) -> Path:
    """Write FOLDER/manifest.json: of each shipped log its bytes, sha256 and sizes, and what `about` adds by file name
    (licence, command); what was said of a file that is not in `about` stays. Returns its path.
    InputError as `listed`."""
    folder, files, before = Path(folder), {}, listed(folder)
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        log = open_shipped(path)
        files[path.name] = {
            **before.get(path.name, {}),
            "sha256": sha256(path),
            "bytes": path.stat().st_size,
            "model": log.manifest["model"]["name"],
            "regime": log.manifest["prompt"]["regime"],
            "text": log.manifest["text"]["mode"],
            "sizes": {"heads": log.n_heads, "prompt": log.n_prompt, "steps": log.n_steps, "wants": len(log.page)},
            **about.get(path.name, {}),
        }
    return write_json(folder / "manifest.json", {"format": FORMAT, "version": VERSION, "files": files})


def verify_shipped(path: str | Path) -> list[str]:
    """Compare a shipped log, or every one of a folder, with the manifest beside it; returns the names checked.

    TraceError names the first file that is missing, changed, foreign or not listed.
    """
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    try:
        listed = entries(json.loads((folder / "manifest.json").read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise TraceError(f"{folder}: manifest.json is missing, so nothing says what lies there: {AGAIN}") from None
    except (ValueError, OSError, RecursionError) as error:
        raise TraceError(f"{folder}/manifest.json is damaged ({error}): {AGAIN}") from None
    there = {file.name for file in folder.iterdir()} - {"manifest.json"}
    if not path.is_dir():
        there, listed = there & {path.name}, {name: listed[name] for name in listed if name == path.name}
    if found := difference(folder, listed, there):
        way = AGAIN if found[0] in listed else "remove it"
        raise TraceError(f"{folder}: {' '.join(found)}; {way}")
    if not listed:
        raise TraceError(f"{folder}: its manifest.json lists no {path.name}: name a log that it lists")
    for name in listed:
        open_shipped(folder / name)
    return sorted(listed)


def is_shipped(path: str | Path) -> bool:
    """Is this a shipped log, or a folder of them?"""
    path = Path(path)
    return path.suffix == SUFFIX or any(path.glob(f"*{SUFFIX}"))


def code(weight: np.ndarray) -> np.ndarray:
    """uint8: the nearest eighth of an octave above 2**-31, from 1 on; 0 for no weight. Keeps the order of weights."""
    with np.errstate(divide="ignore"):
        octaves = np.log2(np.asarray(weight, np.float64)) - LOWEST
    return np.where(weight > 0, np.clip(np.round(octaves * PER_OCTAVE), 1, 255), 0).astype(np.uint8)


def weight_of(codes: np.ndarray) -> np.ndarray:
    """float32: the weight in the middle of each code's interval."""
    return np.exp2(np.asarray(codes, np.float64) / PER_OCTAVE + LOWEST).astype(np.float32)


def _put(held: zipfile.ZipFile, name: str, content: bytes) -> None:
    entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
    entry.compress_type, entry.create_system, entry.external_attr = zipfile.ZIP_DEFLATED, 3, 0o644 << 16
    held.writestr(entry, content, compresslevel=9)
