"""Recording: what is logged equals eager attention, and a recording that is killed ends in the same bytes."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import random
import shutil
import time
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import tiny
import torch

from wakekv.errors import InputError, ModelError, TraceError
from wakekv.logs.trace import open_trace, verify
from wakekv.recording import journal as journal_module
from wakekv.recording import models, prompts
from wakekv.recording import record as record_module
from wakekv.recording.journal import Journal, part_of
from wakekv.recording.record import record, recording_key, repetition

K = 12


def same_bytes(a, b):
    """Two finished recordings, their manifests included, are the same files."""
    names = sorted(p.name for p in a.iterdir())
    assert names == sorted(p.name for p in b.iterdir())
    return all((a / name).read_bytes() == (b / name).read_bytes() for name in names)


def eager_rows(model, tokens):
    """The whole attention matrix of every query head, float32 [head, row, position], by eager attention."""
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        layers = model(torch.tensor([tokens]), output_attentions=True).attentions
    return torch.cat([a[0].float() for a in layers]).numpy()


def assert_equals_eager(trace, rows, log_rows):
    """Every field of every step, from the definition. Positions may differ only between weights equal to rounding."""
    for t in range(trace.n_steps):
        row = rows[:, trace.n_prompt - 1 + t, : trace.n_prompt + t]
        want = log_rows(row, trace.needle, trace.k, trace.positions.dtype)
        seen = row > 0  # the rest lies outside the window of a sliding layer
        for head in range(trace.n_heads):
            got = trace.positions[head, t]
            got = got[got != np.iinfo(got.dtype).max].astype(int)
            assert len(got) == min(trace.k, seen[head].sum()) and seen[head][got].all()
            odd = np.setxor1d(got, want["positions"][head][: len(got)] if len(got) == trace.k else got)
            if len(odd):
                np.testing.assert_allclose(row[head][odd], row[head][odd[0]], rtol=1e-4)
            np.testing.assert_allclose(trace.weights[head, t][: len(got)], row[head][got], rtol=2e-3, atol=1e-6)
            np.testing.assert_allclose(row[head][trace.top[head, t]], row[head].max(), rtol=1e-4)
        for name in ("needle_mass", "sink_mass", "local_mass", "entropy"):
            np.testing.assert_allclose(getattr(trace, name)[:, t], want[name], atol=1e-4, err_msg=f"{name} {t}")


@pytest.mark.parametrize("family", tiny.CONFIGS)
@pytest.mark.parametrize("n_prompt", [60, 20])
def test_logged_reads_equal_eager_attention(family, n_prompt, tmp_path, log_rows):
    loaded, prompt = tiny.loaded(family), tiny.prompt(n_prompt, n_script=30)
    trace = open_trace(record(loaded, prompt, tmp_path / "t", k=K, progress=False))
    rows = eager_rows(loaded.model, trace.tokens[:-1].tolist())
    assert_equals_eager(trace, rows, log_rows)
    assert trace.manifest["model"]["windows"] == tiny.WINDOWS[family]
    last = rows[:, max(0, n_prompt - 33) : n_prompt - 1, :n_prompt]
    last = np.pad(last, ((0, 0), (32 - last.shape[1], 0), (0, -n_prompt % 16)))
    pages = last.reshape(*last.shape[:2], -1, 16).sum(-1)
    np.testing.assert_allclose(trace.prompt_pages, pages, atol=1e-3)


@pytest.mark.parametrize("family", tiny.CONFIGS)
def test_a_script_in_passes_of_many_steps_is_logged_as_step_by_step(family, tmp_path, monkeypatch):
    logs = []
    for block in (1, 7, 16):
        monkeypatch.setattr(record_module, "BLOCK", block)
        out = record(tiny.loaded(family), tiny.prompt(60, n_script=30), tmp_path / str(block), k=K, progress=False)
        logs.append(open_trace(out))
    alone, *others = logs
    assert [log.manifest["block"] for log in logs] == [1, 7, 16]
    for log in others:
        assert np.array_equal(log.choice, alone.choice) and log.manifest["agreement"] == alone.manifest["agreement"]
        assert np.mean(log.positions == alone.positions) > 0.999  # weights equal to rounding may change places
        for name in ("weights", "needle_mass", "sink_mass", "local_mass", "entropy", "key_means"):
            np.testing.assert_allclose(getattr(log, name), getattr(alone, name), atol=1e-3, err_msg=name)


@pytest.mark.model
def test_real_steps_equal_eager_attention(tmp_path, log_rows):
    loaded = models.load("smollm2-135m", dtype="float32", device="cpu")
    prompt = prompts.build("niah", loaded.tokenizer, length=500, scripted=False)
    trace = open_trace(record(loaded, prompt, tmp_path / "t", steps=3, progress=False))
    verify(tmp_path / "t")
    assert (trace.n_heads, trace.n_kv_heads, trace.k) == (270, 90, 64)
    assert_equals_eager(trace, eager_rows(loaded.model, trace.tokens[:-1].tolist()), log_rows)
    assert trace.needle_mass.max() > 0.1  # some head reads the needle it is asked for


def test_positions_of_sliding_layers_are_absolute(tmp_path):
    loaded, prompt = tiny.loaded("gemma3"), tiny.prompt(60, n_script=30)
    trace = open_trace(record(loaded, prompt, tmp_path / "t", k=K, progress=False))
    context = 60 + np.arange(30)
    for head in np.flatnonzero(trace.layer != 1):
        assert (trace.positions[head].min(1) >= context - 16).all()
    assert (trace.positions[trace.layer == 1].min(2) < 10).any()


def test_key_means_are_those_of_the_keys_after_rope(tmp_path):
    loaded, prompt = tiny.loaded("llama"), tiny.prompt(40, n_script=15)
    trace = open_trace(record(loaded, prompt, tmp_path / "t", k=K, progress=False))
    with torch.inference_mode():
        cache = loaded.model(torch.tensor([trace.tokens[:-1].tolist()]), use_cache=True).past_key_values
    keys = torch.cat([layer.keys[0] for layer in cache.layers]).numpy()  # [kv_head, position, d]
    want = np.stack([keys[:, a : a + 16].mean(1) for a in range(0, 54, 16)], 1)
    np.testing.assert_allclose(trace.key_means, want, atol=2e-3)


def test_a_prompt_of_one_token_and_no_needle_is_logged(tmp_path, log_rows):
    loaded = tiny.loaded()
    trace = open_trace(record(loaded, tiny.prompt(1, n_script=9), tmp_path / "t", k=K, progress=False))
    assert trace.needle == [] and (trace.needle_mass == 0).all() and (trace.prompt_pages == 0).all()
    assert_equals_eager(trace, eager_rows(loaded.model, trace.tokens[:-1].tolist()), log_rows)


def test_scripted_text_is_the_script_and_choices_are_the_models_own(tmp_path):
    loaded, prompt = tiny.loaded(), tiny.prompt(50, n_script=25)
    trace = open_trace(record(loaded, prompt, tmp_path / "t", k=K, progress=False))
    assert tuple(trace.tokens) == prompt.tokens + prompt.script
    with torch.inference_mode():
        logits = loaded.model(torch.tensor([trace.tokens.tolist()])).logits[0]
    np.testing.assert_array_equal(trace.choice, logits[49:-1].argmax(-1).numpy())
    assert trace.manifest["agreement"] == np.mean(trace.choice == trace.emitted)
    assert trace.manifest["text"] == {"mode": "scripted", "max_steps": 25}


def test_a_script_is_cut_at_steps(tmp_path):
    path = record(tiny.loaded(), tiny.prompt(50, n_script=25), tmp_path / "t", steps=7, k=K, progress=False)
    assert open_trace(path).n_steps == 7


def test_greedy_text_is_what_generate_makes(tmp_path):
    loaded, prompt = tiny.loaded(), tiny.prompt(50)
    trace = open_trace(record(loaded, prompt, tmp_path / "t", steps=20, k=K, progress=False))
    stock = loaded.model.generate(torch.tensor([prompt.tokens]), max_new_tokens=20, do_sample=False)
    np.testing.assert_array_equal(trace.tokens, stock[0].numpy())
    assert trace.manifest["agreement"] == 1.0 and trace.manifest["text"]["mode"] == "greedy"


def test_greedy_text_ends_at_the_end_token_which_is_logged(tmp_path):
    free = open_trace(record(tiny.loaded(), tiny.prompt(50), tmp_path / "a", steps=20, k=K, progress=False))
    end = int(free.emitted[6])
    first = free.emitted.tolist().index(end)
    path = record(tiny.loaded(end=end), tiny.prompt(50), tmp_path / "b", steps=20, k=K, progress=False)
    np.testing.assert_array_equal(open_trace(path).emitted, free.emitted[: first + 1])
    verify(path)


def test_sampled_text_depends_on_its_seed_alone(tmp_path):
    def tokens(name, **sample):
        settings = {"temperature": 1.5, "top_p": 0.95, "repetition_penalty": 1.1, **sample}
        path = record(tiny.loaded(), tiny.prompt(50), tmp_path / name, steps=20, k=K, sample=settings, progress=False)
        return open_trace(path).emitted.tolist()

    assert tokens("a", seed=1) == tokens("b", seed=1) != tokens("c", seed=2)
    text = open_trace(tmp_path / "a").manifest["text"]
    assert text == {
        "mode": "sampled", "max_steps": 20, "temperature": 1.5, "top_p": 0.95, "repetition_penalty": 1.1, "seed": 1
    }  # fmt: skip


def test_a_nearly_cold_sample_is_greedy(tmp_path):
    greedy = record(tiny.loaded(), tiny.prompt(50), tmp_path / "a", steps=20, k=K, progress=False)
    cold = record(
        tiny.loaded(), tiny.prompt(50), tmp_path / "b", steps=20, k=K, sample={"temperature": 1e-6}, progress=False
    )
    np.testing.assert_array_equal(open_trace(greedy).emitted, open_trace(cold).emitted)


def test_draws_follow_the_nucleus_distribution():
    logits, sample = np.log(np.array([0.5, 0.3, 0.15, 0.05])), {**record_module.SAMPLE, "top_p": 0.7}
    draws = [record_module._draw(logits, np.array([], int), sample, step) for step in range(4000)]
    share = np.bincount(draws, minlength=4) / 4000
    np.testing.assert_allclose(share, [0.625, 0.375, 0, 0], atol=0.03)
    sample = {**record_module.SAMPLE, "repetition_penalty": 1e9}
    penalised = np.array([2.0, 1.0, -1.0, -1.0])
    draws = {record_module._draw(penalised, np.array([0, 2]), sample, step) for step in range(300)}
    assert 2 not in draws and {0, 1, 3} <= draws  # seen: 0 falls to 0, 2 to far below


def test_repetition_is_the_share_of_grams_seen_before():
    assert repetition(np.arange(100)) == 0
    assert repetition(np.arange(7)) == 0
    assert repetition(np.array([1, 2] * 50)) == pytest.approx(91 / 93)
    assert repetition(np.r_[np.arange(20), np.arange(20)]) == pytest.approx(13 / 33)


def test_text_that_repeats_itself_is_flagged(tmp_path):
    prompt = tiny.prompt(50, n_script=40)
    prompt.script = (3, 4) * 20
    manifest = open_trace(record(tiny.loaded(), prompt, tmp_path / "t", k=K, progress=False)).manifest
    assert manifest["repetition"]["flagged"] and "8-grams" in manifest["repetition"]["rule"]


# Killed and resumed


def _slow_record(out, delay):
    torch.set_num_threads(1)
    put = Journal.put

    def slow(self, step, *rest):
        if step >= self.n_stored:
            time.sleep(delay)
        put(self, step, *rest)

    Journal.put = slow
    record(tiny.loaded("gemma3"), tiny.prompt(40), out, steps=40, k=K, sample={"seed": 5}, resume=True, progress=False)


def test_a_recording_killed_at_random_moments_ends_in_the_same_bytes(tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    whole = record(
        tiny.loaded("gemma3"), tiny.prompt(40), tmp_path / "whole", steps=40, k=K, sample={"seed": 5}, progress=False
    )
    torch.set_num_threads(threads)
    out, rng, kills, stored = tmp_path / "killed", random.Random(0), 0, 0
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(["test_record"])
    while not out.exists():
        child = forks.Process(target=_slow_record, args=(out, 0.01))
        child.start()
        child.join(rng.uniform(0.1, 0.7) if kills < 8 else None)
        if child.is_alive():
            child.kill()
            child.join()
            kills += 1
            steps = part_of(out) / "steps.bin"
            if not out.exists() and steps.exists():
                assert steps.stat().st_size >= stored  # what is stored stays stored
                stored = steps.stat().st_size
        else:
            assert child.exitcode == 0
    assert kills > 0 and same_bytes(whole, out)
    verify(out)
    assert not part_of(out).exists()


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """A recording that was interrupted after 9 of 20 steps: (out, arguments)."""
    args = {"steps": 20, "k": K, "progress": False}
    _interrupt(monkeypatch, tmp_path / "t", args, at=9)
    return tmp_path / "t", args


def _interrupt(monkeypatch, out, args, at):
    put = Journal.put

    def interrupted(self, step, *rest):
        if step == at:
            raise KeyboardInterrupt
        put(self, step, *rest)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Journal, "put", interrupted)
        record(tiny.loaded(), tiny.prompt(50), out, **args)


def whole(tmp_path, args):
    return record(tiny.loaded(), tiny.prompt(50), tmp_path / "whole", **args)


def test_an_unfinished_recording_is_no_trace_and_is_not_overwritten(begun):
    out, args = begun
    assert not out.exists()
    with pytest.raises(TraceError, match="incomplete"):
        open_trace(part_of(out))
    with pytest.raises(InputError, match="unfinished recording: resume it"):
        record(tiny.loaded(), tiny.prompt(50), out, **args)


def test_resume_repeats_the_stored_steps_and_goes_on(begun, tmp_path):
    out, args = begun
    record(tiny.loaded(), tiny.prompt(50), out, **args, resume=True)
    assert same_bytes(out, whole(tmp_path, args))


@pytest.mark.parametrize("cut", [1, 700, "flip"])
def test_a_torn_last_step_is_recorded_again(begun, tmp_path, cut):
    out, args = begun
    data = bytearray((part_of(out) / "steps.bin").read_bytes())
    if cut == "flip":
        data[-100] ^= 1
    else:
        del data[-cut:]
    (part_of(out) / "steps.bin").write_bytes(data)
    record(tiny.loaded(), tiny.prompt(50), out, **args, resume=True)
    assert same_bytes(out, whole(tmp_path, args))


@pytest.mark.parametrize("where", ["start.json", "steps.bin"])
def test_resume_after_a_kill_before_the_first_step(begun, tmp_path, where):
    out, args = begun
    (part_of(out) / where).unlink()
    record(tiny.loaded(), tiny.prompt(50), out, **args, resume=True)
    assert same_bytes(out, whole(tmp_path, args))


@pytest.mark.parametrize("where", ["write_array", "write_manifest", "publish"])
def test_resume_after_a_kill_while_finishing(tmp_path, monkeypatch, where):
    out, args = tmp_path / "t", {"steps": 20, "k": K, "progress": False}

    def killed(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(journal_module, where, killed)
        record(tiny.loaded(), tiny.prompt(50), out, **args)
    record(tiny.loaded(), tiny.prompt(50), out, **args, resume=True)
    assert same_bytes(out, whole(tmp_path, args))


def test_resume_without_anything_to_resume_records(tmp_path):
    args = {"steps": 20, "k": K, "progress": False}
    assert same_bytes(
        record(tiny.loaded(), tiny.prompt(50), tmp_path / "t", **args, resume=True), whole(tmp_path, args)
    )


def test_resume_of_a_finished_recording_leaves_it_and_of_another_is_refused(tmp_path):
    args = {"steps": 20, "k": K, "progress": False}
    path = whole(tmp_path, args)
    before = sorted((p.name, p.stat().st_mtime_ns) for p in path.iterdir())
    assert record(tiny.loaded(), tiny.prompt(50), path, **args, resume=True) == path
    assert sorted((p.name, p.stat().st_mtime_ns) for p in path.iterdir()) == before
    for other in (dict(args, k=K - 1), dict(args, steps=19)):
        with pytest.raises(InputError, match="never overwritten"):
            record(tiny.loaded(), tiny.prompt(50), path, **other, resume=True)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"loaded": lambda: tiny.loaded(seed=1)}, "model.weights_sha256"),
        ({"prompt": lambda: tiny.prompt(50, seed=1)}, "prompt.seed"),
        ({"prompt": lambda: tiny.prompt(49)}, "prompt.text_sha256|n_prompt"),
        ({"args": {"k": K - 1}}, r"\bk \("),
        ({"args": {"steps": 21}}, "n_steps"),
        ({"args": {"sample": {"seed": 1}}}, "text.mode"),
    ],
)
def test_resume_under_other_settings_names_the_difference(begun, change, names):
    out, args = begun
    size = (part_of(out) / "steps.bin").stat().st_size
    loaded, prompt = change.get("loaded", tiny.loaded)(), change.get("prompt", lambda: tiny.prompt(50))()
    with pytest.raises(TraceError, match=names):
        record(loaded, prompt, out, **{**args, **change.get("args", {})}, resume=True)
    assert (part_of(out) / "steps.bin").stat().st_size == size


def test_resume_with_other_threads_names_them(begun):
    out, args = begun
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        with pytest.raises(TraceError, match=f"threads .{threads} then, {threads + 1} now"):
            record(tiny.loaded(), tiny.prompt(50), out, **args, resume=True)
    finally:
        torch.set_num_threads(threads)


def test_resume_that_computes_other_numbers_is_refused(begun):
    out, args = begun
    loaded = tiny.loaded()
    loaded.source["sha256"] = record_module.weights_sha256(loaded)  # claims to be the same weights, but is not
    start = json.loads((part_of(out) / "start.json").read_text())
    start["model"]["source"]["sha256"] = loaded.source["sha256"]
    (part_of(out) / "start.json").write_text(json.dumps(start))
    with torch.no_grad():
        loaded.model.model.layers[2].self_attn.q_proj.weight[0, 0] += 1e-3
    with pytest.raises(TraceError, match="repeating step . gave other numbers"):
        record(loaded, tiny.prompt(50), out, **args, resume=True)


def test_two_processes_cannot_append_to_one_journal(begun, monkeypatch):
    out, args = begun
    put = Journal.put

    def intruded(self, step, *rest):
        if step == 12:
            with open(self.part / "steps.bin", "ab") as other:
                other.write(b"x" * self.record.itemsize)
        put(self, step, *rest)

    monkeypatch.setattr(Journal, "put", intruded)
    with pytest.raises(TraceError, match="another process records"):
        record(tiny.loaded(), tiny.prompt(50), out, **args, resume=True)


def test_a_second_writer_is_refused_while_the_first_holds_the_journal(begun):
    out, _ = begun
    head = json.loads((part_of(out) / "start.json").read_text())
    first = Journal(out, head, resume=True)
    with pytest.raises(InputError, match="another process records there: wait for it"):
        Journal(out, head, resume=True)
    first.close()
    Journal(out, head, resume=True).close()
    assert sorted(p.name for p in part_of(out).iterdir()) == ["start.json", "steps.bin"]


# What is refused


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match="never overwritten"):
        record(tiny.loaded(), tiny.prompt(50), tmp_path / "t", steps=3, progress=False)
    with pytest.raises(TraceError, match="manifest.json is missing"):
        record(tiny.loaded(), tiny.prompt(50), tmp_path / "t", steps=3, progress=False, resume=True)
    assert [p.name for p in tmp_path.rglob("*")] == ["t", "mine.txt"]


def test_too_little_disk_is_refused_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(InputError, match="needs up to 1 MB and its disk has 0 MB left"):
        record(tiny.loaded(), tiny.prompt(50), tmp_path / "t", steps=3, progress=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("how", ["refused", "partly written"])
def test_a_disk_that_fills_up_loses_no_step(tmp_path, monkeypatch, code, how):
    out, args, write, calls = tmp_path / "t", {"steps": 20, "k": K, "progress": False}, os.write, []

    def full(fd, data):
        calls.append(fd)
        if len(calls) <= 9:
            return write(fd, data)
        if how == "refused":
            raise OSError(code, os.strerror(code))
        return write(fd, data[: len(data) // 2])

    with monkeypatch.context() as patch, pytest.raises(TraceError, match="disk is full: free some space and resume"):
        patch.setattr(os, "write", full)
        record(tiny.loaded(), tiny.prompt(50), out, **args)
    monkeypatch.setattr(Journal, "close", lambda self: (os.close(self._fd), calls.append(self.n_stored)))
    record(tiny.loaded(), tiny.prompt(50), out, **args, resume=True)
    assert calls[-1] == 9 and same_bytes(out, whole(tmp_path, args))


def test_weights_that_are_not_numbers_name_layer_and_step(tmp_path):
    loaded = tiny.loaded()
    with torch.no_grad():
        loaded.model.model.embed_tokens.weight[7] = float("inf")
    prompt = tiny.prompt(50, n_script=10)
    prompt.tokens, prompt.script = tuple(t % 7 for t in prompt.tokens), (*[1, 2, 3] * 5, 7, 1)
    with pytest.raises(
        ModelError, match="layer 0 .*not numbers in the pass of step 16: load the model with dtype float32"
    ):
        record(loaded, prompt, tmp_path / "t", k=K, progress=False)
    assert not (tmp_path / "t").exists()


def test_logits_that_are_not_numbers_name_the_step(tmp_path):
    loaded = tiny.loaded()
    with torch.no_grad():
        loaded.model.lm_head.weight[3] = float("nan")
    with pytest.raises(ModelError, match="logits of step 0 are not numbers"):
        record(loaded, tiny.prompt(50), tmp_path / "t", k=K, steps=5, progress=False)
    assert list(tmp_path.iterdir()) == []  # a journal without a step is nothing to go on with


def test_a_model_whose_configuration_misstates_its_heads_is_refused(tmp_path):
    loaded = tiny.loaded()
    loaded.model.config.num_key_value_heads = 4
    with pytest.raises(ModelError, match="its configuration says"):
        record(loaded, tiny.prompt(50), tmp_path / "t", k=K, steps=5, progress=False)


@pytest.mark.parametrize(
    ("change", "args", "names"),
    [
        ({"tokens": ()}, {}, "at least one token"),
        ({"script": ()}, {}, "at least one token"),
        ({"tokens": (1, 64)}, {}, "does not know"),
        ({"script": (1, -1)}, {}, "does not know"),
        ({"needle": ((10, 51),)}, {}, "needle"),
        ({"needle": ((9, 9),)}, {}, "needle"),
        ({"tokens": (1,) * 1000}, {"steps": 25}, "exceed the 1024 positions of tiny-llama"),
        ({}, {"k": 0}, "count from 1"),
        ({}, {"steps": 0}, "count from 1"),
        ({}, {"sample": {"top_k": 5}}, "unknown sampling setting 'top_k'"),
        ({}, {"sample": {"temperature": 0}}, "temperature > 0"),
        ({"script": (1, 2)}, {"sample": {}}, "scripted, so its text cannot be sampled"),
    ],
)
def test_bad_input_is_one_clear_line_and_leaves_nothing(tmp_path, change, args, names):
    prompt = tiny.prompt(50)
    vars(prompt).update(change)
    with pytest.raises(InputError, match=names) as error:
        record(tiny.loaded(), prompt, tmp_path / "deep" / "t", progress=False, **args)
    assert "\n" not in str(error.value) and list(tmp_path.iterdir()) == []


def test_the_longest_context_is_allowed(tmp_path):
    prompt = tiny.prompt(50)
    prompt.tokens = (1,) * 1000
    path = record(tiny.loaded(), prompt, tmp_path / "t", k=K, steps=24, progress=False)
    assert open_trace(path).n_steps == 24


# The key


def test_the_key_is_known_before_and_moves_with_all_that_matters(tmp_path):
    args = {"steps": 4, "k": K}
    key = recording_key(tiny.loaded(), tiny.prompt(50), **args)
    path = record(tiny.loaded(), tiny.prompt(50), tmp_path / "t", **args, progress=False)
    assert open_trace(path).manifest["key"] == key == recording_key(tiny.loaded(), tiny.prompt(50), **args)
    half = tiny.loaded()
    half.model.to(torch.bfloat16)
    others = [
        recording_key(tiny.loaded(seed=1), tiny.prompt(50), **args),
        recording_key(half, tiny.prompt(50), **args),
        recording_key(tiny.loaded(end=5), tiny.prompt(50), **args),
        recording_key(tiny.loaded(), tiny.prompt(50, seed=1), **args),
        recording_key(tiny.loaded(), tiny.prompt(50, n_script=4), **args),
        recording_key(tiny.loaded(), tiny.prompt(50, needle=((1, 2),)), **args),
        recording_key(tiny.loaded(), tiny.prompt(50), steps=5, k=K),
        recording_key(tiny.loaded(), tiny.prompt(50), steps=4, k=K + 1),
        recording_key(tiny.loaded(), tiny.prompt(50), **args, sample={"seed": 0}),
        recording_key(tiny.loaded(), tiny.prompt(50), **args, sample={"seed": 1}),
    ]
    assert len({key, *others}) == 1 + len(others)


# Memory


def test_memory_stays_flat_over_500_steps(tmp_path, monkeypatch):
    process, seen, put = psutil.Process(), [], Journal.put

    def watched(self, step, *rest):
        put(self, step, *rest)
        seen.append(process.memory_info().rss)

    monkeypatch.setattr(Journal, "put", watched)
    record(tiny.loaded(), tiny.prompt(500, n_script=505), tmp_path / "t", progress=False)
    assert len(seen) == 505
    assert max(seen[50:]) - seen[50] < 8 << 20
