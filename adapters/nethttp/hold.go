// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardhttp

import (
	"bytes"
	"context"
	"errors"
	"hash/maphash"
	"io"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"github.com/stormguard-mq/stormguard/guard"
)

// Held describes a request that is held, or being replayed.
type Held struct {
	ID      string    // as in HeaderHoldID and in dead letters
	Since   time.Time // when it was accepted
	Attempt int       // number of the running replay, from 1; 0 before the first
}

// held is a request that was answered 202.
type held struct {
	id    string
	lane  uint64
	key   string
	since time.Time
	size  int

	// req is a copy without body and with the kept headers only. It is only used to make the copies
	// of replays. Its context has the carried values.
	req  *http.Request
	body []byte
	next http.Handler

	stored   chan error // gets once whether the request is on the disk; nil without a spill
	fromDisk bool       // was read from the disk: no client waits for it, and it is in no list

	// Guarded by Intake.mu.
	listed       bool // in the list from oldest to newest
	older, newer *held
	attempt      int
	running      bool // a replay is running
	given        bool // an end writes it as a dead letter
}

// overhead is the size of a held request beside its bytes.
const overhead = 1 << 10

var laneSeed = maphash.MakeSeed()

// lane returns the lane in which a request keeps its order.
func (in *Intake) lane(r *http.Request) uint64 {
	if in.order != guard.OrderKey {
		return 0
	}
	return in.laneOf(in.o.key(r))
}

func (in *Intake) laneOf(key string) uint64 {
	if in.order != guard.OrderKey {
		return 0
	}
	return maphash.String(laneSeed, key)
}

// behind tells whether a request has to wait, because requests are held that it must not overtake.
func (in *Intake) behind(lane uint64) bool {
	switch {
	case in.holdAll:
		return true
	case in.waiting.Load() == 0 || in.order == guard.OrderNone:
		return false
	case in.order == guard.OrderSource:
		return !in.overtakes()
	default:
		in.mu.Lock()
		defer in.mu.Unlock()
		return in.lanes[lane] > 0 || in.unread > 0
	}
}

// hold reads a request, puts it into the source and answers 202, or refuses it. It may also handle
// a request live that cannot be held, see noRoom and probes.
func (in *Intake) hold(w http.ResponseWriter, c *call, lane uint64) {
	r := c.req
	header, size := in.pick(r)
	key := ""
	fits := r.ContentLength <= in.cfg.MaxBody && size <= in.cfg.MaxHeader
	if fits {
		key = in.o.key(r) // before the body is read: the key may be in a form
	}
	if !fits || r.MultipartForm != nil {
		in.noRoom(w, c, lane, false) // it can be handled, but not held
		return
	}
	size += weight(r.Form) + weight(r.PostForm)
	need := int64(size + overhead)
	if r.ContentLength < 0 {
		need += in.cfg.MaxBody
	} else {
		need += r.ContentLength
	}
	if !in.reserve(need) {
		in.noRoom(w, c, lane, true)
		return
	}
	reserved := true
	defer func() { // reading a body may panic
		if reserved {
			in.unreserve(need)
		}
	}()
	body, err := in.read(w, r)
	if err == nil {
		// If the body was read in front of the intake, the server already reads on in the
		// background. The deadline would end that, and the context of this request and of all
		// later ones of its connection with it.
		_ = http.NewResponseController(w).SetReadDeadline(time.Time{})
	}
	switch {
	case err == nil && int64(len(body)) > in.cfg.MaxBody: // Content-Length did not say so
		reserved = false
		in.unreserve(need)
		putBack(w, r, body)
		in.noRoom(w, c, lane, false)
		return
	case err != nil:
		status := bodyStatus(err)
		http.Error(w, http.StatusText(status), status)
		return
	case r.Context().Err() != nil:
		// Nothing is promised. The client may still be there: the context also ends when a server
		// stops, or at a middleware's timeout.
		in.boundRest(w)
		in.refuse(w, r, guard.ReasonShutdown, nil)
		return
	default:
	}
	h := &held{
		lane: lane, key: key, since: time.Now(), size: size + overhead + len(body),
		req: in.copy(r, header), body: body, next: c.next,
	}
	if in.o.replay != nil {
		h.next = in.o.replay
	}
	if in.disk {
		h.stored = make(chan error, 1)
	}
	reserved = false
	where := HoldMemory
	err = in.enqueue(h, need)
	if in.disk {
		if where = HoldDisk; err == nil {
			err = in.awaitDisk(h)
		}
		if errors.Is(err, guard.ErrFull) {
			in.yields(true) // others need not queue up behind a full hold
		}
		if err != nil && !errors.Is(err, errStalls) { // a disk that stalls may have taken it
			r.Body = io.NopCloser(bytes.NewReader(body))
			if in.probes(c, lane) {
				return
			}
		}
	}
	in.boundRest(w)
	if err != nil {
		why := guard.ReasonBackpressure
		if errors.Is(err, guard.ErrClosed) {
			why = guard.ReasonShutdown
		}
		in.refuse(w, r, why, err)
		return
	}
	in.accepted.Add(1)
	w.Header().Set(HeaderHold, where)
	w.Header().Set(HeaderHoldID, h.id)
	in.o.accepted(w, r, Held{ID: h.id, Since: h.since})
}

