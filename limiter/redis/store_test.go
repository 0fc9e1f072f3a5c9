// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package redis

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/big"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	goredis "github.com/redis/go-redis/v9"
	"pgregory.net/rapid"

	"github.com/stormguard-mq/stormguard/internal/brokers"
	"github.com/stormguard-mq/stormguard/limiter"
)

// The script against a bucket in fractions, on the server's own stamps.
func TestDecisionIsABucket(t *testing.T) {
	t.Parallel()
	c := dial(t, brokers.ForTest(t, brokers.Redis))
	prefix := "test:" + t.Name() + strconv.FormatInt(time.Now().UnixNano(), 36) + ":"
	run := 0
	rapid.Check(t, func(t *rapid.T) {
		ctx := context.Background()
		limit := limiter.Limit{
			Rate:  rapid.SampledFrom([]float64{.001, 3, 1000, 12345.678, 1e6, 1e9}).Draw(t, "rate"),
			Burst: rapid.SampledFrom([]int{1, 2, 5, 300, 1e9}).Draw(t, "burst"),
		}
		cfg := patient(limit)
		cfg.Prefix = prefix
		s, err := New(c, cfg)
		if err != nil {
			t.Fatal(err)
		}
		run++
		h := s.Key(strconv.Itoa(run))
		rate := new(big.Rat)
		rate.SetFloat64(limit.Rate)
		burst := new(big.Rat).SetInt64(int64(limit.Burst))
		level, at := new(big.Rat).Set(burst), int64(0)
		tokens := func(x *big.Rat) float64 { f, _ := x.Float64(); return f }
		for range 40 {
			time.Sleep(time.Duration(rapid.SampledFrom([]int{0, 0, 0, 1, 3}).Draw(t, "ms")) * ms)
			most := rapid.SampledFrom([]int{0, 1, 1, 2, 7, limit.Burst, limit.Burst + 1}).Draw(t, "most")
			least := rapid.SampledFrom([]int{most, most, min(1, most)}).Draw(t, "least")
			back := rapid.SampledFrom([]int{0, 0, 0, 1, 5, limit.Burst}).Draw(t, "back")
			asked := time.Now()
			a, err := s.ask(h, least, most, back)
			if err != nil {
				t.Fatal(err)
			}
			kept, err := c.Get(ctx, h.keys[0]).Result()
			if errors.Is(err, goredis.Nil) {
				// It is full, and says nothing of when: at once, or a second and more after the
				// answer, if the machine stood still that long.
				if (a.left != limit.Burst || a.took > 0) && time.Since(asked) < time.Second {
					t.Fatal("forgotten though it is not full")
				}
				level.Set(burst)
				continue
			}
			if err != nil {
				t.Fatal(err)
			}
			var stored float64
			var now int64
			if _, err := fmt.Sscan(kept, &stored, &now); err != nil {
				t.Fatal(err)
			}
			if at != 0 {
				minted := new(big.Rat).SetFrac64(now-at, 1e6)
				level.Add(level, minted.Mul(minted, rate))
			}
			level.Add(least0(level, burst), new(big.Rat).SetInt64(int64(back)))
			level = least0(level, burst)
			at = now
			const tiny = 1e-5 // a double of 1e9 tokens has 1e-7
			there := tokens(level)
			switch {
			case a.took == 0 && least > 0:
				if there >= float64(least)+tiny {
					t.Fatal("denied what is there")
				}
				wait := (float64(least) - there) / limit.Rate
				slack := 1e-5 + tiny/limit.Rate + wait*1e-9
				if got := a.wait.Seconds(); wait < 9e9 && (got < wait-slack || got > wait+slack) || a.wait < 0 {
					t.Fatal("the wait is not the time until there is enough")
				}
			default:
				if a.took < least || a.took > most || float64(a.took) > there+tiny {
					t.Fatal("admitted what is not there")
				}
				if a.took < most && float64(a.took)+1 <= there-tiny {
					t.Fatal("took less than there is")
				}
			}
			level.Sub(level, new(big.Rat).SetInt64(int64(a.took)))
			if d := tokens(level) - stored; d > tiny || d < -tiny {
				t.Fatal("the bucket holds something else")
			}
			level.SetFloat64(stored) // a double's rounding does not add up
			ttl, err := c.PTTL(ctx, h.keys[0]).Result()
			full := (float64(limit.Burst) - stored) / limit.Rate
			if err != nil || full < 9e9 && (ttl.Seconds() > full+1.01 || ttl.Seconds() < full-1-time.Since(asked).Seconds()) { // more than 292 years is no Duration
				t.Fatal("it is kept longer or shorter than until it is full")
			}
		}
	})
}

