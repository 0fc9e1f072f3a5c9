// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardhttp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
)

// ReasonShutdown is the reason of a dead letter whose request was held when its intake was closed.
const ReasonShutdown dlq.Reason = "shutdown"

// A dead letter has the body of the request. Its headers are the kept ones and these, which have
// the rest.
const (
	letterMethod = "Http-Method"
	letterTarget = "Http-Target" // path and query
	letterHost   = "Http-Host"
	letterRemote = "Http-Remote-Addr"
)

var pseudo = []string{letterMethod, letterTarget, letterHost, letterRemote}

// port is the adapter's side of the source. There is no broker behind it, and a disk only with a
// spill. So a request is gone when it is acked.
type port struct{ in *Intake }

func newPort(in *Intake) port { return port{in} }

func (port) Lane(h *held) uint64 { return h.lane }

func (port) Size(h *held) int { return h.size }

func (p port) Meta(h *held) guard.Meta {
	meta := guard.Meta{
		Body: h.body, Timestamp: h.since, Lag: -1,
		Origin: dlq.Origin{
			System: "http", Source: p.in.cfg.Name, Subject: h.req.Method + " " + h.req.URL.Path,
			Group: p.in.cfg.Dependency, MessageID: h.id,
		},
	}
	if p.in.o.keyed || p.in.order == guard.OrderKey {
		meta.Key = []byte(h.key)
	}
	for _, name := range slices.Sorted(maps.Keys(h.req.Header)) {
		for _, v := range h.req.Header[name] {
			meta.Headers = append(meta.Headers, dlq.Header{Name: name, Value: v})
		}
	}
	meta.Headers = append(meta.Headers,
		dlq.Header{Name: letterMethod, Value: h.req.Method}, dlq.Header{Name: letterTarget, Value: target(h.req)},
		dlq.Header{Name: letterHost, Value: h.req.Host}, dlq.Header{Name: letterRemote, Value: h.req.RemoteAddr})
	return meta
}

// target is the path and query that the client asked for, even if a middleware such as
// http.StripPrefix has changed the URL.
func target(r *http.Request) string {
	if strings.HasPrefix(r.RequestURI, "/") || r.RequestURI == "*" {
		return r.RequestURI
	}
	return r.URL.RequestURI()
}

func (p port) Ack(h *held) error {
	p.in.forget(h)
	return nil
}

func (port) Extend([]*held) {}

func (port) Demand(int) {}

func (port) Flush() error { return nil }

// Return writes the remaining requests as dead letters, unless Close is about to. With a spill it
// refuses them instead: they are not on the disk, and their clients may still wait for an answer.
func (p port) Return(hs []*held, _ guard.Reason) error {
	in := p.in
	if in.disk { // these requests are not on the disk
		in.refuseAll(hs)
		return nil
	}
	in.mu.Lock()
	closing := in.closing
	in.mu.Unlock()
	if closing {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), returnTimeout)
	defer cancel()
	_, left := in.surrender(ctx, hs)
	if len(left) > 0 {
		return fmt.Errorf("nethttp: %s: %d requests that were answered 202 are left; Intake.Close has them: %w", in.cfg.Name, len(left), left[0].Err)
	}
	return nil
}

// returnTimeout is for all dead letters of an end without Close.
const returnTimeout = 30 * time.Second

// surrender writes held requests as dead letters, oldest first. It does not write a request that
// another end is writing.
func (in *Intake) surrender(ctx context.Context, hs []*held) (written int, left []Left) {
	deaf := false
	for _, h := range hs {
		in.mu.Lock()
		given, running, attempts := h.given, h.running, h.attempt
		h.given = true
		in.mu.Unlock()
		why := errNotReplayed
		if running {
			why = errUnfinished
		}
		meta := port{in}.Meta(h)
		r := &dlq.Record{
			Key: meta.Key, Body: meta.Body, Headers: meta.Headers, Timestamp: meta.Timestamp, Origin: meta.Origin,
			Attempts: attempts, Reason: ReasonShutdown,
			Error: dlq.DescribeError(why, nil), Cause: dlq.Fingerprint(why, nil),
			TraceParent: h.req.Header.Get("Traceparent"), TraceState: h.req.Header.Get("Tracestate"),
		}
		if given {
			left = append(left, Left{r, errors.New("nethttp: still being written as a dead letter")})
			continue
		}
		err := errWriterHangs
		if !deaf {
			err = in.write(ctx, h, r)
			deaf = errors.Is(err, errWriterHangs)
			if deaf { // the writer may still write the letter
				left = append(left, Left{r, err})
				continue
			}
		}
		if err != nil {
			left = append(left, Left{r, err})
			in.mu.Lock()
			h.given = false
			in.mu.Unlock()
			continue
		}
		written++
		in.forget(h)
	}
	return written, left
}

