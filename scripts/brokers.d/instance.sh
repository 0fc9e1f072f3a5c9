# shellcheck shell=bash
# SPDX-FileCopyrightText: The stormguard authors
# SPDX-License-Identifier: Apache-2.0

# An instance: one or more nodes of one kind, under $state/instances/KIND/NAME:
#
#   settings   NODES=…, TEMP=…, SET=KEY=VALUE, from the first start
#   ports      NAME=PORT
#   holders/   who wants it to run: "always", or a process
#   ready      the first start got as far as writing all data directories
#   N.pid N.log N/   a node; other processes have other names (epmd)
#
# Each kind has these functions, which see dir, nodes and port, the array of ports:
#
#   KIND_install        makes sure that the programs are there
#   KIND_ports          prints the names of the ports it needs
#   KIND_prepare        writes data directories and configuration, once
#   KIND_launch I       starts node I
#   KIND_log I          prints the file where node I says that it is ready
#   KIND_is_ready I     says whether it did (port answers is asked besides)
#   KIND_address        prints the address; with --nodes, all of them
#   KIND_version        prints the version that the running broker names
#   KIND_end            ends what a node leaves behind; optional
#   KIND_info           prints more lines of info; optional

start_limit=120 # seconds until a node must serve

use_instance() {
  kind=$1 name=$2
  dir=$state/instances/$kind/$name
  declare -gA port=()
}

# lock_instance outlives the directory, which --wipe removes.
lock_instance() {
  exec 9>"$state/locks/$kind-$name"
  flock -w 900 9 || die "another command holds $state/locks/$kind-$name for 15 minutes"
}

setting() {
  sed -n "s/^$1=//p" "$dir/settings" 2>/dev/null
}

load_instance() {
  [[ -f $dir/settings ]] || return 1
  nodes=$(setting NODES)
  local key value
  while IFS='=' read -r key value; do
    port[$key]=$value
  done < <(cat "$dir/ports" 2>/dev/null)
}

