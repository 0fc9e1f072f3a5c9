// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package process

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/stormguard-mq/stormguard/crdt/gossip"
	"github.com/stormguard-mq/stormguard/fleet"
	"github.com/stormguard-mq/stormguard/limiter"
)

// Handler serves what an operator asks of a fleet, by any one of its processes; the
// fleet command speaks to it. Whoever may call it can change limits and evict members.
//
//	GET  status                  [Status] as JSON
//	GET  journal                 the entries that are remembered, oldest first
//	POST evict?name=N&number=K   [Process.Evict] upon configuration K; 0 or unset is the newest
//	POST change                  [ChangeRequest] as JSON: [Process.Set]
//	GET  quarantine              the rules in force: [Quarantined] as JSON
//	POST quarantine              [QuarantineRequest] as JSON: [Process.Quarantine]; answered as GET
//
// A request that came to a loopback address or a Unix socket needs no token, unless
// there are some; without one its Host must be a loopback address or localhost. A
// request that came to any other address needs TLS and one of the tokens: the handler
// looks at the listener's address of each request ([http.LocalAddrContextKey]), so a
// server that listens on all addresses by mistake serves nobody but this host. Every
// POST must be application/json, and none may come from a page of another origin. A
// proxy on this host reaches the handler over loopback: pass a Token then.
//
// Writes are logged, done or not, with who, what, before and after; the journal has
// who as well. Requests that were refused are logged once a second.
//
// What was made is answered with {"number": number}. A request that is wrong is 400, 401,
// 403 or 415, and one that cannot be met 409, with "newest" beside the error if another
// change was faster. One that was not made in time is 504: it will not be made, unless the
// error says that its outcome is unknown. Any that asks a process which is out of its
// fleet is 503. These have {"error": text}. Paths are relative to where it is mounted: use http.StripPrefix.
func (p *Process) Handler(tokens ...Token) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /status", func(w http.ResponseWriter, _ *http.Request) { answer(w, http.StatusOK, p.Status()) })
	mux.HandleFunc("GET /journal", func(w http.ResponseWriter, _ *http.Request) { answer(w, http.StatusOK, lines(p.Journal(nil))) })
	mux.HandleFunc("POST /evict", func(w http.ResponseWriter, r *http.Request) {
		name := r.URL.Query().Get("name")
		if name == "" {
			refuse(w, fmt.Errorf("%w: name: \"\" is not a member", fleet.ErrConfig))
			return
		}
		number := uint64(0)
		if text := r.URL.Query().Get("number"); text != "" {
			var err error
			if number, err = strconv.ParseUint(text, 10, 64); err != nil {
				refuse(w, fmt.Errorf("%w: number: %.20q is not a number", fleet.ErrConfig, text))
				return
			}
		}
		p.choose(w, r, "evict "+name, p.standsOf(name), func(ctx context.Context) (uint64, error) { return p.Evict(ctx, number, name) })
	})
	mux.HandleFunc("POST /change", func(w http.ResponseWriter, r *http.Request) {
		var in ChangeRequest
		d := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxBody))
		d.DisallowUnknownFields()
		if err := d.Decode(&in); err != nil {
			refuse(w, fmt.Errorf("%w: body: %w", fleet.ErrConfig, err))
			return
		}
		if d.More() || in.Limit == nil && len(in.Limits)+len(in.Weights) == 0 && !in.Reset {
			refuse(w, fmt.Errorf("%w: body: want one object with a change", fleet.ErrConfig))
			return
		}
		change := in.change()
		p.choose(w, r, "set", p.before(change), func(ctx context.Context) (uint64, error) { return p.Set(ctx, in.Number, change) }, "after", audited(change.String()))
	})
	p.serveQuarantine(mux)
	return newAccess(p, tokens).guard(mux)
}

const (
	maxBody   = 1 << 20
	chooseFor = 10 * time.Second
)

// ChangeRequest is a [fleet.Change] as it is sent. What is left out stays.
type ChangeRequest struct {
	Number  uint64            `json:"number,omitempty"` // of the configuration to change; 0 is the newest
	Limit   *Limit            `json:"limit,omitempty"`
	Limits  map[string]*Limit `json:"limits,omitempty"` // null takes a key's own limit away
	Weights map[string]int    `json:"weights,omitempty"`
	Reset   bool              `json:"reset,omitempty"`
}

