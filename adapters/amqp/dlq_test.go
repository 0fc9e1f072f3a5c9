// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardamqp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
	"github.com/stormguard-mq/stormguard/internal/brokers"
)

func letter() *dlq.Record {
	return &dlq.Record{
		Body: []byte("body"),
		Headers: []dlq.Header{
			{Name: "b", Value: []byte{0, 255}}, {Name: "d", Value: dlq.Decimal{Scale: 2, Unscaled: -314}},
			{Name: "f", Value: 1.5}, {Name: "i8", Value: int8(-8)}, {Name: "i16", Value: int16(-16)}, {Name: "i32", Value: int32(-32)}, {Name: "i64", Value: int64(1) << 40},
			{Name: "list", Value: []any{"x", int64(1), map[string]any{"n": nil}}}, {Name: "nil", Value: nil}, {Name: "t", Value: true},
			{Name: "traceparent", Value: "00-1"}, {Name: "u8", Value: uint8(8)}, {Name: "u16", Value: uint16(16)}, {Name: "u32", Value: uint32(32)},
			{Name: "when", Value: time.Unix(1700000000, 0).UTC()}, {Name: "x-death", Value: "the broker's"}, {Name: "CC", Value: "elsewhere"},
		},
		Properties: []dlq.Header{{Name: "content-type", Value: "text/plain"}, {Name: "correlation-id", Value: "c"}, {Name: "priority", Value: uint8(3)}},
		Timestamp:  time.Unix(1700000001, 0).UTC(),
		Origin:     dlq.Origin{System: "rabbitmq", Source: "q", Subject: "key", Exchange: "ex", MessageID: "m-1"},
		Attempts:   3, Deliveries: 2, Reason: dlq.ReasonAttempts,
		Error: dlq.ErrorInfo{Type: "T", Message: "two\nlines \x00"},
	}
}

func TestDLQRoundTrip(t *testing.T) {
	t.Parallel()
	kinds(t, func(t *testing.T, s *server) {
		for _, kind := range []Kind{Quorum, Classic, Stream} {
			for i, dialect := range []dlq.Dialect{"", dlq.Connect, dlq.Spring} {
				key := [][]byte{[]byte("\xff\x00k"), {}, nil}[i] // of a message from elsewhere
				r := newRig(t, s, Classic, nil)
				d, err := NewDLQ(adaptertest.Context(t), Dial(r.url()), DLQConfig{Queue: r.queue + ".dlq", Kind: kind, Dialect: dialect})
				if err != nil {
					t.Fatal(err)
				}
				want := letter()
				want.Key = key
				if err := d.Write(adaptertest.Context(t), want); err != nil {
					t.Fatal(err)
				}
				if err := d.Close(adaptertest.Context(t)); err != nil {
					t.Fatal(err)
				}
				got := r.readAll(r.queue+".dlq", kind, 1)
				r.on(func(ch *amqp091.Channel) error {
					_, err := ch.QueueDelete(r.queue+".dlq", false, false, false)
					return err
				})
				if len(got) != 1 || got[0].MessageId != want.ID() || got[0].DeliveryMode != amqp091.Persistent || got[0].Expiration != "" {
					t.Fatalf("%s: %+v", kind, got)
				}
				rec, err := ReadDeadLetter(got[0])
				if err != nil {
					t.Fatal(err)
				}
				if (rec.Key == nil) != (key == nil) || !bytes.Equal(rec.Key, key) {
					t.Errorf("%s %s: key %q, want %q", kind, dialect, rec.Key, key)
				}
				if rec.ID() != want.ID() || !bytes.Equal(rec.Body, want.Body) || !rec.Timestamp.Equal(want.Timestamp) || rec.Attempts != 3 ||
					rec.Deliveries != 2 || rec.Reason != want.Reason || rec.TraceParent != "00-1" || rec.Origin != want.Origin ||
					!reflect.DeepEqual(rec.Properties, want.Properties) {
					t.Errorf("%s %s: %+v", kind, dialect, rec)
				}
				for _, h := range want.Headers[:15] {
					v, ok := dlq.Lookup(rec.Headers, h.Name)
					if at, isTime := v.(time.Time); isTime {
						v = at.UTC()
					}
					if kind == Stream { // what a stream does to them is the broker's
						switch h.Name {
						case "d":
							h.Value = "-3.14"
						case "b", "list":
							continue
						}
					}
					if !ok || !reflect.DeepEqual(v, h.Value) {
						t.Errorf("header %s became %#v, it was %#v", h.Name, v, h.Value)
					}
				}
				for _, name := range []string{"x-death", "CC"} {
					if _, ok := dlq.Lookup(rec.Headers, name); ok {
						t.Errorf("%s was sent again", name)
					}
				}
			}
		}
	})
}

