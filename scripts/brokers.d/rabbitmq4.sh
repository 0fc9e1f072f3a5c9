# shellcheck shell=bash
# SPDX-FileCopyrightText: The stormguard authors
# SPDX-License-Identifier: Apache-2.0

# RabbitMQ 4.0 with its Erlang from Debian 13, in a root directory of its own,
# so that it runs beside the system's 3.x. Each process has a mount namespace of
# its own, in which that root has /proc and the instance's directory; both mounts
# end with the process and nobody else ever sees them.
#
# The root has device nodes of its own. Never mount the machine's /dev there:
# removing the root would then remove the machine's devices.

rabbitmq4_root() {
  echo "$state/cache/rabbitmq4-trixie"
}

rabbitmq4_install() {
  local root
  root=$(rabbitmq4_root)
  [[ $(id -u) == 0 ]] || leave_out "rabbitmq4 needs root, for chroot; run as root or set STORMGUARD_RABBITMQ4 to a RabbitMQ 4"
  unshare --mount --propagation private true 2>/dev/null ||
    leave_out "rabbitmq4 needs a mount namespace, which this machine refuses even to root (in a container: CAP_SYS_ADMIN); or set STORMGUARD_RABBITMQ4"
  [[ ! -d $root ]] || return 0
  rabbitmq4_make_root "$root"
}

rabbitmq4_make_root() {
  local root=$1 work=$1.new keyring=/usr/share/keyrings/debian-archive-keyring.gpg deb link
  command -v apt-get >/dev/null && [[ -f $keyring ]] ||
    leave_out "rabbitmq4 needs apt-get and $keyring; set STORMGUARD_RABBITMQ4 to a RabbitMQ 4"
  say "fetching RabbitMQ 4 with its Erlang from Debian 13, some 60 MB"
  rm -rf --one-file-system "$work"
  mkdir -p "$work/apt/lists/partial" "$work/apt/cache/archives/partial" "$work/root/usr"
  : >"$work/apt/status"
  echo "deb [signed-by=$keyring] ${STORMGUARD_DEBIAN_MIRROR:-http://deb.debian.org/debian} trixie main" >"$work/apt/sources.list"
  local apt=(
    apt-get -o Dir::Etc::SourceList="$work/apt/sources.list" -o Dir::Etc::SourceParts=- -o Dir::Etc::PreferencesParts=-
    -o Dir::State="$work/apt" -o Dir::State::Lists="$work/apt/lists" -o Dir::State::status="$work/apt/status"
    -o Dir::Cache="$work/apt/cache" -o APT::Sandbox::User=root -o Acquire::Languages=none
  )
  {
    "${apt[@]}" update &&
      "${apt[@]}" install -y --download-only --no-install-recommends \
        rabbitmq-server dash bash coreutils sed grep mawk hostname findutils
  } >"$work/apt.log" 2>&1 </dev/null 8>&- 9>&- || { tail -n 20 "$work/apt.log" >&2; die "apt-get could not fetch RabbitMQ 4"; }

  for link in bin lib lib64 sbin; do
    mkdir -p "$work/root/usr/$link"
    ln -s "usr/$link" "$work/root/$link"
  done
  for deb in "$work"/apt/cache/archives/*.deb; do
    dpkg-deb -x "$deb" "$work/root" || die "could not unpack $deb"
  done
  # What the packages' own scripts would have made.
  ln -sf dash "$work/root/usr/bin/sh"
  ln -sf mawk "$work/root/usr/bin/awk"
  mkdir -p "$work/root"/{dev,etc,instance,proc,tmp}
  echo 'root:x:0:0:root:/:/bin/sh' >"$work/root/etc/passwd"
  echo '127.0.0.1 localhost' >"$work/root/etc/hosts"
  echo 'hosts: files' >"$work/root/etc/nsswitch.conf"
  mknod -m 666 "$work/root/dev/null" c 1 3
  mknod -m 666 "$work/root/dev/zero" c 1 5
  mknod -m 666 "$work/root/dev/random" c 1 8
  mknod -m 666 "$work/root/dev/urandom" c 1 9
  : >"$work/root/dev/null" 2>/dev/null || leave_out "rabbitmq4 needs device nodes, which $state does not allow (mounted nodev?)"
  mv "$work/root" "$root"
  rm -rf --one-file-system "$work"
}

rabbitmq4_dir() {
  echo /instance
}

rabbitmq4_within() {
  # shellcheck disable=SC2016 # the inner shell expands it
  within=(
    unshare --mount --propagation private
    sh -c 'root=$0 && mount -t proc proc "$root/proc" && mount --bind "$1" "$root/instance" && shift && exec chroot "$root" "$@"'
    "$(rabbitmq4_root)" "$dir"
  )
}

rabbitmq4_ports() { rabbitmq_ports; }
rabbitmq4_prepare() { rabbitmq_prepare; }
rabbitmq4_launch() { rabbitmq_launch "$@"; }
rabbitmq4_log() { rabbitmq_log "$@"; }
rabbitmq4_is_ready() { rabbitmq_is_ready "$@"; }
rabbitmq4_address() { rabbitmq_address; }
rabbitmq4_version() { rabbitmq_version; }
rabbitmq4_info() { rabbitmq_info; }
rabbitmq4_ctl() { rabbitmq_ctl "$@"; }
