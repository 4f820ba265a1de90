"""Does a run write what looks like Python? Greedy continuations of function heads that it wasn't trained on.

    python -m benchmarks.continuations --load RUN [--show 4]

Takes the functions named in benchmarks/function_heads.json from the corpus that the run was trained on, and checks that
the run's split kept their files out of training. A head is signature and docstring; the prompt is the file up to its
end, as far as a training sequence reaches. The run's newest checkpoint continues it by 64 tokens, greedily, and
Python's own `tokenize` must accept head and continuation as they are: no unknown character, no bracket or string left
open, even where the last token stands in the middle of a line, consistent indentation, and at least one whole line.
Ends with an error below half of them.
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
from typing import NamedTuple

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


class Head(NamedTuple):
    """before: the file up to it; text: its lines, to the end of the last, which tokenizers join with the colon."""

    before: str
    text: str


def head_of(source: str, function: str, bare: bool = False) -> Head:
    """Signature and docstring of the function or method `Class.f`; bare: the signature alone.

    Raises ValueError where there is no such function.
    """
    names = function.split(".")
    nodes: Sequence[ast.AST] = ast.parse(source).body
    for depth, name in enumerate(names):
        kind = ast.FunctionDef if depth == len(names) - 1 else ast.ClassDef
        found = [node for node in nodes if isinstance(node, kind) and node.name == name]
        if not found:
            raise ValueError(f"there is no {function}")
        node, nodes = found[0], found[0].body
    documented = not bare and isinstance(node, ast.FunctionDef) and ast.get_docstring(node, clean=False) is not None
    end = node.body[0].end_lineno if documented else node.body[0].lineno - 1
    lines = source.splitlines(keepends=True)
    return Head("".join(lines[: node.lineno - 1]), "".join(lines[node.lineno - 1 : end]))


def read_heads(corpus: Path, split: str, named: list[dict[str, str]], bare: bool = False) -> list[Head]:
    """The heads from the corpus' JSON lines. Ends the program where one's file was trained on, or isn't there."""
    with open(corpus, encoding="utf-8") as stream:
        documents = [json.loads(line) for line in stream]
    trained = split_documents(split, len(documents))[SPLITS.index("train")]
    numbers = {document["path"]: number for number, document in enumerate(documents)}
    heads, wrong = [], []
    for entry in named:
        path, function = entry["path"], entry["function"]
        number = numbers.get(path)
        if number is None:
            wrong.append(f"{path} is no document")
        elif number in trained:
            wrong.append(f"{path} is in the part that is trained on")
        else:
            try:
                heads.append(head_of(documents[number]["text"], function, bare))
            except ValueError as error:
                wrong.append(f"{path}: {error}")
    if wrong:
        raise SystemExit(f"{corpus} of another Python? Name other functions with --heads: {'; '.join(wrong)}")
    return heads


def fault_of(head: str, continuation: str) -> str | None:
    """Why `tokenize` doesn't accept the two together, or that there is no whole line; None where all is well."""
    try:
        for token in tokenize.generate_tokens(io.StringIO(head + continuation).readline):
            if token.type == tokenize.ERRORTOKEN:  # Python 3.12 raises instead
                return f"{token.string!r} begins no token"
    except (tokenize.TokenError, SyntaxError) as error:
        return str(error.args[0])
    return None if "\n" in continuation else "no whole line"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", required=True, help="directory of the run")
    parser.add_argument("--corpus", help="JSON lines of the run's text; by default corpus.jsonl beside its --data-path")
    parser.add_argument("--heads", default=str(HEADS), help="JSON list of {path, function} (%(default)s)")
    parser.add_argument("--bare", action="store_true", help="heads without their docstrings")
    parser.add_argument("--alone", action="store_true", help="prompts without what stands before the head in its file")
    parser.add_argument("--tokens", type=int, default=64, help="of each continuation (%(default)s)")
    parser.add_argument("--show", type=int, default=0, help="print the first so many continuations (%(default)s)")
    options = parser.parse_args()

    source = ModelSource.find(Path(options.load))
    run = from_yaml((source.path / "config.yaml").read_text(encoding="utf-8"), "config.yaml of the checkpoint")
    if source.tokenizer is None:
        raise SystemExit(f"{source.path}: the run's tokenizer isn't there any more")
    tokenizer = load_tokenizer(source.tokenizer)
    corpus = Path(options.corpus) if options.corpus else Path(run.data.data_path[-1]).parent / "corpus.jsonl"
    named = json.loads(Path(options.heads).read_text(encoding="utf-8"))
    heads = read_heads(corpus, run.data.split, named, options.bare)
    texts = [head.text if options.alone else head.before + head.text for head in heads]
    prompts = [tokenizer.encode(text)[-run.training.seq_length :] for text in texts]
    model = load_model(source, Mesh.create(Layout()))
    decoder = Decoder(model.config, model.stage, model.mesh, model.dtype)
    steps = list(generate(decoder, prompts, options.tokens, Sampling(), tokenizer.eod_id, tokenizer.vocab_size))
    print("| function | |\n|---|---|")
    passed, shown = 0, []
    for number, (entry, head, prompt) in enumerate(zip(named, heads, prompts, strict=True)):
        new = [step[number] for step in steps if step[number] not in (ENDED, tokenizer.eod_id)]
        continuation = tokenizer.decode([*prompt, *new]).removeprefix(tokenizer.decode(prompt))
        fault = fault_of(head.text, continuation)
        passed += fault is None
        print(f"| `{entry['function']}` of {entry['path']} | {fault or 'passes'} |")
        shown.append(textwrap.dedent(head.text + continuation))
    print(f"\n{passed} of {len(heads)} continuations of {options.tokens} tokens pass")
    for text in shown[: options.show]:
        print(f"\n```python\n{text}\n```")
    if passed < WANTED * len(heads):
        raise SystemExit(f"fewer than {WANTED:.0%}")


if __name__ == "__main__":
    main()
