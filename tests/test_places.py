"""Logs are found wherever fsspec reads, told apart by what they are, and checked before they are used."""

from __future__ import annotations

import shutil

import fsspec
import pytest

from wakekv.errors import InputError, TraceError
from wakekv.files import ROOT
from wakekv.logs.shipped import pack
from wakekv.logs.trace import open_trace, save_trace, verify
from wakekv.reproduction import places

SHIPPED = ROOT / "artifact" / "logs" / "smoke_smollm2-135m_niah_d50_s1.npz"


@pytest.fixture
def logs(make_trace, tmp_path, monkeypatch):
    """A folder of two logs, one of them shipped, and a file that is none."""
    monkeypatch.setenv("WAKEKV_CACHE", str(tmp_path / "cache"))
    places.local.cache_clear()
    save_trace(make_trace(), tmp_path / "logs" / "whole")
    shutil.copy(SHIPPED, tmp_path / "logs")
    (tmp_path / "logs" / "notes.txt").write_text("none")
    return tmp_path / "logs"


@pytest.fixture
def bucket(logs):
    """The same in fsspec's memory."""
    store = fsspec.filesystem("memory")
    store.put(f"{logs}/", "/bucket/logs", recursive=True)
    yield "memory://bucket/logs"
    store.rm("/bucket", recursive=True)


def test_a_folder_a_pattern_and_the_logs_themselves_are_the_same(logs):
    found = places.find([str(logs)])
    assert [place.name for place in found] == ["smoke_smollm2-135m_niah_d50_s1", "whole"]
    assert places.find([f"{logs}/*"]) == places.find([f"{logs}/whole", str(logs / SHIPPED.name)]) == found
    assert places.find([f"{logs}/whole", str(logs)]) == found, "each once"


def test_a_log_is_the_same_wherever_it_lies(logs, bucket):
    here, there = places.find([str(logs)]), places.find([bucket])
    assert [one.sha256 for one in here] == [one.sha256 for one in there]
    assert [one.manifest for one in here] == [one.manifest for one in there]
    assert places.local(here[1].url, here[1].sha256) == logs / "whole"
    for one in there:
        copy = places.local(one.url, one.sha256)
        assert "cache" in copy.parts and places.local(one.url, one.sha256) == copy
    verify(copy)


def test_a_damaged_log_is_refused_and_leaves_nothing_behind(logs, bucket, tmp_path):
    (place,) = (one for one in places.find([bucket]) if one.name == "whole")
    fsspec.filesystem("memory").pipe("/bucket/logs/whole/top.npy", b"short")
    with pytest.raises(TraceError, match="top.npy"):
        places.local(place.url, place.sha256)
    assert not list((tmp_path / "cache" / "logs").iterdir())


def test_another_log_under_the_same_name_is_noticed(logs, make_trace):
    (place,) = places.find([f"{logs}/whole"])
    shutil.rmtree(logs / "whole")
    save_trace(make_trace(seed=5), logs / "whole")
    with pytest.raises(TraceError, match="changed since"):
        places.local(place.url, place.sha256)


@pytest.mark.parametrize("where", ["nowhere", "notes.txt", "none/*"])
def test_where_no_log_lies_says_so(logs, where):
    with pytest.raises(InputError, match="no log at"):
        places.find([f"{logs}/{where}"])


def test_a_name_may_have_what_patterns_are_made_of(logs):
    for name in "a [b] *", "c?":
        (logs / "whole").rename(logs / name)
        assert [place.name for place in places.find([str(logs / name)])] == [name]
        (logs / name).rename(logs / "whole")
    logs.rename(logs.parent / "[logs]")
    assert len(places.find([str(logs.parent / "[logs]")])) == 2


def test_a_log_that_is_there_whole_and_shipped_is_one(logs):
    whole = open_trace(logs / "whole")
    pack(whole, ["x"] * len(whole.tokens), logs / "again.npz")
    assert [place.name for place in places.find([str(logs)])] == [SHIPPED.stem, "whole"]


class Refused(Exception):
    """What a store's client raises is not always an OSError."""


def test_what_a_store_raises_is_told_in_one_line(bucket, monkeypatch):
    def refuse(*_, **__):
        raise Refused("no credentials")

    with monkeypatch.context() as patch:
        patch.setattr("fsspec.implementations.memory.MemoryFileSystem.ls", refuse)
        with pytest.raises(InputError, match=r"memory://bucket/logs cannot be read \(no credentials\)"):
            places.find([bucket])


def test_a_store_that_is_not_known_says_so():
    with pytest.raises(InputError, match="nosuch://bucket/logs cannot be read"):
        places.find(["nosuch://bucket/logs"])
