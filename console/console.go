// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package console

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/operator"
)

// Config holds the settings of a Console. The zero value serves loopback only.
type Config struct {
	// Process is the name of the process in answers; default the host's name.
	Process string

	// Tokens are the tokens of operators. Without any only requests over loopback are
	// served.
	Tokens []Token

	// Fleet carries orders to the consoles of other processes. It is fleet.Process.Orders,
	// or nil without a fleet. Requests below fleet/ are answered as by
	// fleet.Process.Handler.
	Fleet operator.Carrier

	// Logger gets a line for each order: at INFO if it is carried out, at WARN if it is
	// refused. Default: the logger of the first guard.
	Logger *slog.Logger
}

// A Token admits an operator: the request carries "Authorization: Bearer SECRET".
type Token struct {
	// Name is the token's owner, in logs and in the audit. Up to 32 bytes count.
	Name string

	// Secret has at least 16 bytes.
	Secret string
}

// A Console answers operators about the guards of one process. It is an http.Handler, safe
// for concurrent use. It owns one goroutine, or two with a fleet; Close ends them.
type Console struct {
	process string
	guards  []*guard.Guard
	log     *slog.Logger
	audit   audit
	events  events
	unwatch []func()
	handler http.Handler
	fleet   *follower // nil without a fleet

	history  history
	watchers atomic.Int64
	closed   <-chan struct{} // closed by end
	end      context.CancelFunc
	done     sync.WaitGroup
}

const (
	leastSecret = 16
	maxBody     = 1 << 20
)

// New makes the console of one or more guards. The error joins all problems.
func New(cfg Config, guards ...*guard.Guard) (*Console, error) {
	var all []error
	if len(guards) == 0 {
		all = append(all, errors.New("console: guards: none is given"))
	}
	for i, g := range guards {
		if g == nil {
			all = append(all, fmt.Errorf("console: guards: number %d is nil", i))
		}
	}
	tokens := make([]operator.Token, len(cfg.Tokens))
	for i, t := range cfg.Tokens {
		if len(t.Secret) < leastSecret {
			all = append(all, fmt.Errorf("console: Config.Tokens: the secret of %q has %d bytes, the least is %d", t.Name, len(t.Secret), leastSecret))
		}
		tokens[i] = operator.Token(t)
	}
	if err := errors.Join(all...); err != nil {
		return nil, err
	}
	c := &Console{process: cfg.Process, guards: guards, log: cfg.Logger}
	if c.process == "" {
		c.process, _ = os.Hostname()
	}
	if c.log == nil {
		c.log = guards[0].Logger()
	}
	access := operator.New("console", c.log, tokens)
	access.OnRefused = func(who operator.Who, asked, why string, others int) {
		if others > 0 {
			why += fmt.Sprintf("; %d others were refused since the entry before", others)
		}
		c.audit.refuse(Entry{At: time.Now().UTC(), Who: who.String(), Order: clip(asked), Error: clip(why)})
	}
	access.Page = true
	c.handler = access.Guard(c.routes(cfg.Fleet))
	c.events.now = time.Now
	for _, g := range guards {
		c.unwatch = append(c.unwatch, g.Watch(c.events.watcher()))
	}
	ctx, end := context.WithCancel(context.Background())
	c.closed, c.end = ctx.Done(), end
	c.done.Go(func() { c.history.run(ctx, c.states) })
	if cfg.Fleet != nil {
		c.fleet = follow(c, cfg.Fleet)
	}
	return c, nil
}

// Close stops watching the guards and following the fleet's orders. Call it before you
// close the guards. Pauses and forced breakers stay until their time. Requests to watch
// end.
func (c *Console) Close() {
	c.end()
	c.done.Wait()
	for _, stop := range c.unwatch {
		stop()
	}
	if c.fleet != nil {
		c.fleet.close()
	}
}

// ServeHTTP answers one request.
func (c *Console) ServeHTTP(w http.ResponseWriter, r *http.Request) { c.handler.ServeHTTP(w, r) }

