"""Claims can fail, a surrogate cannot reproduce, and what the file says was published stands in published.json."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from wakekv.errors import InputError
from wakekv.reproduction import claims
from wakekv.reproduction.claims import decide, hardware, load_claims, published, table, write_claims
from wakekv.verdicts import as_text

DECLARED = load_claims()


def declared(**changes):
    example = DECLARED["evict-19-of-20"]
    return {"c": replace(example, id="c", notebook="nb", **changes)}


@pytest.mark.parametrize("claim", DECLARED.values(), ids=str)
def test_published_values_stand_in_published_json(claim):
    facts = [published(pointer) for pointer in claim.source.split()]
    printed = claim.published
    if not facts:  # stands in no table: the sentence says it, or `why` how the sentence is read
        parts = printed if isinstance(printed, list) else str(printed).split("/")
        text = f"{claim.sentence} {claim.why}"
        assert "never" in text or all(re.search(rf"\b{part}\b", text) for part in map(str, parts))
    elif isinstance(facts[0], str):  # an example in words: both numbers occur in it
        assert all(part in facts[0] for part in printed.split("/"))
    elif isinstance(printed, str):
        assert facts == [int(part) for part in printed.split("/")]
    elif isinstance(printed, list):
        assert printed == (sorted(facts) if len(facts) > 1 else facts[0])
    else:
        assert facts == [printed]


@pytest.mark.parametrize("claim", DECLARED.values(), ids=str)
def test_the_published_value_satisfies_its_own_claim(claim):
    machine = claim.hardware or "any machine"
    value = claim.published if not isinstance(claim.published, list) else sum(claim.published) / 2
    assert decide(claim.id, value, model=claim.models[0], machine=machine, claims=DECLARED).verdict == "reproduced"


@pytest.mark.parametrize("claim", DECLARED.values(), ids=str)
def test_every_claim_can_fail(claim):
    against = -1e9 if claim.direction.startswith(">") else 1e9
    assert (
        decide(claim.id, against, model=claim.models[0], machine=claim.hardware, claims=DECLARED).verdict
        == "not reproduced"
    )


@pytest.mark.parametrize("claim", DECLARED.values(), ids=str)
def test_every_rule_can_be_broken(claim):
    """A value off the published one by more than the tolerance, on the paper's model: no longer reproduced."""
    lo, hi = claims.number(claim.published)
    gap = claim.tolerance + 0.01 * max(1, abs(hi))
    values = {"within": [lo - gap, hi + gap], "le": [hi + gap], "ge": [lo - gap]}[claim.rule]
    where = {"model": claim.models[0], "machine": claim.hardware or "any machine", "claims": DECLARED}
    assert decide(claim.id, lo, **where).verdict == "reproduced"
    assert "reproduced" not in {decide(claim.id, value, **where).verdict for value in values}


@pytest.mark.parametrize("claim", DECLARED.values(), ids=str)
def test_a_surrogate_model_never_reproduces(claim):
    value = claim.published if not isinstance(claim.published, list) else claim.published[0]
    assert (
        decide(claim.id, value, model="smollm2-135m", machine="NVIDIA A30", claims=DECLARED).verdict
        == "direction holds"
    )


def test_a_count_over_several_models_reproduces_only_if_all_are_the_papers():
    verdicts = [decide("evict-19-of-20", "20/20", model=m).verdict for m in ("qwen2.5-3b, mistral-7b", "qwen2.5-3b, x")]
    assert verdicts == ["reproduced", "direction holds"]


def test_another_machine_never_reproduces_an_a30_number():
    verdicts = [decide("throughput-r1", 1.34, model="mistral-7b", machine=m).verdict for m in ("NVIDIA A30", "a CPU")]
    assert verdicts == ["reproduced", "direction holds"]


def test_the_paper_model_off_the_number_shows_the_direction_only():
    assert decide("drift-niah-3b", 0.9, model="qwen2.5-3b").verdict == "direction holds"


def test_an_interval_that_crosses_the_threshold_decides_against():
    assert decide("drift-niah-3b", 0.63, lo=0.4, hi=0.8, model="qwen2.5-3b").verdict == "not reproduced"
    assert decide("drift-niah-3b", 0.63, lo=0.6, hi=0.8, model="qwen2.5-3b").verdict == "reproduced"


def test_no_value_needs_a_reason():
    with pytest.raises(InputError, match="say in `note` why"):
        decide("drift-niah-3b")
    assert decide("drift-niah-3b", note="too few prompts").verdict == "not run here"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "17 of 17", "1/0", "", {}, [2, 1]])
def test_a_value_that_is_no_number_is_refused(value):
    with pytest.raises(InputError):
        decide("drift-niah-3b", value)


def test_an_unknown_claim_names_the_nearest():
    with pytest.raises(InputError, match="evict-19-of-20"):
        decide("evict-19-of-2", 1)


def test_a_failed_claim_that_is_declared_to_hold_is_red(tmp_path):
    known = declared(expected="holds")
    write_claims(tmp_path, "nb", [decide("c", "3/36", claims=known, model="smollm2-135m")], known)
    (row,) = table(tmp_path, known)
    assert row["failed"] and row["verdict"] == "not reproduced"
    assert "declared to hold, and failed: c" in as_text([row])


