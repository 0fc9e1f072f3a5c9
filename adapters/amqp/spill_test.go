// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardamqp

import (
	"context"
	"math"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
)

// In an outage the broker has the acks of more messages than the prefetch, and after a
// restart they are handled in order.
func TestSpill(t *testing.T) {
	t.Parallel()
	kinds(t, func(t *testing.T, s *server) {
		const n = 300
		r := newRig(t, s, Quorum, nil)
		cfg := guard.Config{SpillDir: filepath.Join(t.TempDir(), "spill"), Policy: guard.Policy{Spill: true, Window: 50}}
		var h record
		h.down.Store(true)
		g := adaptertest.Guard(t, cfg)
		c := r.consume(g, h.handle)
		r.publish(0, n)
		adaptertest.Eventually(t, "all spilled", func() bool {
			all := g.Sources()
			return len(all) == 1 && all[0].State().Spilled == n
		})
		if err := c.Stop(t); err != nil {
			t.Error(err)
		}
		if _, err := g.Close(adaptertest.Context(t)); err != nil {
			t.Error(err)
		}
		if left, err := r.ready(); err != nil || left != 0 {
			t.Errorf("%d messages are left at the broker, %v", left, err)
		}
		h.down.Store(false)
		g = adaptertest.Guard(t, cfg)
		c = r.consume(g, h.handle)
		adaptertest.Eventually(t, "all handled", func() bool { return h.distinct() == n })
		if err := c.Stop(t); err != nil {
			t.Error(err)
		}
		if err := h.order(); err != nil || h.twice() > 0 {
			t.Errorf("%v; %d twice", err, h.twice())
		}
	})
}

// A drain that takes longer than the broker waits costs what came meanwhile one delivery, and
// not its order: no consumer is there until the disk is empty.
func TestSpillThatDrainsForLong(t *testing.T) {
	t.Parallel()
	kinds(t, func(t *testing.T, s *server) {
		const spilled, n = 150, 170
		r := newRig(t, s, Quorum, amqp091.Table{"x-delivery-limit": int64(3)})
		letters := r.deadLetters(Classic)
		g := adaptertest.Guard(t, guard.Config{
			SpillDir: filepath.Join(t.TempDir(), "spill"),
			Policy:   guard.Policy{Spill: true, Window: 20, Timeout: 500 * time.Millisecond, Breaker: breaker.Config{Cap: time.Second}},
		})
		var l lines
		var h record
		h.down.Store(true)
		c := r.consumeBy(l.dialer(r.url()), g, func(ctx context.Context, d amqp091.Delivery) error {
			if !h.down.Load() {
				time.Sleep(100 * time.Millisecond)
			}
			return guard.Unavailable(h.handle(ctx, d))
		}, WithConsumerTimeout(8*time.Second), WithDeliveryLimit(3), WithDeadLetters(letters))
		r.publish(0, spilled)
		adaptertest.Eventually(t, "all spilled", func() bool {
			all := g.Sources()
			return len(all) == 1 && all[0].State().Spilled == spilled
		})
		before := len(l.books().prefetch)
		h.down.Store(false)
		adaptertest.Eventually(t, "it drains", func() bool { return h.distinct() > 10 })
		r.publish(spilled, n)
		adaptertest.Eventually(t, "all handled", func() bool { return h.distinct() == n })
		if err := c.Stop(t); err != nil {
			t.Error(err)
		}
		if err := h.order(); err != nil || h.twice() > 0 {
			t.Errorf("%v; %d twice", err, h.twice())
		}
		if dead, err := r.get(letters.cfg.Queue); err != nil || len(dead) > 0 {
			t.Errorf("%d dead letters, %v", len(dead), err)
		}
		// One that probes, if the drain was at its ramp when the channel closed, and one after it.
		if opened := len(l.books().prefetch) - before; opened > 2 {
			t.Errorf("%d consumers were opened in the drain", opened)
		}
	})
}

