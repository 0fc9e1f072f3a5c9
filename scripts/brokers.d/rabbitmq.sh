# shellcheck shell=bash
# SPDX-FileCopyrightText: The stormguard authors
# SPDX-License-Identifier: Apache-2.0

# RabbitMQ 3.x from the system's packages, with the management plugin. Each
# instance has its own home, cookie and epmd. rabbitmq4.sh shares all that does
# not say where the programs are: KIND_dir and KIND_within differ.

rabbitmq_install() {
  local version
  [[ -x /usr/lib/rabbitmq/bin/rabbitmq-server ]] || apt_install rabbitmq-server
  version=$(basename /usr/lib/rabbitmq/lib/rabbitmq_server-*)
  [[ $version == rabbitmq_server-3.* ]] ||
    leave_out "this system's rabbitmq-server package is ${version#*-}, and kind rabbitmq stands for 3.x; set STORMGUARD_RABBITMQ to one"
}

rabbitmq_ports() {
  echo node1 distribution epmd management
}

# rabbitmq_dir prints the instance's directory as the broker sees it.
rabbitmq_dir() {
  echo "$dir"
}

rabbitmq_prepare() {
  mkdir -p "$dir/1/home" "$dir/1/log"
  head -c 24 /dev/urandom | base64 | tr -d '/+=\n' >"$dir/1/home/.erlang.cookie"
  chmod 400 "$dir/1/home/.erlang.cookie"
  echo '[rabbitmq_management].' >"$dir/1/enabled_plugins"
  : >"$dir/1/environment.conf"
  # How often a channel compares its oldest message with consumer_timeout, in
  # ms: a minute by default, so that a test would wait for one.
  echo '[{rabbit, [{channel_tick_interval, 500}]}].' >"$dir/1/advanced.config"
  {
    cat <<END
listeners.tcp.1 = 127.0.0.1:${port[node1]}
management.tcp.ip = 127.0.0.1
management.tcp.port = ${port[management]}
log.console = true
log.console.level = info
log.file = false
END
    extra_settings '%s = %s'
  } >"$dir/1/rabbitmq.conf"
}

# rabbitmq_environment fills the array environment: nothing of the caller's own.
rabbitmq_environment() {
  local seen
  seen=$("${kind}_dir")/1
  environment=(
    env -i LC_ALL=C.UTF-8 LANG=C.UTF-8 PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin HOME="$seen/home"
    ERL_EPMD_ADDRESS=127.0.0.1 ERL_EPMD_PORT="${port[epmd]}"
    # The environment file and the wrapper would read the system's own settings.
    RABBITMQ_CONF_ENV_FILE="$seen/environment.conf"
    RABBITMQ_NODENAME="stormguard-${port[node1]}@localhost"
    RABBITMQ_DIST_PORT="${port[distribution]}"
    RABBITMQ_CONFIG_FILE="$seen/rabbitmq.conf" RABBITMQ_ADVANCED_CONFIG_FILE="$seen/advanced.config"
    RABBITMQ_MNESIA_BASE="$seen/data" RABBITMQ_LOG_BASE="$seen/log"
    RABBITMQ_FEATURE_FLAGS_FILE="$seen/feature_flags" RABBITMQ_ENABLED_PLUGINS_FILE="$seen/enabled_plugins"
    RABBITMQ_PID_FILE="$seen/rabbitmq.pid"
    # The shell script becomes the broker instead of waiting beside it.
    RUNNING_UNDER_SYSTEMD=true
  )
  # Idle schedulers sleep rather than spin: the machine is shared.
  server_environment=(
    "${environment[@]}"
    RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS="-kernel inet_dist_use_interface {127,0,0,1} +sbwt none +sbwtdcpu none +sbwtdio none"
  )
}

# rabbitmq_within fills the array within, what goes before a command: nothing,
# for programs in the system's own root.
rabbitmq_within() {
  within=()
}

rabbitmq_launch() {
  local environment server_environment within
  rabbitmq_environment
  "${kind}_within"
  if ! alive "$dir/epmd.pid"; then
    launch "$dir/epmd.pid" "$dir/epmd.log" ${within[@]+"${within[@]}"} "${environment[@]}" epmd -address 127.0.0.1 -port "${port[epmd]}"
    until answers "${port[epmd]}"; do
      alive "$dir/epmd.pid" || { cat "$dir/epmd.log" >&2; die "$kind $name: epmd ended at once"; }
      sleep 0.02
    done
  fi
  launch "$dir/1.pid" "$dir/1.log" ${within[@]+"${within[@]}"} "${server_environment[@]}" /usr/lib/rabbitmq/bin/rabbitmq-server
}

rabbitmq_log() {
  echo "$dir/1.log"
}

rabbitmq_is_ready() {
  grep -q 'Server startup complete' "$dir/1.log"
}

rabbitmq_address() {
  echo "amqp://guest:guest@127.0.0.1:${port[node1]}/"
}

rabbitmq_version() {
  sed -n 's/.*Starting RabbitMQ \([^ ]*\) on Erlang \([^ ]*\).*/RabbitMQ \1, Erlang \2/p' "$dir/1.log" 2>/dev/null | head -n1
}

rabbitmq_info() {
  echo "management=http://guest:guest@127.0.0.1:${port[management]}"
}

rabbitmq_ctl() {
  load_instance || die "no $kind named $name"
  local environment server_environment within
  rabbitmq_environment
  "${kind}_within"
  ${within[@]+"${within[@]}"} "${environment[@]}" /usr/lib/rabbitmq/bin/rabbitmqctl "$@" </dev/null
}
