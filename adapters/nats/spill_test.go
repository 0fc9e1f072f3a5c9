// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardnats

import (
	"context"
	"errors"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
)

// In an outage the server has the acks of more messages than MaxAckPending, and after a
// restart they are handled in order, as they were.
func TestSpill(t *testing.T) {
	t.Parallel()
	const n = 300
	r := newRig(t, jetstream.ConsumerConfig{MaxAckPending: 50})
	dir := filepath.Join(t.TempDir(), "spill")
	cfg := guard.Config{SpillDir: dir, Policy: guard.Policy{Spill: true}}
	var down atomic.Bool
	down.Store(true)
	var mu sync.Mutex
	var got []int
	handle := func(_ context.Context, m jetstream.Msg) error {
		if down.Load() {
			return guard.Unavailable(errors.New("down"))
		}
		i, err := strconv.Atoi(string(m.Data()))
		if err != nil {
			return err
		}
		if md, err := m.Metadata(); err != nil || md.Sequence.Stream != uint64(i+1) || md.Stream != "S" || md.NumDelivered != 1 || md.Timestamp.IsZero() {
			t.Errorf("message %d: %+v, %v", i, md, err)
		}
		if m.Subject() != "s.x" || m.Headers().Get("Nats-Msg-Id") != strconv.Itoa(i) || !slices.Equal(m.Headers()["X-Raw"], []string{"\xff", "two"}) {
			t.Errorf("message %d: subject %q, headers %v", i, m.Subject(), m.Headers())
		}
		mu.Lock()
		defer mu.Unlock()
		got = append(got, i)
		return nil
	}
	g := adaptertest.Guard(t, cfg)
	c := consume(t, g, r.consumer, handle)
	for i := range n {
		msg := nats.NewMsg("s.x")
		msg.Data = strconv.AppendInt(nil, int64(i), 10)
		msg.Header.Set("Nats-Msg-Id", strconv.Itoa(i))
		msg.Header["X-Raw"] = []string{"\xff", "two"}
		if _, err := r.js.PublishMsg(adaptertest.Context(t), msg); err != nil {
			t.Fatal(err)
		}
	}
	adaptertest.Eventually(t, "all acked in the outage", func() bool { return r.info(t).AckFloor.Stream == n })
	if st := g.Sources()[0].State(); st.Spilled != n || st.Account.Unsettled() != n {
		t.Errorf("%d messages are in the spill, want %d: %+v", st.Spilled, n, st.Account)
	}
	if err := c.Stop(t); err != nil {
		t.Error(err)
	}
	if _, err := g.Close(adaptertest.Context(t)); err != nil {
		t.Error(err)
	}

	down.Store(false)
	g = adaptertest.Guard(t, cfg)
	c = consume(t, g, r.consumer, handle)
	adaptertest.Eventually(t, "all handled", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(got) >= n
	})
	if err := c.Stop(t); err != nil {
		t.Error(err)
	}
	if len(got) != n || !slices.IsSorted(got) {
		t.Errorf("handled %v", got)
	}
	if i := r.info(t); i.NumRedelivered != 0 || i.NumAckPending != 0 {
		t.Errorf("%+v", i)
	}
}

// Headers take room in the window, as data does.
func TestHeadersHaveASize(t *testing.T) {
	t.Parallel()
	m := &spilledMsg{subject: "s", header: nats.Header{"Trace": {strings.Repeat("x", 1000), "y"}}}
	if n := new(msgPort).Size(m); n < 1000+2*len("Trace") {
		t.Errorf("%d bytes", n)
	}
}

// A handler of long work says InProgress, of a message that is on the disk as of any other.
func TestInProgressOfASpilledMessage(t *testing.T) {
	t.Parallel()
	const n = 100
	r := newRig(t, jetstream.ConsumerConfig{MaxAckPending: 50})
	g := adaptertest.Guard(t, guard.Config{SpillDir: filepath.Join(t.TempDir(), "spill"), Policy: guard.Policy{Spill: true}})
	var down atomic.Bool
	down.Store(true)
	c := consume(t, g, r.consumer, func(_ context.Context, m jetstream.Msg) error {
		if down.Load() {
			return guard.Unavailable(errors.New("down"))
		}
		return m.InProgress()
	})
	r.publish(t, subject, 0, n)
	adaptertest.Eventually(t, "all acked in the outage", func() bool { return r.info(t).AckFloor.Stream == n })
	down.Store(false)
	src := adaptertest.Source(t, g, "S/C")
	adaptertest.Eventually(t, "all handled", func() bool { return src.Account().Acked == n })
	if tally := src.State().Tally; tally.DeadLettered > 0 {
		t.Errorf("%+v", tally)
	}
	if err := c.Stop(t); err != nil {
		t.Error(err)
	}
}
