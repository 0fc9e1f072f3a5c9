// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardhttp

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/guard/guardtest"
)

// The rules of every broker hold for what is held, with the client in the part
// of the broker: it keeps a request until it is accepted, sends it again when it
// is refused, and gets it back as a dead letter when the intake closes. What
// differs: nothing is delivered again by itself (no Killer, no Restarter, no
// AckWait), an ack is the intake's own and cannot fail (no Refuser), and a dead-letter queue of the suite's own has to stand in.
func TestExercise(t *testing.T) {
	for _, c := range []struct {
		name    string
		order   guard.Order
		workers int
	}{
		{"source", guard.OrderSource, 1},
		{"key", guard.OrderKey, 4},
		{"none", guard.OrderNone, 4},
	} {
		t.Run(c.name, func(t *testing.T) {
			guardtest.Exercise(t, guardtest.Features{
				Order: c.order, Workers: c.workers, Keys: true, Headers: guardtest.HeaderText, EmptyBody: true, OneDelivery: true,
			}, func(t testing.TB, _ guardtest.Setup) guardtest.Subject { return newClient(t) })
		})
	}
}

// client is the sending side, and the dead-letter queue.
type client struct {
	t    testing.TB
	in   *Intake
	h    http.Handler
	stop chan struct{}
	sent sync.WaitGroup

	started guardtest.Consumer

	mu    sync.Mutex
	queue []guardtest.Publication
	dead  []dlq.Record
	out   int // accepted
	back  int // of them, given back at the end
}

func newClient(t testing.TB) *client { return &client{t: t} }

func (c *client) Publish(_ context.Context, ps ...guardtest.Publication) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.queue = append(c.queue, ps...)
	return nil
}

func (c *client) Start(con guardtest.Consumer) error {
	c.started = con
	cfg := Config{
		Name: "orders", Policy: &con.Policy, MaxBody: 4 << 20,
		Headers: []string{"Tenant", "Step", "traceparent", "tracestate", "baggage", "x-empty", "x-utf8", "x-long"},
	}
	in, err := New(con.Guard, cfg, WithKey(func(r *http.Request) string { return r.URL.Query().Get("key") }),
		WithDeadLetters(con.Writer(dlq.WriterFunc(c.write))))
	if err != nil {
		return err
	}
	in.holdAll = true
	in.live.End(context.Background(), guard.ReasonShutdown) // no request is live, and a subject has one source
	c.in, c.stop = in, make(chan struct{})
	c.h = in.Defer(HandlerFunc(func(_ http.ResponseWriter, r *http.Request) error {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return err
		}
		return con.Handler(r.Context(), r.URL.Query().Get("key"), body)
	}))
	c.sent.Go(func() { c.send(c.stop) })
	return nil
}

// send sends in order, and again what was refused.
func (c *client) send(stop chan struct{}) {
	for {
		c.mu.Lock()
		var next *guardtest.Publication
		if len(c.queue) > 0 {
			p := c.queue[0]
			next = &p
		}
		c.mu.Unlock()
		if next != nil && c.post(*next) {
			c.mu.Lock()
			c.queue = c.queue[1:]
			c.out++
			c.mu.Unlock()
			continue
		}
		select {
		case <-stop:
			return
		case <-time.After(5 * time.Millisecond):
		}
	}
}

func (c *client) post(p guardtest.Publication) (accepted bool) {
	w := httptest.NewRecorder()
	r := httptest.NewRequestWithContext(context.Background(), "POST", "/?key="+url.QueryEscape(p.Key), bytes.NewReader(p.Body))
	for _, h := range p.Headers {
		r.Header.Add(h.Name, fmt.Sprint(h.Value))
	}
	c.h.ServeHTTP(w, r)
	if w.Code != http.StatusAccepted && w.Code != http.StatusServiceUnavailable {
		c.t.Errorf("answered %d", w.Code)
	}
	return w.Code == http.StatusAccepted
}

// write is the dead-letter queue; what the end gives back the client sends again.
func (c *client) write(_ context.Context, r *dlq.Record) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if r.Reason == ReasonShutdown {
		c.back++
		c.again(r)
		return nil
	}
	c.dead = append(c.dead, *r)
	return nil
}

// again puts a request that came back in front of those not yet sent.
func (c *client) again(r *dlq.Record) {
	p := guardtest.Publication{Key: string(r.Key), Body: r.Body, Headers: r.Headers}
	if req, err := FromRecord(context.Background(), r); err != nil {
		c.t.Error(err)
	} else {
		p.Key = req.URL.Query().Get("key")
	}
	at := 0
	for at < len(c.queue) && guardtest.Number(c.queue[at].Body) < guardtest.Number(p.Body) {
		at++
	}
	c.queue = slices.Insert(c.queue, at, p)
}

func (c *client) Stop(ctx context.Context) error {
	close(c.stop)
	c.sent.Wait()
	rep, err := c.in.Close(ctx)
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, l := range rep.Left { // its caller sees to them
		c.back++
		c.again(l.Record)
	}
	if len(rep.Left) > 0 || len(rep.Held.Left) > 0 {
		err = nil
	}
	return err
}

// Revoke closes the intake and opens another: the client sends what it gets back again.
func (c *client) Revoke(ctx context.Context) error {
	if err := c.Stop(ctx); err != nil {
		return err
	}
	return c.Start(c.started)
}

func (c *client) DeadLetters(context.Context) ([]dlq.Record, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.dead), nil
}

func (c *client) Backlog(context.Context) (guardtest.Backlog, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	pending := len(c.queue)
	if c.in != nil {
		pending += c.in.Stats().Held
	}
	return guardtest.Backlog{Pending: pending, Delivered: c.out}, nil
}