// RabbitMQ routes by CC and BCC, and refuses a message in which they are no lists. A message of
// another broker may have headers of these names. Its letter is written all the same.
func TestRoutingHeadersFromElsewhere(t *testing.T) {
	t.Parallel()
	kinds(t, func(t *testing.T, s *server) {
		r := newRig(t, s, Classic, nil)
		d := r.deadLetters(Quorum)
		rec := letter()
		rec.Origin = dlq.Origin{System: "kafka", Source: "orders", Group: "billing", HasPartition: true, Offset: 7, HasOffset: true}
		rec.Headers = []dlq.Header{{Name: "BCC", Value: []any{r.queue}}, {Name: "CC", Value: []byte("x")}, {Name: "cc", Value: "y"}}
		if err := d.Write(adaptertest.Context(t), rec); err != nil {
			t.Fatal(err)
		}
		rec.Headers = append(rec.Headers, dlq.Header{Name: "kept-CC", Value: "of an earlier death"})
		if err := d.Write(adaptertest.Context(t), rec); err != nil {
			t.Fatal(err)
		}
		for i, m := range r.readAll(d.cfg.Queue, Quorum, 2) {
			got, err := ReadDeadLetter(m)
			if err != nil {
				t.Error(err)
			}
			want := []dlq.Header{{Name: "cc", Value: "y"}, {Name: "kept-BCC", Value: []any{r.queue}}, {Name: "kept-CC", Value: []byte("x")}}
			if i == 1 {
				want[2].Value = "of an earlier death"
			}
			if !reflect.DeepEqual(got.Headers, want) {
				t.Errorf("letter %d has headers %v, want %v", i, got.Headers, want)
			}
		}
		if n, err := r.ready(); err != nil || n > 0 {
			t.Errorf("%d copies: %v", n, err)
		}
	})
}

// readAll reads n messages of a queue or stream, from the beginning.
func (r *rig) readAll(queue string, kind Kind, n int) (out []amqp091.Delivery) {
	r.t.Helper()
	r.on(func(ch *amqp091.Channel) error {
		if err := ch.Qos(100, 0, false); err != nil {
			return err
		}
		var args amqp091.Table
		if kind == Stream {
			args = amqp091.Table{"x-stream-offset": "first"}
		}
		in, err := ch.Consume(queue, "", false, false, false, false, args)
		if err != nil {
			return err
		}
		for range n {
			select {
			case d := <-in:
				out = append(out, d)
			case <-time.After(time.Minute):
				return errors.New("no message comes")
			}
		}
		return nil
	})
	return out
}

