// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package gossip

import (
	"context"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
)

// stalled is a log that takes nothing from the first line about a member until it
// is let go.
type stalled struct {
	slog.Handler

	once       sync.Once
	stuck, let chan struct{}
}

func (s *stalled) Handle(_ context.Context, r slog.Record) error {
	if strings.Contains(r.Message, "member") {
		s.once.Do(func() { close(s.stuck) })
		<-s.let
	}
	return nil
}

func (s *stalled) Enabled(context.Context, slog.Level) bool { return true }

// A log that hangs does not hold up membership, which has its lock held when it
// says something, nor the session.
func TestLogThatHangs(t *testing.T) {
	log := &stalled{stuck: make(chan struct{}), let: make(chan struct{})}
	node := func(name string, opts ...Option) *Node {
		t.Helper()
		n, err := Start(NodeConfig{
			Config: Config{Cluster: "c", Self: crdt.Replica{Name: name, Incarnation: 1}},
			Bind:   "127.0.0.1:0",
		}, opts...)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = n.Close() })
		return n
	}
	a := node("a", WithLogger(slog.New(log)))
	t.Cleanup(func() { close(log.let) })
	seed := WithDiscovery(Seeds(nil, a.Addr().String()))
	b := node("b", seed)
	<-log.stuck
	c := node("c", seed)
	waitFor(t, 10*time.Second, "all know all", func() bool {
		return a.ml.NumMembers() == 3 && len(a.Members()) == 3 && len(b.Members()) == 3 && len(c.Members()) == 3
	})
	waitFor(t, 10*time.Second, "all hear all", func() bool {
		return len(a.Peers()) == 2 && len(b.Peers()) == 2 && len(c.Peers()) == 2
	})
}
