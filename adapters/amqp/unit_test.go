// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardamqp

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/rabbitmq/amqp091-go"
	"pgregory.net/rapid"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
)

// The frames that tags gives out are checked against a broker's books: each acks
// what is settled and nothing else, names a tag that is out, and in the end all
// that is settled is acked.
func TestTagsAgainstABroker(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		tg := tags{mixed: rapid.Bool().Draw(t, "mixed")}
		others := map[uint64]bool{}  // deliveries of other consumers of the channel
		out := map[uint64]bool{}     // at the broker
		settled := map[uint64]bool{} // by us, not acked
		refused := map[uint64]bool{} // of settled: to be rejected
		var next uint64
		send := func(frames []ack) {
			for _, f := range frames {
				if !out[f.tag] {
					t.Fatalf("an ack of %d, which is not out", f.tag)
				}
				if f.reject != refused[f.tag] || f.reject && f.multiple {
					t.Fatalf("%+v; rejected: %t", f, refused[f.tag])
				}
				for n := range others {
					if f.multiple && n < f.tag {
						t.Fatalf("%+v acks %d, which is another consumer's", f, n)
					}
				}
				for n := range out {
					if n == f.tag || f.multiple && n < f.tag {
						if !settled[n] || refused[n] != f.reject {
							t.Fatalf("%d is settled by %+v; settled: %t, rejected: %t", n, f, settled[n], refused[n])
						}
						delete(out, n)
						delete(settled, n)
						delete(refused, n)
					}
				}
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"deliver": func(t *rapid.T) {
				for range rapid.IntRange(1, 40).Draw(t, "n") {
					next++
					if rapid.IntRange(0, 30).Draw(t, "gap") == 0 {
						others[next] = tg.mixed
						next++
					}
					maps.DeleteFunc(others, func(_ uint64, is bool) bool { return !is })
					if _, ok := tg.add(next, 1); !ok {
						t.Fatal("a new tag is refused")
					}
					out[next] = true
				}
				if _, ok := tg.add(uint64(rapid.IntRange(0, int(next)).Draw(t, "old")), 1); ok {
					t.Fatal("an old tag is taken")
				}
			},
			"settle": func(t *rapid.T) {
				open := slices.Sorted(maps.Keys(out))
				open = slices.DeleteFunc(open, func(n uint64) bool { return settled[n] })
				if len(open) == 0 {
					t.Skip("nothing is open")
				}
				for _, i := range rapid.SliceOfN(rapid.IntRange(0, len(open)-1), 1, 60).Draw(t, "which") {
					n := open[i]
					ok, due, rest := tg.settle(n, tagSettled)
					if ok == settled[n] {
						t.Fatalf("settle %d: %t", n, ok)
					}
					settled[n] = true
					if ok && (due != len(settled) || rest != len(out)-due) {
						t.Fatalf("settle %d: %d due, %d left", n, due, rest)
					}
				}
			},
			"reject": func(t *rapid.T) {
				for n := range out {
					if !settled[n] {
						if ok, due, _ := tg.settle(n, tagRejected); !ok || due != len(settled)+1 {
							t.Fatalf("reject %d: %t, %d due", n, ok, due)
						}
						settled[n], refused[n] = true, true
						break
					}
				}
			},
			"ack": func(*rapid.T) { send(tg.take(nil)) },
			"": func(t *rapid.T) {
				if tg.open() != len(out)-0 {
					t.Fatalf("%d are out, tags says %d", len(out), tg.open())
				}
				var oldest uint64
				for n := range out {
					if oldest == 0 || n < oldest {
						oldest = n
					}
				}
				if n, high := tg.oldest(); n != oldest || high != next {
					t.Fatalf("oldest %d, latest %d; tags says %d, %d", oldest, next, n, high)
				}
				if most := 4*len(out) + 256; len(tg.out) > most {
					t.Fatalf("%d entries for %d tags", len(tg.out), len(out))
				}
			},
		})
		send(tg.take(nil))
		if len(settled) > 0 {
			t.Fatalf("%d settled tags were never acked", len(settled))
		}
	})
}

