// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package operator decides who may call a handler for operators, and names the caller.
package operator

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/json"
	"fmt"
	"log/slog"
	"mime"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"
)

// A Token admits an operator to a handler: the request carries
// "Authorization: Bearer SECRET".
type Token struct {
	// Name identifies the token in logs and in the journal. Only the first 32 bytes are used.
	Name string

	// Secret must have at least 16 bytes. A shorter one admits nobody, and an error is logged.
	Secret string
}

// Page has the paths of a console's page. The page contains no data of the process, so it needs no
// token. The person types the token into the page, which sends it with each request.
var Page = []string{"/", "/app.js", "/app.css"}

const (
	minSecret    = 16
	maxTokenName = 32
	refuseEvery  = time.Second // between two log lines about requests that were refused
)

// Access decides who may call a handler. It is safe for concurrent use.
type Access struct {
	log    *slog.Logger
	room   string // the package that the handler belongs to, in errors and log lines
	tokens []heldToken
	cross  *http.CrossOriginProtection

	// OnRefused is called for refused requests, at most once a second: who asked, what was asked,
	// why it was refused, and how many others were refused since the last call. Set it before the
	// first request.
	OnRefused func(who Who, asked, why string, others int)

	// Page lets everybody read the paths in [Page] without a token. Beyond loopback TLS is still
	// needed. Set it before the first request.
	Page bool

	mu     sync.Mutex
	saidAt time.Time
	unsaid int // requests refused since the last log line
}

// heldToken is a token with a hashed secret, so that all comparisons take the same time.
type heldToken struct {
	name string
	hash [sha256.Size]byte
}

// New returns the rules for the handler of a package.
//
// A request to a loopback address or a Unix socket needs a token only if tokens are given. Without
// tokens its Host must be a loopback address or localhost. Any other request needs TLS and one of
// the tokens. A request that may change something must be application/json, and must not come from
// a page of another origin.
func New(room string, log *slog.Logger, tokens []Token) *Access {
	a := &Access{room: room, log: log, cross: http.NewCrossOriginProtection()}
	for i, t := range tokens {
		if len(t.Secret) < minSecret {
			log.Error("a token is too short and admits nobody", "handler", room, "token", i, "name", clip(t.Name), "bytes", len(t.Secret), "least", minSecret)
		}
		a.tokens = append(a.tokens, heldToken{clip(t.Name), sha256.Sum256([]byte(t.Secret))})
	}
	return a
}

func clip(name string) string { return name[:min(len(name), maxTokenName)] }

// Who is the caller: its remote address, and the name of its token if there is one.
type Who struct{ Remote, Token string }

func (w Who) String() string {
	if w.Token == "" {
		return w.Remote
	}
	return w.Token + " at " + w.Remote
}

type whoKey struct{}

// From returns the operator for whom ctx runs; false if a program calls.
func From(ctx context.Context) (Who, bool) {
	w, ok := ctx.Value(whoKey{}).(Who)
	return w, ok
}

// Guard refuses requests that are not allowed. next gets the others.
func (a *Access) Guard(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		who := Who{Remote: r.RemoteAddr}
		status, why := a.judge(r, &who)
		if status == 0 {
			next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), whoKey{}, who)))
			return
		}
		a.say(r, who, status, why)
		if status == http.StatusUnauthorized {
			w.Header().Set("WWW-Authenticate", "Bearer")
		}
		w.Header().Set("Connection", "close") // an unread body is not worth reading
		Answer(w, status, map[string]string{"error": a.room + ": " + why})
	})
}

// judge returns the status with which to refuse r, or 0 to allow it. It sets the token's name.
func (a *Access) judge(r *http.Request, who *Who) (status int, why string) {
	local := cameToLoopback(r)
	reads := r.Method == http.MethodGet || r.Method == http.MethodHead
	switch {
	case !local && len(a.tokens) == 0:
		return http.StatusForbidden, "this handler is not served on loopback: pass a Token to Handler, and serve it with TLS"
	case !local && r.TLS == nil:
		return http.StatusForbidden, "this handler is not served on loopback: serve it with TLS"
	case len(a.tokens) > 0:
		var ok bool
		if who.Token, ok = a.token(r); !ok && !(reads && a.Page && slices.Contains(Page, r.URL.Path)) {
			return http.StatusUnauthorized, "a token is needed: Authorization: Bearer SECRET"
		}
	case !localHost(r.Host):
		// This is a page whose name was made to resolve to loopback (DNS rebinding), or a proxy.
		return http.StatusForbidden, fmt.Sprintf("Host: %.64q is not a loopback address or localhost", r.Host)
	}
	if reads {
		return 0, ""
	}
	if err := a.cross.Check(r); err != nil {
		return http.StatusForbidden, "a page of another origin may not ask: " + err.Error()
	}
	// A page's form needs no preflight for the types that it can send; JSON needs one.
	if kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || kind != "application/json" {
		return http.StatusUnsupportedMediaType, fmt.Sprintf("Content-Type: %.64q is not application/json", r.Header.Get("Content-Type"))
	}
	return 0, ""
}

// cameToLoopback tells whether the request came to a loopback address or a Unix socket of this
// host. Without a listener's address it returns false, as with a server of another kind.
func cameToLoopback(r *http.Request) bool {
	switch at := r.Context().Value(http.LocalAddrContextKey).(type) {
	case *net.TCPAddr:
		return at.AddrPort().Addr().Unmap().IsLoopback()
	case *net.UnixAddr:
		return true
	}
	return false
}

func localHost(host string) bool {
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	host = strings.TrimSuffix(strings.TrimPrefix(host, "["), "]")
	if ip, err := netip.ParseAddr(host); err == nil {
		return ip.Unmap().IsLoopback()
	}
	return strings.EqualFold(host, "localhost")
}

// token compares the secret with all tokens. The time does not depend on which one matches.
func (a *Access) token(r *http.Request) (name string, ok bool) {
	scheme, secret, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	hash := sha256.Sum256([]byte(secret))
	for _, t := range a.tokens {
		if subtle.ConstantTimeCompare(hash[:], t.hash[:]) == 1 {
			name, ok = t.name, true
		}
	}
	return name, ok && strings.EqualFold(scheme, "Bearer") && len(secret) >= minSecret
}

// say logs a refused request, at most one a second: callers decide how many there are.
func (a *Access) say(r *http.Request, who Who, status int, why string) {
	a.mu.Lock()
	now := time.Now()
	if now.Sub(a.saidAt) < refuseEvery {
		a.unsaid++
		a.mu.Unlock()
		return
	}
	unsaid := a.unsaid
	a.saidAt, a.unsaid = now, 0
	a.mu.Unlock()
	a.log.Warn("an operator's request was refused", "handler", a.room, "who", who.String(), "method", r.Method, "path", r.URL.Path,
		"status", status, "why", why, "since_last", unsaid)
	if a.OnRefused != nil {
		a.OnRefused(who, r.Method+" "+r.URL.EscapedPath(), why, unsaid)
	}
}

// Answer writes v as JSON that must not be cached.
func Answer(w http.ResponseWriter, status int, v any) {
	b, err := json.Marshal(v)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_, _ = w.Write(append(b, '\n'))
}