// errWriterHangs means that a writer ignores its context and is left behind.
var errWriterHangs = errors.New("nethttp: the dead-letter writer does not heed its context")

// writerGrace is how long a writer may take once its context is over.
const writerGrace = 250 * time.Millisecond

// write calls the dead-letter writer on a goroutine of its own, which ends with the call: a writer
// may panic, or ignore its context. If it returns after write has left it behind, its result still
// counts.
func (in *Intake) write(ctx context.Context, h *held, r *dlq.Record) error {
	mine := *r // a copy: a writer that is left behind may still read it
	mine.Headers = slices.Clone(r.Headers)
	done, over := make(chan error, 1), new(atomic.Bool) // over: the writer has answered, or is left behind
	go func() {
		err := errors.New("nethttp: the dead-letter writer called Goexit")
		defer func() {
			if v := recover(); v != nil {
				err = fmt.Errorf("nethttp: the dead-letter writer panicked: %v", v)
			}
			switch {
			case over.CompareAndSwap(false, true):
				done <- err
			case err == nil:
				in.forget(h)
			default:
				in.mu.Lock()
				h.given = false
				in.mu.Unlock()
			}
		}()
		if err = in.o.letters.Write(ctx, &mine); err != nil && ctx.Err() == nil && dlq.TrimFor(&mine, err) {
			err = in.o.letters.Write(ctx, &mine)
		}
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	late := time.NewTimer(writerGrace)
	defer late.Stop()
	select {
	case err := <-done:
		return err
	case <-late.C:
		if over.CompareAndSwap(false, true) {
			return errWriterHangs
		}
		return <-done
	}
}

// FromRecord makes a request of a dead letter, to be sent or served again. Its URL is the path and
// query that the client asked for. To send the request, add scheme and host. The error names what
// is missing or not well-formed.
func FromRecord(ctx context.Context, rec *dlq.Record) (*http.Request, error) {
	text := func(name string) string {
		s, _ := dlq.LookupText(rec.Headers, name)
		return s
	}
	method, target := text(letterMethod), text(letterTarget)
	if !isToken(method) {
		return nil, fmt.Errorf("nethttp: dead letter %s: header %s: %q is not a method", rec.ID(), letterMethod, method)
	}
	if !strings.HasPrefix(target, "/") && target != "*" {
		return nil, fmt.Errorf("nethttp: dead letter %s: header %s: %q is not a path", rec.ID(), letterTarget, target)
	}
	at, err := url.ParseRequestURI(target)
	if err != nil {
		return nil, fmt.Errorf("nethttp: dead letter %s: header %s: %w", rec.ID(), letterTarget, err)
	}
	r, err := http.NewRequestWithContext(ctx, method, "/", bytes.NewReader(rec.Body))
	if err != nil {
		return nil, fmt.Errorf("nethttp: dead letter %s: %w", rec.ID(), err)
	}
	r.URL = at
	for _, h := range rec.Headers {
		value, ok := dlq.LookupText([]dlq.Header{h}, h.Name)
		name := http.CanonicalHeaderKey(h.Name)
		if !ok || slices.Contains(pseudo, name) || slices.Contains(perHop, name) || !isToken(name) || strings.ContainsAny(value, "\r\n\x00") {
			continue
		}
		r.Header.Add(name, value)
	}
	r.Host, r.RemoteAddr = text(letterHost), text(letterRemote)
	return r, nil
}
