// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardhttp

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
)

func bodies(all []*dlq.Record) string {
	var list []string
	for _, r := range all {
		list = append(list, string(r.Body))
	}
	return strings.Join(list, " ")
}

// What is held at the end goes to the dead-letter writer, in order, whoever ends
// it: nothing that was answered 202 vanishes.
func TestCloseHandsOver(t *testing.T) {
	for _, how := range []string{"intake", "guard"} {
		bubble(t, how, func(t *testing.T) {
			r := newRig(t, quick, Config{})
			r.breakIt()
			for i := range 20 {
				r.want(r.post(strconv.Itoa(i)), 202)
			}
			time.Sleep(time.Second)
			if how == "guard" {
				if _, err := r.g.Close(t.Context()); err != nil {
					t.Error(err)
				}
			}
			rep, err := r.in.Close(t.Context())
			if err != nil || len(rep.Left) > 0 || how == "intake" && rep.Written != 20 {
				t.Errorf("%v, %+v", err, rep)
			}
			got := r.letters.list()
			if bodies(got) != words("%d", 0, 20) {
				t.Errorf("handed over: %s", bodies(got))
			}
			for i, rec := range got { // some behind the head were tried as witnesses
				if rec.Reason != ReasonShutdown || rec.ID() == "" || rec.Error.Message != errNotReplayed.Error() || i == 0 && rec.Attempts == 0 || i > 8 && rec.Attempts != 0 {
					t.Errorf("%+v", rec)
				}
			}
			again, err := r.in.Close(t.Context())
			if err != nil || again.Written != rep.Written || len(r.letters.list()) != 20 {
				t.Errorf("a second Close: %v %+v", err, again)
			}
			r.want(r.post("late"), 503)
			r.close()
		})
	}
}

// What the writer does not take is in the report, and the Guard's end says so.
func TestCloseReportsTheRest(t *testing.T) {
	for _, how := range []string{"intake", "guard"} {
		bubble(t, how, func(t *testing.T) {
			r := newRig(t, quick, Config{})
			r.breakIt()
			for i := range 3 {
				r.want(r.post(strconv.Itoa(i)), 202)
			}
			r.letters.fail(errBroken)
			if how == "guard" {
				if _, err := r.g.Close(t.Context()); !errors.Is(err, errBroken) || !strings.Contains(err.Error(), "3 requests that were answered 202 are left") {
					t.Errorf("the Guard's end: %v", err)
				}
			}
			rep, err := r.in.Close(t.Context())
			if !errors.Is(err, errBroken) || rep.Written != 0 || len(rep.Left) != 3 {
				t.Errorf("%v, %+v", err, rep)
			}
			for i, l := range rep.Left {
				if string(l.Record.Body) != strconv.Itoa(i) || !errors.Is(l.Err, errBroken) {
					t.Errorf("%+v", l)
				}
			}
			_, _ = r.g.Close(t.Context())
		})
	}
}

// A writer that hangs cannot keep Close, nor lose what it was given.
func TestCloseWithHangingWriter(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		g, err := guard.New(guard.Config{Policy: quick})
		if err != nil {
			t.Fatal(err)
		}
		in, err := New(g, Config{}, WithDeadLetters(dlq.WriterFunc(func(ctx context.Context, _ *dlq.Record) error {
			<-ctx.Done()
			return ctx.Err()
		})))
		if err != nil {
			t.Fatal(err)
		}
		_ = g.Source("http").ForceOpen(time.Hour)
		h := in.Defer(http.NotFoundHandler())
		for range 5 {
			send(h, "POST", "/", "x")
		}
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		start := time.Now()
		rep, err := in.Close(ctx)
		if took := time.Since(start); took > 2*time.Second+lastLetters || len(rep.Left) != 5 || !errors.Is(err, context.Canceled) {
			t.Errorf("%s, %v, %d left", took, err, len(rep.Left))
		}
		_, _ = g.Close(t.Context())
	})
}

// A replay that does not return is handed over too, and said to be unfinished.
func TestCloseWithHangingReplay(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newRig(t, quick, Config{})
		release := make(chan struct{})
		r.s.handle = func(_ http.ResponseWriter, req *http.Request) bool {
			if _, ok := Replayed(req.Context()); ok {
				<-release // deaf to its context
			}
			return false
		}
		_ = r.g.Source("http").ForceOpen(time.Second)
		for i := range 3 {
			r.want(r.post(strconv.Itoa(i)), 202)
		}
		time.Sleep(2 * time.Second)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		rep, err := r.in.Close(ctx)
		if err == nil || rep.Written != 3 || len(rep.Held.Left) != 1 {
			t.Errorf("%v, %+v", err, rep)
		}
		got := r.letters.list()
		if bodies(got) != "0 1 2" || got[0].Error.Message != errUnfinished.Error() || got[1].Error.Message != errNotReplayed.Error() {
			t.Errorf("%s %+v", bodies(got), got[0].Error)
		}
		close(release)
		synctest.Wait()
		_, _ = r.g.Close(t.Context())
	})
}

