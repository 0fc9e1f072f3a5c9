// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package brokers

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// hosts returns the host:port of each node of an address.
func hosts(t *testing.T, k Kind, addr string) []string {
	t.Helper()
	if k == Kafka {
		return strings.Split(addr, ",")
	}
	u, err := url.Parse(addr)
	if err != nil {
		t.Fatal(err)
	}
	if want := map[Kind]string{RabbitMQ: "amqp", RabbitMQ4: "amqp", NATS: "nats"}[k]; u.Scheme != want {
		t.Errorf("address %s: scheme %s, want %s", addr, u.Scheme, want)
	}
	return []string{u.Host}
}

func dial(ctx context.Context, host string) error {
	c, err := new(net.Dialer).DialContext(ctx, "tcp", host)
	if err != nil {
		return err
	}
	return c.Close()
}

func mustInfo(t *testing.T, b *Broker) map[string]string {
	t.Helper()
	info, err := b.Info(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return info
}

// A crash and a restart keep ports and data; a stop leaves nothing.
func TestLife(t *testing.T) {
	for _, k := range []Kind{Kafka, RabbitMQ, RabbitMQ4, NATS} {
		t.Run(string(k), func(t *testing.T) {
			b := StartForTest(t, k, Options{})
			host := hosts(t, k, b.Addr())[0]
			if err := dial(t.Context(), host); err != nil {
				t.Fatalf("after Start: %v", err)
			}
			before := mustInfo(t, b)
			t.Logf("%s at %s", before["version"], b.Addr())
			if prefix := map[Kind]string{Kafka: "Kafka 4.", RabbitMQ: "RabbitMQ 3.", RabbitMQ4: "RabbitMQ 4.", NATS: "nats-server 2."}[k]; !strings.HasPrefix(before["version"], prefix) {
				t.Errorf("version %q, want %q…", before["version"], prefix)
			}
			marks := dataFiles(t, before["directory"])
			if len(marks) == 0 {
				t.Errorf("no data in %s", before["directory"])
			}

			if err := b.Kill(t.Context(), 1); err != nil {
				t.Fatal(err)
			}
			if err := dial(t.Context(), host); !errors.Is(err, syscall.ECONNREFUSED) {
				t.Errorf("after Kill: dial says %v, want connection refused", err)
			}
			if err := b.Kill(t.Context(), 1); err == nil {
				t.Error("Kill of a node that does not run reports nothing")
			}
			addr := b.Addr()
			if err := b.Restart(t.Context()); err != nil {
				t.Fatal(err)
			}
			if b.Addr() != addr {
				t.Errorf("Restart moved it from %s to %s", addr, b.Addr())
			}
			if err := dial(t.Context(), host); err != nil {
				t.Errorf("after Restart: %v", err)
			}
			if after := mustInfo(t, b); after["pid1"] == before["pid1"] || after["pid1"] == "" {
				t.Errorf("pid before Kill %q, after Restart %q", before["pid1"], after["pid1"])
			}
			for _, mark := range marks {
				if _, err := os.Stat(mark); err != nil {
					t.Errorf("data before Kill is not there after Restart: %v", err)
				}
			}

			if err := b.Stop(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := dial(t.Context(), host); !errors.Is(err, syscall.ECONNREFUSED) {
				t.Errorf("after Stop: dial says %v, want connection refused", err)
			}
			if _, err := os.Stat(before["directory"]); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("Stop leaves %s (stat: %v)", before["directory"], err)
			}
		})
	}
}

// dataFiles returns files by which a broker's data directory is known.
func dataFiles(t *testing.T, dir string) []string {
	t.Helper()
	var files []string
	for _, pattern := range []string{"1/data/meta.properties", "1/data/*/cluster_nodes.config", "1/data/*/schema.DAT", "1/store/jetstream"} {
		found, err := filepath.Glob(filepath.Join(dir, pattern))
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, found...)
	}
	return files
}

