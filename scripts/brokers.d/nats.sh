# shellcheck shell=bash
# SPDX-FileCopyrightText: The stormguard authors
# SPDX-License-Identifier: Apache-2.0

# nats-server with JetStream on disk: the version in go.mod, which the tests link.

nats_install() {
  command -v go >/dev/null || leave_out "needs go, which builds nats-server"
}

nats_ports() {
  echo node1
}

nats_prepare() {
  mkdir -p "$dir/1"
  {
    cat <<END
listen: "127.0.0.1:${port[node1]}"
jetstream { store_dir: "$dir/1/store" }
max_payload: 8MB
END
    extra_settings '%s: %s'
  } >"$dir/1/nats.conf"
}

nats_launch() {
  (cd "$module" && go build -o "$dir/natsserver" ./internal/brokers/natsserver) >&2 || die "could not build internal/brokers/natsserver"
  launch "$dir/$1.pid" "$dir/$1.log" "$dir/natsserver" "$dir/1/nats.conf"
}

nats_log() {
  echo "$dir/$1.log"
}

nats_is_ready() {
  grep -q 'Server is ready' "$dir/$1.log"
}

nats_address() {
  echo "nats://127.0.0.1:${port[node1]}"
}

nats_version() {
  sed -n 's/.*Version: *\([^ ]*\).*/nats-server \1/p' "$dir/1.log" 2>/dev/null | head -n1
}
