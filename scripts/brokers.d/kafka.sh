# shellcheck shell=bash
# SPDX-FileCopyrightText: The stormguard authors
# SPDX-License-Identifier: Apache-2.0

# Apache Kafka in KRaft mode: each node is broker and controller. The version is
# the one in kafka/pom.xml.

kafka_home() {
  local version
  version=$(sed -n '/<artifactId>kafka_/{n;s/.*<version>\(.*\)<\/version>.*/\1/p}' "$parts/kafka/pom.xml")
  echo "$state/cache/kafka-$version"
}

kafka_install() {
  local home java
  home=$(kafka_home)
  if ! java=$(java -version 2>&1) || ! [[ $java =~ version\ \"([0-9]+) && ${BASH_REMATCH[1]} -ge 17 ]]; then
    apt_install openjdk-17-jre-headless
  fi
  [[ ! -d $home ]] || return 0
  command -v mvn >/dev/null || apt_install maven
  say "fetching Kafka's jars, some 45 MB"
  rm -rf --one-file-system "$home.new"
  mvn -B -q -f "$parts/kafka/pom.xml" dependency:copy-dependencies -DincludeScope=runtime \
    -DoutputDirectory="$home.new" >"$state/cache/mvn.log" 2>&1 </dev/null ||
    { tail -n 20 "$state/cache/mvn.log" >&2; die "Maven could not fetch what $parts/kafka/pom.xml names"; }
  mv "$home.new" "$home"
}

kafka_ports() {
  local i
  for ((i = 1; i <= nodes; i++)); do
    echo "node$i controller$i"
  done
}

# kafka_format I ID becomes the program that makes node I's data directory, for
# a cluster of that ID.
kafka_format() {
  exec env -i PATH="$PATH" HOME="$dir" LC_ALL=C java -Xmx128m -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -cp "$(kafka_home)/*" \
    -Dlog4j2.configurationFile="$parts/kafka/log4j2.properties" \
    kafka.tools.StorageTool format -t "$2" -c "$dir/$1/server.properties" >"$dir/$1/format.log" 2>&1
}

kafka_prepare() {
  local i id voters='' copies=$((nodes < 3 ? nodes : 3))
  for ((i = 1; i <= nodes; i++)); do
    voters+="${voters:+,}$i@127.0.0.1:${port[controller$i]}"
  done
  # As Kafka writes ids: 16 bytes in base64 for URLs. It refuses a leading dash.
  id=S$(head -c 16 /dev/urandom | base64 | tr '+/' '-_' | cut -c2-22)
  for ((i = 1; i <= nodes; i++)); do
    mkdir -p "$dir/$i"
    cat >"$dir/$i/server.properties" <<END
process.roles=broker,controller
node.id=$i
controller.quorum.voters=$voters
controller.listener.names=CONTROLLER
listeners=PLAINTEXT://127.0.0.1:${port[node$i]},CONTROLLER://127.0.0.1:${port[controller$i]}
advertised.listeners=PLAINTEXT://127.0.0.1:${port[node$i]}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
log.dirs=$dir/$i/data

# A topic has as many copies as there are nodes to hold them, and acks=all means
# a majority. A leader moves to a copy that is in sync or nowhere.
default.replication.factor=$copies
min.insync.replicas=$((copies / 2 + 1))
offsets.topic.replication.factor=$copies
transaction.state.log.replication.factor=$copies
transaction.state.log.min.isr=$((copies / 2 + 1))
share.coordinator.state.topic.replication.factor=$copies
share.coordinator.state.topic.min.isr=$((copies / 2 + 1))
unclean.leader.election.enable=false

# A topic that nobody created is a typing error in a test.
auto.create.topics.enable=false
delete.topic.enable=true

# Groups form at once, and may lose a member sooner than the 6 s of production.
group.initial.rebalance.delay.ms=0
group.min.session.timeout.ms=1000
group.consumer.min.session.timeout.ms=1000
group.consumer.min.heartbeat.interval.ms=200

# A killed node among others is missed after 3 s, not 9. One that is alone is
# missed by nobody; starved for that long it would fence itself, and be without
# topics and groups for a moment. A restart after a kill takes as long.
broker.heartbeat.interval.ms=500
broker.session.timeout.ms=$((nodes > 1 ? 3000 : 10000))

# Small: many topics, little data, two processors.
offsets.topic.num.partitions=4
transaction.state.log.num.partitions=4
share.coordinator.state.topic.num.partitions=1
offsets.topic.segment.bytes=16777216
transaction.state.log.segment.bytes=16777216
log.cleaner.dedupe.buffer.size=16777216
log.segment.delete.delay.ms=1000
num.network.threads=2
num.io.threads=4
END
    extra_settings '%s=%s' >>"$dir/$i/server.properties"
  done
  local pids=() pid
  for ((i = 1; i <= nodes; i++)); do
    kafka_format "$i" "$id" 7>&- 8>&- 9>&- &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do
    wait "$pid" || { tail -n 20 "$dir"/[1-9]/format.log >&2; die "kafka $name: could not format the data directories"; }
  done
}

kafka_launch() {
  local home
  home=$(kafka_home)
  launch "$dir/$1.pid" "$dir/$1.log" env -i PATH="$PATH" HOME="$dir" LC_ALL=C \
    java -Xms256m -Xmx512m -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:+ExitOnOutOfMemoryError -Djava.awt.headless=true -Djava.net.preferIPv4Stack=true \
    -Dlog4j2.configurationFile="$parts/kafka/log4j2.properties" -cp "$home/*" \
    kafka.Kafka "$dir/$1/server.properties"
}

kafka_log() {
  echo "$dir/$1.log"
}

kafka_is_ready() {
  grep -q 'Kafka Server started' "$dir/$1.log"
}

kafka_address() {
  local i list=''
  for ((i = 1; i <= nodes; i++)); do
    list+="${list:+,}127.0.0.1:${port[node$i]}"
  done
  echo "$list"
}

kafka_version() {
  sed -n 's/.*Kafka version: \([^ ]*\).*/Kafka \1/p' "$dir"/[1-9].log 2>/dev/null | sort -u | paste -sd ' ' -
}