func TestDLQIsCheckedOrCreated(t *testing.T) {
	t.Parallel()
	kinds(t, func(t *testing.T, s *server) {
		r := newRig(t, s, Classic, nil)
		ctx := adaptertest.Context(t)
		name := r.queue + ".dlq"
		_, err := NewDLQ(ctx, Dial(r.url()), DLQConfig{Queue: name, NoCreate: true})
		if !errors.Is(err, ErrUnsuitable) || !strings.Contains(err.Error(), "rabbitmqadmin declare queue name="+name) {
			t.Fatal(err)
		}
		for range 2 { // the second finds it
			d, err := NewDLQ(ctx, Dial(r.url()), DLQConfig{Queue: name})
			if err != nil {
				t.Fatal(err)
			}
			defer func() {
				if err := d.Close(ctx); err != nil {
					t.Error(err)
				}
				if err := d.Write(ctx, letter()); !errors.Is(err, errDLQClosed) {
					t.Errorf("%v", err)
				}
			}()
		}
		d, err := NewDLQ(ctx, Dial(r.url()), DLQConfig{Queue: name, NoCreate: true, Kind: Classic})
		if err != nil {
			t.Fatal("a queue of another kind will do:", err)
		}
		defer func() { _ = d.Close(ctx) }()
		r.on(func(ch *amqp091.Channel) error { _, err := ch.QueueDelete(name, false, false, false); return err })
		if err := d.Write(ctx, letter()); !errors.Is(err, errNoQueue) || !errors.Is(err, dlq.ErrRefused) {
			t.Errorf("unroutable: %v", err)
		}
		r.on(func(ch *amqp091.Channel) error {
			_, err := ch.QueueDeclare(name, true, false, false, false, amqp091.Table{"x-queue-type": "stream"})
			return err
		})
		if err := d.Write(ctx, letter()); err == nil {
			t.Error("a stream takes decimals: nothing need be done about them any more")
		}
		if err := d.Write(ctx, letter()); err != nil {
			t.Errorf("the queue is back, as a stream: %v", err)
		}
		r.on(func(ch *amqp091.Channel) error { _, err := ch.QueueDelete(name, false, false, false); return err })
	})
	err := DLQConfig{Queue: "amq.x", Kind: "odd", Dialect: "rabbitmq", Args: amqp091.Table{"x": struct{}{}}}.Validate()
	for _, field := range []string{"Queue", "Kind", "Dialect", "Args"} {
		if err == nil || !strings.Contains(err.Error(), "DLQConfig."+field) {
			t.Errorf("nothing about %s: %v", field, err)
		}
	}
}

// A letter over a limit of the broker is told apart, and can be trimmed.
func TestTooLargeDeadLetters(t *testing.T) {
	t.Parallel()
	kinds(t, func(t *testing.T, s *server) {
		r := newRig(t, s, Classic, nil)
		d := r.deadLetters(Classic)
		rec := letter()
		rec.Error.Stack = strings.Repeat("x", 140_000) // a frame is 131072 bytes
		err := d.Write(adaptertest.Context(t), rec)
		var large *dlq.TooLargeError
		if !errors.As(err, &large) || large.Size < 140_000 || large.Max != 131072 {
			t.Fatal(err)
		}
		if !dlq.TrimFor(rec, err) {
			t.Fatal("it cannot be trimmed")
		}
		if err := d.Write(adaptertest.Context(t), rec); err != nil {
			t.Fatal(err)
		}
		if s.kind == brokers.RabbitMQ4 { // 16 MiB there, 128 before
			rec.Body = make([]byte, 17<<20)
			if err := d.Write(adaptertest.Context(t), rec); !errors.As(err, &large) || large.Size < 17<<20 || large.Max != 16<<20 {
				t.Fatal(err)
			}
			if err := d.Write(adaptertest.Context(t), letter()); err != nil {
				t.Fatal("after a channel that was closed:", err)
			}
		}
		for name, bad := range map[string]*dlq.Record{
			"a long name": {Headers: []dlq.Header{{Name: strings.Repeat("n", 256), Value: "v"}}},
			"a type":      {Headers: []dlq.Header{{Name: "n", Value: struct{}{}}}},
		} {
			if err := d.Write(adaptertest.Context(t), bad); !errors.Is(err, dlq.ErrRefused) {
				t.Errorf("%s: %v", name, err)
			}
		}
		if err := d.Write(adaptertest.Context(t), letter()); err != nil {
			t.Fatal("the connection did not survive:", err)
		}
	})
}

// freezer passes bytes on to a broker until it is frozen.
type freezer struct {
	addr   string
	frozen atomic.Bool
	mu     sync.Mutex
	conns  []net.Conn
}

// outlived is a context that ends when a letter was handed to the socket, which is what
// a writer's context.AfterFunc is for: sooner its end would cut the connection.
type outlived struct {
	context.Context
	done chan struct{}
}

func newOutlived() outlived { return outlived{context.Background(), make(chan struct{})} }

func (o outlived) AfterFunc(func()) (stop func() bool) {
	return func() bool { close(o.done); return true }
}

func (o outlived) Done() <-chan struct{} { return o.done }

