// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardnats

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/url"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stormguard-mq/stormguard/fleet/register"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
	"github.com/stormguard-mq/stormguard/internal/registertest"
)

// registerAt is an empty register at a server, each handle with a connection of its
// own.
func registerAt(urls string, replicas int) registertest.Place {
	bucket := fmt.Sprintf("register-%08x", rand.Uint32())
	return registertest.Place{Open: func(t *testing.T) register.Register {
		nc, err := nats.Connect(urls, nats.MaxReconnects(-1), nats.ReconnectWait(50*time.Millisecond),
			nats.Timeout(time.Second), nats.RetryOnFailedConnect(true))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(nc.Close)
		js, err := jetstream.New(nc)
		if err != nil {
			t.Fatal(err)
		}
		r, err := NewRegister(js, RegisterConfig{Bucket: bucket, Replicas: replicas})
		if err != nil {
			t.Fatal(err)
		}
		return r
	}}
}

func TestRegister(t *testing.T) {
	t.Parallel()
	b := newBroker(t)
	registertest.Run(t, func(*testing.T) registertest.Place { return registerAt(b.url(), 1) })
}

// With replicas a conflict may be known before the write that won.
func TestRegisterOfReplicas(t *testing.T) {
	t.Parallel()
	urls := newCluster(t)
	registertest.Run(t, func(*testing.T) registertest.Place { return registerAt(urls, 3) })
}

func TestRegisterFaults(t *testing.T) {
	t.Parallel()
	t.Run("Restarted", func(t *testing.T) {
		t.Parallel()
		b := newBroker(t)
		p := registerAt(b.url(), 1)
		p.Break = func(*testing.T) { b.stop() }
		p.Mend = func(*testing.T) { b.start() }
		registertest.Fault(t, p)
	})
	for name, fault := range map[string]func(*registertest.Relay, *testing.T){
		"Cut":    (*registertest.Relay).Cut,
		"Frozen": (*registertest.Relay).Freeze,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBroker(t)
			u, err := url.Parse(b.url())
			if err != nil {
				t.Fatal(err)
			}
			relay := registertest.NewRelay(t, u.Host)
			p := registerAt("nats://"+relay.Addr(), 1)
			p.Break = func(t *testing.T) { fault(relay, t) }
			p.Mend = relay.Mend
			registertest.Fault(t, p)
		})
	}
}

// newCluster is three servers, and the stream that a test makes has a copy on each.
func newCluster(t *testing.T) (urls string) {
	t.Helper()
	host := "127.0.0.1"
	if runtime.GOOS == "linux" { // an address of its own, where nobody else takes the ports meanwhile
		host = fmt.Sprintf("127.%d.%d.1", 1+rand.IntN(250), rand.IntN(250))
	}
	var all, routes []string
	var ports []int
	for range 3 {
		l, err := net.Listen("tcp", host+":0")
		if err != nil {
			t.Fatal(err)
		}
		ports = append(ports, l.Addr().(*net.TCPAddr).Port)
		routes = append(routes, "nats://"+l.Addr().String())
		_ = l.Close()
	}
	var servers []*server.Server
	for i := range 3 {
		s, err := server.NewServer(&server.Options{
			ServerName: fmt.Sprint("n", i), Host: "127.0.0.1", Port: server.RANDOM_PORT, JetStream: true, StoreDir: t.TempDir(), NoSigs: true, NoLog: true,
			Cluster: server.ClusterOpts{Name: "c", Host: host, Port: ports[i]},
			Routes:  server.RoutesFromStr(strings.Join(routes, ",")),
		})
		if err != nil {
			t.Fatal(err)
		}
		s.Start()
		servers = append(servers, s)
		t.Cleanup(func() {
			s.Shutdown()
			s.WaitForShutdown()
		})
	}
	for _, s := range servers {
		if !s.ReadyForConnections(time.Minute) {
			t.Fatal("the server is not ready")
		}
		all = append(all, s.ClientURL())
	}
	urls = strings.Join(all, ",")
	nc, err := nats.Connect(urls, nats.Timeout(connectTimeout))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	adaptertest.Eventually(t, "the cluster takes a stream of three", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := js.CreateOrUpdateStream(ctx, jetstream.StreamConfig{Name: "ready", Subjects: []string{"ready"}, Replicas: 3})
		return err == nil
	})
	return urls
}

// A bucket that may forget is refused, with what mends it.
func TestRegisterUnsuitable(t *testing.T) {
	t.Parallel()
	b := newBroker(t)
	js, err := jetstream.New(b.connect())
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		cfg  jetstream.KeyValueConfig
		says string
	}{
		{jetstream.KeyValueConfig{Bucket: "ttl", TTL: time.Hour}, "nats stream edit KV_ttl --max-age=-1"},
		{jetstream.KeyValueConfig{Bucket: "memory", Storage: jetstream.MemoryStorage}, "create it anew with file storage"},
	} {
		if _, err := js.CreateKeyValue(t.Context(), tt.cfg); err != nil {
			t.Fatal(err)
		}
		r, err := NewRegister(js, RegisterConfig{Bucket: tt.cfg.Bucket})
		if err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if _, _, err := r.Read(t.Context()); !errors.Is(err, ErrUnsuitable) || !strings.Contains(err.Error(), tt.says) {
				t.Errorf("%s: %v, want ErrUnsuitable with %q", tt.cfg.Bucket, err, tt.says)
			}
		}
		if err := r.CompareAndSet(t.Context(), 1, []byte("x")); !errors.Is(err, ErrUnsuitable) {
			t.Errorf("%s: %v, want ErrUnsuitable", tt.cfg.Bucket, err)
		}
	}
	// One that was made by hand, as kv add does, is taken.
	if _, err := js.CreateKeyValue(t.Context(), jetstream.KeyValueConfig{Bucket: "byhand"}); err != nil {
		t.Fatal(err)
	}
	r, err := NewRegister(js, RegisterConfig{Bucket: "byhand", NoCreate: true})
	if err != nil {
		t.Fatal(err)
	}
	if err := r.CompareAndSet(t.Context(), 1, []byte("x")); err != nil {
		t.Error(err)
	}
	r, err = NewRegister(js, RegisterConfig{Bucket: "none", NoCreate: true})
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := r.Read(t.Context()); !errors.Is(err, jetstream.ErrStreamNotFound) {
		t.Errorf("a bucket that does not exist: %v", err)
	}
	if _, err := NewRegister(js, RegisterConfig{Bucket: "a b", Key: "x.y", Replicas: 6}); err == nil {
		t.Error("a configuration that is all wrong is taken")
	} else if n := strings.Count(err.Error(), "RegisterConfig."); n != 3 {
		t.Errorf("%d problems of 3 are named: %v", n, err)
	}
}