func least0(a, b *big.Rat) *big.Rat {
	if a.Cmp(b) < 0 {
		return a
	}
	return new(big.Rat).Set(b)
}

// Many clients, one limit, to the token.
func TestManyClients(t *testing.T) {
	t.Parallel()
	const clients, rate, burst = 8, 3000, 30_000 // ten seconds' worth: the machine may stand still that long
	url := brokers.ForTest(t, brokers.Redis)
	cfg := patient(limiter.Limit{Rate: rate, Burst: burst})
	cfg.Prefix = "test:" + t.Name() + time.Now().Format(":150405.000000:")
	watch := dial(t, url)
	var handles []*Handle
	for range clients {
		handles = append(handles, at(t, dial(t, url), cfg).Key("k"))
	}
	bucket := func() (level float64, at int64) {
		if _, err := fmt.Sscan(watch.Get(t.Context(), handles[0].keys[0]).Val(), &level, &at); err != nil {
			t.Fatal(err)
		}
		return level, at
	}
	var admitted atomic.Int64
	var all sync.WaitGroup
	if !handles[0].AllowN(burst - 1) {
		t.Fatal(handles[0].store.Err())
	}
	had, from := bucket()
	for i, h := range handles {
		all.Go(func() {
			for end := time.Now().Add(1500 * ms); time.Now().Before(end) || admitted.Load() < 100; {
				if h.AllowN(1 + i%3) {
					admitted.Add(int64(1 + i%3))
				}
			}
		})
	}
	all.Wait()
	left, to := bucket()
	got, want := float64(admitted.Load())+left, had+rate*float64(to-from)/1e6
	if admitted.Load() < 100 || got < want-.001 || got > want+.001 {
		t.Errorf("%d admitted and %v left, together want %v", admitted.Load(), left, want)
	}
}

// Waiters of several processes: as fast as the limit allows. Their order is
// TestWaitersInOrder's.
func TestWaitPaces(t *testing.T) {
	t.Parallel()
	url := brokers.ForTest(t, brokers.Redis)
	cfg := patient(limiter.Limit{Rate: 100, Burst: 2})
	cfg.Prefix = "test:" + t.Name() + time.Now().Format(":150405.000000:")
	var all sync.WaitGroup
	start := time.Now()
	const stores, each = 3, 20
	for range stores {
		h := at(t, dial(t, url), cfg).Key("k")
		for range each {
			all.Go(func() {
				if err := h.Wait(t.Context()); err != nil {
					t.Error(err)
				}
			})
		}
	}
	all.Wait()
	if d := time.Since(start); d < (stores*each-2)*10*ms {
		t.Errorf("%d of 100/s in %v", stores*each, d)
	}
}