func (o outlived) Err() error {
	select {
	case <-o.done:
		return context.Canceled
	default:
		return nil
	}
}

func newFreezer(t testing.TB, target string) *freezer {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	f := &freezer{addr: l.Addr().String()}
	var done sync.WaitGroup
	done.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			b, err := net.Dial("tcp", target)
			if err != nil {
				_ = c.Close()
				continue
			}
			f.mu.Lock()
			f.conns = append(f.conns, c, b)
			f.mu.Unlock()
			for _, p := range [][2]net.Conn{{c, b}, {b, c}} {
				done.Go(func() {
					buf := make([]byte, 1<<16)
					for {
						n, err := p[0].Read(buf)
						for f.frozen.Load() {
							time.Sleep(time.Millisecond)
						}
						if _, e := p[1].Write(buf[:n]); e != nil || err != nil {
							_ = p[0].Close()
							_ = p[1].Close()
							return
						}
					}
				})
			}
		}
	})
	t.Cleanup(func() {
		f.frozen.Store(false)
		_ = l.Close()
		f.mu.Lock()
		for _, c := range f.conns {
			_ = c.Close()
		}
		f.mu.Unlock()
		done.Wait()
	})
	return f
}

// The client knows no context: a broker that does not answer, or does not even
// read, must not keep Write.
func TestWriteReturnsWithItsContext(t *testing.T) {
	t.Parallel()
	s := shared(t, brokers.RabbitMQ)
	r := newRig(t, s, Classic, nil)
	uri, err := amqp091.ParseURI(r.url())
	if err != nil {
		t.Fatal(err)
	}
	f := newFreezer(t, net.JoinHostPort(uri.Host, fmt.Sprint(uri.Port)))
	r.on(func(ch *amqp091.Channel) error {
		_, err := ch.QueueDeclare(r.queue+".dlq", true, false, false, false, nil)
		return err
	})
	var d *DLQ
	adaptertest.Eventually(t, "it connects within its second", func() bool {
		d, err = NewDLQ(adaptertest.Context(t), Dialer{URLs: []string{"amqp://guest:guest@" + f.addr + "/"}, Timeout: time.Second}, DLQConfig{Queue: r.queue + ".dlq", NoCreate: true})
		return err == nil
	})
	rec := letter()
	rec.Origin.MessageID = "" // the digest of 64 MB for an ID can take longer than the context
	if err := d.Write(adaptertest.Context(t), rec); err != nil {
		t.Fatal(err)
	}
	f.frozen.Store(true)
	for _, c := range []struct {
		size int
		ends time.Duration
		cut  bool
	}{
		{64 << 20, 0, false},
		{10, time.Second, false},
		{64 << 20, 3 * time.Second, true}, // fills every buffer on the way
	} {
		rec.Body = make([]byte, c.size)
		ctx, cancel := context.WithTimeout(context.Background(), c.ends)
		start := time.Now()
		err := d.Write(ctx, rec)
		cancel()
		if took := time.Since(start); !errors.Is(err, context.DeadlineExceeded) || took > 10*time.Second { // missed heartbeats would end it after 30 s
			t.Errorf("%d bytes: %v after %s", c.size, err, took)
		}
		if d.s.over() != c.cut {
			t.Errorf("%d bytes: the connection's end is %t", c.size, !c.cut)
		}
	}
	f.frozen.Store(false)
	rec.Body = []byte("after")
	adaptertest.Eventually(t, "it writes again", func() bool { return d.Write(adaptertest.Context(t), rec) == nil })
	f.frozen.Store(true)
	ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
	defer cancel()
	start := time.Now()
	if err := d.Close(ctx); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(start); took >= closeTimeout {
		t.Errorf("closed after %s", took)
	}
}

