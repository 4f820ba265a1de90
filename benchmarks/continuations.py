"""Does a run write what looks like Python? Greedy continuations of function heads that it wasn't trained on.

    python -m benchmarks.continuations --load RUN [--show 4]

Takes the functions named in benchmarks/function_heads.json from the corpus that the default run was trained on, checks
that the run's split kept their files out of training, lets the run's newest checkpoint continue each head by 64 tokens,
and counts what Python's own `tokenize` accepts: no unknown character, no open bracket or string, consistent
indentation, and a body. Ends with an error below 10 of 20.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import textwrap
import tokenize
from collections.abc import Sequence
from pathlib import Path

from data.blend import SPLITS, split_documents
from data.tokenizer import load_tokenizer
from model.generation import ENDED, Decoder, generate
from model.sampling import Sampling
from parallel.mesh import Layout, Mesh
from training.command_line import from_yaml
from training.inference import ModelSource, load_model

HEADS = Path(__file__).parent / "function_heads.json"
WANTED = 0.5
"""Share of the continuations that must pass."""


def head_of(source: str, function: str) -> str:
    """ "def f(a, b):" of the function or method `Class.f`, at column 0. Raises ValueError where there is none."""
    names = function.split(".")
    nodes: Sequence[ast.AST] = ast.parse(source).body
    for depth, name in enumerate(names):
        kind = ast.FunctionDef if depth == len(names) - 1 else ast.ClassDef
        found = [node for node in nodes if isinstance(node, kind) and node.name == name]
        if not found:
            raise ValueError(f"there is no {function}")
        node, nodes = found[0], found[0].body
    lines = source.splitlines(keepends=True)[node.lineno - 1 : node.body[0].lineno - 1]
    head = textwrap.dedent("".join(lines))
    return head[: head.rindex(":") + 1]


def read_heads(corpus: Path, split: str, named: list[dict[str, str]]) -> list[str]:
    """The heads from the corpus' JSON lines. Ends the program where one's file was trained on, or isn't there."""
    with open(corpus, encoding="utf-8") as stream:
        documents = [json.loads(line) for line in stream]
    trained = split_documents(split, len(documents))[SPLITS.index("train")]
    numbers = {document["path"]: number for number, document in enumerate(documents)}
    heads, wrong = [], []
    for entry in named:
        number = numbers.get(entry["path"])
        if number is None or number in trained:
            wrong.append(
                f"{entry['path']} {'is no document' if number is None else 'is in the part that is trained on'}"
            )
            continue
        try:
            heads.append(head_of(documents[number]["text"], entry["function"]))
        except ValueError as error:
            wrong.append(f"{entry['path']}: {error}")
    if wrong:
        raise SystemExit(f"{corpus} of another Python? Name other functions with --heads: {'; '.join(wrong)}")
    return heads


def fault_of(text: str) -> str | None:
    """Why `tokenize` doesn't accept a function's text, or why it has no body; None where all is well."""
    kinds = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.ERRORTOKEN:  # Python 3.12 raises instead
                return f"line {token.start[0]}: {token.string!r} begins no token"
            kinds.append(token.type)
    except (tokenize.TokenError, SyntaxError) as error:
        return str(error.args[0])
    return None if tokenize.INDENT in kinds else "no body"


def up_to_the_last_line(text: str) -> str:
    """Without the line that the limit of tokens has cut, where there is one before it."""
    return text[: text.rindex("\n") + 1] if "\n" in text else text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", required=True, help="directory of the run")
    parser.add_argument("--corpus", help="JSON lines of the run's text; by default corpus.jsonl beside its --data-path")
    parser.add_argument("--heads", default=str(HEADS), help="JSON list of {path, function} (%(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="of each continuation (%(default)s)")
    parser.add_argument("--show", type=int, default=0, help="print the first so many continuations (%(default)s)")
    options = parser.parse_args()

    source = ModelSource.find(Path(options.load))
    run = from_yaml((source.path / "config.yaml").read_text(encoding="utf-8"), "config.yaml of the checkpoint").data
    if source.tokenizer is None:
        raise SystemExit(f"{source.path}: the run's tokenizer isn't there any more")
    tokenizer = load_tokenizer(source.tokenizer)
    corpus = Path(options.corpus) if options.corpus else Path(run.data_path[-1]).parent / "corpus.jsonl"
    heads = read_heads(corpus, run.split, json.loads(Path(options.heads).read_text(encoding="utf-8")))
    prompts = [tokenizer.encode(head) for head in heads]
    model = load_model(source, Mesh.create(Layout()))
    decoder = Decoder(model.config, model.stage, model.mesh, model.dtype)
    stops = (ENDED, tokenizer.eod_id)
    steps = list(generate(decoder, prompts, options.tokens, Sampling(), tokenizer.eod_id, tokenizer.vocab_size))
    passed = uncut = 0
    print("| head | up to the last line's end | with the line that the limit has cut |\n|---|---|---|")
    texts = []
    for number, (head, prompt) in enumerate(zip(heads, prompts, strict=True)):
        text = tokenizer.decode([*prompt, *(step[number] for step in steps if step[number] not in stops)])
        faults = fault_of(up_to_the_last_line(text)), fault_of(text)
        passed, uncut = passed + (faults[0] is None), uncut + (faults[1] is None)
        shown = " ".join(head.split())
        print(f"| `{shown}` | {faults[0] or 'passes'} | {faults[1] or 'passes'} |")
        texts.append(text)
    print(f"\n{passed} of {len(heads)} pass up to the end of their last whole line, {uncut} with the cut line as well")
    for text in texts[: options.show]:
        print(f"\n```python\n{text}\n```")
    if passed < WANTED * len(heads):
        raise SystemExit(f"fewer than {WANTED:.0%}")


if __name__ == "__main__":
    main()
