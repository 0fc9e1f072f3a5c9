// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardhttp

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/http"
	"sync/atomic"
)

// recorder sees the status of an answer on its way, and holds nothing back. Its
// writer has the optional methods of what it wraps, so that a handler that streams or
// takes the connection over sees no difference; http.ResponseController gets
// to the rest through Unwrap.
type recorder struct {
	w        http.ResponseWriter
	ctx      context.Context //nolint:containedctx // of the request that is answered; for CloseNotify
	status   atomic.Int32    // 0 until the header is written
	hijacked atomic.Bool
}

func (r *recorder) Unwrap() http.ResponseWriter { return r.w }

func (r *recorder) Header() http.Header { return r.w.Header() }

func (r *recorder) WriteHeader(status int) {
	if status >= 200 || status == http.StatusSwitchingProtocols { // others are only on the way
		r.status.CompareAndSwap(0, int32(status))
	}
	r.w.WriteHeader(status)
}

func (r *recorder) Write(p []byte) (int, error) {
	r.begun()
	return r.w.Write(p)
}

func (r *recorder) WriteString(s string) (int, error) {
	r.begun()
	return io.WriteString(r.w, s)
}

// CloseNotify is there whatever w has: gin's Context.Stream calls it unasked. Without
// one of w's own, the channel is told when the request's context ends.
func (r *recorder) CloseNotify() <-chan bool {
	if w, ok := r.w.(http.CloseNotifier); ok { //nolint:staticcheck // deprecated, and still called by gin
		return w.CloseNotify()
	}
	gone := make(chan bool, 1)
	context.AfterFunc(r.ctx, func() { gone <- true })
	return gone
}

// begun is what a first Write or Flush means.
func (r *recorder) begun() {
	if r.status.Load() == 0 {
		r.status.CompareAndSwap(0, http.StatusOK)
	}
}

// silent tells that nothing was answered.
func (r *recorder) silent() bool { return r.status.Load() == 0 && !r.hijacked.Load() }

type flusher struct{ r *recorder }

func (f flusher) Flush() { _ = f.FlushError() }

// FlushError is what http.ResponseController looks for.
func (f flusher) FlushError() error {
	f.r.begun()
	switch w := f.r.w.(type) {
	case interface{ FlushError() error }:
		return w.FlushError()
	case http.Flusher:
		w.Flush()
		return nil
	default:
		return http.ErrNotSupported
	}
}

type hijacker struct {
	r *recorder
	w http.Hijacker
}

func (h hijacker) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	c, rw, err := h.w.Hijack()
	if err == nil {
		h.r.hijacked.Store(true)
	}
	return c, rw, err
}

type readerFrom struct {
	r *recorder
	w io.ReaderFrom
}

func (f readerFrom) ReadFrom(src io.Reader) (int64, error) {
	f.r.begun()
	return f.w.ReadFrom(src)
}

// writer is the recorder with the optional methods that w has and no others.
// HTTP/1 has Flusher, Hijacker and ReaderFrom, HTTP/2 has Flusher and Pusher;
// other combinations are other middleware's.
func (r *recorder) writer() http.ResponseWriter {
	const (
		canFlush = 1 << iota
		canHijack
		canReadFrom
		canPush
	)
	has := 0
	f := flusher{r}
	if _, ok := r.w.(http.Flusher); ok {
		has |= canFlush
	}
	h, ok := r.w.(http.Hijacker)
	if ok {
		has |= canHijack
	}
	rf, ok := r.w.(io.ReaderFrom)
	if ok {
		has |= canReadFrom
	}
	p, ok := r.w.(http.Pusher)
	if ok {
		has |= canPush
	}
	switch has {
	case canFlush:
		return struct {
			*recorder
			flusher
		}{r, f}
	case canHijack:
		return struct {
			*recorder
			hijacker
		}{r, hijacker{r, h}}
	case canReadFrom:
		return struct {
			*recorder
			readerFrom
		}{r, readerFrom{r, rf}}
	case canPush:
		return struct {
			*recorder
			http.Pusher
		}{r, p}
	case canFlush | canHijack:
		return struct {
			*recorder
			flusher
			hijacker
		}{r, f, hijacker{r, h}}
	case canFlush | canReadFrom:
		return struct {
			*recorder
			flusher
			readerFrom
		}{r, f, readerFrom{r, rf}}
	case canFlush | canPush:
		return struct {
			*recorder
			flusher
			http.Pusher
		}{r, f, p}
	case canHijack | canReadFrom:
		return struct {
			*recorder
			hijacker
			readerFrom
		}{r, hijacker{r, h}, readerFrom{r, rf}}
	case canHijack | canPush:
		return struct {
			*recorder
			hijacker
			http.Pusher
		}{r, hijacker{r, h}, p}
	case canReadFrom | canPush:
		return struct {
			*recorder
			readerFrom
			http.Pusher
		}{r, readerFrom{r, rf}, p}
	case canFlush | canHijack | canReadFrom:
		return struct {
			*recorder
			flusher
			hijacker
			readerFrom
		}{r, f, hijacker{r, h}, readerFrom{r, rf}}
	case canFlush | canHijack | canPush:
		return struct {
			*recorder
			flusher
			hijacker
			http.Pusher
		}{r, f, hijacker{r, h}, p}
	case canFlush | canReadFrom | canPush:
		return struct {
			*recorder
			flusher
			readerFrom
			http.Pusher
		}{r, f, readerFrom{r, rf}, p}
	case canHijack | canReadFrom | canPush:
		return struct {
			*recorder
			hijacker
			readerFrom
			http.Pusher
		}{r, hijacker{r, h}, readerFrom{r, rf}, p}
	case canFlush | canHijack | canReadFrom | canPush:
		return struct {
			*recorder
			flusher
			hijacker
			readerFrom
			http.Pusher
		}{r, f, hijacker{r, h}, readerFrom{r, rf}, p}
	default:
		return r
	}
}

// sink takes a replay's answer: nobody waits for it. It keeps the beginning of
// what a failing handler had to say.
type sink struct {
	header http.Header
	text   []byte
}

const maxText = 256

func (s *sink) Header() http.Header { return s.header }

func (*sink) WriteHeader(int) {}

func (s *sink) Write(p []byte) (int, error) {
	s.text = append(s.text, p[:min(len(p), maxText-len(s.text))]...)
	return len(p), nil
}

// CloseNotify never tells: there is no client to go away.
func (*sink) CloseNotify() <-chan bool { return make(chan bool) }

// Flush does nothing: a handler that streams may go on.
func (*sink) Flush() {}