func TestWaitEnds(t *testing.T) {
	t.Parallel()
	s, _ := open(t, patient(limiter.Limit{Rate: .01, Burst: 3}))
	h := s.Key("k")
	is(t, h.WaitN(t.Context(), 4), limiter.ErrBurst)
	is(t, s.Key("").Wait(t.Context()), errConfig)
	if err := h.WaitN(t.Context(), 3); err != nil {
		t.Fatal(err)
	}
	// 100 s: a deadline of a minute is answered now.
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	start := time.Now()
	is(t, h.Wait(ctx), context.DeadlineExceeded)
	if d := time.Since(start); d > 20*time.Second {
		t.Errorf("took %v to know that it cannot be in time", d)
	}
	var denied *limiter.DeniedError
	if err := limiter.Enter(ctx, h, time.Hour); !errors.As(err, &denied) || denied.After < 80*time.Second {
		t.Errorf("Enter: %v", err)
	}
	ctx, cancel = context.WithCancel(t.Context())
	waits := make(chan error, 2)
	go func() { waits <- h.Wait(ctx) }()
	soon(t, "waiting", func() bool { return h.waiting.Load() == 1 })
	if h.Allow() {
		t.Error("passed a waiter")
	}
	cancel()
	is(t, <-waits, context.Canceled)
	go func() { waits <- h.Wait(t.Context()) }()
	soon(t, "waiting", func() bool { return h.waiting.Load() == 1 })
	s.Close()
	is(t, <-waits, limiter.ErrClosed)
	is(t, h.Wait(t.Context()), limiter.ErrClosed)
	if h.Allow() || h.Admit(0) == 0 {
		t.Error("a closed store admits")
	}
}

// Processes whose clock says the year 2000, and stands still, are admitted at the
// server's pace.
func TestClocksOfClients(t *testing.T) {
	t.Parallel()
	url := brokers.ForTest(t, brokers.Redis)
	prefix := "test:" + t.Name() + time.Now().Format(":150405.000000:")
	synctest.Test(t, func(t *testing.T) {
		c := dial(t, url)
		cfg := patient(limiter.Limit{Rate: 200, Burst: 2000})
		cfg.Prefix = prefix
		h := at(t, c, cfg).Key("k")
		before, start, admitted := serverTime(t, c), time.Now(), 0
		if !h.AllowN(2000) {
			t.Fatal(h.store.Err())
		}
		from := serverTime(t, c)
		for serverTime(t, c).Sub(from) < 500*ms {
			if h.Allow() {
				admitted++
			}
		}
		for h.Allow() {
			admitted++
		}
		after := serverTime(t, c)
		if start.Year() != 2000 || time.Since(start) > 100*ms {
			t.Fatal("not a clock that stands still", start, time.Since(start))
		}
		if bound := 200 * after.Sub(before).Seconds(); float64(admitted) > bound || admitted < 99 {
			t.Errorf("%d admitted, want 99 to %v", admitted, bound)
		}
	})
}

// A server whose clock was set back an hour mints nothing for that hour, and goes on
// at once.
func TestServerClockSetBack(t *testing.T) {
	t.Parallel()
	s, c := open(t, patient(limiter.Limit{Rate: 20, Burst: 10}))
	h := s.Key("k")
	ahead := serverTime(t, c).Add(time.Hour)
	if err := c.Set(t.Context(), h.keys[0], fmt.Sprintf("3 %d", ahead.UnixMicro()), 0).Err(); err != nil {
		t.Fatal(err)
	}
	if h.AllowN(4) || !h.AllowN(3) {
		t.Error("not the three that were there")
	}
	soon(t, "minted", h.Allow)
}

func TestScriptIsForgotten(t *testing.T) {
	t.Parallel()
	b := brokers.StartForTest(t, brokers.Redis, brokers.Options{}) // SCRIPT FLUSH is everybody's
	c := dial(t, b.Addr())
	s := at(t, c, patient(limiter.Limit{Rate: .001, Burst: 50}))
	h := s.Key("k")
	for i := range 50 {
		if i%10 == 0 {
			if err := c.ScriptFlush(t.Context()).Err(); err != nil {
				t.Fatal(err)
			}
		}
		if !h.Allow() {
			t.Fatalf("%d denied: %v", i, s.Err())
		}
	}
	if h.Allow() {
		t.Error("one too many")
	}
	// One round trip: the script is named, not sent.
	info, err := c.Info(t.Context(), "commandstats").Result()
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"eval": "5", "evalsha": "51"} {
		if !strings.Contains(info, "cmdstat_"+name+":calls="+want+",") {
			t.Errorf("want %s %s in\n%s", want, name, info)
		}
	}
}

