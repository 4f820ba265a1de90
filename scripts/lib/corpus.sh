# The default corpus: Python's own standard library, its tokenizer and its index. To be sourced after environment.sh,
# with ROOT, PYTHON and DATA_DIR set.
#
#   prepare_corpus   makes DATA_DIR/python_library/{corpus.jsonl, tokenizer.model, corpus_text_document.bin, .idx} once

prepare_corpus() {
  CORPUS=$DATA_DIR/python_library
  corpus_is_ready || with_lock "$DATA_DIR/python_library.lock" "making the corpus in $CORPUS" make_corpus
}

# The recipe names what the files depend on; it is written last, into a directory that is renamed when all is there.
corpus_recipe() {
  printf 'vocabulary %s\n' "$VOCABULARY_SIZE"
  (cd "$ROOT" && cat tools/build_corpus.py tools/train_tokenizer.py tools/preprocess_data.py data/corpus.py \
    data/tokenizer.py data/preprocess.py data/indexed.py | cksum)
}

corpus_is_ready() {
  VOCABULARY_SIZE=$(sed -n 's/^ *"vocab_size": *\([0-9]*\).*/\1/p' "$ROOT/configs/models/tiny_v3.json")
  [[ -f $CORPUS/recipe && $(<"$CORPUS/recipe") == "$(corpus_recipe)" ]]
}

make_corpus() {
  ! corpus_is_ready || return 0 # made while this process waited for the lock
  local part=$CORPUS.part
  rm -rf "$part" # what a killed try left
  mkdir -p "$part" || die "$DATA_DIR can't be written: set DATA_DIR to a directory that can"
  say "making the corpus from Python's standard library in $CORPUS (once, about 20 s; nothing is downloaded)"
  run_tool build_corpus --output "$part/corpus.jsonl"
  run_tool train_tokenizer --input "$part/corpus.jsonl" --vocab-size "$VOCABULARY_SIZE" --output "$part/tokenizer.model"
  run_tool preprocess_data --input "$part/corpus.jsonl" --output-prefix "$part/corpus" \
    --tokenizer-model "$part/tokenizer.model"
  corpus_recipe >"$part/recipe"
  rm -rf "$CORPUS"
  mv "$part" "$CORPUS"
}

# What a tool prints besides progress is shown only where it fails: SentencePiece alone prints hundreds of lines.
run_tool() {
  local log=$CORPUS.part/$1.log
  say "  $1"
  (cd "$ROOT" && "$PYTHON" -m "tools.$1" "${@:2}") >"$log" 2>&1 ||
    die "tools/$1.py failed:"$'\n'"$(tail -n 20 "$log")"
}
