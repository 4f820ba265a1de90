"""What benchmarks/continuations.py counts: heads of held-out functions only, and what Python's tokenize accepts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.continuations import HEADS, Head, fault_of, head_of, read_heads

SOURCE = '''
class Box:
    @property
    def lid(
        self, a: dict[str, int] = {"x": 1},
    ) -> None:  # it: has colons
        """Text."""
        return None

def plain(x):
    return x
'''


def test_a_head_is_signature_and_docstring_with_the_file_before() -> None:
    signature = '    def lid(\n        self, a: dict[str, int] = {"x": 1},\n    ) -> None:  # it: has colons\n'
    assert head_of(SOURCE, "Box.lid", bare=True) == Head("\nclass Box:\n    @property\n", signature)
    assert head_of(SOURCE, "Box.lid").text == signature + '        """Text."""\n'
    assert head_of(SOURCE, "plain") == Head(SOURCE.split("def plain")[0], "def plain(x):\n")
    for missing in ("lid", "Box.plain", "Bag.lid"):
        with pytest.raises(ValueError, match=f"there is no {missing}"):
            head_of(SOURCE, missing)


def test_heads_of_text_that_was_trained_on_are_refused(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"path": f"{i}.py", "text": SOURCE}) + "\n" for i in range(10)))
    (head,) = read_heads(corpus, "80,10,10", [{"path": "8.py", "function": "plain"}])
    assert head.text == "def plain(x):\n"
    wrong = [{"path": f"{i}.py", "function": function} for i, function in ((7, "plain"), (9, "no"), (11, "plain"))]
    with pytest.raises(SystemExit) as ended:
        read_heads(corpus, "80,10,10", wrong)
    for said in ("7.py is in the part that is trained on", "9.py: there is no no", "11.py is no document"):
        assert said in str(ended.value)


@pytest.mark.parametrize(
    ("continuation", "fault"),
    [
        ("        return x\n", None),
        ("        if x:\n            pass\n        return\n    def g(self):\n        ret", None),
        ("        # only a comment\n", None),
        ("        y = 'a\n", "begins no token|unterminated"),
        ("            pass\n        return x\n", "unindent"),
        ("        return (x\n", "multi-line|EOF"),
        ('        """Text\n', "multi-line|unterminated"),
        ("        return x ? 1\n", "begins no token"),
        ("        return", "no whole line"),
        ("", "no whole line"),
    ],
)
def test_what_is_no_python_is_told(continuation: str, fault: str | None) -> None:
    found = fault_of("    def f(self, x):\n", continuation)
    assert found is None if fault is None else re.search(fault, found or "")


def test_the_heads_are_twenty_functions_of_several_files() -> None:
    named = json.loads(HEADS.read_text())
    assert len({(entry["path"], entry["function"]) for entry in named}) == len(named) == 20
    assert len({entry["path"] for entry in named}) > 5