// A letter whose confirmation is late is not published twice, also if its message never failed.
// Another of the same ID is another letter, and so is one that cannot be told from it.
func TestALateConfirmationMakesNoTwin(t *testing.T) {
	t.Parallel()
	s := shared(t, brokers.RabbitMQ4)
	r := newRig(t, s, Classic, nil)
	uri, err := amqp091.ParseURI(r.url())
	if err != nil {
		t.Fatal(err)
	}
	f := newFreezer(t, net.JoinHostPort(uri.Host, fmt.Sprint(uri.Port)))
	name := r.queue + ".dlq"
	r.on(func(ch *amqp091.Channel) error {
		_, err := ch.QueueDeclare(name, true, false, false, false, nil)
		return err
	})
	d, err := NewDLQ(adaptertest.Context(t), Dial("amqp://guest:guest@"+f.addr+"/"), DLQConfig{Queue: name, NoCreate: true})
	if err != nil {
		t.Fatal(err)
	}
	failed := func(at int64) *dlq.Record {
		rec := letter()
		rec.FirstFailed, rec.LastFailed = time.Unix(at, 1), time.Unix(at, 2)
		return rec
	}
	unknown := func() *dlq.Record { // one of two times is as good as none
		rec := letter()
		rec.FirstFailed = time.Unix(1, 1)
		return rec
	}
	same, empty := unknown(), unknown()
	empty.Body = nil
	for _, c := range []struct {
		late, then *dlq.Record
		letters    int
	}{{failed(1), failed(1), 1}, {failed(1), failed(2), 2}, {same, same, 1}, {unknown(), unknown(), 2}, {empty, empty, 2}} {
		f.frozen.Store(true)
		if err = d.Write(newOutlived(), c.late); !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
		f.frozen.Store(false)
		if err := d.Write(adaptertest.Context(t), c.then); err != nil {
			t.Fatal(err)
		}
		if all, err := r.get(name); err != nil || len(all) != c.letters {
			t.Errorf("%d letters, want %d: %v", len(all), c.letters, err)
		}
		r.on(func(ch *amqp091.Channel) error { _, err := ch.QueuePurge(name, false); return err })
	}
	if err := d.Close(adaptertest.Context(t)); err != nil {
		t.Fatal(err)
	}
	r.on(func(ch *amqp091.Channel) error { _, err := ch.QueueDelete(name, false, false, false); return err })
}

// Of returned letters that nobody waits for any more none passes for written, however
// many; and there is an end to them.
func TestReturnsAfterTheirWrites(t *testing.T) {
	t.Parallel()
	s := shared(t, brokers.RabbitMQ4)
	r := newRig(t, s, Classic, nil)
	uri, err := amqp091.ParseURI(r.url())
	if err != nil {
		t.Fatal(err)
	}
	f := newFreezer(t, net.JoinHostPort(uri.Host, fmt.Sprint(uri.Port)))
	name := r.queue + ".dlq"
	d, err := NewDLQ(adaptertest.Context(t), Dial("amqp://guest:guest@"+f.addr+"/"), DLQConfig{Queue: name, Kind: Classic})
	if err != nil {
		t.Fatal(err)
	}
	r.on(func(ch *amqp091.Channel) error { _, err := ch.QueueDelete(name, false, false, false); return err })
	write := func(ctx context.Context, id int) error {
		rec := letter()
		rec.Origin.MessageID, rec.FirstFailed, rec.LastFailed = fmt.Sprint(id), time.Unix(1, 1), time.Unix(1, 2)
		return d.Write(ctx, rec)
	}
	const lost = 12
	f.frozen.Store(true)
	for i := range lost {
		if err := write(newOutlived(), i); !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
	}
	f.frozen.Store(false)
	for _, p := range d.s.pending { // none may come to be confirmed without its return
		if ok, err := p.confirm.WaitContext(adaptertest.Context(t)); err != nil || !ok {
			t.Errorf("%t, %v", ok, err)
		}
	}
	for _, id := range []int{lost, 0, 8, lost - 1} { // a new one, and some that are out already
		if err := write(adaptertest.Context(t), id); !errors.Is(err, errNoQueue) {
			t.Errorf("letter %d: %v", id, err)
		}
	}
	full := d.s
	if full.unread != lost {
		t.Errorf("%d were given up, not %d", lost, full.unread)
	}
	f.frozen.Store(true)
	full.unread = maxPending - lost
	for i := range lost {
		if full.over() {
			t.Errorf("ended after %d more", i)
		}
		_ = write(newOutlived(), lost+1+i)
	}
	f.frozen.Store(false)
	adaptertest.Eventually(t, "no more may be given up", full.over)
	if err := write(adaptertest.Context(t), 0); !errors.Is(err, errNoQueue) || d.s == full {
		t.Errorf("%v, by the same session: %t", err, d.s == full)
	}
	start := time.Now()
	if err := d.Close(adaptertest.Context(t)); err != nil || time.Since(start) > closeTimeout/2 {
		t.Errorf("%v after %s", err, time.Since(start))
	}
}