// Acks that come in order take one frame.
func TestTagsInOrder(t *testing.T) {
	t.Parallel()
	var tg tags
	for n := uint64(1); n <= 100; n++ {
		tg.add(n, 1)
		tg.settle(n, tagSettled)
	}
	if f := tg.take(nil); len(f) != 1 || f[0] != (ack{tag: 100, multiple: true}) {
		t.Errorf("%v", f)
	}
	tg.add(101, 1)
	tg.settle(101, tagSettled)
	if f := tg.take(nil); len(f) != 1 || f[0] != (ack{tag: 101}) {
		t.Errorf("%v", f)
	}
}

// On a channel that may not be ours alone, they do up to the first delivery
// that is another's.
func TestTagsOfAMixedChannel(t *testing.T) {
	t.Parallel()
	tg := tags{mixed: true}
	for n := uint64(1); n <= 103; n++ {
		if n != 51 && n != 102 {
			tg.add(n, 1)
			tg.settle(n, tagSettled)
		}
	}
	f := tg.take(nil)
	if len(f) != 52 || f[0] != (ack{tag: 50, multiple: true}) || f[1] != (ack{tag: 52}) || f[51] != (ack{tag: 103}) {
		t.Errorf("%v", f)
	}
}

// Acks do not wait while the program may run out of deliveries.
func TestPressing(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		due, left int
		want      bool
	}{
		{1, 0, true}, {1, -1, true}, // all others are in the program's hands
		{1, 1, true}, {1, 2, false}, {49, 51, false}, {50, 50, true},
		{63, 60000, false}, {64, 60000, true},
	} {
		if got := pressing(c.due, c.left); got != c.want {
			t.Errorf("%+v: %t", c, got)
		}
	}
}

// A delivery is over its time not before the limit less two looks, and not
// later than the limit.
func TestAges(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		const limit = 160 * time.Second
		a := newAges(limit)
		var high, oldest uint64
		arrived := map[uint64]int{}
		for s := range 700 {
			now := time.Unix(int64(s), 0)
			if rapid.IntRange(0, 9).Draw(t, "deliver") == 0 {
				high++
				arrived[high] = s
				if oldest == 0 {
					oldest = high
				}
			}
			if oldest > 0 && rapid.IntRange(0, 99).Draw(t, "settle") == 0 {
				if oldest++; oldest > high {
					oldest = 0
				}
			}
			over := a.over(now, oldest, high)
			age := 0
			if oldest > 0 {
				age = s - arrived[oldest]
			}
			if over && age < 140 || !over && age > 160 {
				t.Fatalf("%d s: over %t", age, over)
			}
			if over {
				a, oldest, high = newAges(limit), 0, 0
				clear(arrived)
			}
			if len(a.samples) > 2*agesPerLimit {
				t.Fatalf("%d samples", len(a.samples))
			}
		}
	})
}

func TestPace(t *testing.T) {
	t.Parallel()
	p := &pace{ramp: guard.Ramp{Start: 10, Double: time.Second, For: 3 * time.Second}}
	admitted := func(from, to time.Duration) (n int) {
		for at := from; at < to; at += time.Millisecond {
			for p.Admit(at) == 0 && n < 1e5 {
				n++
			}
		}
		return n
	}
	if n := admitted(0, time.Millisecond); n != 1e5 {
		t.Errorf("%d before it begins", n)
	}
	p.begin()
	// 10/ln 2·(2^t−1): 14 in the first second, 29 in the next, 58 in the third.
	for i, most := range []int{16, 30, 59} {
		from := time.Second * time.Duration(i+1)
		if n := admitted(from, from+time.Second); n > most || n < most-4 {
			t.Errorf("%d in second %d", n, i+1)
		}
	}
	if n := admitted(4*time.Second, 4*time.Second+time.Millisecond); n != 1e5 {
		t.Errorf("%d after it has ended", n)
	}
	asked := &limiterFunc{}
	q := &pace{inner: asked, ramp: guard.Ramp{Off: true}}
	q.begin()
	if q.Admit(0) != time.Minute || asked.n != 1 {
		t.Error("the user's limiter is not asked")
	}
}

type limiterFunc struct{ n int }

func (l *limiterFunc) Admit(time.Duration) time.Duration { l.n++; return time.Minute }

