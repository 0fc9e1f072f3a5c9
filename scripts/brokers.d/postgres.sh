# shellcheck shell=bash
# SPDX-FileCopyrightText: The stormguard authors
# SPDX-License-Identifier: Apache-2.0

# PostgreSQL from the system's packages: one server, one database, a user without
# a password. The server refuses to run as root, so root runs it as nobody.

# postgres_program NAME prints the path of a server's program, which Debian keeps
# out of PATH. The newest version is taken.
postgres_program() {
  local path
  path=$(printf '%s\n' /usr/lib/postgresql/*/bin/"$1" | sort -V | tail -n1)
  if [[ -x $path ]]; then
    echo "$path"
  else
    command -v "$1"
  fi
}

postgres_install() {
  postgres_program initdb >/dev/null && postgres_program postgres >/dev/null || postgres_apt
  local version
  version=$("$(postgres_program postgres)" --version | sed -n 's/^[^0-9]*\([0-9]*\).*/\1/p')
  ((version >= 12)) || leave_out "this system's PostgreSQL is version $version, and fleet/register/postgres is tested from 12 on; set STORMGUARD_POSTGRES to one"
  if [[ $(id -u) == 0 ]]; then
    command -v setpriv >/dev/null || leave_out "postgres needs setpriv, to run as nobody; run as another user, or set STORMGUARD_POSTGRES"
  fi
}

# postgres_apt installs the server. The package would make a cluster of its own.
postgres_apt() {
  local config=/etc/postgresql-common/createcluster.conf
  if [[ $(id -u) == 0 && ! -e $config ]]; then
    mkdir -p "${config%/*}"
    echo 'create_main_cluster = false' >"$config"
  fi
  apt_install postgresql
}

postgres_ports() {
  echo node1
}

# postgres_as sets within, the words that run a command as who the server runs as.
# Nobody may not pass root's directories, but for the capability.
postgres_as() {
  within=()
  if [[ $(id -u) == 0 ]]; then
    within=(
      setpriv --reuid=65534 --regid=65534 --clear-groups
      --inh-caps=+dac_read_search --ambient-caps=+dac_read_search --
    )
  fi
}

postgres_prepare() {
  local data=$dir/1/pgdata within
  mkdir -p "$data"
  postgres_as
  ((${#within[@]} == 0)) || chown 65534:65534 "$data"
  (
    cd /
    "${within[@]}" "$(postgres_program initdb)" --pgdata "$data" --username postgres --auth trust --encoding UTF8 --no-locale --no-sync
  ) >"$dir/1/initdb.log" 2>&1 </dev/null 7>&- 8>&- 9>&- || { tail -n 20 "$dir/1/initdb.log" >&2; die "initdb failed"; }
  {
    cat <<END
listen_addresses = '127.0.0.1'
port = ${port[node1]}
unix_socket_directories = ''
max_connections = 200
END
    extra_settings "%s = '%s'"
  } >>"$data/postgresql.conf"
}

postgres_launch() {
  local data=$dir/$1/pgdata within shm deadline=$((SECONDS + 10))
  # The processes of a killed server end by themselves. It would not start beside
  # them, nor beside its own note where nobody collects the dead.
  shm=$(sed -n '7s/.* //p' "$data/postmaster.pid" 2>/dev/null) || true
  until awk -v id="${shm:-none}" '$2 == id && $7 > 0 { found = 1 } END { exit found }' /proc/sysvipc/shm; do
    ((SECONDS < deadline)) || die "$kind $name: what a killed server started still runs"
    sleep 0.02
  done
  rm -f "$data/postmaster.pid"
  postgres_as
  launch "$dir/$1.pid" "$dir/$1.log" "${within[@]}" "$(postgres_program postgres)" -D "$data"
}

postgres_log() {
  echo "$dir/$1.log"
}

postgres_is_ready() {
  grep -q 'database system is ready to accept connections' "$dir/$1.log"
}

postgres_address() {
  echo "postgres://postgres@127.0.0.1:${port[node1]}/postgres?sslmode=disable"
}

postgres_version() {
  sed -n 's/.*starting PostgreSQL \([^ ]*\).*/PostgreSQL \1/p' "$dir/1.log" 2>/dev/null | head -n1
}