// accept is the default answer to a request that is held.
func accept(w http.ResponseWriter, _ *http.Request, _ Held) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(http.StatusAccepted)
	text := "accepted: held in memory until it can be handled; lost if this process crashes\n"
	if w.Header().Get(HeaderHold) == HoldDisk {
		text = "accepted: held on disk until it can be handled\n"
	}
	_, _ = io.WriteString(w, text) // an error means that the client is gone
}

// pick chooses the headers to keep. It returns their size together with that of the URL.
func (in *Intake) pick(r *http.Request) (http.Header, int) {
	header := make(http.Header)
	size := len(r.Method) + len(r.RequestURI) + len(r.Host)
	for name, values := range r.Header {
		if in.keep[name] && !named(r.Header["Connection"], name) {
			header[name] = append([]string(nil), values...)
			for _, v := range values {
				size += len(name) + len(v)
			}
		}
	}
	// The link of a replay's span goes to the server's span if there is one, and else to the
	// client's.
	if sc := trace.SpanContextFromContext(r.Context()); sc.IsValid() && in.keep["Traceparent"] {
		propagation.TraceContext{}.Inject(r.Context(), propagation.HeaderCarrier(header))
	}
	return header, size
}

// weight is about the size of a parsed form. If its values are short, that is a multiple of the
// body.
func weight(form url.Values) (n int) {
	for name, values := range form {
		n += len(name) + 100
		for _, v := range values {
			n += len(v) + 16
		}
	}
	return n
}

// named tells whether the Connection header says that a header is for this hop only.
func named(connection []string, name string) bool {
	for _, list := range connection {
		for token := range strings.SplitSeq(list, ",") {
			if strings.EqualFold(strings.TrimSpace(token), name) {
				return true
			}
		}
	}
	return false
}

// reserve takes room for a request that is about to be read.
func (in *Intake) reserve(bytes int64) bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	n := in.listed + in.reading
	if in.closing || n >= in.window || n > 0 && in.bytes+bytes > in.room {
		return false
	}
	in.reading++
	in.bytes += bytes
	return true
}

func (in *Intake) unreserve(bytes int64) {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.reading--
	in.bytes -= bytes
}

// read reads the body to its end, or up to one byte more than can be held. A middleware may have
// replaced the body, for example decompressed it, and kept the length. If a form was parsed in
// front of the intake, read encodes it as the body again.
func (in *Intake) read(w http.ResponseWriter, r *http.Request) ([]byte, error) {
	if r.Body == nil || r.Body == http.NoBody {
		return nil, nil
	}
	// Not every ResponseWriter can set a deadline. Then the server's own timeout applies.
	_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(in.cfg.BodyTimeout))
	var body bytes.Buffer
	body.Grow(int(max(r.ContentLength, 0)) + bytes.MinRead) // without room left the end is not seen
	_, err := body.ReadFrom(io.LimitReader(r.Body, in.cfg.MaxBody+1))
	switch {
	case err != nil:
		return nil, err
	case body.Len() == 0 && len(r.PostForm) > 0:
		return []byte(r.PostForm.Encode()), nil
	case int64(body.Len()) < r.ContentLength && r.Header.Get("Content-Encoding") == "": // with Content-Encoding, the length is that of the compressed body
		return nil, io.ErrUnexpectedEOF
	default:
		return body.Bytes(), nil
	}
}