// A delivery is the same after it was in the spill, its tags left out.
func TestSpilledDelivery(t *testing.T) {
	t.Parallel()
	d := amqp091.Delivery{
		Headers: amqp091.Table{
			"nil": nil, "true": true, "i8": int8(-8), "u8": uint8(8), "i16": int16(-16), "u16": uint16(16), "i32": int32(-32), "u32": uint32(32),
			"i64": int64(math.MinInt64), "f32": float32(1.5), "f64": math.Inf(-1), "dec": amqp091.Decimal{Scale: 2, Value: -7},
			"s": "\xff text", "\xfe name": true, "bytes": []byte{0, 255}, "time": time.Unix(1_700_000_000, 0),
			"list": []any{int32(1), "two", amqp091.Table{"in": int64(3)}}, "table": amqp091.Table{"x-death": []any{amqp091.Table{"count": int64(2)}}},
		},
		ContentType: "text/plain", ContentEncoding: "gzip", DeliveryMode: 2, Priority: 9, CorrelationId: "\xff\xfe", ReplyTo: "r", Expiration: "1000",
		MessageId: "m", Timestamp: time.Unix(1_700_000_000_123, 0), Type: "t", UserId: "u", AppId: "a", Redelivered: true, Exchange: "e", RoutingKey: "k",
		Body: []byte("body"),
	}
	p := newPort("q", &options{})
	head, body, err := p.Spill(d)
	if err != nil {
		t.Fatal(err)
	}
	got, err := p.Unspill(head, body)
	if err != nil {
		t.Fatal(err)
	}
	if !got.Timestamp.Equal(d.Timestamp) {
		t.Errorf("timestamp %v, want %v", got.Timestamp, d.Timestamp)
	}
	got.Timestamp = d.Timestamp
	if !reflect.DeepEqual(got, d) {
		t.Errorf("got %#v\nwant %#v", got, d)
	}

	d = amqp091.Delivery{DeliveryTag: 7}
	want := p.Meta(d).Origin
	if head, body, err = p.Spill(d); err != nil {
		t.Fatal(err)
	}
	if got, err = p.Unspill(head, body); err != nil || p.Meta(got).Origin != want {
		t.Errorf("%+v, %v, want %+v", p.Meta(got).Origin, err, want)
	}
	// Its content names it as before, so that its attempts are known.
	if m := p.Meta(got); m.Content == nil || m.Content() != p.Meta(d).Content() || !m.Redelivered {
		t.Errorf("from the spill: %+v", m)
	}
	if _, _, err := p.Spill(amqp091.Delivery{Headers: amqp091.Table{"c": make(chan int)}}); err == nil || !strings.Contains(err.Error(), `header "c"`) {
		t.Errorf("a header of no type: %v", err)
	}
}

// A message that is acked cannot be rejected.
func TestSpillRefusesRejects(t *testing.T) {
	t.Parallel()
	g := adaptertest.Guard(t, guard.Config{SpillDir: filepath.Join(t.TempDir(), "spill"), Policy: guard.Policy{Spill: true}})
	err := Consume(t.Context(), g, Dialer{URLs: []string{"amqp://127.0.0.1:1"}}, "q", func(context.Context, amqp091.Delivery) error { return nil }, WithDeadLetterExchange("dlx"))
	if err == nil || !strings.Contains(err.Error(), "Policy.Spill: not with WithDeadLetterExchange") {
		t.Error(err)
	}
}

func FuzzUnspill(f *testing.F) {
	p := newPort("q", &options{})
	for i, table := range []amqp091.Table{nil, {"a": int64(1)}, {"l": []any{nil, "s", amqp091.Table{"x": []byte{1}}}}} {
		head, _, err := p.Spill(amqp091.Delivery{Headers: table, MessageId: strconv.Itoa(i), RoutingKey: "k"})
		if err != nil {
			f.Fatal(err)
		}
		f.Add(head)
	}
	f.Add([]byte(`{"headers":{"t":"A","v":[null]}}`))
	f.Fuzz(func(t *testing.T, head []byte) {
		d, err := p.Unspill(head, nil)
		if err != nil {
			return
		}
		again, _, err := p.Spill(d)
		if err != nil {
			t.Fatal(err)
		}
		d2, err := p.Unspill(again, nil)
		if err != nil {
			t.Fatal(err)
		}
		once, _, err := p.Spill(d2)
		if err != nil || string(once) != string(again) {
			t.Errorf("%s\n%s, %v", again, once, err)
		}
	})
}