func (l *Limit) limit() *limiter.Limit {
	if l == nil {
		return nil
	}
	return &limiter.Limit{Rate: l.Rate, Burst: l.Burst}
}

func (c ChangeRequest) change() fleet.Change {
	out := fleet.Change{Limit: c.Limit.limit(), Weights: c.Weights, Reset: c.Reset}
	for key, l := range c.Limits {
		if out.Limits == nil {
			out.Limits = map[string]*limiter.Limit{}
		}
		out.Limits[key] = l.limit()
	}
	return out
}

// Line is an entry of the journal as it is sent.
type Line struct {
	At      time.Time `json:"at"`
	By      string    `json:"by"`
	Kind    string    `json:"kind"`
	Number  uint64    `json:"number,omitempty"`
	Subject string    `json:"subject,omitempty"`
	Text    string    `json:"text,omitempty"`
}

func lines(entries []fleet.Entry) []Line {
	all := make([]Line, len(entries))
	for i, e := range entries {
		all[i] = Line{At: e.At.Time(), By: e.By.Name, Kind: e.Kind.String(), Number: e.Number, Subject: e.Subject, Text: e.Text}
	}
	return all
}

// choose waits until what is asked for is made, and logs what became of it.
func (p *Process) choose(w http.ResponseWriter, r *http.Request, what, before string, ask func(context.Context) (uint64, error), more ...any) {
	ctx, cancel := context.WithTimeout(r.Context(), chooseFor)
	defer cancel()
	who, _ := askedBy(ctx)
	number, err := ask(ctx)
	line := append([]any{"who", who.remote, "token", who.token, "what", audited(what), "before", before}, more...)
	if err != nil {
		p.log.Warn("fleet: an operator's change was not made", append(line, "error", err)...)
		refuse(w, err)
		return
	}
	p.log.Info("fleet: an operator's change was made", append(line, "number", number)...)
	answer(w, http.StatusOK, map[string]uint64{"number": number})
}

// maxAudited bounds a text in the log, in bytes: a change may name thousands of keys.
const maxAudited = 1024

func audited(s string) string {
	if len(s) <= maxAudited {
		return s
	}
	return s[:maxAudited] + "…"
}

// before is what a change replaces, in the words of [fleet.Change.String].
func (p *Process) before(change fleet.Change) string {
	c := p.limits.Configuration()
	was := fleet.Change{Limits: map[string]*limiter.Limit{}, Weights: map[string]int{}}
	if change.Limit != nil {
		was.Limit = &c.Limit
	}
	for key := range change.Limits {
		was.Limits[key] = nil
		if l, ok := c.Limits[key]; ok {
			was.Limits[key] = &l
		}
	}
	for _, m := range c.Roster.Members {
		if _, ok := change.Weights[m.Name]; ok {
			was.Weights[m.Name] = int(m.Weighs())
		}
	}
	return audited(was.String())
}

// standsOf is how a member stands in the configuration.
func (p *Process) standsOf(name string) string {
	for _, m := range p.limits.Configuration().Roster.Members {
		if m.Name == name {
			return fmt.Sprintf("%s weighs %d", audited(name), m.Weighs())
		}
	}
	return "no member"
}

func refuse(w http.ResponseWriter, err error) {
	status := http.StatusInternalServerError
	body := map[string]any{}
	if conflict, ok := errors.AsType[*fleet.ConflictError](err); ok {
		body["newest"] = conflict.Newest
	}
	switch {
	case errors.Is(err, fleet.ErrConfig), errors.Is(err, limiter.ErrConfig):
		status = http.StatusBadRequest
	case errors.Is(err, fleet.ErrMember), errors.Is(err, ErrAlone), errors.Is(err, fleet.ErrBusy), errors.Is(err, fleet.ErrConflict):
		status = http.StatusConflict
	case errors.Is(err, gossip.ErrClosed), errors.Is(err, gossip.ErrDisplaced):
		status = http.StatusServiceUnavailable
	case errors.Is(err, context.DeadlineExceeded):
		status = http.StatusGatewayTimeout
	}
	body["error"] = err.Error()
	answer(w, status, body)
}

func answer(w http.ResponseWriter, status int, v any) {
	b, err := json.Marshal(v)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(append(b, '\n'))
}
