// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardhttp

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"sync/atomic"

	"github.com/felixge/httpsnoop"
)

// recorder sees the status of an answer on its way to w, and holds nothing back.
type recorder struct {
	w        http.ResponseWriter
	status   atomic.Int32 // 0 until the header is written
	hijacked atomic.Bool
}

// writer is w, seen by the recorder: a handler that streams, or takes the connection over,
// finds the optional methods that w has, and no others.
func (r *recorder) writer() http.ResponseWriter {
	return httpsnoop.Wrap(r.w, httpsnoop.Hooks{
		WriteHeader: func(next httpsnoop.WriteHeaderFunc) httpsnoop.WriteHeaderFunc {
			return func(status int) {
				if status >= 200 || status == http.StatusSwitchingProtocols { // others are only on the way
					r.status.CompareAndSwap(0, int32(status))
				}
				next(status)
			}
		},
		Write: func(next httpsnoop.WriteFunc) httpsnoop.WriteFunc {
			return func(p []byte) (int, error) {
				r.begun()
				return next(p)
			}
		},
		WriteString: func(next httpsnoop.WriteStringFunc) httpsnoop.WriteStringFunc {
			return func(s string) (int, error) {
				r.begun()
				return next(s)
			}
		},
		ReadFrom: func(next httpsnoop.ReadFromFunc) httpsnoop.ReadFromFunc {
			return func(src io.Reader) (int64, error) {
				r.begun()
				return next(src)
			}
		},
		Flush: func(next httpsnoop.FlushFunc) httpsnoop.FlushFunc {
			return func() {
				r.begun()
				next()
			}
		},
		FlushError: func(next httpsnoop.FlushErrorFunc) httpsnoop.FlushErrorFunc {
			return func() error {
				r.begun()
				return next()
			}
		},
		Hijack: func(next httpsnoop.HijackFunc) httpsnoop.HijackFunc {
			return func() (net.Conn, *bufio.ReadWriter, error) {
				c, rw, err := next()
				if err == nil {
					r.hijacked.Store(true)
				}
				return c, rw, err
			}
		},
	})
}

// begun is what a first Write or Flush means.
func (r *recorder) begun() {
	if r.status.Load() == 0 {
		r.status.CompareAndSwap(0, http.StatusOK)
	}
}

// silent tells that nothing was answered.
func (r *recorder) silent() bool { return r.status.Load() == 0 && !r.hijacked.Load() }

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
