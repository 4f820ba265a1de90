"""The bucket benchmark: its table from given times, and a small run between two simulated hosts."""

from __future__ import annotations

import pytest

from benchmarks.buckets import measure, parse, table
from tests.simulated_hosts import unavailable


def test_exposed_time_is_what_a_step_takes_beyond_computation_and_hidden_what_overlap_saves_of_it() -> None:
    found = {
        "gradient_bytes": 50e6,
        "seconds": {
            "ours, 25": [1.1, 3.1, 1.2],
            "ours without overlap, 25": [1.4, 3.4, 9.9],
            "ours, no_sync": [1.0, 3.0, 1.0],  # the second round was disturbed
            "ddp, 25": [1.3, 3.2, 1.3],
            "ddp, no_sync": [1.1, 3.0, 1.0],
        },
        "blocked": {"ours, 25": [0.05, 0.05, 0.06], "ours without overlap, 25": [0.4, 0.5, 0.4]},
        "sent": {"ours, 25": [5e7] * 3, "ours without overlap, 25": [5e7] * 3, "ddp, 25": [6e7] * 3},
        "messages": {"ours, 25": 3, "ours without overlap, 25": 3, "ddp, 25": 2},
    }
    rows = table("1gbit", found).splitlines()
    assert rows[0] == "### 1gbit: 50.0 MB of fp32 gradients, 1.000 s of computation a step"
    assert rows[4:] == [
        "| ours | 25 | 3 | 50.0 | 1.200 | 0.100 | 75% | 0.050 | 88% |",
        "| ours without overlap | 25 | 3 | 50.0 | 3.400 | 0.400 |  | 0.400 |  |",
        "| ddp | 25 | 2 | 60.0 | 1.300 | 0.200 |  |  |  |",
    ]
    assert {row.count("|") for row in rows[2:]} == {10}


reason = unavailable()


@pytest.mark.full
@pytest.mark.skipif(reason is not None, reason=reason or "")
def test_two_hosts_send_no_more_messages_than_ddp_but_one_and_the_same_bytes() -> None:
    options = parse("--bucket-mb 0.5 100 --rounds 2 --tokens 32 --hidden 64 --layers 2".split())
    found = measure("1gbit", options)
    for cap in ("0.5", "100"):
        ours, ddp = found["messages"][f"ours, {cap}"], found["messages"][f"ddp, {cap}"]
        assert 1 <= ours <= ddp + 1 and found["messages"][f"ours without overlap, {cap}"] == ours
        for kind in (f"ours, {cap}", f"ours without overlap, {cap}", f"ddp, {cap}"):
            # What still queues at the link when a step ends is counted with the next.
            sent = min(found["sent"][kind]) / found["gradient_bytes"]
            assert 0.8 < sent < 1.2, kind
    assert found["messages"]["ours, 0.5"] > found["messages"]["ours, 100"] == 1
    assert max(found["sent"]["ours, no_sync"]) < 0.05 * found["gradient_bytes"]
    assert "| ddp | 100 | 1 |" in table("1gbit", found)
