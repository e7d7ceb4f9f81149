import json
from dataclasses import replace

import pytest

from benchmarks.peers.report import Limit, Lookup, Problem, Report, Transfer, from_line, to_line

STORE = Transfer("pegaflow", "tp8-4k", 64, 1, "store", 27.65, 1.518, variant="direct", verified=True)
LOAD = replace(STORE, direction="load", gbps=1.234)
LOOKUP = Lookup("lmcache", 512, True, 2900.4, "32 chunks")
LIMIT = Limit("pegaflow", "store", 55.3)
PROBLEM = Problem("lmcache", "not installed")


def report(*rows):
    made = Report(machine={"gpu": "NVIDIA H200"})
    made.add(rows)
    return made


def line_with(text, *words):
    return next(line for line in text.splitlines() if all(word in line for word in words))


@pytest.mark.parametrize("row", [STORE, LOOKUP, LIMIT, PROBLEM], ids=lambda row: type(row).__name__)
def test_a_row_survives_the_way_through_a_file(row):
    assert from_line(to_line(row)) == row


@pytest.mark.parametrize("line", [to_line(STORE)[:-9], "", "[]", '{"kind": "Nothing"}', '{"kind": "Limit", "gbps": 1}'])
def test_a_line_that_is_no_row_is_refused(line):
    with pytest.raises(ValueError):
        from_line(line)


def test_the_json_has_what_a_comparison_needs():
    document = json.loads(report(STORE, LOAD, LOOKUP, LIMIT, PROBLEM).as_json())
    assert document["machine"] == {"gpu": "NVIDIA H200"}
    keys = {"system", "layout", "blocks", "in_flight", "direction", "gbps", "ms_p50", "note"}
    assert all(keys <= row.keys() for row in document["rows"])
    assert [row["of_limit"] for row in document["rows"]] == [0.5, None]  # no limit was measured for loads
    expected = {"system": "lmcache", "hashes": 512, "hit": True, "us_p50": 2900.4, "note": "32 chunks"}
    assert document["lookups"] == [expected]
    assert document["problems"] == [{"system": "lmcache", "reason": "not installed"}]


def test_both_directions_and_all_sizes_of_a_layout_share_a_line():
    text = report(STORE, LOAD, replace(STORE, blocks=1, gbps=2.5), LIMIT).as_text()
    cells = [cell.strip() for cell in line_with(text, "pegaflow direct", "tp8-4k").strip("|").split("|")]
    head = [cell.strip() for cell in line_with(text, "store 64").strip("|").split("|")]
    found = dict(zip(head, cells, strict=True))
    assert (found["store 1"], found["store 64"], found["load 1"], found["load 64"]) == ("2.5", "27.6", "-", "1.23")
    assert found["checked"] == "yes"


def test_variants_orders_and_depths_have_lines_of_their_own():
    rows = [STORE, replace(STORE, variant="kernel"), replace(STORE, ids="consecutive"), replace(STORE, in_flight=4)]
    assert report(*rows).as_text().count("tp8-4k") == 4


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([replace(STORE, verified=None)], "NO"),
        ([STORE, replace(LOAD, verified=None)], "NO"),
        ([replace(STORE, verified=False)], "WRONG BYTES"),
        ([replace(STORE, valid=False, note="slow fallback")], "INVALID"),
    ],
)
def test_a_row_that_is_not_to_be_trusted_says_so(rows, said):
    line = line_with(report(*rows).as_text(), "tp8-4k")
    assert said in [cell.strip() for cell in line.split("|")]
    assert all(row.note in line for row in rows)


def test_the_figure_of_an_invalid_row_is_set_apart():
    assert "(27.6)" in report(replace(STORE, valid=False)).as_text()


def test_what_was_not_measured_is_in_the_table_with_its_reason():
    text = report(PROBLEM).as_text()
    assert "not installed" in line_with(text, "lmcache")
    assert "GB/s" not in text
