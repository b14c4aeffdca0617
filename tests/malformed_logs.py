"""Logs that are broken, on disk or in what they say: whole ones as `record` makes them, and shipped ones."""

from __future__ import annotations

import io
import json
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from conftest import _make_trace
from malformed import Case

from wakekv.logs.shipped import describe, pack
from wakekv.logs.trace import Trace, save_trace

AGAIN, BACK = "record it again", "fetch the repository's again, or pack it again"
VERIFY, SIMULATE = ("verify", "log"), ("simulate", "log", "--policy", "reactive", "--budgets", "4")
STUDY = ("--policies", "reactive", "--budgets", "4", "--out", "out")
SHIPPED = ("simulate", "x.npz", "--policy", "reactive", "--budgets", "4")


def trace() -> Trace:
    return _make_trace(n_steps=6, k=8)


def packed(folder: Path) -> Path:
    """One shipped log with its manifest."""
    made = trace()
    path = pack(made, [str(token) for token in made.tokens], folder / "x.npz")
    describe(folder, {})
    return path


def log(change: Callable[[Path], object]) -> Callable[[Path], object]:
    """Make a whole log and do something to its folder."""
    return lambda folder: change(save_trace(trace(), folder / "log"))


def stated(change: Callable[[dict], object]) -> Callable[[Path], object]:
    """A log whose manifest says something else."""

    def to(path: Path) -> None:
        manifest = json.loads((path / "manifest.json").read_text())
        change(manifest)
        (path / "manifest.json").write_text(json.dumps(manifest))

    return log(to)


def manifest(text: str | bytes) -> Callable[[Path], object]:
    """A log whose manifest is something else."""
    return log(lambda path: (path / "manifest.json").write_bytes(text if isinstance(text, bytes) else text.encode()))


def numbers(name: str, where: object, value: float) -> Callable[[Path], object]:
    """A log, whole by its hashes, in which attention gave what it cannot give."""

    def to(folder: Path) -> None:
        made = trace()
        array = np.array(getattr(made, name))
        array[where] = value
        save_trace(replace(made, **{name: array}), folder / "log")

    return to


def array(name: str, content: np.ndarray, pickled: bool = False) -> Callable[[Path], object]:
    """A log one of whose arrays is another, its hash in the manifest."""

    def to(path: Path) -> None:
        np.save(path / f"{name}.npy", content, allow_pickle=pickled)

    return log(to)