func (c *Console) routes(fleet operator.Carrier) *http.ServeMux {
	mux := http.NewServeMux()
	files := servePage()
	for _, path := range operator.Page {
		if path == "/" {
			path = "/{$}"
		}
		mux.Handle("GET "+path, files)
	}
	get := func(path string, look func(pattern string) any) {
		mux.HandleFunc("GET /"+path, func(w http.ResponseWriter, r *http.Request) {
			pattern := r.URL.Query().Get("name")
			if pattern == "" {
				pattern = "*"
			}
			operator.Answer(w, http.StatusOK, look(pattern))
		})
	}
	get("status", func(string) any { return c.status(time.Now(), c.sources("*")) })
	get("sources", func(pattern string) any { return c.sources(pattern) })
	get("breakers", func(pattern string) any { return c.breakers(pattern) })
	get("audit", func(string) any { return c.audit.entries() })
	get("history", func(string) any { return c.history.view(time.Now()) })
	get("topology", func(string) any { return c.topology() })
	mux.HandleFunc("GET /watch", c.watch)
	get("quarantine", func(string) any { return c.rules() })
	recent := func(path string, look func(then time.Time) any) {
		mux.HandleFunc("GET /"+path, func(w http.ResponseWriter, r *http.Request) {
			since := time.Hour
			if text := r.URL.Query().Get("since"); text != "" {
				var err error
				if since, err = time.ParseDuration(text); err != nil || since <= 0 {
					err = fmt.Errorf("%w: since: %.32q is not a duration above 0, such as 1h", errOrder, text)
					operator.Answer(w, http.StatusBadRequest, map[string]string{"error": err.Error()})
					return
				}
			}
			operator.Answer(w, http.StatusOK, look(time.Now().Add(-since)))
		})
	}
	recent("events", func(then time.Time) any { return c.since(then) })
	recent("causes", func(then time.Time) any { return c.events.causes(then) })
	mux.HandleFunc("POST /order", c.order)
	mux.HandleFunc("POST /quarantine", c.changeRules)
	if fleet != nil {
		mux.Handle("/fleet/", fleet.Routes())
	}
	return mux
}

// order carries out one order and writes the audit.
func (c *Console) order(w http.ResponseWriter, r *http.Request) {
	at := time.Now().UTC() // taken first: in the timeline the order comes before its effects
	who, _ := operator.From(r.Context())
	o, err := readOrder(json.NewDecoder(http.MaxBytesReader(w, r.Body, maxBody)))
	out := Outcome{}
	switch {
	case err != nil:
	case o.In == "" || o.In == inProcess:
		carryOut := c.do
		if c.fleet != nil {
			carryOut = c.fleet.alone
		}
		out, err = carryOut(o)
	case c.fleet == nil:
		err = fmt.Errorf("%w: in: %q: this process has no fleet", errOrder, o.In)
	default:
		out, err = c.fleet.give(r.Context(), o, who.String())
	}
	line := []any{"who", who.String(), "order", clip(o.String()), "why", clip(o.Why)}
	e := Entry{At: at, Who: who.String(), Order: clip(o.String()), Why: clip(o.Why)}
	if err != nil {
		c.log.Warn("console: an operator's order was not carried out", append(line, "error", err)...)
		e.Error = clip(err.Error())
		c.audit.order(e)
		status := http.StatusBadRequest
		if errors.Is(err, errNoSource) {
			status = http.StatusNotFound
		}
		operator.Answer(w, status, map[string]string{"error": err.Error()})
		return
	}
	if !o.DryRun {
		failed := 0
		for _, r := range out.Results {
			if r.Error != "" {
				failed++
			}
		}
		line = append(line, "sources", len(out.Results), "failed", failed)
		if len(out.Results) > 0 {
			first := out.Results[0]
			line = append(line, "first", first.Source, "before", first.Before, "after", first.After)
		}
		if len(out.Processes)+len(out.Silent) > 0 {
			line = append(line, "processes", len(out.Processes), "silent", out.Silent)
		}
		c.log.Info("console: an operator's order was carried out", line...)
		e.Results, e.Fleet = out.Results, clip(out.fleet())
		c.audit.order(e)
	}
	operator.Answer(w, http.StatusOK, out)
}

// clip shortens a text for the log and the audit: an order may name a thousand sources.
func clip(s string) string { return clipTo(s, 1024) }

func clipTo(s string, most int) string {
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "") + "…"
}
