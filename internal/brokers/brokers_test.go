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
	"os/exec"
	"path/filepath"
	"strconv"
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
	if want := map[Kind]string{RabbitMQ: "amqp", RabbitMQ4: "amqp", NATS: "nats", Redis: "redis", Etcd: "http", Postgres: "postgres"}[k]; u.Scheme != want {
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

// Tests with a broker mostly wait for it, so they are parallel.

// A crash and a restart keep ports and data; a stop leaves nothing.
func TestLife(t *testing.T) {
	t.Parallel()
	for _, k := range []Kind{Kafka, RabbitMQ, RabbitMQ4, NATS, Redis, Etcd, Postgres} {
		t.Run(string(k), func(t *testing.T) {
			t.Parallel()
			b := StartForTest(t, k, Options{})
			host := hosts(t, k, b.Addr())[0]
			if err := dial(t.Context(), host); err != nil {
				t.Fatalf("after Start: %v", err)
			}
			before := mustInfo(t, b)
			t.Logf("%s at %s", before["version"], b.Addr())
			if prefix := map[Kind]string{Kafka: "Kafka 4.", RabbitMQ: "RabbitMQ 3.", RabbitMQ4: "RabbitMQ 4.", NATS: "nats-server 2.", Redis: "Redis ", Etcd: "etcd 3.", Postgres: "PostgreSQL "}[k]; !strings.HasPrefix(before["version"], prefix) {
				t.Errorf("version %q, want %q…", before["version"], prefix)
			}
			marks := dataFiles(t, before["directory"])
			if len(marks) == 0 {
				t.Errorf("no data in %s", before["directory"])
			}

			if err := b.Kill(t.Context(), 1); err != nil {
				t.Fatal(err)
			}
			refuses(t, host, "after Kill")
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
			refuses(t, host, "after Stop")
			if _, err := os.Stat(before["directory"]); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("Stop leaves %s (stat: %v)", before["directory"], err)
			}
		})
	}
}

// refuses waits until a connection is refused: what a killed server has just forked may
// have its socket for a moment.
func refuses(t *testing.T, host, when string) {
	t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(30 * time.Second); ; <-tick.C {
		err := dial(t.Context(), host)
		if errors.Is(err, syscall.ECONNREFUSED) {
			return
		}
		if time.Now().After(end) {
			t.Errorf("%s: dial says %v, want connection refused", when, err)
			return
		}
	}
}