def test_a_failed_open_claim_is_reported_and_not_red(tmp_path):
    known = declared(expected="open")
    write_claims(tmp_path, "nb", [decide("c", "3/36", claims=known)], known)
    (row,) = table(tmp_path, known)
    assert not row["failed"] and row["verdict"] == "not reproduced"


def test_a_claim_whose_notebook_did_not_run_says_so(tmp_path):
    rows = table(tmp_path)
    assert len(rows) == len(DECLARED) and {row["verdict"] for row in rows} == {"not run here"}
    assert all(row["notebook"] in row["note"] for row in rows)


def test_a_notebook_must_decide_each_of_its_claims_once(tmp_path):
    known = declared() | {"d": replace(declared()["c"], id="d")}
    one = decide("c", 1, claims=known)
    for given in [one], [one, one], [one, decide("d", 1, claims=known), decide("evict-19-of-20", 1)]:
        with pytest.raises(InputError, match="claims of nb"):
            write_claims(tmp_path, "nb", given, known)
    assert not (tmp_path / "claims").exists()


def test_two_writes_of_the_same_verdicts_are_the_same_bytes(tmp_path):
    known = declared()
    texts = []
    for _ in range(2):
        path = write_claims(tmp_path, "nb", [decide("c", "36/36", claims=known)], known)
        texts.append(path.read_bytes())
    assert texts[0] == texts[1] and [p.name for p in path.parent.iterdir()] == ["nb.json"]


def test_a_damaged_claims_file_is_named(tmp_path):
    (tmp_path / "claims").mkdir()
    (tmp_path / "claims" / "nb.json").write_text(json.dumps({"verdicts": [{"id": "c"}]}))
    with pytest.raises(InputError, match=r"nb\.json is not a claims file"):
        table(tmp_path)


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "\0"])
def test_damaged_published_numbers_are_named(tmp_path, text):
    path = tmp_path / "published.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"published\.json cannot be read"):
        published("table3", path)


@pytest.mark.parametrize(
    "text, said",
    [
        ("- {id: a", "not YAML"),
        ("- {id: a, models: [m]}", "malformed claim"),
        ("nothing", "malformed claim"),
    ],
)
def test_a_malformed_declaration_is_named(tmp_path, text, said):
    path = tmp_path / "claims.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=said):
        load_claims(path)


@pytest.mark.parametrize(
    "change", [{"rule": "about"}, {"kind": "dreamt"}, {"expected": "maybe"}, {"tolerance": -1}, {"direction": "up"}]
)
def test_a_claim_with_an_unknown_word_is_refused(change):
    with pytest.raises(InputError):
        declared(**change)


def test_ids_are_unique(tmp_path):
    text = (claims.ROOT / "artifact" / "claims.yaml").read_text(encoding="utf-8")
    path = tmp_path / "claims.yaml"
    path.write_text(text + "\n" + text, encoding="utf-8")
    with pytest.raises(InputError, match="declared twice"):
        load_claims(path)


def test_a_pointer_into_nothing_is_named():
    with pytest.raises(InputError, match="table9"):
        published("table9.0")


def test_hardware_names_cores():
    assert re.search(r"\d+ cores", hardware())


PRINTED = {  # every result that the paper's text states as a number, and a claim about it
    "1.34–2.33×": "throughput-every-r", "95–99 %": "quality-range", "0.08–0.20": "signal-precision",
    "0.41–0.70": "signal-recall", "never beats": "ensemble-no-better", "0.53–0.62": "markers-cot",
    "4–5×": "markers-over-signals", "Zero markers": "markers-niah", "+9.7": "burst-z", "54 %": "coarse-trigger",
    "0.055": "frozen-example", "0.405": "frozen-example", "7×": "frozen-example", "56k": "frozen-example",
    "0.632": "evict-exception", "0.624": "evict-exception", "0.078": "rkv-example", "0.132": "rkv-example",
    "28k": "rkv-example", "17/17": "frozen-17-of-17", "3 of 20": "dropped-3-of-20", "19/20": "evict-19-of-20",
    "32/32": "cited-32-of-32", "several times": "cited-memory", "1.34×": "throughput-r1", "97.4 %": "quality-r1",
    "2.33×": "throughput-r16", "above 95 %": "quality-floor", "that same 2.33×": "zero-dense-heads",
    "one PCIe transfer": "one-fetch-a-miss", "none is both": "none-both", "three models": "heads-change",
    "not reliably anticipate": "signals-unreliable",
}  # fmt: skip


@pytest.mark.parametrize("said, claim", PRINTED.items())
def test_every_number_of_the_papers_text_has_a_claim(said, claim):
    assert said in DECLARED[claim].sentence


def test_every_row_of_the_papers_tables_of_measurements_has_its_claims():
    sources = " ".join(claim.source for claim in DECLARED.values()).split()
    for row, line in enumerate(published("table4_churn")):
        for column in line.keys() & {"adjacent_jaccard", "unstable_fraction", "drift_fraction"}:
            assert f"table4_churn.{row}.{column}" in sources
    for row in range(1, len(published("table2_system.rows"))):  # row 0 is what the others are compared with
        for column in ("speedup", "longbench_pct"):
            assert f"table2_system.rows.{row}.{column}" in sources