// An answer that time mends is no refusal, also where a Redis before 7 hides it in the
// script's.
func TestPassingAnswers(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]bool{
		"READONLY You can't write against a read only replica.":                                                                              false,
		"ERR Error running script (call to f_1c): @user_script:37: @user_script: 37: -READONLY You can't write against a read only replica.": false,
		"ERR Error running script (call to f_1c): @user_script:37: WRONGTYPE Operation against a key holding the wrong kind of value":        true,
		"NOPERM this user has no permissions to run the 'evalsha' command":                                                                   true,
	} {
		if got := refused(told(text)); got != want {
			t.Errorf("%s: %t", text, got)
		}
	}
}

// A refusal is logged, and not each one.
func TestRefusalIsLogged(t *testing.T) {
	t.Parallel()
	var logged lockedBuffer
	s := &Store{log: slog.New(slog.NewTextHandler(&logged, nil)), start: time.Now()}
	for range 3 {
		is(t, s.failed(told("NOPERM this user has no permissions")), errRefused)
	}
	if said := logged.String(); strings.Count(said, "limit store refuses") != 1 || !strings.Contains(said, "NOPERM") {
		t.Errorf("logged:\n%s", said)
	}
}

// told is an error that a server answered with.
type told string

func (e told) Error() string { return string(e) }
func (told) RedisError()     {}

// A key that is something else is refused, not overwritten, and keeps nobody from
// other keys.
func TestWrongType(t *testing.T) {
	t.Parallel()
	for _, silence := range []Silence{FailClosed, FailOpen} {
		cfg := patient(limiter.Limit{Rate: 1, Burst: 5})
		cfg.Silence = silence
		s, c := open(t, cfg)
		hash, word, other := s.Key("hash"), s.Key("word"), s.Key("other")
		if err := errors.Join(c.HSet(t.Context(), hash.keys[0], "a", 1).Err(), c.Set(t.Context(), word.keys[0], "mine", 0).Err()); err != nil {
			t.Fatal(err)
		}
		for _, h := range []*Handle{hash, word} {
			if h.Allow() != (silence == FailOpen) {
				t.Errorf("%v: Allow", silence)
			}
			is(t, s.Err(), errRefused)
			if !strings.Contains(s.Err().Error(), "WRONGTYPE") {
				t.Errorf("%v does not say why", s.Err())
			}
			if err := h.Wait(t.Context()); (err == nil) != (silence == FailOpen) || err != nil && !errors.Is(err, errRefused) {
				t.Errorf("%v: Wait: %v", silence, err)
			}
			if silence == FailOpen {
				soon(t, "Admit is open", func() bool { return h.Admit(0) == 0 })
				idle(t, h) // or its refusal may come after the other key's answer
			}
			if !other.Allow() || s.Err() != nil {
				t.Errorf("%v: another key: %v", silence, s.Err())
			}
		}
		if v, err := c.Get(t.Context(), word.keys[0]).Result(); v != "mine" || err != nil {
			t.Errorf("overwritten: %q, %v", v, err)
		}
	}
}

func TestKeysAtRedis(t *testing.T) {
	t.Parallel()
	s, c := open(t, Config{Limit: limiter.Limit{Rate: 1000, Burst: 10}, Limits: map[string]limiter.Limit{"slow": {Rate: .001, Burst: 2}}, Timeout: 10 * time.Second})
	if !s.Key("slow").AllowN(2) || s.Key("slow").Allow() || s.Key("fast").AllowN(11) || !s.Key("fast").AllowN(10) {
		t.Error("not their own limits")
	}
	if n, err := c.Exists(t.Context(), s.cfg.Prefix+"{slow}").Result(); n != 1 || err != nil {
		t.Errorf("%d, %v", n, err)
	}
	soon(t, "a full bucket is forgotten", func() bool {
		n, err := c.Exists(t.Context(), s.cfg.Prefix+"{fast}").Result()
		return n == 0 && err == nil
	})
}