// boundRest bounds how long the server reads what a replaced body has left unread: it does so before
// it sends the answer.
func (in *Intake) boundRest(w http.ResponseWriter) {
	_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(in.cfg.BodyTimeout))
}

// putBack puts the beginning of a body back in front of its rest, for which the timeout of the
// server applies.
func putBack(w http.ResponseWriter, r *http.Request, body []byte) {
	var until time.Time
	if s, ok := r.Context().Value(http.ServerContextKey).(*http.Server); ok && s.ReadTimeout > 0 {
		until = time.Now().Add(s.ReadTimeout)
	}
	_ = http.NewResponseController(w).SetReadDeadline(until)
	r.Body = rejoined{io.MultiReader(bytes.NewReader(body), r.Body), r.Body}
}

type rejoined struct {
	io.Reader
	io.Closer
}

// bodyStatus is the answer to a request whose body could not be read.
func bodyStatus(err error) int {
	switch {
	case errors.As(err, new(*http.MaxBytesError)): // set by a middleware further out
		return http.StatusRequestEntityTooLarge
	case errors.Is(err, os.ErrDeadlineExceeded):
		return http.StatusRequestTimeout
	default:
		return http.StatusBadRequest
	}
}

// copy makes the copy of a request that is kept. It keeps path values, and forms that were parsed
// in front of the intake.
func (in *Intake) copy(r *http.Request, header http.Header) *http.Request {
	ctx := context.Background()
	keys := append([]any{http.ServerContextKey, http.LocalAddrContextKey}, in.o.values...)
	values := make([]any, len(keys))
	for i, key := range keys {
		values[i] = r.Context().Value(key)
	}
	kept := r.Clone(&carried{ctx, keys, values})
	kept.Header = header
	kept.Body, kept.GetBody = nil, nil
	kept.Trailer, kept.TransferEncoding, kept.Close = nil, nil, false
	kept.Proto, kept.ProtoMajor, kept.ProtoMinor = "HTTP/1.1", 1, 1
	if kept.URL == nil {
		kept.URL = new(url.URL)
	}
	return kept
}

// enqueue turns a reservation into a held request. From here on no request of its lane overtakes
// it.
func (in *Intake) enqueue(h *held, reserved int64) error {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.reading--
	in.bytes -= reserved
	if in.closing {
		return guard.ErrClosed
	}
	// The body may be larger than its Content-Length, for which room was reserved.
	if (in.oldest != nil || in.reading > 0) && in.bytes+int64(h.size) > in.room {
		return guard.ErrFull
	}
	in.seq++
	h.id = in.ids + "-" + strconv.FormatUint(in.seq, 10)
	if err := in.src.Offer(h); err != nil {
		return err
	}
	in.bytes += int64(h.size)
	in.lanes[h.lane]++
	in.waiting.Add(1)
	in.listed++
	h.listed = true
	if h.older = in.newest; h.older != nil {
		h.older.newer = h
	} else {
		in.oldest = h
	}
	in.newest = h
	return nil
}

// forget ends a held request: it was handled or dead-lettered, or cannot be held after all.
func (in *Intake) forget(h *held) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if !h.fromDisk && !h.listed {
		return // it was forgotten before
	}
	in.unlistLocked(h)
	if in.lanes[h.lane]--; in.lanes[h.lane] <= 0 {
		delete(in.lanes, h.lane)
	}
	in.lessLocked(1)
}

// lessLocked notes that n requests are no longer held.
func (in *Intake) lessLocked(n int64) {
	if in.waiting.Add(-n) > 0 {
		return
	}
	clear(in.lanes) // damaged requests on the disk have no lane
	in.unread = 0
	in.drain = drain{}
	if in.idle != nil {
		close(in.idle)
		in.idle = nil
	}
}

// unlistLocked takes a request off the list of those that are in memory.
func (in *Intake) unlistLocked(h *held) {
	if !h.listed {
		return
	}
	if h.older != nil {
		h.older.newer = h.newer
	} else {
		in.oldest = h.newer
	}
	if h.newer != nil {
		h.newer.older = h.older
	} else {
		in.newest = h.older
	}
	h.older, h.newer, h.listed = nil, nil, false
	in.listed--
	in.bytes -= int64(h.size)
}