// A replay that gives up without a word when the intake ends is handed over as well: it was
// no success.
func TestCloseDuringAReplayThatGivesUp(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newRig(t, quick, Config{})
		r.s.handle = func(_ http.ResponseWriter, req *http.Request) bool {
			if _, ok := Replayed(req.Context()); ok {
				<-req.Context().Done()
				return true
			}
			return false
		}
		_ = r.g.Source("http").ForceOpen(time.Second)
		for i := range 3 {
			r.want(r.post(strconv.Itoa(i)), 202)
		}
		time.Sleep(2 * time.Second)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		rep, err := r.in.Close(ctx)
		if got := r.letters.list(); err != nil || rep.Written != 3 || bodies(got) != "0 1 2" {
			t.Errorf("%v, %+v, %s", err, rep, bodies(got))
		}
		_, _ = r.g.Close(t.Context())
	})
}

// A dead-letter writer that is deaf to its context, or panics, neither keeps Close nor loses
// what is held.
func TestCloseWithABadWriter(t *testing.T) {
	for name, panics := range map[string]bool{"deaf": false, "panics once": true} {
		bubble(t, name, func(t *testing.T) {
			g, err := guard.New(guard.Config{Policy: quick})
			if err != nil {
				t.Fatal(err)
			}
			release, calls := make(chan struct{}), 0
			in, err := New(g, Config{}, WithDeadLetters(dlq.WriterFunc(func(context.Context, *dlq.Record) error {
				if calls++; panics && calls == 1 {
					panic("boom")
				} else if !panics {
					<-release
				}
				return nil
			})))
			if err != nil {
				t.Fatal(err)
			}
			_ = g.Source("http").ForceOpen(time.Hour)
			h := in.Defer(http.NotFoundHandler())
			for range 5 {
				send(h, "POST", "/", "x")
			}
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
			defer cancel()
			start := time.Now()
			rep, err := in.Close(ctx)
			want := 5
			if panics {
				want = 1
			}
			if took := time.Since(start); took > 2*time.Second+lastLetters+writerGrace || len(rep.Left) != want || rep.Written != 5-want || err == nil {
				t.Errorf("%s, %v, %d written, %d left", took, err, rep.Written, len(rep.Left))
			}
			if again, _ := in.Close(t.Context()); len(again.Left) != want {
				t.Errorf("a second Close: %+v", again)
			}
			close(release)
			synctest.Wait()
			_, _ = g.Close(t.Context())
		})
	}
}

// A live request that is being handled when the intake closes is finished.
func TestCloseWaitsForLive(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newRig(t, quick, Config{})
		r.s.handle = func(http.ResponseWriter, *http.Request) bool { time.Sleep(time.Second); return false }
		got := make(chan int)
		go func() { got <- r.get().StatusCode }()
		synctest.Wait()
		start := time.Now()
		if _, err := r.in.Close(t.Context()); err != nil {
			t.Error(err)
		}
		if took := time.Since(start); took < 900*time.Millisecond {
			t.Errorf("closed after %s", took)
		}
		if status := <-got; status != 200 {
			t.Error(status)
		}
		r.close()
	})
}

// Requests that are being read when the intake closes are refused.
func TestCloseWhileReading(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newRig(t, quick, Config{})
		_ = r.g.Source("http").ForceOpen(time.Hour)
		block := make(chan struct{})
		got := make(chan answer)
		go func() {
			got <- send(r.defers, "POST", "/", "", func(req *http.Request) {
				req.Body, req.ContentLength = readerFunc(func([]byte) (int, error) { <-block; return 0, http.ErrBodyReadAfterClose }), -1
			})
		}()
		slow := make(chan answer)
		go func() {
			slow <- send(r.defers, "POST", "/", "x", func(req *http.Request) {
				body := req.Body
				req.Body = readerFunc(func(p []byte) (int, error) { <-block; return body.Read(p) })
			})
		}()
		synctest.Wait()
		if _, err := r.in.Close(t.Context()); err != nil {
			t.Error(err)
		}
		close(block)
		r.want(<-got, 400)
		if res := r.want(<-slow, 503); res.Header.Get(HeaderReason) != "shutdown" {
			t.Error(res.Header)
		}
		if n := len(r.letters.list()); n != 0 {
			t.Errorf("%d dead letters of requests that were not accepted", n)
		}
		r.close()
	})
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }
func (readerFunc) Close() error                 { return nil }

// Close waits for a loop that the disk holds up until its context is over and a second more,
// and says so.
func TestCloseWithALoopThatHangs(t *testing.T) {
	for _, c := range []struct {
		ends, want time.Duration
		says       bool
	}{
		{500 * time.Millisecond, 500 * time.Millisecond, true},
		{1500 * time.Millisecond, 1500 * time.Millisecond, true},
		{time.Hour, time.Second + lastLetters, false},
	} {
		synctest.Test(t, func(t *testing.T) {
			in := &Intake{ran: make(chan struct{})}
			time.AfterFunc(c.ends, func() { close(in.ran) })
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			began := time.Now()
			if ended := in.loopEnds(ctx); ended != c.says || time.Since(began) != c.want {
				t.Errorf("a loop that ends after %v: %v after %v", c.ends, ended, time.Since(began))
			}
		})
	}
}
