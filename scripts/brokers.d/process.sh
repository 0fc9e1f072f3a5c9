# shellcheck shell=bash
# SPDX-FileCopyrightText: The stormguard authors
# SPDX-License-Identifier: Apache-2.0

# Messages, locks, processes and ports. Read by scripts/brokers.
#
# Locks are files under $state/locks, taken in this order: 9, one instance; 8,
# what is installed; 7, the ports of all instances. The kernel drops them when
# the script ends; what a script leaves running closes them first.

say() {
  printf 'scripts/brokers: %s\n' "$*" >&2
}

die() {
  say "$*"
  exit 1
}

# leave_out WHY says that this machine cannot run a kind.
leave_out() {
  say "LEFT OUT: $*"
  exit 77
}

# apt_install PACKAGE... as root on a Debian system, else says what is missing.
# Nothing that it installs is started as a service. It waits for others that install.
apt_install() {
  [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null ||
    leave_out "needs $* (Debian's names); install them, or run this as root on a Debian system"
  local log=$state/cache/apt.log policy=/usr/sbin/policy-rc.d ours=
  if [[ -d /run/systemd/system && ! -e $policy ]]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
    ours=1
  fi
  say "installing $*"
  local status=0 install=(env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=900 install -y --no-install-recommends "$@")
  {
    "${install[@]}" || { apt-get update && "${install[@]}"; }
  } >"$log" 2>&1 </dev/null 7>&- 8>&- 9>&- || status=$?
  [[ -z $ours ]] || rm -f "$policy"
  ((status == 0)) || { tail -n 20 "$log" >&2; die "apt-get could not install $*"; }
}

# --- processes ---------------------------------------------------------------
#
# A process is known by its id, when it started, and the boot that counts from:
# an id alone may be another process by now.

# started PID prints when PID started, in ticks since boot; fails if it is gone.
# A zombie is gone, and not every init collects it; but a process of which only
# the first thread has ended looks like one too, and still has its sockets.
started() {
  local stat
  { read -r stat <"/proc/$1/stat"; } 2>/dev/null || return 1
  read -ra stat <<<"${stat##*) }"
  [[ ${stat[0]} != [ZX] ]] || ((stat[17] > 1)) || return 1
  echo "${stat[19]}"
}

boot_id() {
  cat /proc/sys/kernel/random/boot_id
}

# alive FILE says whether the process noted in FILE lives, and sets pid.
alive() {
  local start boot
  pid=
  { read -r pid start boot <"$1"; } 2>/dev/null || return 1
  [[ $boot == "$(boot_id)" && $(started "$pid") == "$start" ]]
}

# launch FILE LOG COMMAND... starts COMMAND as the leader of its own session and
# notes it in FILE. The process itself writes the note, so that there is never
# one without the other. The previous log is kept as LOG.old.
launch() {
  local file=$1 log=$2
  shift 2
  rm -f "$file"
  if [[ -f $log ]]; then
    mv "$log" "$log.old"
  fi
  # shellcheck disable=SC2016 # the inner shell expands it
  setsid bash -c '
    stat=$(</proc/$$/stat)
    read -ra stat <<<"${stat##*) }"
    echo "$$ ${stat[19]} $(</proc/sys/kernel/random/boot_id)" >"$0.new"
    mv "$0.new" "$0"
    exec "$@"' "$file" "$@" </dev/null >"$log" 2>&1 7>&- 8>&- 9>&- &
  local child=$!
  until [[ -f $file ]]; do
    kill -0 "$child" 2>/dev/null || { [[ -f $file ]] || die "could not start $1: $(cat "$log")"; }
    sleep 0.01
  done
}

# signal SIGNAL FILE signals the process of FILE and those it started.
signal() {
  alive "$2" || return 0
  kill "-$1" -- "-$pid" 2>/dev/null || kill "-$1" "$pid" 2>/dev/null || true
}

# gone SECONDS FILE waits until the process of FILE has ended.
gone() {
  local deadline=$((SECONDS + $1))
  while alive "$2"; do
    ((SECONDS < deadline)) || return 1
    sleep 0.02
  done
}

# --- ports -------------------------------------------------------------------

# answers PORT says whether something on loopback accepts connections there.
answers() {
  (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null
}

# allot_ports FILE NAME... writes NAME=PORT lines: ports that nothing uses now
# and that no instance has. They lie below the range from which the kernel takes
# ports for outgoing connections, so that none of those has the port of a broker
# which is down for a moment.
allot_ports() {
  local file=$1 low high used port name
  shift
  exec 7>"$state/locks/ports"
  flock -w 60 7 || die "another start holds $state/locks/ports for a minute"
  read -r low high </proc/sys/net/ipv4/ip_local_port_range
  low=$((low > 12000 ? low : 65536)) # all of it is taken: then any
  used=" $(
    sed -s 's/.*=//' "$state"/instances/*/*/ports 2>/dev/null || true
    awk 'FNR > 1 { split($2, a, ":"); print a[2] }' /proc/net/tcp /proc/net/tcp6 2>/dev/null |
      while read -r port; do echo "$((16#$port))"; done
  )"
  used="${used//$'\n'/ } "
  for name in "$@"; do
    until port=$((10000 + (RANDOM * 32768 + RANDOM) % (low - 10000))) && [[ $used != *" $port "* ]]; do :; done
    used+="$port "
    echo "$name=$port"
  done >"$file.new"
  mv "$file.new" "$file"
  exec 7>&-
}
