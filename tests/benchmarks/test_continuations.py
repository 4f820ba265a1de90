"""What benchmarks/continuations.py counts: heads of held-out functions only, and what Python's tokenize accepts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.continuations import HEADS, fault_of, head_of, read_heads, up_to_the_last_line

SOURCE = '''
class Box:
    @property
    def lid(
        self, a: dict[str, int] = {"x": 1},
    ) -> None:  # it: has colons
        """Text."""

def plain(x):
    return x
'''


def test_a_head_is_what_stands_before_the_body_at_the_margin() -> None:
    assert head_of(SOURCE, "plain") == "def plain(x):"
    assert head_of(SOURCE, "Box.lid").splitlines()[:2] == ["def lid(", '    self, a: dict[str, int] = {"x": 1},']
    for missing in ("lid", "Box.plain", "Bag.lid"):
        with pytest.raises(ValueError, match=f"there is no {missing}"):
            head_of(SOURCE, missing)


def test_heads_of_text_that_was_trained_on_are_refused(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"path": f"{i}.py", "text": SOURCE}) + "\n" for i in range(10)))
    assert read_heads(corpus, "80,10,10", [{"path": "8.py", "function": "plain"}]) == ["def plain(x):"]
    wrong = [{"path": f"{i}.py", "function": function} for i, function in ((7, "plain"), (9, "no"), (11, "plain"))]
    with pytest.raises(SystemExit) as ended:
        read_heads(corpus, "80,10,10", wrong)
    for said in ("7.py is in the part that is trained on", "9.py: there is no no", "11.py is no document"):
        assert said in str(ended.value)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("def f(x):\n    return x\n", None),
        ("def f(x):\n    if x:\n        pass\n    else:\n        y = 'a", "no token"),
        ("def f(x):\n        if x:\n            pass\n    return x\n", "unindent"),
        ("def f(x):\n    return (x\n", "multi-line"),
        ('def f(x):\n    """Text\n', "multi-line"),
        ("def f(x):\n    return x ? 1\n", "no token"),
        ("def f(x):\n\n\n", "no body"),
        ("def f(x):", "no body"),
    ],
)
def test_what_is_no_python_is_told(text: str, fault: str | None) -> None:
    found = fault_of(text)
    assert found is None if fault is None else found is not None
    if fault == "no body":
        assert found == fault


def test_the_line_that_the_limit_has_cut_can_be_left_out() -> None:
    assert up_to_the_last_line("def f():\n    return (a,\n") == "def f():\n    return (a,\n"
    assert up_to_the_last_line("def f():\n    return 1\n    x = (") == "def f():\n    return 1\n"
    assert up_to_the_last_line("def f():") == "def f():"


def test_the_heads_are_twenty_functions_of_several_files() -> None:
    named = json.loads(HEADS.read_text())
    assert len({(entry["path"], entry["function"]) for entry in named}) == len(named) == 20
    assert len({entry["path"] for entry in named}) > 5
