"""What every other command is asked in vain: names, numbers and folders that are not to be used."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from malformed import Case
from malformed_logs import cut, packed, trace
from malformed_models import place

from wakekv.logs.trace import save_trace


def log(folder: Path) -> Path:
    return save_trace(trace(), folder / "log")


def two_models(folder: Path) -> None:
    log(folder)
    made = trace()
    stated = made.manifest | {"model": made.manifest["model"] | {"name": "another"}}
    save_trace(replace(made, manifest=stated), folder / "other")


def windows_only(folder: Path) -> None:
    made = trace()
    stated = made.manifest | {"model": made.manifest["model"] | {"windows": [16, 16]}}
    save_trace(replace(made, manifest=stated), folder / "log")


def files(contents: str, make: Callable[[Path], object] = place) -> Callable[[Path], None]:
    """A model and an article, or what `make` makes, and text files: "name=content & name=content"."""

    def to(folder: Path) -> None:
        make(folder)
        for name, content in (part.split("=", 1) for part in contents.split(" & ")):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)

    return to


def held(folder: Path) -> None:
    """A folder that another run holds: the lock lives as long as this process does, or until the next case."""
    from filelock import FileLock

    (folder / "out").mkdir()
    lock = FileLock(folder / "out" / ".lock")
    lock.acquire()
    HELD.append(lock)


HELD: list[object] = []


def cut_shipped(folder: Path) -> None:
    cut(packed(folder), 99)


def half_shipped(folder: Path) -> None:
    cut(packed(folder))


def cases() -> Iterator[Case]:
    for row in TABLE.strip().splitlines():
        asked, what, names, way, *given = (cell.strip() for cell in row.split(" | "))
        argv = [word for part in shlex.split(asked) for word in SHORT.get(part, [part])]
        where = argv[0] if argv and argv[0] in MAIN else "python -m wakekv"
        make = (MAKES.get(given[0]) or files(given[0])) if given else MADE.get(where)
        yield Case(where, what, names, way, tuple(argv), make=make)


def alike(folder: Path) -> None:
    """Two logs of one name, in two folders."""
    for name in "a", "b":
        save_trace(trace(), folder / name / "log")


def shipped_alike(folder: Path) -> None:
    for name in "a", "b":
        (folder / name).mkdir()
        packed(folder / name)


VERDICT = 'out/claims/x.json={"verdicts": [{"id": "one-fetch-a-miss", "verdict": "reproduced", %s}]}'
ROW = {"context": "c", "input": "i", "answers": ["a"], "dataset": "qasper"}
MAIN = "record simulate plan quality system verify reproduce models claims tables study pack".split()
MAIN += ["compare", "spotcheck", "site"]
MADE: dict[str, Callable[[Path], object]] = {
    "simulate": log,
    "plan": log,
    "quality": place,
    "system": place,
    "spotcheck": packed,
    "study": packed,
}
MAKES: dict[str, Callable[[Path], object]] = {
    "log": log,
    "two models": two_models,
    "windows only": windows_only,
    "packed": packed,
    "packed, cut": cut_shipped,
    "packed, half": half_shipped,
    "held": held,
    "alike": alike,
    "shipped alike": shipped_alike,
    "log, damaged list": files("out/manifest.json={", log),
    "log, another's list": files('out/manifest.json={"files": {}}', log),
    "deep": files("b.jsonl=" + "[" * 100_000),
    "half a surrogate": files("b.jsonl=" + json.dumps(ROW | {"context": "\ud800"})),
    "answers by name": files("b.jsonl=" + json.dumps(ROW | {"answers": {"a": 1}})),
    "prompts of lists": files("p.jsonl=" + json.dumps({"input": ["a"] * 300})),
    "prompts, deep": files("p.jsonl=" + "[" * 100_000),
    "nothing executed": files('run/notebooks/00_a.ipynb={"cells": []}', packed),
    "nested notebook": files("run/notebooks/00_a.ipynb=" + "[" * 100_000, packed),
    "a list of a value": files(VERDICT % '"value": [1]'),
    "an interval in words": files(VERDICT % '"value": 1, "lo": "a", "hi": "b"'),
    "a model in numbers": files(VERDICT % '"model": 3'),
    "no verdict": files(VERDICT.replace("reproduced", "great") % '"value": 1'),
    "ids in numbers": files('out/claims/a.json={"verdicts": [{"id": 1}]} & other/claims/a.json={"verdicts": []}'),
    "one answer": files("b.jsonl=" + json.dumps(ROW | {"answers": "a"})),
    "another task": files("b.jsonl=" + json.dumps(ROW | {"dataset": "qaspar"})),
    "another profile": files('out/run.json={"profile": "full", "stages": {}, "volatile": {}}'),
    "a file": files("file.txt=x"),
    "some files": files("t.yaml=- {file: 'a*', columns: ['*'], why: b}"),
    "one column": files("t.yaml=- {file: '*', columns: abc, why: b}"),
    "a file in numbers": files("t.yaml=- {file: 3, columns: ['*'], why: b}"),
    "judged in words": files("t.yaml=- {file: '*', columns: ['*'], why: b, judged: no way}"),
    "a file in a site": files("out/explorer.html=x & out/mine.txt=x"),
    "text for a log": files("x.npz=x"),
    "stages in a list": files('out/run.json={"profile": "smoke", "stages": [], "volatile": {}}'),
    "a stage in numbers": files('out/run.json={"profile": "smoke", "stages": {"00_start": 3}, "volatile": {}}'),
    "a time in words": files(
        'out/run.json={"profile": "smoke", "stages": {}, "volatile": {"00_start": {"seconds_s": "long"}}}'
    ),
    "outputs outside": files(
        'out/run.json={"profile": "smoke", "volatile": {}, "stages": {"00_start": {"inputs": {}, "outputs": '
        '{"tables/../../article.txt": "0"}}}}'
    ),
    "a word": files("t.yaml=- {file: '*', columns: ['*'], why: b, abs: much}"),
    "damaged record": files("out/run.json={ & out/tables/a.csv=a\n1\n"),
    "damaged table": files('out/tables/a.csv=" & other/tables/a.csv=a\n1\n'),
    "damaged claims": files("out/claims/a.json={ & other/claims/a.json={}"),
    "another shape": files('out/claims/x.json={"verdicts": [{"id": "a", "colour": "b"}]}'),
}
SHORT = {
    name: words.split()
    for name, words in {
        "SIMULATE": "simulate log --policy reactive --budgets 4",
        "PLAN": "plan log --step-ms 12",
        "QUALITY": "quality --model model --budgets 2 --lengths 700 --depths 0.5",
        "BENCHMARK": "quality --model model --budgets 2 --lengths 700 --depths 0.5 --longbench b.jsonl",
        "SYSTEM": "system --engine transformers --profile smoke --out out --model model --dtype float32",
        "REPRODUCE": "reproduce --profile smoke --out out",
        "COMPARE": "compare reference reference",
        "STUDY": "study x.npz --out out",
    }.items()
}

# What is asked, in words | what is malformed | what the line must name | the way out it must show | what is made first
TABLE = """
frobnicate | a command that is not known | 'frobnicate' | see
simulat log | a command that is misspelt | 'simulat' | did you mean simulate
 | no command | COMMAND | see
