// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardhttp

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"github.com/stormguard-mq/stormguard/guard"
)

// replay is one run of a held request: the context of its handler, and what is recorded of its
// answer.
type replay struct {
	context.Context //nolint:containedctx // the guard's; replay is a context itself
	outcome

	in      *Intake
	kept    context.Context //nolint:containedctx // values that were carried over
	info    Held
	answers sink
	looked  atomic.Bool // the handler, or code that it called, has asked whether the context has ended
}

// Done is that of the guard's context.
func (p *replay) Done() <-chan struct{} {
	p.looked.Store(true)
	return p.Context.Done()
}

// Err is that of the guard's context.
func (p *replay) Err() error {
	p.looked.Store(true)
	return p.Context.Err()
}

type replayKey struct{}

func (p *replay) Value(key any) any {
	switch k := key.(type) {
	case outcomeKey:
		return &p.outcome
	case replayKey:
		return p
	case insideKey:
		if k.in == p.in {
			return p
		}
	}
	if v := p.kept.Value(key); v != nil {
		return v
	}
	return p.Context.Value(key)
}

// Replayed tells a handler whether it handles a request that was held, and which one. Nobody gets
// the answer to such a request.
func Replayed(ctx context.Context) (Held, bool) {
	if p, ok := ctx.Value(replayKey{}).(*replay); ok {
		return p.info, true
	}
	return Held{}, false
}

// replay is the handler of the source: it makes a request of a held one, and calls the user's
// handler with it.
func (in *Intake) replay(ctx context.Context, h *held) error {
	in.replays.Add(1)
	in.mu.Lock()
	h.attempt++
	h.running = true
	info := Held{ID: h.id, Since: h.since, Attempt: h.attempt}
	in.mu.Unlock()
	p := &replay{Context: ctx, in: in, kept: h.req.Context(), info: info}
	p.answers.header = make(http.Header)
	p.rec.w = &p.answers
	r := h.req.Clone(p)
	defer func() { // also if the handler panics
		if r.MultipartForm != nil {
			_ = r.MultipartForm.RemoveAll() // as a server does
		}
		in.mu.Lock()
		h.running = false
		in.mu.Unlock()
	}()
	r.Body, r.ContentLength = http.NoBody, int64(len(h.body))
	if len(h.body) > 0 {
		r.Body = io.NopCloser(bytes.NewReader(h.body))
	}
	h.next.ServeHTTP(p.rec.writer(), r)
	err := p.result(r)
	e, ok := errors.AsType[*StatusError](err)
	in.vain.Store(ok && e.rejects())
	return err
}

// result is the outcome of a replay.
func (p *replay) result(r *http.Request) error {
	refused, err := p.said()
	if err != nil {
		return err
	}
	now := time.Now()
	if refused != nil {
		return guard.Backoff(errRefused, now.Add(refused.Until))
	}
	status := p.status()
	if ended := p.Context.Err(); ended != nil && p.looked.Load() && (p.rec.silent() || status >= 400 && status < 500) {
		return ended // the handler gave up, at its timeout or when the intake ends: that is no answer
	}
	err = p.in.o.judge(r, status, true)
	e, ok := errors.AsType[*StatusError](err)
	if !ok || p.in.o.judged {
		return err
	}
	e.Text = strings.TrimSpace(strings.ToValidUTF8(string(p.answers.text), "\uFFFD"))
	if at := retryAfter(p.answers.header, now); status == http.StatusTooManyRequests && !at.IsZero() {
		return guard.Backoff(e, at)
	}
	return err
}