// While the broker has a memory alarm dead letters wait, by name, and the
// consumer goes on: its acks are on another connection.
func TestMemoryAlarm(t *testing.T) {
	t.Parallel()
	adaptertest.NotShort(t, "needs a broker of its own")
	s := own(t, brokers.RabbitMQ, nil)
	r := newRig(t, s, Classic, nil)
	d := r.deadLetters(Classic)
	var rec record
	g := adaptertest.Guard(t, guard.Config{Policy: guard.Policy{Order: guard.OrderNone}})
	r.publish(0, 50)
	if _, err := s.broker.Ctl(adaptertest.Context(t), "set_vm_memory_high_watermark", "0.000001"); err != nil {
		t.Fatal(err)
	}
	var l lines
	c := r.consumeBy(l.dialer(r.url()), g, func(ctx context.Context, m amqp091.Delivery) error {
		if bytes.HasSuffix(m.Body, []byte("7")) {
			return guard.Permanent(errDown)
		}
		return rec.handle(ctx, m)
	}, WithDeadLetters(d))
	adaptertest.Eventually(t, "the healthy ones are handled and acked", func() bool { return rec.distinct() == 45 && l.unacked() == 5 })
	var why error
	adaptertest.Eventually(t, "the Guard says why", func() bool { why = g.Ready(); return errors.Is(why, errBlocked) })
	if !strings.Contains(why.Error(), "low on memory") {
		t.Errorf("%v", why)
	}
	if _, err := s.broker.Ctl(adaptertest.Context(t), "set_vm_memory_high_watermark", "0.8"); err != nil {
		t.Fatal(err)
	}
	adaptertest.Eventually(t, "all settled", func() bool { return l.unacked() == 0 })
	if err := errors.Join(c.Stop(t), l.check()); err != nil {
		t.Fatal(err)
	}
	all, err := r.get(r.queue + ".dlq")
	if err != nil || len(all) != 5 {
		t.Errorf("%d letters, %v", len(all), err)
	}
}

// Natively: a rejected delivery goes to the queue's dead-letter exchange, once,
// and the acks around it miss it.
func TestNativeDeadLetters(t *testing.T) {
	t.Parallel()
	kinds(t, func(t *testing.T, s *server) {
		for _, kind := range []Kind{Quorum, Classic} {
			dead := "x-" + strings.TrimPrefix(newRig(t, s, Classic, nil).queue, "q-")
			r := newRig(t, s, kind, amqp091.Table{"x-dead-letter-exchange": dead})
			r.on(func(ch *amqp091.Channel) error {
				if err := ch.ExchangeDeclare(dead, "fanout", false, true, false, false, nil); err != nil {
					return err
				}
				if _, err := ch.QueueDeclare(dead, true, false, false, false, nil); err != nil {
					return err
				}
				return ch.QueueBind(dead, "", dead, false, nil)
			})
			var l lines
			var rec record
			const n = 500
			c := r.consumeBy(l.dialer(r.url()), adaptertest.Guard(t, guard.Config{}), func(ctx context.Context, m amqp091.Delivery) error {
				if bytes.HasSuffix(m.Body, []byte("33")) {
					return guard.Permanent(errDown)
				}
				return rec.handle(ctx, m)
			}, WithDeadLetterExchange(dead))
			r.publish(0, n)
			adaptertest.Eventually(t, "all settled", func() bool { k, err := r.ready(); return err == nil && k+l.unacked() == 0 && rec.distinct() == n-5 })
			if err := errors.Join(c.Stop(t), l.check()); err != nil {
				t.Fatal(err)
			}
			var all []amqp091.Delivery
			adaptertest.Eventually(t, "the letters are there", func() bool {
				var err error
				all, err = r.get(dead)
				return err == nil && len(all) >= 5
			})
			if len(all) != 5 || l.books().rejects != 5 || rec.order() != nil {
				t.Errorf("%d letters, %+v, %v", len(all), l.books(), rec.order())
			}
			letter, err := ReadDeadLetter(all[0])
			if err != nil || letter.Reason != "rejected" || letter.Origin.Source != r.queue || string(letter.Body) != "33" {
				t.Errorf("%+v, %v", letter, err)
			}
			r.on(func(ch *amqp091.Channel) error { _, err := ch.QueueDelete(dead, false, false, false); return err })
		}
	})
}