// dataFiles returns files by which a broker's data directory is known.
func dataFiles(t *testing.T, dir string) []string {
	t.Helper()
	var files []string
	for _, pattern := range []string{"1/data/meta.properties", "1/data/*/cluster_nodes.config", "1/data/*/schema.DAT", "1/store/jetstream", "1/appendonlydir/*.aof", "1/data/member/snap/db", "1/pgdata/PG_VERSION"} {
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
	t.Parallel()
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

// Several callers at once, as test binaries are, get one and the same broker,
// whether it is new or was killed.
func TestStartAtOnce(t *testing.T) {
	t.Parallel()
	const callers = 4
	type result struct {
		b   *Broker
		err error
	}
	name := fmt.Sprintf("at-once-%d", os.Getpid())
	var first *Broker
	for round := range 2 {
		results := make(chan result, callers)
		for range callers {
			go func() {
				b, err := Start(t.Context(), NATS, Options{Name: name})
				results <- result{b, err}
			}()
		}
		for range callers {
			r := <-results
			if r.err != nil {
				t.Fatal(r.err)
			}
			if first == nil {
				first = r.b
				t.Cleanup(func() { _ = first.Stop(context.WithoutCancel(t.Context())) })
			}
			if r.b.Addr() != first.Addr() {
				t.Errorf("round %d: one caller got %s, another %s", round, first.Addr(), r.b.Addr())
			}
		}
		if err := dial(t.Context(), hosts(t, NATS, first.Addr())[0]); err != nil {
			t.Errorf("round %d: %v", round, err)
		}
		if err := first.Kill(t.Context(), 0); err != nil {
			t.Fatal(err)
		}
	}
}

// An instance ends with the last of those who hold it, also when they were
// killed, and not before.
func TestHolders(t *testing.T) {
	t.Parallel()
	var pids []string
	var holders []*exec.Cmd
	for range 2 {
		cmd := exec.CommandContext(t.Context(), "sleep", "600")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
		holders, pids = append(holders, cmd), append(pids, strconv.Itoa(cmd.Process.Pid))
	}
	run := func(args ...string) string {
		t.Helper()
		out, err := script(t.Context(), args...)
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	name := fmt.Sprintf("holders-%d", os.Getpid())
	b := &Broker{kind: NATS, name: name}
	t.Cleanup(func() { _ = b.Stop(context.WithoutCancel(t.Context())) })
	for _, pid := range pids {
		b.addr = run("start", "nats", "--name", name, "--temp", "--while", pid)
	}
	host := hosts(t, NATS, b.Addr())[0]

	run("stop", "nats", "--name", name, "--while", pids[0])
	run("sweep")
	if err := dial(t.Context(), host); err != nil {
		t.Errorf("it is gone while one process holds it: %v", err)
	}
	_ = holders[1].Process.Kill()
	_ = holders[1].Wait()
	// A sweep passes over what another one, of a start beside this test, looks at.
	for end := time.Now().Add(time.Minute); ; {
		run("sweep")
		if _, err := b.Info(t.Context()); err != nil {
			break
		}
		if time.Now().After(end) {
			t.Fatal("a temporary instance is still there after the sweep")
		}
	}
	refuses(t, host, "nobody holds it")
}

func TestSettings(t *testing.T) {
	t.Parallel()
	b := StartForTest(t, NATS, Options{Set: map[string]string{"max_payload": "4096", "http": "127.0.0.1:{monitor}"}})
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

	if port := mustInfo(t, b)["port_monitor"]; port == "" {
		t.Error("the info names no port for {monitor}")
	} else if err := dial(t.Context(), "127.0.0.1:"+port); err != nil {
		t.Errorf("the further listener: %v", err)
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
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 1500*time.Millisecond)
	defer cancel()
	name := fmt.Sprintf("given-up-%d", os.Getpid())
	if _, err := Start(ctx, Kafka, Options{Name: name}); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("got %v, want the context's error", err)
	}
	dir := instanceDir(t, Kafka, name)
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s is still there (stat: %v)", dir, err)
	}
	commands, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range commands {
		// Of a process that has ended by now there is nothing to read.
		if command, err := os.ReadFile(path); err == nil && strings.Contains(string(command), dir+"/") {
			t.Errorf("still running: %s", strings.ReplaceAll(string(command), "\x00", " "))
		}
	}
}

// A start can be ended when it has made a directory and nothing in it.
func TestStartGivenUpAtOnce(t *testing.T) {
	t.Parallel()
	b := &Broker{kind: NATS, name: fmt.Sprintf("hardly-begun-%d", os.Getpid())}
	dir := instanceDir(t, NATS, b.name)
	for what, end := range map[string]func() error{
		"stop":  func() error { return b.Stop(t.Context()) },
		"sweep": func() error { _, err := script(t.Context(), "sweep"); return err },
	} {
		// A sweep of a start beside this test may come between, and be passed over by ours.
		for err := os.ErrNotExist; errors.Is(err, os.ErrNotExist); {
			if err = os.MkdirAll(filepath.Join(dir, "holders"), 0o755); err != nil && !errors.Is(err, os.ErrNotExist) {
				t.Fatal(err)
			}
		}
		for late := time.Now().Add(time.Minute); ; {
			if err := end(); err != nil {
				t.Error(err)
			}
			_, err := os.Stat(dir)
			if errors.Is(err, os.ErrNotExist) {
				break
			}
			if time.Now().After(late) {
				t.Errorf("%s: %s is still there (stat: %v)", what, dir, err)
				break
			}
		}
	}
}

func instanceDir(t *testing.T, kind Kind, name string) string {
	t.Helper()
	state := os.Getenv("STORMGUARD_BROKERS")
	if state == "" {
		cache, err := os.UserCacheDir()
		if err != nil {
			t.Fatal(err)
		}
		state = filepath.Join(cache, "stormguard", "brokers")
	}
	return filepath.Join(state, "instances", string(kind), name)
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
