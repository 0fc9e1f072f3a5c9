# shellcheck shell=bash
# SPDX-FileCopyrightText: The stormguard authors
# SPDX-License-Identifier: Apache-2.0

# Redis from the system's packages, with its append-only file on.

redis_install() {
  # An old Redis has no answer for a script that asks the time and then writes.
  command -v redis-server >/dev/null || apt_install redis-server
  local version
  version=$(redis-server --version | sed -n 's/.* v=\([0-9]*\).*/\1/p')
  ((version >= 5)) || leave_out "this system's redis-server is version $version, and limiter/redis needs 5; set STORMGUARD_REDIS to one"
}

redis_ports() {
  echo node1
}

redis_prepare() {
  mkdir -p "$dir/1"
  {
    cat <<END
bind 127.0.0.1
port ${port[node1]}
dir "$dir/1"
daemonize no
save ""
appendonly yes
appendfsync everysec
END
    extra_settings '%s %s'
  } >"$dir/redis.conf"
}

redis_launch() {
  launch "$dir/$1.pid" "$dir/$1.log" redis-server "$dir/redis.conf"
}

redis_log() {
  echo "$dir/$1.log"
}

redis_is_ready() {
  grep -q 'Ready to accept connections' "$dir/$1.log"
}

redis_address() {
  echo "redis://127.0.0.1:${port[node1]}"
}

redis_version() {
  sed -n 's/.*Redis version=\([^,]*\).*/Redis \1/p' "$dir/1.log" 2>/dev/null | head -n1
}
