// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardkafka

import (
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/fleet/register"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
	"github.com/stormguard-mq/stormguard/internal/brokers"
	"github.com/stormguard-mq/stormguard/internal/registertest"
)

// through sends every connection through a relay, whatever address the brokers name.
type through struct{ relay *registertest.Relay }

func (d through) Dial(network, _ string) (net.Conn, error) {
	return (&net.Dialer{Timeout: registerTimeout}).Dial(network, d.relay.Addr())
}

// registerAt is an empty register in a topic of its own. relay may be nil.
func registerAt(addr string, relay *registertest.Relay) registertest.Place {
	topic := fmt.Sprintf("register-%d", number.Add(1)) + "-" + strings.ToLower(rand.Text())
	return registertest.Place{Open: func(t *testing.T) register.Register {
		cfg := testConfig()
		if relay != nil {
			cfg.Net.Proxy.Enable, cfg.Net.Proxy.Dialer = true, through{relay}
		}
		r, err := NewRegister(strings.Split(addr, ","), cfg, RegisterConfig{Topic: topic})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = r.Close() })
		return r
	}}
}

func TestRegister(t *testing.T) {
	t.Parallel()
	addr := brokers.ForTest(t, brokers.Kafka)
	registertest.Run(t, func(*testing.T) registertest.Place { return registerAt(addr, nil) })
}

func TestRegisterFaults(t *testing.T) {
	t.Parallel()
	for name, fault := range map[string]func(*registertest.Relay, *testing.T){
		"Cut":    (*registertest.Relay).Cut,
		"Frozen": (*registertest.Relay).Freeze,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			addr := brokers.ForTest(t, brokers.Kafka)
			relay := registertest.NewRelay(t, strings.Split(addr, ",")[0])
			p := registerAt(addr, relay)
			p.Break = func(t *testing.T) { fault(relay, t) }
			p.Mend = relay.Mend
			registertest.Fault(t, p)
		})
	}
	for name, fault := range map[string]func(registertest.Server) (_, _ func(*testing.T)){
		"Killed":  registertest.Killed,
		"Stopped": registertest.Stopped,
	} {
		t.Run(name, func(t *testing.T) {
			if !adaptertest.Full() {
				t.Skip("a Kafka of its own that restarts: STORMGUARD_FULL=1, or scripts/test --full")
			}
			t.Parallel()
			b := brokers.StartForTest(t, brokers.Kafka, brokers.Options{})
			p := registerAt(b.Addr(), nil)
			p.Break, p.Mend = fault(b)
			registertest.Fault(t, p)
		})
	}
}

// A topic that may forget a record, or let the wrong one win, is refused.
func TestRegisterUnsuitable(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	for name, tt := range map[string]struct {
		partitions int32
		settings   map[string]string
		says       []string
	}{
		"compacted": {1, map[string]string{"cleanup.policy": "compact", "retention.ms": "-1"}, []string{"--add-config cleanup.policy=delete"}},
		"forgets":   {1, map[string]string{"retention.ms": "1000", "retention.bytes": "5000"}, []string{"--add-config retention.ms=-1", "--add-config retention.bytes=-1"}},
		"unclean":   {1, map[string]string{"unclean.leader.election.enable": "true", "retention.ms": "-1"}, []string{"unclean.leader.election.enable=false"}},
		"wide":      {2, map[string]string{"retention.ms": "-1"}, []string{"2 partitions"}},
		"narrow":    {1, map[string]string{"max.message.bytes": "1000", "retention.ms": "-1"}, []string{"max.message.bytes=65792"}},
	} {
		topic := r.topic + "-" + name
		entries := map[string]*string{}
		for k, v := range tt.settings {
			entries[k] = &v
		}
		if err := r.admin.CreateTopic(topic, &sarama.TopicDetail{NumPartitions: tt.partitions, ReplicationFactor: 1, ConfigEntries: entries}, false); err != nil {
			t.Fatal(err)
		}
		r.awaitTopic(topic, int(tt.partitions))
		reg, err := NewRegister(r.addrs, testConfig(), RegisterConfig{Topic: topic})
		if err != nil {
			t.Fatal(err)
		}
		_, _, err = reg.Read(t.Context())
		for _, says := range tt.says {
			if !errors.Is(err, ErrUnsuitable) || !strings.Contains(fmt.Sprint(err), says) {
				t.Errorf("%s: %v, want ErrUnsuitable with %q", name, err, says)
			}
		}
		if err := reg.CompareAndSet(t.Context(), 1, []byte("x")); !errors.Is(err, ErrUnsuitable) {
			t.Errorf("%s: a write returns %v", name, err)
		}
		_ = reg.Close()
		_ = r.admin.DeleteTopic(topic)
	}
	reg, err := NewRegister(r.addrs, testConfig(), RegisterConfig{Topic: r.topic + "-none", NoCreate: true})
	if err != nil {
		t.Fatal(err)
	}
	defer reg.Close()
	if _, _, err := reg.Read(t.Context()); !errors.Is(err, ErrUnsuitable) || !strings.Contains(err.Error(), "--create --topic "+r.topic+"-none --partitions 1") {
		t.Errorf("a topic that does not exist: %v", err)
	}
	if _, err := NewRegister(nil, nil, RegisterConfig{Topic: "a b", Replicas: -1}); err == nil || strings.Count(err.Error(), "\n") != 2 {
		t.Errorf("a configuration that is all wrong: %v", err)
	}
}