// The close event alone ends the tags' life: with the client's recovery the
// channel is open again before anybody has read the event.
func TestTheCloseEventEndsTheTags(t *testing.T) {
	t.Parallel()
	l := &channelEpoch{ch: new(amqp091.Channel), latch: make(chan *amqp091.Error, 1)}
	p := newPassivePort(&options{})
	p.life.Store(l)
	p.tags.add(1, 1)
	l.latch <- amqp091.ErrClosed
	if err := p.Ack(&taken{Delivery: amqp091.Delivery{DeliveryTag: 1}}); !errors.Is(err, errChannelGone) {
		t.Errorf("passive: %v", err)
	}
	q := newPort("q", &options{})
	q.life.Store(l)
	q.tags.add(1, 1)
	if err := q.Ack(amqp091.Delivery{DeliveryTag: 1}); !errors.Is(err, errChannelGone) {
		t.Errorf("function: %v", err)
	}
}

// Every endpoint is tried, not always in one order, and a context ends it.
func TestDialerTriesAllInAFreshOrder(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	var rounds [][]string
	d := Dialer{URLs: []string{"amqp://h1/", "amqp://h2/", "amqp://h3/"}, Config: amqp091.Config{Dial: func(_, addr string) (net.Conn, error) {
		mu.Lock()
		defer mu.Unlock()
		if len(rounds) == 0 || len(rounds[len(rounds)-1]) == 3 {
			rounds = append(rounds, nil)
		}
		rounds[len(rounds)-1] = append(rounds[len(rounds)-1], addr)
		return nil, errDown
	}}}
	firsts := map[string]int{}
	for range 60 {
		if _, err := d.once(t.Context()); err == nil {
			t.Fatal("connected to nobody")
		}
	}
	for _, r := range rounds {
		if len(slices.Compact(slices.Sorted(slices.Values(r)))) != 3 {
			t.Fatalf("a round tries %v", r)
		}
		firsts[r[0]]++
	}
	if len(firsts) != 3 || len(rounds) != 60 {
		t.Errorf("%d rounds begin with %v", len(rounds), firsts)
	}
	// A peer that accepts and says nothing.
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	start := time.Now()
	if _, err := Dial(fmt.Sprintf("amqp://%s/", l.Addr())).once(ctx); err == nil || time.Since(start) > 5*time.Second {
		t.Errorf("%v after %s", err, time.Since(start))
	}
	start = time.Now()
	if _, err := (Dialer{URLs: []string{fmt.Sprintf("amqp://%s/", l.Addr())}, Timeout: 50 * time.Millisecond}).once(t.Context()); err == nil || time.Since(start) > 5*time.Second {
		t.Errorf("%v after %s", err, time.Since(start))
	}
}

// Dials at the same time and one after another share nothing that the client
// writes: each endpoint is asked for under its own name.
func TestDialsShareNothing(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	asked := map[string]int{} // by the name in the handshake
	addr := handshakes(t, func(name string) {
		mu.Lock()
		defer mu.Unlock()
		asked[name]++
	})
	d := Dialer{URLs: []string{"amqps://one.example/", "amqps://two.example/"}, Config: amqp091.Config{
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, // the names are what counts
		Properties:      amqp091.Table{"connection_name": "orders"},
		Dial:            func(network, _ string) (net.Conn, error) { return net.Dial(network, addr) },
	}}
	const dials = 8
	var all sync.WaitGroup
	for range dials {
		all.Go(func() {
			if _, err := d.once(t.Context()); !errors.Is(err, amqp091.ErrCredentials) {
				t.Errorf("not as far as the credentials: %v", err)
			}
		})
	}
	all.Wait()
	mu.Lock()
	defer mu.Unlock()
	if asked["one.example"] != dials || asked["two.example"] != dials {
		t.Errorf("%d dials of each asked for %v", dials, asked)
	}
	if c := d.Config; c.TLSClientConfig.ServerName != "" || len(c.Properties) != 1 {
		t.Errorf("the caller's configuration was written to: name %q, properties %v", c.TLSClientConfig.ServerName, c.Properties)
	}
}