func TestRefund(t *testing.T) {
	t.Parallel()
	s, _ := open(t, patient(limiter.Limit{Rate: .001, Burst: 10}))
	h := s.Key("k")
	left := func() int {
		a, err := s.ask(h, 0, 0, 0)
		if err != nil {
			t.Fatal(err)
		}
		return a.left
	}
	if !h.AllowN(6) || !s.Key("k").AllowN(4) {
		t.Fatal("the burst")
	}
	h.Refund(2)
	h.Refund(1)
	soon(t, "given back", func() bool { return left() == 3 })
	h.Refund(100) // of which it had 3
	h.Refund(1)
	soon(t, "given back", func() bool { return left() == 6 })
	s.Close() // waits for all that is on its way
	again := at(t, s.client, s.cfg)
	if a, err := again.ask(h, 0, 0, 0); err != nil || a.left != 6 {
		t.Errorf("%d left, want 6 of what another handle has not: %v", a.left, err)
	}
}

// Together with a local limit.
func TestAll(t *testing.T) {
	t.Parallel()
	s, _ := open(t, patient(limiter.Limit{Rate: .001, Burst: 10}))
	tenant, err := limiter.Local(limiter.Limit{Rate: .001, Burst: 3})
	if err != nil {
		t.Fatal(err)
	}
	h := s.Key("k")
	g := limiter.All(h, tenant) // the wrong order, so that there is something to give back
	for range 3 {
		if !g.Allow() {
			t.Fatal("denied")
		}
	}
	for range 5 {
		if g.Allow() {
			t.Fatal("admitted")
		}
	}
	soon(t, "given back", func() bool {
		a, err := s.ask(h, 0, 0, 0)
		return err == nil && a.left == 7
	})
}

// A node of a real cluster, which refuses keys that are not its own.
func TestCluster(t *testing.T) {
	t.Parallel()
	b := brokers.StartForTest(t, brokers.Redis, brokers.Options{Set: map[string]string{"cluster-enabled": "yes"}})
	node := dial(t, b.Addr())
	if err := node.ClusterAddSlotsRange(t.Context(), 0, 16383).Err(); err != nil {
		t.Fatal(err)
	}
	c := goredis.NewClusterClient(&goredis.ClusterOptions{Addrs: []string{node.Options().Addr}, ContextTimeoutEnabled: true, ReadTimeout: time.Minute, WriteTimeout: time.Minute})
	t.Cleanup(func() { _ = c.Close() })
	s := at(t, c, patient(limiter.Limit{Rate: .001, Burst: 3}))
	soon(t, "the cluster is up", func() bool { return s.Key("first").Allow() })
	for i := range 20 {
		h := s.Key(fmt.Sprintf("tenant-%d}x{", i))
		if !h.AllowN(3) || h.Allow() {
			t.Errorf("key %d: %v", i, s.Err())
		}
	}
}

