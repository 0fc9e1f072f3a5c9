// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package process

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/stormguard-mq/stormguard/crdt/gossip"
	"github.com/stormguard-mq/stormguard/fleet"
	"github.com/stormguard-mq/stormguard/limiter"
)

// Handler serves what an operator asks of a fleet, by any one of its processes; the
// fleet command speaks to it. It decides nothing about who may: mount it where only
// operators get, for whoever can call it can change limits and evict members.
//
//	GET  status          [Status] as JSON
//	GET  journal         the entries that are remembered, oldest first
//	POST evict?name=N    [Process.Evict]
//	POST change          [ChangeRequest] as JSON: [Process.Propose]
//
// What is chosen is answered with {"charter": number}. A request that is wrong is
// 400, one that cannot be met 409, one that was not chosen in time 504, and any that
// asks a process which is out of its fleet 503; these have {"error": text}. Paths are relative to where it is mounted: use http.StripPrefix.
func (p *Process) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /status", func(w http.ResponseWriter, _ *http.Request) { answer(w, http.StatusOK, p.Status()) })
	mux.HandleFunc("GET /journal", func(w http.ResponseWriter, _ *http.Request) { answer(w, http.StatusOK, lines(p.Journal(nil))) })
	mux.HandleFunc("POST /evict", func(w http.ResponseWriter, r *http.Request) {
		name := r.URL.Query().Get("name")
		if name == "" {
			refuse(w, fmt.Errorf("%w: name: \"\" is not a member", fleet.ErrConfig))
			return
		}
		choose(w, r, func(ctx context.Context) (uint64, error) { return p.Evict(ctx, name) })
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
		choose(w, r, func(ctx context.Context) (uint64, error) { return p.Propose(ctx, in.change()) })
	})
	return mux
}

const (
	maxBody   = 1 << 20
	chooseFor = 10 * time.Second
)

// ChangeRequest is a [fleet.Change] as it is sent. What is left out stays.
type ChangeRequest struct {
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

// choose waits until what is asked for is chosen.
func choose(w http.ResponseWriter, r *http.Request, ask func(context.Context) (uint64, error)) {
	ctx, cancel := context.WithTimeout(r.Context(), chooseFor)
	defer cancel()
	number, err := ask(ctx)
	if err != nil {
		refuse(w, err)
		return
	}
	answer(w, http.StatusOK, map[string]uint64{"charter": number})
}

func refuse(w http.ResponseWriter, err error) {
	status := http.StatusInternalServerError
	switch {
	case errors.Is(err, fleet.ErrConfig), errors.Is(err, limiter.ErrConfig):
		status = http.StatusBadRequest
	case errors.Is(err, fleet.ErrMember), errors.Is(err, ErrMoot), errors.Is(err, ErrAlone), errors.Is(err, fleet.ErrBusy):
		status = http.StatusConflict
	case errors.Is(err, gossip.ErrClosed), errors.Is(err, gossip.ErrDisplaced):
		status = http.StatusServiceUnavailable
	case errors.Is(err, context.DeadlineExceeded):
		status = http.StatusGatewayTimeout
		err = fmt.Errorf("no majority of the roster has chosen it within %v; it may be chosen still", chooseFor)
	}
	answer(w, status, map[string]string{"error": err.Error()})
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
