// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/stormguard-mq/stormguard/internal/escrow"
	"github.com/stormguard-mq/stormguard/internal/fleetstate"
	"github.com/stormguard-mq/stormguard/internal/gossip"
	"github.com/stormguard-mq/stormguard/internal/operator"
)

// A Token admits an operator to [Process.Handler]: the request carries
// "Authorization: Bearer SECRET".
type Token struct {
	// Name identifies the token in logs and in the journal. Only the first 32 bytes are used.
	Name string

	// Secret must have at least 16 bytes. A shorter one admits nobody, and an error is logged.
	Secret string
}

// Handler serves the requests of operators about the whole fleet; the fleet command is its client.
// Any one process can answer. A client that may call it can change limits and evict members.
//
//	GET  fleet/status                  [Status] as JSON
//	GET  fleet/journal                 [Process.Journal] as JSON, oldest first
//	POST fleet/evict?name=N&number=K   [Process.Evict] upon configuration K; 0 or unset is the newest
//	POST fleet/change                  [Change] as JSON: [Process.Set]
//	GET  fleet/quarantine              the rules in force: [Quarantined] as JSON
//	POST fleet/quarantine              [QuarantineRequest] as JSON: [Process.Quarantine]; answered as GET
//
// A request to a loopback address or a Unix socket needs a token only if tokens are given. Without
// tokens its Host must be a loopback address or localhost. A request to any other address needs TLS
// and one of the tokens. The handler looks at the listener's address of each request
// ([http.LocalAddrContextKey]), so a server that listens on all addresses by mistake serves this
// host only. Every POST must be application/json, and must not come from a page of another origin.
// A proxy on this host reaches the handler over loopback: pass a Token then.
//
// Each change is logged, made or not, with who, what, before and after. The journal has who as
// well. Refused requests are logged at most once a second.
//
// A change of the configuration is answered with {"number": number}, and an error with
// {"error": text}:
//
//   - 400, 401, 403 or 415: the request is wrong.
//   - 409: it cannot be met. If another change was faster, "newest" has the newest number.
//   - 503: this process is out of its fleet.
//   - 504: it was not made in time. It will not be made, unless the error says that its outcome is
//     unknown.
//
// Paths are relative to where the handler is mounted: use http.StripPrefix. A program with a
// console need not serve it: the console answers the same requests.
func (p *Process) Handler(tokens ...Token) http.Handler {
	held := make([]operator.Token, len(tokens))
	for i, t := range tokens {
		held[i] = operator.Token(t)
	}
	return operator.New("fleet", p.log, held).Guard(p.routes())
}

// routes answers all requests: the caller has checked who asks.
func (p *Process) routes() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /fleet/status", func(w http.ResponseWriter, _ *http.Request) { operator.Answer(w, http.StatusOK, p.Status()) })
	mux.HandleFunc("GET /fleet/journal", func(w http.ResponseWriter, _ *http.Request) { operator.Answer(w, http.StatusOK, p.Journal()) })
	mux.HandleFunc("POST /fleet/evict", func(w http.ResponseWriter, r *http.Request) {
		name := r.URL.Query().Get("name")
		if name == "" {
			refuse(w, fmt.Errorf("%w: name: \"\" is not a member", fleetstate.ErrConfig))
			return
		}
		number := uint64(0)
		if text := r.URL.Query().Get("number"); text != "" {
			var err error
			if number, err = strconv.ParseUint(text, 10, 64); err != nil {
				refuse(w, fmt.Errorf("%w: number: %.20q is not a number", fleetstate.ErrConfig, text))
				return
			}
		}
		p.choose(w, r, "evict "+name, p.standsOf(name), func(ctx context.Context) (uint64, error) { return p.Evict(ctx, number, name) })
	})
	mux.HandleFunc("POST /fleet/change", func(w http.ResponseWriter, r *http.Request) {
		var in Change
		d := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxBody))
		d.DisallowUnknownFields()
		if err := d.Decode(&in); err != nil {
			refuse(w, fmt.Errorf("%w: body: %w", fleetstate.ErrConfig, err))
			return
		}
		if d.More() || in.Limit == nil && len(in.Limits)+len(in.Weights) == 0 && !in.Reset {
			refuse(w, fmt.Errorf("%w: body: want one object with a change", fleetstate.ErrConfig))
			return
		}
		change := in.change()
		p.choose(w, r, "set", p.before(change), func(ctx context.Context) (uint64, error) { return p.Set(ctx, in) }, "after", audited(change.String()))
	})
	p.serveQuarantine(mux)
	return mux
}

const (
	maxBody   = 1 << 20
	chooseFor = 10 * time.Second
)

// choose makes a request, waits until it is made, and logs the outcome.
func (p *Process) choose(w http.ResponseWriter, r *http.Request, what, before string, ask func(context.Context) (uint64, error), more ...any) {
	ctx, cancel := context.WithTimeout(r.Context(), chooseFor)
	defer cancel()
	who, _ := operator.From(ctx)
	number, err := ask(ctx)
	line := append([]any{"who", who.Remote, "token", who.Token, "what", audited(what), "before", before}, more...)
	if err != nil {
		p.log.Warn("fleet: an operator's change was not made", append(line, "error", err)...)
		refuse(w, err)
		return
	}
	p.log.Info("fleet: an operator's change was made", append(line, "number", number)...)
	operator.Answer(w, http.StatusOK, map[string]uint64{"number": number})
}

// maxAudited is how many bytes of a text are logged: a change may name thousands of keys.
const maxAudited = 1024

func audited(s string) string {
	if len(s) <= maxAudited {
		return s
	}
	return s[:maxAudited] + "…"
}

// before describes the values that a change replaces, in the format of [fleetstate.Change.String].
func (p *Process) before(change fleetstate.Change) string {
	c := p.limits.Configuration()
	was := fleetstate.Change{Limits: map[string]*escrow.Limit{}, Weights: map[string]int{}}
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

// standsOf describes a member's weight in the configuration.
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
	if conflict, ok := errors.AsType[*fleetstate.ConflictError](err); ok {
		body["newest"] = conflict.Newest
	}
	switch {
	case errors.Is(err, fleetstate.ErrConfig), errors.Is(err, escrow.ErrConfig):
		status = http.StatusBadRequest
	case errors.Is(err, fleetstate.ErrMember), errors.Is(err, errAlone), errors.Is(err, fleetstate.ErrBusy), errors.Is(err, fleetstate.ErrConflict):
		status = http.StatusConflict
	case errors.Is(err, gossip.ErrClosed), errors.Is(err, gossip.ErrDisplaced):
		status = http.StatusServiceUnavailable
	case errors.Is(err, context.DeadlineExceeded):
		status = http.StatusGatewayTimeout
	}
	body["error"] = err.Error()
	operator.Answer(w, status, body)
}