func TestNodes(t *testing.T) {
	if os.Getenv("STORMGUARD_FULL") != "1" {
		t.Skip("three Kafka nodes: STORMGUARD_FULL=1, or scripts/test --full")
	}
	b := StartForTest(t, Kafka, Options{Nodes: 3})
	nodes := hosts(t, Kafka, b.Addr())
	if len(nodes) != 3 {
		t.Fatalf("address %s: want three nodes", b.Addr())
	}
	if err := b.Kill(t.Context(), 2); err != nil {
		t.Fatal(err)
	}
	for i, host := range nodes {
		if err := dial(t.Context(), host); (err != nil) != (i == 1) {
			t.Errorf("after Kill of node 2: dial of node %d says %v", i+1, err)
		}
	}
	if err := b.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	for i, host := range nodes {
		if err := dial(t.Context(), host); err != nil {
			t.Errorf("after Restart: node %d: %v", i+1, err)
		}
	}
}

// Several callers at once, as test binaries are, get one and the same broker.
func TestStartAtOnce(t *testing.T) {
	first := StartForTest(t, NATS, Options{})
	if err := first.Kill(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	const callers = 4
	type result struct {
		addr string
		err  error
	}
	results := make(chan result, callers)
	for range callers {
		go func() {
			b, err := Start(t.Context(), NATS, Options{Name: first.Name()})
			if err != nil {
				results <- result{err: err}
				return
			}
			results <- result{addr: b.Addr()}
		}()
	}
	for range callers {
		if r := <-results; r.err != nil || r.addr != first.Addr() {
			t.Errorf("got %q, %v; want %s", r.addr, r.err, first.Addr())
		}
	}
}

func TestSettings(t *testing.T) {
	b := StartForTest(t, NATS, Options{Set: map[string]string{"max_payload": "4096"}})
	// A NATS server names its settings to whoever connects.
	c, err := new(net.Dialer).DialContext(t.Context(), "tcp", hosts(t, NATS, b.Addr())[0])
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	hello := make([]byte, 4096)
	n, err := c.Read(hello)
	if err != nil || !strings.Contains(string(hello[:n]), `"max_payload":4096`) {
		t.Errorf("the server says %q, %v; want the max_payload that was set", hello[:n], err)
	}

	_, err = Start(t.Context(), NATS, Options{Name: b.Name() + "-no", Set: map[string]string{"max payload": "1"}})
	if err == nil || !strings.Contains(err.Error(), "max payload=1") {
		t.Errorf("a key with a space: got %v, want an error that names it", err)
	}
	_, err = Start(t.Context(), RabbitMQ, Options{Nodes: 3})
	if err == nil || !strings.Contains(err.Error(), "--nodes 3") {
		t.Errorf("three nodes of RabbitMQ: got %v, want an error that says so", err)
	}
}

// A start that its caller gives up leaves nothing behind.
func TestStartGivenUp(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 1500*time.Millisecond)
	defer cancel()
	name := fmt.Sprintf("given-up-%d", os.Getpid())
	if _, err := Start(ctx, Kafka, Options{Name: name}); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("got %v, want the context's error", err)
	}
	if _, err := (&Broker{kind: Kafka, name: name}).Info(t.Context()); err == nil {
		t.Error("the instance is still there")
	}
}

func TestFindTakesTheEnvironment(t *testing.T) {
	t.Setenv("STORMGUARD_RABBITMQ4", "amqp://example.test/")
	addr, err := Find(t.Context(), RabbitMQ4)
	if addr != "amqp://example.test/" || err != nil {
		t.Errorf("got %q, %v; want the variable's value", addr, err)
	}
}

func TestOutsideTheModule(t *testing.T) {
	t.Chdir(t.TempDir())
	t.Setenv("STORMGUARD_NATS", "")
	if _, err := Find(t.Context(), NATS); err == nil || !strings.Contains(err.Error(), "is not in the stormguard module") {
		t.Errorf("got %v, want an error that says where scripts/brokers is to be found", err)
	}
}