# settle_settings writes the settings at the first start, and refuses others later.
settle_settings() {
  mkdir -p "$dir/holders"
  local wanted
  wanted=$(
    echo "NODES=${nodes:-1}"
    printf 'SET=%s\n' ${sets[@]+"${sets[@]}"} | grep -v '^SET=$' | sort
  ) || true
  if [[ ! -f $dir/settings ]]; then
    { echo "$wanted"; echo "TEMP=$temp"; } >"$dir/settings.new"
    mv "$dir/settings.new" "$dir/settings"
    return
  fi
  local have
  have=$(grep -v '^TEMP=' "$dir/settings")
  if [[ $nodes && $nodes != "$(setting NODES)" ]] || { ((${#sets[@]})) && [[ $(grep '^SET=' <<<"$wanted") != "$(grep '^SET=' <<<"$have")" ]]; }; then
    die "$kind $name exists with other settings: has $(tr '\n' ' ' <<<"$have"), asked for $(tr '\n' ' ' <<<"$wanted")" \
      "(another --name, or stop $kind --name $name --wipe)"
  fi
}

# extra_ports prints the {NAME}s of the --set lines.
extra_ports() {
  setting SET | grep -o '{[a-z][a-z0-9]*}' | tr -d '{}' || true
}

# extra_settings FORMAT prints the --set lines for a configuration file, with
# ports for {NAME}s.
extra_settings() {
  local set key
  while IFS= read -r set; do
    for key in "${!port[@]}"; do
      set=${set//"{$key}"/"${port[$key]}"}
    done
    # shellcheck disable=SC2059 # the caller's format
    [[ -z $set ]] || printf "$1\n" "${set%%=*}" "${set#*=}"
  done < <(setting SET)
}

start_instance() {
  if [[ ! -f $dir/ready ]]; then
    install
  fi
  settle_settings
  hold
  # Whatever ends the script before all nodes serve ends what it started.
  launched=()
  trap 'undo_start' EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM
  if [[ ! -f $dir/ready ]]; then
    rm -rf --one-file-system "$dir"/[1-9]
    # shellcheck disable=SC2046 # words are wanted
    [[ -f $dir/ports ]] || { load_instance; allot_ports "$dir/ports" $({ "${kind}_ports"; extra_ports; } | tr ' ' '\n' | sort -u); }
    load_instance
    "${kind}_prepare"
    : >"$dir/ready"
  fi
  load_instance

  local i
  for ((i = 1; i <= nodes; i++)); do
    if ! alive "$dir/$i.pid"; then
      ((${#launched[@]})) || install
      launched+=("$i")
      "${kind}_launch" "$i"
    fi
  done
  # All of them: a start that was killed may have left one on its way.
  for ((i = 1; i <= nodes; i++)); do
    wait_ready "$i"
  done
  trap - EXIT INT TERM
  ((${#launched[@]} == 0)) || say "$kind $name: $("${kind}_version") serves"
  "${kind}_address"
}

install() {
  exec 8>"$state/locks/install"
  flock -w 900 8 || die "another install holds $state/locks/install for 15 minutes"
  "${kind}_install"
  exec 8>&-
}

undo_start() {
  local i pid
  for i in ${launched[@]+"${launched[@]}"}; do
    signal KILL "$dir/$i.pid"
    gone 10 "$dir/$i.pid" || true
  done
  for pid in $(jobs -p); do
    kill -KILL "$pid" 2>/dev/null || true
  done
  wait
}

wait_ready() {
  local deadline=$((SECONDS + start_limit)) log
  log=$("${kind}_log" "$1")
  until "${kind}_is_ready" "$1" 2>/dev/null && answers "${port[node$1]}"; do
    if ! alive "$dir/$1.pid"; then
      tail -n 30 "$log" >&2
      die "$kind $name: node $1 ended before it was ready; its log is $log"
    fi
    if ((SECONDS >= deadline)); then
      tail -n 30 "$log" >&2
      die "$kind $name: node $1 is not ready after $start_limit s; its log is $log"
    fi
    sleep 0.1
  done
}

# --- who wants it ------------------------------------------------------------

hold() {
  if [[ $holder ]]; then
    local start
    start=$(started "$holder") || die "--while $holder: no such process"
    echo "$holder $start $(boot_id)" >"$dir/holders/$holder"
  else
    : >"$dir/holders/always"
  fi
}

# held says whether anybody wants the instance, and forgets the dead.
held() {
  [[ ! -f $dir/holders/always ]] || return 0
  local file pid some=1
  for file in "$dir"/holders/*; do
    if alive "$file"; then
      some=0
    else
      rm -f "$file"
    fi
  done
  return $some
}

# forget_unbegun removes what a start left that was ended before it had settings.
# A directory with anything else in it is not that, and stays.
forget_unbegun() {
  [[ -d $dir ]] || return 0
  rm -f "$dir/settings.new"
  rmdir --ignore-fail-on-non-empty "$dir/holders" "$dir" 2>/dev/null || true
}

release_instance() {
  load_instance || { forget_unbegun; return 0; }
  if [[ $holder ]]; then
    rm -f "$dir/holders/$holder"
    if held; then
      return
    fi
  fi
  stop_instance
}

# sweep stops what nobody holds. Others may be busy with an instance: those are passed over.
sweep() {
  local path
  for path in "$state"/instances/*/*/; do
    [[ -d $path ]] || continue
    (
      path=${path%/}
      use_instance "$(basename "$(dirname "$path")")" "$(basename "$path")"
      exec 9>"$state/locks/$kind-$name"
      flock -n 9 || exit 0
      load_instance || { forget_unbegun; exit 0; }
      if held; then
        exit 0
      fi
      wipe=$(setting TEMP)
      if running || [[ $wipe ]]; then
        say "sweeping $kind $name, whose users are gone"
        stop_instance
      fi
    ) || say "could not sweep $path"
  done
}

running() {
  local file pid
  for file in "$dir"/*.pid; do
    if alive "$file"; then
      return 0
    fi
  done
  return 1
}

# --- ends --------------------------------------------------------------------

stop_instance() {
  local i file
  for ((i = 1; i <= nodes; i++)); do
    signal "$([[ $wipe ]] && echo KILL || echo TERM)" "$dir/$i.pid"
  done
  for ((i = 1; i <= nodes; i++)); do
    if ! gone 20 "$dir/$i.pid"; then
      say "$kind $name: node $i did not stop in 20 s; killing it"
      signal KILL "$dir/$i.pid"
      gone 10 "$dir/$i.pid" || die "$kind $name: node $i survives kill -9"
    fi
  done
  for file in "$dir"/*.pid; do
    signal TERM "$file"
    gone 5 "$file" || { signal KILL "$file"; gone 5 "$file"; } || die "could not stop the process of $file"
  done
  rm -f "$dir"/*.pid "$dir"/holders/*
  if [[ $wipe ]]; then
    rm -rf --one-file-system "$dir"
  fi
}

kill_instance() {
  load_instance || die "no $kind named $name"
  local i first=1 last=$nodes
  if [[ $node ]]; then
    ((node <= nodes)) || die "--node $node: $kind $name has $nodes"
    first=$node last=$node
  fi
  for ((i = first; i <= last; i++)); do
    alive "$dir/$i.pid" || die "$kind $name: node $i does not run"
    signal KILL "$dir/$i.pid"
  done
  for ((i = first; i <= last; i++)); do
    gone 10 "$dir/$i.pid" || die "$kind $name: node $i survives kill -9"
  done
}

# --- what is there -----------------------------------------------------------

info_instance() {
  load_instance && [[ -f $dir/ready ]] || die "no $kind named $name"
  local i pid up=0
  for ((i = 1; i <= nodes; i++)); do
    if alive "$dir/$i.pid"; then
      up=$((up + 1))
    else
      pid=
    fi
    echo "pid$i=$pid"
    echo "log$i=$("${kind}_log" "$i")"
  done
  echo "kind=$kind"
  echo "name=$name"
  echo "nodes=$nodes"
  echo "up=$up"
  echo "address=$("${kind}_address")"
  echo "version=$("${kind}_version")"
  echo "directory=$dir"
  sed 's/^/port_/' "$dir/ports"
  if [[ $(type -t "${kind}_info") ]]; then
    "${kind}_info"
  fi
}

status() {
  local path facts
  printf '%-10s %-20s %-6s %-34s %s\n' KIND NAME UP VERSION ADDRESS
  for path in "$state"/instances/*/*/; do
    path=${path%/}
    [[ -f $path/ready ]] || continue
    (
      use_instance "$(basename "$(dirname "$path")")" "$(basename "$path")"
      facts=$(info_instance)
      fact() { sed -n "s/^$1=//p" <<<"$facts"; }
      printf '%-10s %-20s %-6s %-34s %s\n' "$kind" "$name" "$(fact up)/$(fact nodes)" "$(fact version)" "$(fact address)"
    ) || true
  done
}
