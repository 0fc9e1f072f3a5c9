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

// recorder records the status of an answer on its way to w. It delays nothing.
type recorder struct {
	w        http.ResponseWriter
	status   atomic.Int32 // 0 until the header is written
	hijacked atomic.Bool
}

// writer returns w, seen by the recorder. A handler that streams, or takes the connection over,
// finds the optional methods that w has, and no others.
func (r *recorder) writer() http.ResponseWriter {
	return httpsnoop.Wrap(r.w, httpsnoop.Hooks{
		WriteHeader: func(next httpsnoop.WriteHeaderFunc) httpsnoop.WriteHeaderFunc {
			return func(status int) {
				if status >= 200 || status == http.StatusSwitchingProtocols { // other 1xx are not the answer
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

// begun records the status 200 at the first Write or Flush, if no status was written.
func (r *recorder) begun() {
	if r.status.Load() == 0 {
		r.status.CompareAndSwap(0, http.StatusOK)
	}
}

// silent tells whether nothing was answered.
func (r *recorder) silent() bool { return r.status.Load() == 0 && !r.hijacked.Load() }

// sink takes a replay's answer, for which nobody waits. It keeps the beginning of the text, for the
// error of a failing handler.
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

// CloseNotify never sends: there is no client that could leave.
func (*sink) CloseNotify() <-chan bool { return make(chan bool) }

// Flush does nothing: a handler that streams may go on.
func (*sink) Flush() {}