record | no place for a recording | --out | see
simulate log | no policy | --policy | see
SIMULATE --policy reactiv | a policy that is misspelt | unknown policy 'reactiv' | did you mean reactive
SIMULATE --policy '' | an empty policy | unknown policy '' | known:
SIMULATE --budgets 0 | a budget of nothing | budget 0 | between 1 and 13
SIMULATE --budgets -4 | a negative budget | budget -4 | between 1 and 13
SIMULATE --budgets 8,999 | a budget beyond all pages | budget 999 | between 1 and 13
SIMULATE --budgets 8,x | budgets in words | '8,x' | whole numbers with commas
SIMULATE --budgets 1e3 | a budget with an exponent | '1e3' | whole numbers with commas
SIMULATE --budgets nan | a budget that is not a number | 'nan' | whole numbers with commas
SIMULATE --budgets '' | no budgets | '' | whole numbers with commas
SIMULATE --unit heads | a unit that is not known | 'heads' | choose from
SIMULATE --first-touch hot | a first touch that is not known | 'hot' | choose from
SIMULATE --convention sequential --policy frozen | a convention that a policy has not | the sequential convention | only
PLAN --link pcie9 | a link that is not known | unknown link 'pcie9' | did you mean pcie
PLAN --step-ms 0 | a step of no time | 0 s | must take some time
PLAN --step-ms -3 | a step of negative time | -0.003 s | must take some time
PLAN --step-ms nan | a step whose time is not a number | nan s | must take some time
PLAN --max-slowdown -1 | a negative slowdown | max_slowdown | at least 0
PLAN --max-at-risk nan | a risk that is not a number | max_at_risk | at least 0
PLAN --batch 0 | a batch of nothing | batch | from 1
PLAN --policies reactive,evic | a policy to plan with that is misspelt | 'evic' | did you mean evict
PLAN --policies optimum | a policy that knows the future | optimum | another policy
PLAN --policies , | no policies | no policies | name one or more
PLAN --dtype int4 | a type to serve in that is not known | unknown dtype 'int4' | known:
PLAN --budgets '8;16' | budgets to print that are no list | '8;16' | whole numbers with commas
plan nowhere --step-ms 12 | a log that is not there | nowhere | record one with
QUALITY --budgets 0 | a budget of nothing | budget | from 1
QUALITY --budgets many | budgets in words | 'many' | whole numbers with commas
QUALITY --lengths 0 | a prompt of no length | length 0 | at least 1
QUALITY --lengths 9000 | a prompt beyond the context | length 9000 | ask for less
QUALITY --depths 2 | a depth beyond the end | depth 2.0 | from 0 to 1
QUALITY --depths 0.5,x | depths in words | '0.5,x' | numbers, such as
QUALITY --seeds 0 | no prompts | --seeds | from 1
QUALITY --seeds -2 | a negative number of prompts | --seeds | from 1
QUALITY --model smollm3 | a model that is not known | unknown model 'smollm3' | did you mean smollm2-135m
QUALITY --longbench no.jsonl | a benchmark's file that is not there | no.jsonl | cannot be read
QUALITY --longbench no.jsonl --lengths 1,2 | a benchmark at two lengths | --longbench | give --lengths one number
QUALITY --longbench no.jsonl --samples 0 | no samples of a benchmark | 0 samples | 1 or more
SYSTEM --profile gpu | a profile that is not known | unknown profile 'gpu' | did you mean cpu
SYSTEM --engine sglang | an engine that is not known | 'sglang' | choose from
SYSTEM --dtype float16 | a type the sweep has not | 'float16' | choose from
SYSTEM --prompts x.jsonl --needles 0 | prompts that are not there | x.jsonl | cannot be read
SYSTEM --longbench x.jsonl | a benchmark's file that is not there | x.jsonl | cannot be read
SYSTEM --only stock,reactive-r3 | a configuration that is not known | 'reactive-r3' | did you mean
SYSTEM --only reactive-r1 | a sweep without what it is measured against | stock | name it
SYSTEM --samples 0 | no samples of a benchmark | --samples | from 1
SYSTEM --length 0 | a prompt of no length | --length | from 1
SYSTEM --requests 0 | no requests | --requests | from 1
SYSTEM --n-tokens 0 | no tokens to write | --n-tokens | from 1
SYSTEM --budget 0 | a budget of nothing | budget | from 1
SYSTEM --repeats -1 | a negative number of repeats | --repeats | from 1
SYSTEM --model smollm3 | a model that is not known | unknown model 'smollm3' | did you mean smollm2-135m
verify nowhere.npz | a shipped log that is not there | manifest.json is missing | pack it again
reproduce --profile smok | a profile that is misspelt | unknown | did you mean smoke
reproduce --profile smoke --only 99 | a notebook that is not there | unknown notebook '99' | did you mean
REPRODUCE -p unit | a parameter without a value | 'unit' | -p takes NAME=VALUE
REPRODUCE -p unti=head | a parameter that is misspelt | unti | see their first cells
STUDY --policies reactiv | a policy that is misspelt | unknown policy 'reactiv' | did you mean reactive
STUDY --budgets 0 | a budget of nothing | budgets | from 1 on
STUDY --budgets 8,x | budgets in words | '8,x' | whole numbers with commas
STUDY --models smollm | a model that no log is of | 'smollm' | known:
STUDY --regimes nihai | a regime that no log is of | 'nihai' | did you mean niah
STUDY --jobs 0 | no processes | --jobs | from 1
STUDY --unit heads | a unit that is not known | 'heads' | choose from
STUDY --first-touch hot | a first touch that is not known | 'hot' | choose from
study nowhere --out out | logs that are not there | nowhere | name
study s4://bucket/logs --out out | a store that is not known | s4://bucket/logs | name logs here
STUDY --out file.txt/out | a folder below a file | file.txt/out | another place | a file
study model --out out | a folder without logs | model | name | a file
models --fetch smollm | a model that is misspelt | unknown model 'smollm' | did you mean smollm2-135m
claims --out nowhere | a run that is not there | nowhere is no run | python -m wakekv reproduce
tables nowhere.npz --out x | a shipped log that is not there | nowhere.npz | see artifact/logs
pack nowhere --out x | a log that is not there | nowhere | record one with
compare nowhere reference | a run that is not there | nowhere holds no results | give a run
COMPARE --tolerances no.yaml | tolerances that are not there | no.yaml | cannot be read
COMPARE --only pictures | a part that is not known | 'pictures' | choose from
spotcheck nowhere.npz | a shipped log that is not there | lists no nowhere.npz | name a log
spotcheck x.npz --steps 0 | no steps | not 0 | between 1 and 6
spotcheck x.npz --steps 99 | more steps than the log has | not 99 | between 1 and 6
spotcheck x.npz --share 1.5 | a share above 1 | 1.5 | between 0 and 1
spotcheck x.npz --share nan | a share that is not a number | nan | between 0 and 1
spotcheck x.npz | a shipped log of a model that is not known | unknown model 'made-up' | known:
site --run nowhere --out x | a run that is not there | nowhere holds no executed notebooks | make reproduce
PLAN --step-ms inf | a step without end | inf | from 0.000001 to 1000000000
PLAN --batch 1000000000000000000000000 | a batch of all there is | --batch | 1000000 at most
plan log log --step-ms 12 | a log named twice | log is named twice | name each log once
STUDY --dask nonsense | a scheduler without a port | 'nonsense' | tcp://host:8786
STUDY --dask gopher://host:1 | a scheduler of an unknown kind | 'gopher://host:1' | tcp://host:8786
STUDY --budgets 99 | budgets beyond all pages of a log | x.npz has 13 pages | ask for fewer
study github://logs --out out | a store that wants more than a place | github://logs cannot be read | name logs here
study zip://a::x.npz --out out | a store in what is no archive | zip://a::x.npz | name logs here | text for a log
tables x.npz x.npz --out out | a log named twice | x.npz is named twice | name each log once | packed
pack a/log b/log --out out | two logs of one name | b/log | with a --prefix each | alike
pack log log --out out | a log named twice | log is named twice | name each log once | log
pack log --out log | a recorded log's folder | log/manifest.json is not that of shipped logs | another folder | log
pack log --out out | a folder whose list is damaged | out/manifest.json is damaged | remove it | log, damaged list
pack log --out out | a folder whose list is of other files | out/manifest.json is not | another | log, another's list
pack log --out out --prefix ../ | a prefix that leads out of the folder | '../' | leave slashes out | log
claims --out out | a value that is a list | one-fetch-a-miss | run notebook | a list of a value
claims --out out | an interval in words | one-fetch-a-miss | run notebook | an interval in words
claims --out out | a model in numbers | one-fetch-a-miss | run notebook | a model in numbers
claims --out out | a verdict that is none | one-fetch-a-miss | run notebook | no verdict
compare out other | claims whose ids are numbers | out/claims/a.json | run its notebook again | ids in numbers
COMPARE --tolerances t.yaml | tolerances that are none | t.yaml | cannot be read | t.yaml=[]
COMPARE --tolerances t.yaml | tolerances of some files only | t.yaml | must fit every | some files
COMPARE --tolerances t.yaml | a tolerance with a word for its columns | t.yaml | columns a list | one column
COMPARE --tolerances t.yaml | a tolerance of a file in numbers | t.yaml | are names | a file in numbers
COMPARE --tolerances t.yaml | a tolerance judged in words | t.yaml | true or false | judged in words
REPRODUCE -p out=elsewhere | another folder as a parameter | -p out | give --out
REPRODUCE -p profile=full | another profile as a parameter | -p profile | give --profile
SYSTEM --budget 99 --needles 0 | a budget beyond all pages | budget 99 is more than all | ask for less
SYSTEM --prompts p.jsonl --needles 0 | prompts that are lists | p.jsonl, line 1 | is needed | prompts of lists
SYSTEM --prompts p.jsonl --needles 0 | prompts nested 100,000 deep | p.jsonl, line 1 | is needed | prompts, deep
BENCHMARK | a benchmark's line nested 100,000 deep | b.jsonl, line 1 | are needed | deep
BENCHMARK | a benchmark's line with half a surrogate | b.jsonl, line 1 | are needed | half a surrogate
BENCHMARK | a benchmark's line with answers by name | b.jsonl, line 1 | a list of them | answers by name
site --log x.npz --out out | a site with another's file in it | out holds mine.txt | move it | a file in a site
site --log a/x.npz --log b/x.npz --out out | two logs of one name | two of the 2 logs | rename one | shipped alike
site --run run --log x.npz --out out | a notebook with nothing in it | 00_a.ipynb | no executed | nothing executed
site --run run --log x.npz --out out | a notebook nested 100,000 deep | 00_a.ipynb | no executed | nested notebook
plan log other --step-ms 12 | logs of two models | another | one at a time | two models
PLAN | a log whose layers all have a window | every layer of made-up | no page to plan for | windows only
plan x.npz --step-ms 12 | a shipped log, where a whole one is needed | x.npz | record | packed
BENCHMARK | a benchmark's file with nothing in it | b.jsonl is empty | is needed | b.jsonl=
BENCHMARK | a benchmark's line that is no JSON | b.jsonl, line 1 | are needed | b.jsonl={
BENCHMARK | a benchmark's line without answers | b.jsonl, line 1 | are needed | b.jsonl={"context": "c"}
BENCHMARK | a benchmark's line with one answer for a list | b.jsonl, line 1 | must be texts | one answer
BENCHMARK | a benchmark's task that is not known | b.jsonl, line 1 | did you mean | another task
REPRODUCE --out file.txt | a file for a folder | file.txt is a file | give a folder | a file
REPRODUCE --out file.txt/out | a folder below a file | file.txt/out cannot be written | another place | a file
REPRODUCE | a run whose record is damaged | run.json is damaged | remove it | out/run.json={
REPRODUCE | a run whose stages are a list | run.json is damaged | remove it | stages in a list
REPRODUCE | a run with a stage in numbers | run.json is damaged | remove it | a stage in numbers
REPRODUCE | a run that took a time in words | run.json is damaged | remove it | a time in words
REPRODUCE | a run whose outputs lead out of its folder | run.json is damaged | remove it | outputs outside
REPRODUCE | a run whose record is a list | run.json is damaged | remove it | out/run.json=[]
REPRODUCE | a run of another profile | a run of profile full | give another --out | another profile
REPRODUCE | a folder that another run holds | another run is writing into | wait for it | held
claims --out out | claims that are no JSON | x.json is not a claims file | run its notebook again | out/claims/x.json={
claims --out out | claims that are a list | x.json is not a claims file | run its notebook again | out/claims/x.json=[]
claims --out out | claims of another shape | x.json is not a claims file | run its notebook again | another shape
claims --out file.txt | a file for a run | file.txt is no run | reproduce | a file
tables x.npz --out out | a shipped log cut short | x.npz is damaged | pack it again | packed, cut
tables x.npz --out manifest.json | a file for a folder | manifest.json/tables cannot be written | another place | packed
pack log --out out | a log of a model that is not known | unknown model 'made-up' | known: | log
pack log --out log/manifest.json | a file for a folder | log/manifest.json | another place | log
compare out out | a run whose record is no JSON | out/run.json is damaged | run it again | damaged record
compare out other | a table that is no CSV | tables/a.csv of | run it again | damaged table
compare out other | claims that are no JSON | out/claims/a.json | run it again | damaged claims
COMPARE --tolerances t.yaml | tolerances that are not YAML | t.yaml | cannot be read | t.yaml=[
COMPARE --tolerances t.yaml | a tolerance without columns | t.yaml | cannot be read | t.yaml=- {file: a, why: b}
COMPARE --tolerances t.yaml | a tolerance in words | t.yaml | cannot be read | a word
spotcheck x.npz | a shipped log cut short | x.npz has | pack it again | packed, half
site --log x.npz --out out | a folder that is no site | out exists and is no site | give another --out | out/mine.txt=x
site --log x.npz --out out | a shipped log that is not there | x.npz | see artifact/logs
site --log x.npz --out file.txt/out | a folder below a file | file.txt/out | another place | a file
SYSTEM --out file.txt/out --model model | a folder below a file | file.txt/out | another place | a file
"""