def flip(path: Path, at: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def cut(path: Path, n: int = 1) -> None:
    path.write_bytes(path.read_bytes()[:-n])


def linked(path: Path) -> None:
    os.replace(path / "top.npy", path.parent / "elsewhere.npy")
    (path / "top.npy").symlink_to(path.parent / "elsewhere.npy")


def leading_out(stated: dict) -> None:
    stated["files"]["../secret.npy"] = stated["files"].pop("top.npy")


def repacked(**changes: bytes | None) -> Callable[[Path], object]:
    """A shipped log with some of its members changed; None: left out."""

    def to(folder: Path) -> None:
        path = packed(folder)
        with zipfile.ZipFile(path) as held:
            members = {name: held.read(name) for name in held.namelist()}
        members |= {name.replace("__", "."): content for name, content in changes.items()}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as held:
            for name, content in members.items():
                if content is not None:
                    held.writestr(name, content)

    return to


def encrypted(folder: Path) -> None:
    """One bit in the archive's list of contents says so."""
    path = packed(folder)
    flip(path, path.read_bytes().index(b"PK\x01\x02") + 8)


def npy(content: np.ndarray) -> bytes:
    made = io.BytesIO()
    np.save(made, content, allow_pickle=True)
    return made.getvalue()


def restated(**changes: object) -> bytes:
    """The manifest of a shipped log, changed."""
    made = trace().manifest | {"format": "wakekv-pages", "version": 1}
    return json.dumps(made | changes).encode()


def deep(depth: object) -> bytes:
    """The manifest of a shipped log whose needle lies at `depth`."""
    return restated(prompt=trace().manifest["prompt"] | {"params": {"depths": depth}})


def shipped(change: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda folder: change(packed(folder).parent)


def cases() -> Iterator[Case]:
    yield Case("verify", "a path where nothing is", "nowhere", "record one with", ("verify", "nowhere"))
    yield Case(
        "simulate", "a path where nothing is", "nowhere", "record one with", ("simulate", "nowhere", *SIMULATE[2:])
    )
    for what, make, names, way in ON_DISK:
        yield Case("verify", what, names, way, VERIFY, make=make)
    for what, make, names in STATED:
        yield Case("simulate", what, names, AGAIN, SIMULATE, make=make)
    for what, make, names in NUMBERS:
        yield Case("verify", what, names, AGAIN, VERIFY, make=make)
    for what, make, names in ARRAYS:
        yield Case("simulate", what, names, AGAIN, SIMULATE, make=make)
    yield Case("simulate", "a shipped log that is not there", "x.npz", "see artifact/logs", SHIPPED)
    for what, make, names in IN_ARCHIVE:
        yield Case("simulate", what, names, BACK, SHIPPED, make=make)
    for what, make, names in STUDIED:
        yield Case("study", what, names, AGAIN, ("study", "log", *STUDY), make=make)
    for what, make, names in STUDIED_SHIPPED:
        yield Case("study", what, names, BACK, ("study", "x.npz", *STUDY), make=make)
    for what, make, names in PLANNED:
        yield Case("plan", what, names, AGAIN, ("plan", "log", "--step-ms", "12"), make=make)
    for what, make, names, way in SHIPPED_ON_DISK:
        yield Case("verify", what, names, way, ("verify", "."), make=make)


ON_DISK = [
    ("a log with a file cut short", log(lambda p: cut(p / "top.npy")), "top.npy has", AGAIN),
    (
        "a log with a file grown",
        log(lambda p: (p / "top.npy").write_bytes((p / "top.npy").read_bytes() + b"x")),
        "top.npy has",
        AGAIN,
    ),
    (
        "a log with a flipped bit",
        log(lambda p: flip(p / "weights.npy")),
        "weights.npy does not match its sha256",
        AGAIN,
    ),
    ("a log with a flipped bit in its manifest", log(lambda p: flip(p / "manifest.json", 40)), "manifest.json", AGAIN),
    ("a log with a file missing", log(lambda p: (p / "top.npy").unlink()), "top.npy is missing", AGAIN),
    (
        "a log with a file of another's",
        log(lambda p: (p / "notes.txt").write_text("x")),
        "notes.txt is not in the manifest",
        "remove it",
    ),
    ("a log with a folder inside", log(lambda p: (p / "more").mkdir()), "more is not in the manifest", "remove it"),
    ("a log with a link that leads out of it", log(linked), "top.npy is a link", AGAIN),
    (
        "a log with a folder in a file's place",
        log(lambda p: ((p / "top.npy").unlink(), (p / "top.npy").mkdir())),
        "top.npy is a link or a folder",
        AGAIN,
    ),
    ("a log without a manifest", log(lambda p: (p / "manifest.json").unlink()), "manifest.json is missing", AGAIN),
    (
        "a folder in the manifest's place",
        log(lambda p: ((p / "manifest.json").unlink(), (p / "manifest.json").mkdir())),
        "manifest.json",
        AGAIN,
    ),
    ("an empty folder", lambda f: (f / "log").mkdir(), "manifest.json is missing", AGAIN),
    ("a file in place of a log", lambda f: (f / "log").write_text("x"), "no trace at log", "record one with"),
]

STATED = [
    ("a manifest that is no JSON", manifest("{"), "is not JSON"),
    ("a manifest that is not UTF-8", manifest(b"\xff\xfe"), "is not JSON"),
    ("a manifest that is a list", manifest("[]"), "wakekv-trace"),
    ("a manifest of another format", manifest('{"format": "other"}'), "wakekv-trace"),
    ("a manifest of a later version", manifest('{"format": "wakekv-trace", "version": 99}'), "version 99"),
    ("a manifest nested 100,000 deep", manifest("[" * 100_000), "is not JSON"),
    ("a manifest with a number that is none", stated(lambda m: m.update(n_prompt=float("nan"))), "is not JSON"),
    ("a manifest with half a surrogate", manifest('{"format": "\\ud800"}'), "is not JSON"),
    ("a manifest without a model", stated(lambda m: m.pop("model")), "model"),
    ("a manifest without its files", stated(lambda m: m.pop("files")), "files"),
    ("a manifest whose files are a list", stated(lambda m: m.update(files=[])), "files"),
    ("a manifest whose entry lacks a size", stated(lambda m: m["files"]["top.npy"].pop("bytes")), "top.npy"),
    (
        "a manifest whose entry has a size in words",
        stated(lambda m: m["files"]["top.npy"].update(bytes="two")),
        "top.npy",
    ),
    ("a manifest that leads out of the folder", stated(leading_out), "../secret.npy"),
    ("a manifest without KV heads", stated(lambda m: m["model"].pop("n_kv_heads")), "n_kv_heads"),
    ("a manifest with no heads", stated(lambda m: m["model"].update(n_heads=0)), "n_heads is 0"),
    ("a manifest with heads in unequal groups", stated(lambda m: m["model"].update(n_kv_heads=3)), "3 KV heads"),
    ("a manifest with a negative number of steps", stated(lambda m: m.update(n_steps=-6)), "n_steps is -6"),
    ("a manifest with k in words", stated(lambda m: m.update(k="eight")), "k is 'eight'"),
    (
        "a manifest with a needle beyond the prompt",
        stated(lambda m: m["prompt"].update(needle=[[190, 201]])),
        "needle [190, 201]",
    ),
    (
        "a manifest with a needle that ends before it begins",
        stated(lambda m: m["prompt"].update(needle=[[9, 8]])),
        "needle [9, 8]",
    ),
    ("a manifest with a needle of one number", stated(lambda m: m["prompt"].update(needle=[[9]])), "garbles an entry"),
]

PLANNED = [
    ("a manifest without windows", stated(lambda m: m["model"].pop("windows")), "model.windows is None"),
    (
        "a manifest with windows of too few layers",
        stated(lambda m: m["model"].update(windows=[None])),
        "model.windows is [None]",
    ),
    ("a manifest with a model of two names", stated(lambda m: m["model"].update(name=["a", "b"])), "model.name is"),
]

STUDIED = [
    ("a manifest that is no JSON", manifest("{"), "log: manifest.json is not JSON"),
    ("a manifest nested 100,000 deep", manifest("[" * 100_000), "log: manifest.json is not JSON"),
    ("a folder in the manifest's place", log(lambda p: in_place(p / "manifest.json")), "log: manifest.json"),
    ("a manifest without its own sha256", stated(lambda m: m.pop("sha256")), "its own sha256"),
    ("a manifest without sizes", manifest('{"format": "wakekv-trace", "sha256": "0"}'), "'model'"),
    ("a manifest without a regime", stated(lambda m: m["prompt"].pop("regime")), "prompt.regime is None"),
    (
        "a manifest that says in words what is flagged",
        stated(lambda m: m.update(repetition="no")),
        "repetition.flagged",
    ),
]

STUDIED_SHIPPED = [
    ("a shipped log with a flipped bit in what is packed", lambda f: flip(packed(f), 99), "x.npz is damaged"),
    ("a shipped log whose manifest is a list", repacked(manifest__json=b"[]"), "x.npz is damaged"),
    ("a shipped log whose manifest is nested", repacked(manifest__json=b"[" * 100_000), "x.npz is damaged"),
    ("a shipped log of no model", repacked(manifest__json=restated(model={})), "x.npz is damaged"),
    ("a shipped log without a kind of text", repacked(manifest__json=restated(text={})), "text.mode is None"),
]


def in_place(path: Path) -> None:
    path.unlink()
    path.mkdir()


NUMBERS = [
    (
        "positions that do not rise",
        numbers("positions", (0, 2, slice(0, 2)), 7),
        "head 0 has positions that do not rise",
    ),
    ("a position beyond the context", numbers("positions", (3, 0, -1), 200), "head 3 has positions beyond the context"),
    ("a position after the padding", numbers("positions", (1, 0, 3), 65535), "head 1 has positions that do not rise"),
    ("a weight that is not a number", numbers("weights", (0, 1, 2), np.nan), "head 0 has weights that are"),
    ("an infinite weight", numbers("weights", (0, 1, 2), np.inf), "head 0 has weights that are"),
    ("a negative weight", numbers("weights", (2, 1, 2), -0.25), "head 2 has weights that are"),
    ("weights that come to more than 1", numbers("weights", (0, 1), 0.25), "head 0 has weights that come to"),
    ("a largest weight beyond the context", numbers("top", (0, 1), 9999), "place of its largest weight"),
    ("a mass that is not a number", numbers("needle_mass", (0, 1), np.nan), "masses that are"),
    ("a negative mass", numbers("local_mass", (0, 1), -1), "masses that are"),
    ("masses that come to more than 1", numbers("sink_mass", (0, 1), 1.5), "masses that come to"),
    ("an entropy that no row has", numbers("entropy", (0, 1), 99), "entropy that no row"),
    (
        "a prompt page weight that is not a number",
        numbers("prompt_pages", (0, 1, 2), np.nan),
        "prompt page weights that are",
    ),
    ("prompt page weights that do not come to 1", numbers("prompt_pages", (0, 1, 2), 3), "do not come to 1"),
    ("a mean key that is not a number", numbers("key_means", (0, 1, 2), np.inf), "key means"),
    ("a negative token", numbers("tokens", 3, -3), "negative token"),
]

ARRAYS = [
    ("an array of another type", array("entropy", np.zeros((8, 6))), "entropy.npy is float64"),
    ("an array of another shape", array("entropy", np.zeros((3, 3), np.float32)), "entropy.npy is float32 [3, 3]"),
    ("an array of pickled objects", array("entropy", np.array([{}]), True), "entropy.npy cannot be read"),
    ("an array cut short", log(lambda p: cut(p / "weights.npy", 9)), "weights.npy cannot be read"),
    ("an empty array file", log(lambda p: (p / "weights.npy").write_bytes(b"")), "weights.npy cannot be read"),
    (
        "an array file of text",
        log(lambda p: (p / "weights.npy").write_text("hello" * 99)),
        "weights.npy cannot be read",
    ),
    ("an array that is missing", log(lambda p: (p / "choice.npy").unlink()), "choice.npy is missing"),
]

IN_ARCHIVE = [
    ("a shipped log that is empty", lambda f: (f / "x.npz").write_bytes(b""), "x.npz is damaged"),
    ("a shipped log cut short", lambda f: cut(packed(f), 999), "x.npz is damaged"),
    ("a shipped log that is text", lambda f: (f / "x.npz").write_text("hello"), "x.npz is damaged"),
    ("an archive of something else", lambda f: np.savez(f / "x.npz", a=np.zeros(3)), "x.npz is damaged"),
    ("a shipped log without its weights", repacked(weights__npy=None), "x.npz is damaged"),
    ("a shipped log with pickled objects", repacked(weights__npy=npy(np.array([{}]))), "x.npz is damaged"),
    (
        "a shipped log with weights of another type",
        repacked(weights__npy=npy(np.zeros(9, np.int64))),
        "its weights are int64",
    ),
    ("a shipped log with too few weights", repacked(weights__npy=npy(np.zeros(9, np.uint8))), "disagree"),
    (
        "a shipped log whose pages come in two lengths",
        repacked(page_low__npy=npy(np.zeros(9, np.uint8))),
        "x.npz is damaged",
    ),
    ("a shipped log that wants a page twice in a step", repacked(page_low__npy=npy(np.zeros(248, np.uint8))), "twice"),
    ("a shipped log of pages made too late", repacked(created__npy=npy(np.full(13, 5, np.int32))), "as their tokens"),
    ("a shipped log that seems encrypted", encrypted, "password"),
    ("a shipped log that wants pages beyond its last", lambda f: beyond(f), "it wants page"),
    ("a shipped log whose manifest is a list", repacked(manifest__json=b"[]"), "x.npz is damaged"),
    (
        "a shipped log of another version",
        repacked(manifest__json=restated(version=9)),
        "not a wakekv-pages of version 1",
    ),
    ("a shipped log that states more steps", repacked(manifest__json=restated(n_steps=7)), "disagree"),
    ("a shipped log that states steps in words", repacked(manifest__json=restated(n_steps="7")), "x.npz is damaged"),
    ("a shipped log with a depth in words", repacked(manifest__json=deep("half")), "depths is"),
    ("a shipped log without a device", repacked(manifest__json=restated(device=None)), "device is None"),
    ("a shipped log with too few texts", repacked(pieces__json=b'["a"]'), "disagree"),
    ("a shipped log that unpacks to 2 GB", lambda f: bomb(f), "unpacked it has more than"),
]

SHIPPED_ON_DISK = [
    (
        "a shipped log with a flipped bit",
        shipped(lambda f: flip(f / "x.npz", 99)),
        "x.npz does not match its sha256",
        BACK,
    ),
    ("a shipped log cut short", shipped(lambda f: cut(f / "x.npz")), "x.npz has", BACK),
    (
        "a shipped log that its manifest does not list",
        shipped(lambda f: shutil.copy(f / "x.npz", f / "y.npz")),
        "y.npz is not in the manifest",
        "remove it",
    ),
    (
        "another's file among shipped logs",
        shipped(lambda f: (f / "notes.txt").write_text("x")),
        "notes.txt is not in the manifest",
        "remove it",
    ),
    (
        "shipped logs whose manifest is no JSON",
        shipped(lambda f: (f / "manifest.json").write_text("{")),
        "manifest.json is damaged",
        BACK,
    ),
    ("shipped logs whose manifest leads out of the folder", shipped(lambda f: astray(f)), "../x.npz is missing", BACK),
    (
        "shipped logs without a manifest",
        shipped(lambda f: (f / "manifest.json").unlink()),
        "manifest.json is missing",
        BACK,
    ),
]


def beyond(folder: Path) -> None:
    with zipfile.ZipFile(packed(folder)) as held:
        low = np.load(io.BytesIO(held.read("page_low.npy")))
    repacked(page_low__npy=npy(np.full_like(low, 250)))(folder)


def bomb(folder: Path) -> None:
    """Zeros pack small: the archive itself has some kilobytes a gigabyte."""
    with zipfile.ZipFile(folder / "x.npz", "w", zipfile.ZIP_DEFLATED) as held:
        held.writestr("manifest.json", "{}")
    content = (folder / "x.npz").read_bytes()
    at = content.rindex(b"PK\x01\x02") + 24  # what the directory says of the unpacked size
    (folder / "x.npz").write_bytes(content[:at] + (2_000_000_000).to_bytes(4, "little") + content[at + 4 :])


def astray(folder: Path) -> None:
    stated = json.loads((folder / "manifest.json").read_text())
    stated["files"]["../x.npz"] = stated["files"].pop("x.npz")
    (folder / "manifest.json").write_text(json.dumps(stated))
