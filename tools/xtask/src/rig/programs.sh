# Head of the script that `cargo x test --rig` writes for each machine: its test programs follow.
failed=0

# run NAME LIMIT DIRECTORY PROGRAM...: runs a program and reports its failure. A program that exceeds LIMIT seconds is
# ended, so that the rest runs all the same.
run() {
  local name=$1 limit=$2 directory=$3 program end status=0; shift 3
  printf 'rig: %s\n' "$name"
  (cd "$directory" && exec "$@") & program=$!
  # The pipe that `watch` reads from closes with the program.
  exec {end}> >(watch "$program" "$limit" "$name")
  wait "$program" || status=$?
  exec {end}>&-
  ((status == 0)) || { printf 'rig: FAILED with status %s: %s\n' "$status" "$name"; failed=1; }
}

watch() {
  local process processes
  read -rt "$2" || (($? > 128)) || return 0
  printf 'rig: not over after %s s: %s: what its threads do; those of tests have the beginning of their names\n' "$2" "$3"
  processes=("$1" $(children "$1"))
  for process in "${processes[@]}"; do threads "$process"; done
  kill -KILL "${processes[@]}"
}

children() {
  local stat fields parent
  for stat in /proc/[0-9]*/stat; do
    { fields=$(<"$stat"); } 2>/dev/null || continue
    # State and parent follow the name, which may contain spaces and brackets.
    read -r _ parent _ <<<"${fields##*) }"
    [[ $parent != "$1" ]] || { echo "${fields%% *}"; children "${fields%% *}"; }
  done
}

# Prints a line for each thread: its state, and its kernel stack.
threads() {
  local thread fields state where
  for thread in "/proc/$1/task"/*; do
    # Some threads end meanwhile.
    { fields=$(<"$thread/stat"); } 2>/dev/null || continue
    where=$(sed 's/^[^ ]* //; s/+.*//' "$thread/stack" 2>/dev/null | head -n 6 | tr '\n' ' ')
    read -r state _ <<<"${fields##*) }"
    printf 'rig:   %s %s: %s %s\n' "$1" "$(expr "$fields" : '[0-9]* (\(.*\))')" "$state" "$where"
  done
}

packets() {
  local file sum=0
  for file in /sys/class/infiniband/rxe*/ports/1/hw_counters/sent_pkts; do sum=$((sum + $(<"$file"))); done
  echo "$sum"
}

# Runs a program with RDMA in place of TCP. The devices count the packets that they send.
over_rdma() {
  local before sent
  before=$(packets)
  export KVPLANE_TEST_TRANSPORT=rdma
  run "$@"
  unset KVPLANE_TEST_TRANSPORT
  sent=$(($(packets) - before))
  printf 'rig: %s: the RDMA devices sent %s packets\n' "$1" "$sent"
  ((sent > 100)) || { printf 'rig: FAILED: nothing went over RDMA: %s\n' "$1"; failed=1; }
}
