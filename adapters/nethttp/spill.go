// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardhttp

import (
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/stormguard-mq/stormguard/guard"
)

var _ guard.Keeper[*held] = port{}

// spillHead is what the spill keeps of a request beside its body. Values that a client chooses are
// bytes: as text, JSON would change invalid UTF-8.
type spillHead struct {
	ID     string              `json:"id"`
	Since  time.Time           `json:"since"`
	Key    []byte              `json:"key"`
	Method string              `json:"method"`
	URL    keptURL             `json:"url"`
	Asked  []byte              `json:"asked"` // RequestURI
	Host   []byte              `json:"host"`
	Remote string              `json:"remote"`
	TLS    bool                `json:"tls,omitempty"`
	Header map[string][][]byte `json:"header"`
}

// keptURL is a URL in parts: as text, a path such as //a would be read as a host.
type keptURL struct {
	Scheme     string `json:"scheme,omitempty"`
	Opaque     []byte `json:"opaque,omitempty"`
	Host       []byte `json:"host,omitempty"`
	Path       []byte `json:"path"`
	RawPath    []byte `json:"raw_path,omitempty"`
	RawQuery   []byte `json:"raw_query,omitempty"`
	ForceQuery bool   `json:"force_query,omitempty"`
}

// Spill implements [guard.Spiller].
func (port) Spill(h *held) (head, body []byte, err error) {
	r := h.req
	header := make(map[string][][]byte, len(r.Header))
	for name, values := range r.Header {
		for _, v := range values {
			header[name] = append(header[name], []byte(v))
		}
	}
	u := r.URL
	at := keptURL{u.Scheme, []byte(u.Opaque), []byte(u.Host), []byte(u.Path), []byte(u.RawPath), []byte(u.RawQuery), u.ForceQuery}
	head, err = json.Marshal(spillHead{h.id, h.since, []byte(h.key), r.Method, at, []byte(r.RequestURI), []byte(r.Host), r.RemoteAddr, r.TLS != nil, header})
	return head, h.body, err
}

// Unspill implements [guard.Spiller]. The request's handler is that of WithReplay: no other
// outlives a process.
func (p port) Unspill(head, body []byte) (*held, error) {
	in := p.in
	var k spillHead
	if err := json.Unmarshal(head, &k); err != nil {
		return nil, fmt.Errorf("nethttp: a request in the spill: %w", err)
	}
	u := k.URL
	at := &url.URL{
		Scheme: u.Scheme, Opaque: string(u.Opaque), Host: string(u.Host), Path: string(u.Path), RawPath: string(u.RawPath),
		RawQuery: string(u.RawQuery), ForceQuery: u.ForceQuery,
	}
	header := make(http.Header, len(k.Header))
	for name, values := range k.Header {
		for _, v := range values {
			header[name] = append(header[name], string(v))
		}
	}
	h := &held{
		id: k.ID, key: string(k.Key), since: k.Since, size: len(head) + len(body) + overhead, body: body, next: in.o.replay, fromDisk: true,
		req: &http.Request{
			Method: k.Method, URL: at, RequestURI: string(k.Asked), Host: string(k.Host), RemoteAddr: k.Remote, Header: header,
			Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		},
	}
	if k.TLS { // so that a router that redirects plain requests lets it pass
		h.req.TLS = &tls.ConnectionState{HandshakeComplete: true, ServerName: h.req.Host}
	}
	h.lane = in.laneOf(h.key)
	if !strings.HasPrefix(k.ID, in.ids) { // the request is from an earlier process
		in.mu.Lock()
		in.unread = max(0, in.unread-1)
		in.lanes[h.lane]++
		in.mu.Unlock()
	}
	return h, nil
}

// Kept implements [guard.Keeper]: it ends the wait of the request's client.
func (p port) Kept(h *held, err error) {
	if err != nil {
		p.in.forget(h)
	} else {
		p.in.mu.Lock()
		p.in.unlistLocked(h)
		p.in.mu.Unlock()
	}
	h.told(err)
}

// told ends the wait of a request's client, once.
func (h *held) told(err error) {
	select {
	case h.stored <- err:
	default: // the client has given up, or was told before
	}
}

// Lost implements [guard.Keeper].
func (p port) Lost(n int) {
	p.in.mu.Lock()
	defer p.in.mu.Unlock()
	p.in.unread = max(0, p.in.unread-n)
	p.in.lessLocked(int64(n))
}

// maxSpilled is the largest body on the disk: a message there has 16 MiB at most.
const maxSpilled = 8 << 20

// takeOver counts the requests that an earlier process has left on the disk. It returns an error if
// the settings do not allow requests on the disk.
func (in *Intake) takeOver(found int) error {
	if !in.disk {
		return nil
	}
	var wrong []error
	if in.o.replay == nil {
		wrong = append(wrong, fmt.Errorf("%w: Policy.Spill: needs WithReplay: the handler of a request does not outlive the process", errConfig))
	}
	if len(in.o.values) > 0 {
		wrong = append(wrong, fmt.Errorf("%w: Policy.Spill: not with WithValues: a context does not outlive the process", errConfig))
	}
	if in.cfg.MaxBody > maxSpilled {
		wrong = append(wrong, fmt.Errorf("%w: Config.MaxBody: %d is not within 1 and %d bytes, with Policy.Spill", errConfig, in.cfg.MaxBody, maxSpilled))
	}
	in.unread = found
	in.waiting.Store(int64(found))
	return errors.Join(wrong...)
}

// awaitDisk waits until a request is on the disk, or cannot be held. A disk that stalls for longer
// than BodyTimeout counts as full for the client, but the request may still be handled. awaitDisk
// does not end with the request's context. Otherwise a request that is on the disk a moment later
// would be answered 503.
func (in *Intake) awaitDisk(h *held) error {
	late := time.NewTimer(in.cfg.BodyTimeout)
	defer late.Stop()
	select {
	case err := <-h.stored:
		return err
	case <-late.C:
		return errStalls
	}
}

var errStalls = errors.New("nethttp: the disk does not answer")

// refuseAll ends requests that are not on the disk and will not be.
func (in *Intake) refuseAll(hs []*held) {
	for _, h := range hs {
		in.mu.Lock()
		given := h.given
		h.given = true
		in.mu.Unlock()
		if !given {
			in.forget(h)
			h.told(guard.ErrClosed)
		}
	}
}
