# shellcheck shell=bash
# SPDX-FileCopyrightText: The stormguard authors
# SPDX-License-Identifier: Apache-2.0

# etcd from the system's packages: one node, its own cluster.

etcd_install() {
  command -v etcd >/dev/null || apt_install etcd-server
}

etcd_ports() {
  echo node1 peer
}

etcd_prepare() {
  mkdir -p "$dir/1"
  {
    cat <<END
name: node1
data-dir: "$dir/1/data"
listen-client-urls: "http://127.0.0.1:${port[node1]}"
advertise-client-urls: "http://127.0.0.1:${port[node1]}"
listen-peer-urls: "http://127.0.0.1:${port[peer]}"
initial-advertise-peer-urls: "http://127.0.0.1:${port[peer]}"
initial-cluster: "node1=http://127.0.0.1:${port[peer]}"
logger: zap
log-outputs: [stderr]
END
    extra_settings '%s: %s'
  } >"$dir/1/etcd.yaml"
}

etcd_launch() {
  # The environment has settings too, and a file is not read beside them.
  launch "$dir/$1.pid" "$dir/$1.log" env -i PATH="$PATH" HOME="$dir" etcd --config-file "$dir/$1/etcd.yaml"
}

etcd_log() {
  echo "$dir/$1.log"
}

etcd_is_ready() {
  grep -q 'serving client traffic' "$dir/$1.log"
}

etcd_address() {
  echo "http://127.0.0.1:${port[node1]}"
}

etcd_version() {
  sed -n 's/.*"etcd-version":"\([^"]*\)".*/etcd \1/p' "$dir/1.log" 2>/dev/null | head -n1
}