// While settlements are held, as when a consumer is replaced, rejects are too.
func TestRejectsAreHeldWithTheAcks(t *testing.T) {
	t.Parallel()
	r := newRig(t, shared(t, brokers.RabbitMQ4), Quorum, nil)
	var l lines
	const n = 6
	r.publish(0, n)
	_, ch, in := r.opened(l.dialer(r.url()).Config, n)
	p := newPort(r.queue, &options{})
	defer p.end()
	p.rejects = &rejects{}
	p.rejects.begin(p.mark)
	life, _ := newChannelEpoch(ch)
	p.life.Store(life)
	var all []amqp091.Delivery
	for range n {
		d := take(t, in)
		p.tags.add(d.DeliveryTag, 1)
		all = append(all, d)
	}
	settle := func(i int, dead bool) {
		t.Helper()
		if dead {
			if err := p.rejects.Write(t.Context(), &dlq.Record{Properties: p.Meta(all[i]).Properties}); err != nil {
				t.Fatal(err)
			}
		}
		if err := p.Ack(all[i]); err != nil {
			t.Fatal(err)
		}
		if err := p.Ack(all[i]); !errors.Is(err, errSettled) {
			t.Fatalf("settled twice: %v", err)
		}
	}
	settle(1, true)
	if b := l.books(); b.rejects != 1 {
		t.Errorf("not rejected at once: %+v", b)
	}
	p.hold()
	settle(3, true)
	for _, i := range []int{0, 2, 4} {
		settle(i, false)
	}
	if err := p.Flush(); err != nil {
		t.Fatal(err)
	}
	if b := l.books(); b.rejects != 1 || b.acked != 0 || p.tags.open() != n-1 {
		t.Errorf("while held: %+v, %d open", b, p.tags.open())
	}
	p.release()
	if b := l.books(); b.rejects != 2 || b.acked != 3 || b.ackFrames != 1 || p.tags.open() != 1 {
		t.Errorf("after release: %+v, %d open", b, p.tags.open())
	}
	if err := l.check(); err != nil {
		t.Error(err)
	}
}

func TestTablesSurvive(t *testing.T) {
	t.Parallel()
	if fromTable(nil) != nil {
		t.Error("headers of nothing")
	}
	for in, want := range map[any]any{int(7): int64(7), uint64(7): int64(7), uint64(1 << 63): "9223372036854775808"} {
		if got := toField(in); got != want {
			t.Errorf("%T became %#v", in, got)
		}
	}
	for name, c := range map[string]struct {
		t    amqp091.Table
		want int
	}{
		"neither":     {nil, 0},
		"first":       {amqp091.Table{deliveryCount: int64(0)}, 1},
		"third":       {amqp091.Table{deliveryCount: int64(2)}, 3},
		"4.3 nacked":  {amqp091.Table{deliveryCount: int64(1), acquiredCount: int64(5)}, 2},
		"4.3 nothing": {amqp091.Table{acquiredCount: int64(5)}, 5},
		"odd":         {amqp091.Table{deliveryCount: "many"}, 0},
	} {
		if got := deliveries(c.t); got != c.want {
			t.Errorf("%s: %d", name, got)
		}
	}
	if _, ok := longName(amqp091.Table{"a": []any{amqp091.Table{strings.Repeat("n", 300): 1}}}); !ok {
		t.Error("a long name within a list is not seen")
	}
	// What is estimated must not be less than what the client writes.
	m := &amqp091.Publishing{Headers: toTable(letter().Headers), MessageId: "m", ContentType: "c"}
	if n := headerSize(m); n < 200 || n > 1000 {
		t.Errorf("%d bytes", n)
	}
}
