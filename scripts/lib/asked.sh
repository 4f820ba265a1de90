# What was asked for: the flags of pretrain_deepseek.py in FLAGS, numbers in variables, the GPUs. To be sourced after
# environment.sh.

has_flag() { # has_flag NAME: whether FLAGS has --NAME, with dashes or underscores, as "--name value" or "--name=value"
  local flag
  for flag in ${FLAGS[@]+"${FLAGS[@]}"}; do
    flag=${flag%%=*}
    if [[ ${flag//_/-} == "--$1" ]]; then return 0; fi
  done
  return 1
}

flag_value() { # flag_value NAME: the value of the last --NAME in FLAGS
  local i flag
  for ((i = ${#FLAGS[@]} - 1; i >= 0; i--)); do
    flag=${FLAGS[i]%%=*}
    if [[ ${flag//_/-} == "--$1" ]]; then
      if [[ ${FLAGS[i]} == *=* ]]; then printf '%s' "${FLAGS[i]#*=}"; else printf '%s' "${FLAGS[i + 1]:-}"; fi
      return
    fi
  done
}

require_number() { # require_number NAME VALUE MINIMUM [MAXIMUM]
  if [[ ! $2 =~ ^[0-9]+$ ]] || ((10#$2 < $3)) || ((10#$2 > ${4:-10#$2})); then
    die "$1 is '$2': it must be a whole number of at least $3${4:+ and at most $4}"
  fi
}

visible_gpus() { # one device number a line
  if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
    tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | sed '/^$/d'
  elif command -v nvidia-smi >/dev/null; then
    nvidia-smi -L 2>/dev/null | sed -n 's/^GPU \([0-9]*\):.*/\1/p'
  fi
}