// kill -9 and back: denied or admitted meanwhile as configured, at once, and exact
// again with what was there before. With appendfsync everysec Redis holds a write
// back while the disk is slow, and answers before.
func TestServerKilled(t *testing.T) {
	t.Parallel()
	b := brokers.StartForTest(t, brokers.Redis, brokers.Options{Set: map[string]string{"appendfsync": "always"}})
	c := dial(t, b.Addr())
	limit := limiter.Limit{Rate: .001, Burst: 40}
	var logged lockedBuffer
	closed := at(t, c, Config{Limit: limit, Timeout: 10 * time.Second}, WithLogger(slog.New(slog.NewTextHandler(&logged, nil))))
	open := at(t, c, Config{Limit: limit, Timeout: 10 * time.Second, Silence: FailOpen, Prefix: "open:"})
	for _, s := range []*Store{closed, open} {
		if !s.Key("k").AllowN(15) {
			t.Fatal(s.Err())
		}
	}
	if kept, err := c.ConfigGet(t.Context(), "appendfsync").Result(); err != nil || kept["appendfsync"] != "always" {
		t.Fatalf("%v, %v: what is asked of it does not hold", kept, err)
	}
	if err := b.Kill(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	h, o := closed.Key("k"), open.Key("k")
	for range 2000 { // with a question each it would be minutes
		if h.Allow() || !o.Allow() {
			t.Fatal("not as configured")
		}
	}
	is(t, closed.Err(), ErrSilent)
	if l := h.Level(); l.Left != 0 || l.Next > pause {
		t.Errorf("%+v", l)
	}
	if o.Wait(t.Context()) != nil || o.Admit(0) != 0 || h.Admit(0) == 0 {
		t.Error("not as configured")
	}
	o.Refund(7) // perhaps of what Redis did not decide
	ctx, cancel := context.WithTimeout(t.Context(), 300*ms)
	defer cancel()
	err := h.Wait(ctx)
	is(t, err, ErrSilent)
	is(t, err, context.DeadlineExceeded)
	for _, k := range []*Handle{h, o} {
		idle(t, k) // or it may take tokens ahead once Redis is back
	}

	waited := make(chan error)
	go func() { waited <- h.Wait(t.Context()) }()
	if err := b.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-waited; err != nil {
		t.Error(err)
	}
	for _, s := range []*Store{closed, open} {
		want := 25
		if s == closed {
			want = 24
		}
		probe := s.Key("k")
		soon(t, "decides again", func() bool { a, err := s.ask(probe, 0, 0, 0); return err == nil && a.left <= want })
		n := 0
		for probe.Allow() {
			n++
		}
		// A little less if a question was lost on its way back; never more.
		if n > want || n < want-3 {
			t.Errorf("%v: %d left, want %d", s.cfg.Silence, n, want)
		}
		if s.Err() != nil {
			t.Error(s.Err())
		}
	}
	if said := logged.String(); strings.Count(said, "does not answer") == 0 || !strings.Contains(said, "answers again") || strings.Count(said, "\n") > 40 {
		t.Errorf("logged:\n%s", said)
	}
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// A server that is stopped accepts connections and says nothing: nobody is held for
// longer than the timeout, or their own deadline, and Admit not at all.
func TestServerHangs(t *testing.T) {
	t.Parallel()
	b := brokers.StartForTest(t, brokers.Redis, brokers.Options{})
	info, err := b.Info(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(info["pid1"])
	if err != nil {
		t.Fatal(err)
	}
	c := dial(t, b.Addr())
	s := at(t, c, Config{Limit: limiter.Limit{Rate: .001, Burst: 1000}, Timeout: 10 * time.Second})
	h, guarded := s.Key("k"), s.Key("guarded")
	soon(t, "answers", h.Allow)
	soon(t, "something ahead", func() bool { return guarded.Admit(0) == 0 })
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	defer syscall.Kill(pid, syscall.SIGCONT) //nolint:errcheck // it is stopped below
	start := time.Now()
	ctx, cancel := context.WithTimeout(t.Context(), 50*ms)
	defer cancel()
	is(t, h.Wait(ctx), context.DeadlineExceeded)
	if d := time.Since(start); d > 9900*ms {
		t.Errorf("a deadline of 50 ms took %v", d)
	}
	if s.Err() != nil {
		t.Errorf("somebody's deadline says nothing about Redis: %v", s.Err())
	}
	start = time.Now()
	if h.Allow() {
		t.Error("admitted")
	}
	if d := time.Since(start); d < 9990*ms || d > time.Minute {
		t.Errorf("a timeout of 10 s took %v", d)
	}
	is(t, s.Err(), ErrSilent)
	if err := syscall.Kill(pid, syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	soon(t, "answers again", h.Allow)
}
