"""A trace comes back as it was saved, and no damage to it goes unseen."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from conftest import _make_trace
from hypothesis import given, settings
from hypothesis import strategies as st

from wakekv.errors import InputError, TraceError
from wakekv.logs.trace import NAMES, Trace, layout, open_trace, position_dtype, save_trace, verify


@pytest.fixture
def saved(make_trace, tmp_path):
    return save_trace(make_trace(n_steps=5, k=8), tmp_path / "t")


def test_saved_trace_comes_back_equal_and_memory_mapped(make_trace, tmp_path):
    trace = make_trace()
    back = open_trace(save_trace(trace, tmp_path / "t"))
    for name in NAMES:
        assert isinstance(getattr(back, name), np.memmap)
        np.testing.assert_array_equal(getattr(back, name), getattr(trace, name))
    assert {k: back.manifest[k] for k in trace.manifest} == trace.manifest
    verify(tmp_path / "t")


def test_sizes_follow_from_the_arrays(make_trace):
    trace = make_trace(n_layers=3, heads_per_layer=4, kv_per_layer=2, n_prompt=100, n_steps=7, k=9)
    assert (trace.n_heads, trace.n_kv_heads, trace.n_layers, trace.group) == (12, 6, 3, 2)
    assert (trace.n_prompt, trace.n_steps, trace.k) == (100, 7, 9)
    assert list(trace.layer) == [0] * 4 + [1] * 4 + [2] * 4
    np.testing.assert_array_equal(trace.emitted, trace.tokens[100:])
    assert trace.needle == [[50, 62]]


def test_short_contexts_are_padded_at_the_end(make_trace):
    trace = make_trace(n_prompt=5, n_steps=6, k=8)
    assert trace.needle == []
    for t in range(6):
        row, n = trace.positions[0, t], min(8, 5 + t)
        assert (np.diff(row[:n].astype(int)) > 0).all() and (row[n:] == 65535).all()
        assert (trace.weights[:, t, n:] == 0).all()


def test_positions_widen_before_padding_collides():
    assert position_dtype(65_535) == np.uint16
    assert position_dtype(65_536) == np.uint32


def test_same_trace_saves_to_the_same_bytes(make_trace, tmp_path):
    a, b = (save_trace(make_trace(seed=3), tmp_path / name) for name in "ab")
    assert (a / "manifest.json").read_bytes() == (b / "manifest.json").read_bytes()


def test_a_saved_trace_is_never_overwritten(make_trace, saved):
    before = sorted((p.name, p.stat().st_mtime_ns) for p in saved.iterdir())
    with pytest.raises(InputError, match="exists already"):
        save_trace(make_trace(), saved)
    assert sorted((p.name, p.stat().st_mtime_ns) for p in saved.iterdir()) == before


def test_a_misshapen_trace_is_refused_and_leaves_nothing(make_trace, tmp_path):
    trace = make_trace()
    wrong = Trace(**{**vars(trace), "weights": trace.weights.astype(np.float32)})
    with pytest.raises(InputError, match="weights is float32"):
        save_trace(wrong, tmp_path / "t")
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_fails_half_way_leaves_nothing(make_trace, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("wakekv.logs.trace.write_manifest", full)
    with pytest.raises(OSError, match="No space"):
        save_trace(make_trace(), tmp_path / "t")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [*(f"{n}.npy" for n in NAMES), "manifest.json"])
@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_verify_names_the_file_with_a_flipped_bit(saved, name, where):
    data = bytearray((saved / name).read_bytes())
    data[{"first": 0, "middle": len(data) // 2, "last": -1}[where]] ^= 1
    (saved / name).write_bytes(data)
    with pytest.raises(TraceError, match=name):
        verify(saved)


def test_verify_sees_every_flipped_bit_of_the_manifest(saved):
    good = (saved / "manifest.json").read_bytes()
    for at in range(0, len(good), 7):
        for bit in (1, 4, 32):
            (saved / "manifest.json").write_bytes(good[:at] + bytes([good[at] ^ bit]) + good[at + 1 :])
            with pytest.raises(TraceError):
                verify(saved)


@pytest.mark.parametrize("name", [f"{n}.npy" for n in NAMES])
def test_verify_names_a_missing_and_a_truncated_file(saved, name):
    data = (saved / name).read_bytes()
    (saved / name).write_bytes(data[:-1])
    with pytest.raises(TraceError, match=f"{name} has"):
        verify(saved)
    (saved / name).unlink()
    for check in (verify, open_trace):
        with pytest.raises(TraceError, match=f"{name} is missing"):
            check(saved)


def test_verify_names_the_first_of_two_damaged_files(saved):
    for name in ("key_means.npy", "choice.npy"):
        (saved / name).write_bytes(b"x")
    with pytest.raises(TraceError, match="choice.npy"):
        verify(saved)


def test_verify_names_an_extra_file(saved):
    (saved / "notes.txt").write_text("hello")
    with pytest.raises(TraceError, match="notes.txt is not in the manifest"):
        verify(saved)


def test_a_directory_without_manifest_is_incomplete(saved):
    (saved / "manifest.json").unlink()
    for check in (verify, open_trace):
        with pytest.raises(TraceError, match="incomplete"):
            check(saved)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": "wakekv-trace", "version": 2}', '{"format": "other"}', "\xff"]
)
def test_a_foreign_directory_is_refused_in_one_line(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text, encoding="latin-1")
    for check in (verify, open_trace):
        with pytest.raises(TraceError, match="manifest.json") as error:
            check(tmp_path)
        assert "\n" not in str(error.value)


def test_a_missing_trace_is_named(tmp_path):
    for check in (verify, open_trace):
        with pytest.raises(TraceError, match="no trace at .*nowhere"):
            check(tmp_path / "nowhere")


@pytest.mark.parametrize("gone", ["model", "n_prompt", "n_steps", "k", "files"])
def test_a_manifest_without_an_entry_is_refused(saved, gone):
    manifest = json.loads((saved / "manifest.json").read_text())
    del manifest[gone]
    (saved / "manifest.json").write_text(json.dumps(manifest))
    for check in (verify, open_trace):
        with pytest.raises(TraceError, match=f"lacks or garbles an entry.*{gone}"):
            check(saved)


def test_a_manifest_cannot_name_files_elsewhere(saved):
    manifest = json.loads((saved / "manifest.json").read_text())
    manifest["files"]["../secret.npy"] = manifest["files"].pop("top.npy")
    (saved / "manifest.json").write_text(json.dumps(manifest))
    for check in (verify, open_trace):
        with pytest.raises(TraceError, match=r"\.\./secret\.npy"):
            check(saved)


def test_a_link_out_of_the_directory_is_refused(saved, tmp_path):
    os.replace(saved / "top.npy", tmp_path / "elsewhere.npy")
    (saved / "top.npy").symlink_to(tmp_path / "elsewhere.npy")
    with pytest.raises(TraceError, match="top.npy is a link"):
        verify(saved)


def test_arrays_must_have_the_shapes_their_manifest_asks_for(saved):
    np.save(saved / "entropy.npy", np.zeros((3, 3), np.float32))
    with pytest.raises(TraceError, match="entropy.npy is"):
        open_trace(saved)


def test_pickles_are_never_loaded(saved):
    np.save(saved / "choice.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(TraceError, match="choice.npy cannot be read"):
        open_trace(saved)


def test_layout_counts_pages_of_prompt_and_of_all_that_was_fed(make_trace):
    manifest = make_trace(n_prompt=33, n_steps=16).manifest
    assert layout(manifest)["prompt_pages"][1][2] == 3  # 33 tokens
    assert layout(manifest)["key_means"][1][1] == 3  # 48 tokens: the last emitted one is never fed


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
SIZES = {"n_layers": 3, "kv_per_layer": 2, "heads_per_layer": 3, "n_prompt": 40, "n_steps": 5, "k": 20, "head_dim": 4}


@st.composite
def traces(draw):
    sizes = {name: draw(st.integers(1, most), label=name) for name, most in SIZES.items()}
    sizes["heads_per_layer"] *= sizes["kv_per_layer"]  # whole groups
    made = _make_trace(**sizes, seed=draw(st.integers(0, 99)), needle=((1, 3),))
    made.manifest["prompt"]["params"] = draw(st.dictionaries(st.text(), JSON, max_size=3))
    return made


@settings(max_examples=30)
@given(traces(), st.data())
def test_any_trace_comes_back_and_any_changed_byte_is_seen(trace, data):
    with tempfile.TemporaryDirectory() as folder:
        path = save_trace(trace, Path(folder) / "t")
        verify(path)
        back = open_trace(path)
        for name in NAMES:
            was, now = getattr(trace, name), getattr(back, name)
            assert was.dtype == now.dtype and was.shape == now.shape and was.tobytes() == now.tobytes()
        assert {name: back.manifest[name] for name in trace.manifest} == trace.manifest
        file = data.draw(st.sampled_from(sorted(path.iterdir())))
        content = bytearray(file.read_bytes())
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
        file.write_bytes(content)
        with pytest.raises(TraceError, match=file.name):
            verify(path)