// A network that breaks in the handshake is no wrong password, which a broker
// answers by hanging up, too.
func TestBrokenHandshakeIsNoRefusal(t *testing.T) {
	t.Parallel()
	kinds(t, func(t *testing.T, s *server) {
		r := newRig(t, s, Quorum, nil)
		d := Dial(r.url())
		// The client writes its version, who it is, what it agrees to, and the vhost.
		breaks := []int{2, 2, 1, 2, 4} // at these writes
		dials := 0
		d.Config.Dial = func(network, addr string) (net.Conn, error) {
			c, err := net.Dial(network, addr)
			if dials++; err == nil && dials <= len(breaks) {
				c = &breaking{Conn: c, left: breaks[dials-1]}
			}
			return c, err
		}
		l, err := d.connect(t.Context(), true, "q", adaptertest.Log())
		if err != nil {
			t.Fatalf("%d dials: %v", dials, err)
		}
		l.close()
		if dials <= len(breaks) {
			t.Errorf("%d dials: nothing broke", dials)
		}
	})
}

// A writer that panics or ignores its context does not hold up the end of a channel.
func TestWriteSafely(t *testing.T) {
	t.Parallel()
	if err := writeSafely(t.Context(), dlq.WriterFunc(func(context.Context, *dlq.Record) error { panic("full") }), nil); err == nil || !strings.Contains(err.Error(), "full") {
		t.Errorf("%v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	release := make(chan struct{})
	defer close(release)
	deaf := dlq.WriterFunc(func(context.Context, *dlq.Record) error {
		cancel()
		<-release
		return nil
	})
	for range 2 {
		if err := writeSafely(ctx, deaf, nil); !errors.Is(err, context.Canceled) {
			t.Errorf("%v", err)
		}
	}
}

// breaking is a connection that breaks at one of its writes.
type breaking struct {
	net.Conn
	left int
}

func (b *breaking) Write(p []byte) (int, error) {
	if b.left--; b.left == 0 {
		_ = b.Close()
	}
	return b.Conn.Write(p)
}

// Only what the broker says ends the first connection at once.
func TestFirstConnectionRefused(t *testing.T) {
	t.Parallel()
	said := func(code int, reason string) error { return &amqp091.Error{Code: code, Reason: reason, Server: true} }
	for _, c := range []struct {
		errs []error
		last bool
	}{
		{errs: []error{said(amqp091.NotAllowed, "NOT_ALLOWED - vhost x not found")}, last: true},
		{errs: []error{said(amqp091.AccessRefused, "ACCESS_REFUSED - Login was refused")}, last: true},
		{errs: []error{amqp091.ErrSASL}, last: true},
		{errs: []error{said(amqp091.NotAllowed, "NOT_ALLOWED - access to vhost 'x' refused for user 'y': connection limit (1) is reached")}},
		{errs: []error{said(amqp091.NotAllowed, "NOT_ALLOWED - vhost rate-limit not found")}, last: true},
		{errs: []error{said(amqp091.NotAllowed, "NOT_ALLOWED - access to vhost 'x' refused for user 'y', backend rabbit_auth_backend_http returned an error: timeout")}},
		{errs: []error{said(amqp091.InternalError, "INTERNAL_ERROR - vhost 'x' is down")}},
		{errs: []error{io.EOF, io.EOF, io.EOF, io.EOF}},
		{errs: []error{amqp091.ErrCredentials, amqp091.ErrVhost}},
		{errs: []error{amqp091.ErrCredentials, amqp091.ErrCredentials, io.EOF, amqp091.ErrCredentials}},
		{errs: []error{amqp091.ErrCredentials, amqp091.ErrCredentials, amqp091.ErrCredentials}, last: true},
	} {
		var r refusals
		for i, err := range c.errs {
			if got, want := r.last([]error{fmt.Errorf("connect: %w", err)}), c.last && i == len(c.errs)-1; got != want {
				t.Errorf("%v: %t after %d", c.errs, got, i+1)
			}
			if new(refusals).last([]error{err, io.EOF}) {
				t.Errorf("%v: the other endpoint may be well", err)
			}
		}
	}
}

// handshakes is the address of a broker behind TLS that hangs up when it has
// been told who calls.
func handshakes(t *testing.T, asked func(name string)) string {
	t.Helper()
	s := httptest.NewTLSServer(nil) // for its certificate
	certs := s.TLS.Certificates
	s.Close()
	l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: certs, GetConfigForClient: func(h *tls.ClientHelloInfo) (*tls.Config, error) {
		asked(h.ServerName)
		return nil, nil //nolint:nilnil // the configuration stays
	}})
	if err != nil {
		t.Fatal(err)
	}
	start := append([]byte{
		1, 0, 0, 0, 0, 0, 28, // a method of 28 bytes on channel 0
		0, 10, 0, 10, 0, 9, 0, 0, 0, 0, // connection.start of 0-9, with no properties
	}, "\x00\x00\x00\x05PLAIN\x00\x00\x00\x05en_US\xce"...)
	var open sync.WaitGroup
	open.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			open.Go(func() {
				defer c.Close()
				_, err := io.ReadFull(c, make([]byte, len("AMQP0091")))
				if err == nil {
					_, err = c.Write(start)
				}
				if err == nil {
					_, _ = c.Read(make([]byte, 4096))
				}
			})
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		open.Wait()
	})
	return l.Addr().String()
}

// A consumer timeout that is asked for by an argument is the guard's too.
func TestConsumerTimeoutOfTheArguments(t *testing.T) {
	t.Parallel()
	g := adaptertest.Guard(t, guard.Config{})
	for _, c := range []struct {
		arg      any
		opt      time.Duration
		want     time.Duration
		conflict bool
	}{
		{nil, 0, defaultConsumerTimeout, false},
		{int64(60000), 0, time.Minute, false},
		{int32(60000), 30 * time.Second, 30 * time.Second, false},
		{60000, time.Hour, time.Hour, true},
		{"a minute", 0, defaultConsumerTimeout, false},
	} {
		opts := []Option{WithConsumerTimeout(c.opt)}
		if c.arg != nil {
			opts = append(opts, WithConsumeArgs(amqp091.Table{"x-consumer-timeout": c.arg}))
		}
		o, err := newOptions(g, opts)
		if o.timeout != c.want || (err != nil) != c.conflict {
			t.Errorf("%+v: %s, %v", c, o.timeout, err)
		}
	}
}

// A program that is busy elsewhere has not failed: a delivery that it has not taken is no call.
func TestAProgramThatIsBusyElsewhereOpensNoBreaker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := adaptertest.Guard(t, guard.Config{Policy: guard.Policy{Breaker: breaker.Config{MinSample: 1, Plain: true}}})
		d := &passiveSession{
			o: &options{queue: "q"}, out: make(chan amqp091.Delivery), quit: make(chan struct{}),
			port: newPassivePort(&options{queue: "q"}), handed: make(map[uint64]*attempt),
		}
		defer d.port.end()
		d.port.life.Store(&channelEpoch{ch: new(amqp091.Channel)})
		d.port.hold() // there is no broker
		var err error
		if d.src, err = guard.Open(g, guard.SourceConfig{Name: "q"}, guard.Limits{}, d.port, nil); err != nil {
			t.Fatal(err)
		}
		var handing sync.WaitGroup
		handing.Go(d.handOut)
		d.port.tags.add(1, 100)
		if err := d.src.Offer(&taken{Delivery: amqp091.Delivery{DeliveryTag: 1}}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Minute)
		if b := d.src.State().Breaker; b.State != breaker.Closed {
			t.Errorf("%+v", b)
		}
		m := <-d.out
		if err := m.Ack(false); err != nil {
			t.Error(err)
		}
		if a := d.src.Account(); a.Acked != 1 {
			t.Errorf("%+v", a)
		}
		close(d.quit)
		d.src.End(context.Background(), guard.ReasonShutdown)
		handing.Wait()
	})
}

// A dead letter whose turn does not come, behind writes that hang, has not failed: it is put off.
func TestDLQTurnThatDoesNotCome(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &DLQ{cfg: DLQConfig{Queue: "q.dlq"}.withDefaults(), turn: make(chan struct{}, 1)} // another write has the turn
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		err := d.Write(ctx, &dlq.Record{Body: []byte("body")})
		if !errors.Is(err, dlq.ErrPutOff) || !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
	})
}
