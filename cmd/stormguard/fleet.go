// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"net/netip"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"

	"github.com/stormguard-mq/stormguard/cmd/stormguard/internal/words"
	"github.com/stormguard-mq/stormguard/console"
	"github.com/stormguard-mq/stormguard/fleet"
	"github.com/stormguard-mq/stormguard/limiter"
)

const fleetLong = `Show a fleet of processes that share limits and breakers, live, as one of them
sees it: who is there, in which zone, with which share of the limits; whose share
is stranded; who has not applied a change yet; how long changes take to arrive;
and how much of each key is admitted.

--url, or $STORMGUARD_URL, is where a process of the fleet serves its console, or the handler of
fleet.Process. "stormguard fleet run" starts processes to try it with:

  stormguard fleet run --name a --roster a,b,c --register file:trial --bind 127.0.0.1:7001 --http 127.0.0.1:8001
  stormguard fleet run --name b --roster a,b,c --register file:trial --bind 127.0.0.1:7002 --seed 127.0.0.1:7001
  stormguard fleet run --name c --roster a,b,c --register file:trial --bind 127.0.0.1:7003 --seed 127.0.0.1:7001
  stormguard fleet --url http://127.0.0.1:8001 --watch

A handler that listens beyond loopback needs https and --token-file.`

const defaultURL = "http://127.0.0.1:8790"

// operator holds the flags of all commands that send requests to a process.
type operator struct {
	url, ca, tokenFile string
	json               bool
	server             string // kind of the server at url, for errors
	rules              string // path of the server's quarantine
}

// bind adds the flags for the address and the token.
func (op *operator) bind(cmd *cobra.Command, usage string) {
	f := cmd.Flags()
	f.StringVar(&op.url, "url", defaultURL, usage)
	f.StringVar(&op.tokenFile, "token-file", "", "`file` whose first line is NAME SECRET: the token to send")
	f.StringVar(&op.ca, "ca", "", "PEM `file` of the certificates to trust (default: the system's)")
	settings(cmd)
}

// refusedError is the answer of a process that refused a request.
type refusedError struct {
	status int
	text   string
}

func (e refusedError) Error() string { return e.text }

func newFleet() *cobra.Command {
	op := operator{server: "fleet", rules: "fleet/quarantine"}
	var watch bool
	cmd := &cobra.Command{
		Use:   "fleet",
		Short: "Show a fleet live; change its limits; evict who does not come back",
		Long:  fleetLong,
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return op.show(cmd.Context(), cmd.OutOrStdout(), watch)
		},
	}
	cmd.Flags().BoolVar(&watch, "watch", false, "again each second, until interrupted")
	asking := []*cobra.Command{newFleetEvict(&op), newFleetSet(&op), newFleetReset(&op), newFleetJournal(&op)}
	quarantine, rules := newFleetQuarantine(&op)
	for _, c := range slices.Concat(asking, rules, []*cobra.Command{cmd}) {
		op.bind(c, "where a process of the fleet serves its console, or the handler of fleet.Process")
		c.Flags().BoolVar(&op.json, "json", false, "print what the process answers")
	}
	cmd.AddCommand(append(asking, quarantine, newFleetRun(), newFleetKeygen())...)
	return cmd
}

func newFleetKeygen() *cobra.Command {
	return &cobra.Command{
		Use:   "keygen",
		Short: "Print a new key for the fleet's gossip: 32 random bytes, base64",
		Long: `Print a new key for the fleet's gossip: 32 random bytes, base64. Keep it in a file
that only the fleet's processes can read, the same for all of them:

  (umask 077; stormguard fleet keygen > fleet.key)
  stormguard fleet run --keys fleet.key --bind :7946 ...`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := fmt.Fprintln(cmd.OutOrStdout(), base64.StdEncoding.EncodeToString(fleet.NewKey()))
			return err
		},
	}
}

func newFleetEvict(op *operator) *cobra.Command {
	var number uint64
	cmd := &cobra.Command{
		Use:   "evict NAME",
		Short: "Free the share of a member that does not come back",
		Long: `Free the share of a member that does not come back, and what was lent to it.

It is your word that the process does not run: one that does, behind a cut, goes on
admitting by its share until it hears of it. Then it asks for its share again.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return op.change(cmd, number, "evicted %s", func(number uint64) (string, any) {
				return fmt.Sprintf("fleet/evict?name=%s&number=%d", url.QueryEscape(args[0]), number), nil
			}, args[0])
		},
	}
	numberFlag(cmd, &number)
	return cmd
}

// numberFlag adds the flag for the number of the configuration to change.
func numberFlag(cmd *cobra.Command, number *uint64) {
	cmd.Flags().Uint64Var(number, "number", 0, "of the configuration to change; if another change was faster, nothing is changed (default the newest)")
}

func newFleetSet(op *operator) *cobra.Command {
	var key string
	var rate float64
	var burst int
	var unset bool
	var weights map[string]int
	var number uint64
	cmd := &cobra.Command{
		Use:   "set",
		Short: "Change the fleet's limit, that of a key, or weights of members",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			limited := cmd.Flags().Changed("rate") || cmd.Flags().Changed("burst")
			var in change
			switch limit := (&limiter.Limit{Rate: rate, Burst: burst}); {
			case cmd.Flags().Changed("key") && key == "":
				return usageError{errors.New(`--key "": must not be empty; without --key it is the limit of all others`)}
			case unset && (limited || key == ""):
				return usageError{errors.New("--unset: needs --key, and neither --rate nor --burst")}
			case unset:
				in.Limits = map[string]*limiter.Limit{key: nil}
			case limited && !(cmd.Flags().Changed("rate") && cmd.Flags().Changed("burst")):
				return usageError{errors.New("--rate and --burst: must be given together")}
			case limited && key != "":
				in.Limits = map[string]*limiter.Limit{key: limit}
			case limited:
				in.Limit = limit
			case key != "" || len(weights) == 0:
				return usageError{errors.New("nothing to change: give --rate and --burst, --key with --unset, or --weight")}
			}
			in.Weights = weights
			return op.change(cmd, number, "changed", in.path)
		},
	}
	f := cmd.Flags()
	f.StringVar(&key, "key", "", "the key whose own limit it is; without it the limit of all others")
	f.Float64Var(&rate, "rate", 0, "tokens per second, 0.001 to 1e9, of the whole fleet")
	f.IntVar(&burst, "burst", 0, "tokens, 1 to 1000000000, of the whole fleet")
	f.BoolVar(&unset, "unset", false, "take the key's own limit away")
	f.StringToIntVar(&weights, "weight", nil, "NAME=N,...: 0 to 1000000; a member with 0 only borrows")
	numberFlag(cmd, &number)
	return cmd
}

func newFleetReset(op *operator) *cobra.Command {
	var number uint64
	cmd := &cobra.Command{
		Use:   "reset",
		Short: "Fill all buckets, once: up to a burst more is admitted",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return op.change(cmd, number, "all buckets filled", change{Reset: true}.path)
		},
	}
	numberFlag(cmd, &number)
	return cmd
}

// A change is the request of the commands set and reset.
type change fleet.Change

// path returns the path and the body of the request for a change of a numbered
// configuration.
func (c change) path(number uint64) (string, any) {
	c.Number = number
	return "fleet/change", fleet.Change(c)
}

func newFleetJournal(op *operator) *cobra.Command {
	return &cobra.Command{
		Use:   "journal",
		Short: "Print what happened in the fleet, oldest first",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var all []fleet.Entry
			raw, err := op.ask(cmd.Context(), http.MethodGet, "fleet/journal", nil, &all)
			if err != nil {
				return err
			}
			return op.print(cmd, raw, func(w io.Writer, l words.Language) error {
				return table(w, l, "", func(row func(...any)) {
					for _, e := range all {
						number := ""
						if e.Number > 0 {
							number = fmt.Sprint(e.Number)
						}
						row(e.At.Format("2006-01-02 15:04:05.000"), e.By, e.Kind, number, e.Subject, e.Text)
					}
				})
			})
		},
	}
}

// change requests a change of the configuration with a number; 0 is the newest one. The
// process makes the change while the request lasts, and never later.
func (op *operator) change(cmd *cobra.Command, number uint64, done string, path func(number uint64) (string, any), values ...any) error {
	if number == 0 {
		var s fleet.Status
		if _, err := op.ask(cmd.Context(), http.MethodGet, "fleet/status", nil, &s); err != nil {
			return err
		}
		if number = s.Configuration.Number; number == 0 {
			return fmt.Errorf("%s knows no configuration yet", s.Name)
		}
	}
	var out struct {
		Number uint64 `json:"number"`
	}
	where, body := path(number)
	raw, err := op.ask(cmd.Context(), http.MethodPost, where, body, &out)
	if err != nil {
		return err
	}
	return op.print(cmd, raw, func(w io.Writer, l words.Language) error {
		_, err := io.WriteString(w, l.Sayf("%s: configuration %d, after %d\n", l.Sayf(done, values...), out.Number, number))
		return err
	})
}

// print prints an answer: unchanged with --json, else by the function text.
func (op *operator) print(cmd *cobra.Command, raw []byte, text func(io.Writer, words.Language) error) error {
	if op.json {
		_, err := cmd.OutOrStdout().Write(raw)
		return err
	}
	return text(cmd.OutOrStdout(), words.From(cmd.Context()))
}

// client returns the client that sends r, and adds the token to r.
func (op *operator) client(r *http.Request) (*http.Client, error) {
	transport := &http.Transport{DisableKeepAlives: true}
	if op.ca != "" {
		pem, err := os.ReadFile(op.ca)
		if err != nil {
			return nil, usageError{fmt.Errorf("--ca: %w", err)}
		}
		roots := x509.NewCertPool()
		if !roots.AppendCertsFromPEM(pem) {
			return nil, usageError{fmt.Errorf("--ca %s: no certificate in it", op.ca)}
		}
		transport.TLSClientConfig = &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}
	}
	if op.tokenFile != "" {
		tokens, err := readTokens("--token-file", op.tokenFile)
		if err != nil {
			return nil, usageError{err}
		}
		if r.URL.Scheme != "https" && !isLoopback(r.URL.Hostname()) {
			return nil, usageError{fmt.Errorf("--token-file: %s would carry the token unencrypted; use https", op.url)}
		}
		r.Header.Set("Authorization", "Bearer "+tokens[0].Secret)
	}
	stay := func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse } // a redirect must not get the token
	return &http.Client{Transport: transport, CheckRedirect: stay}, nil
}

func isLoopback(host string) bool {
	ip, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && ip.Unmap().IsLoopback()
}

// readTokens reads tokens: one "NAME SECRET" per line; # begins a comment.
func readTokens(flag, path string) ([]fleet.Token, error) {
	text, err := os.ReadFile(path) //nolint:gosec // the operator's own
	if err != nil {
		return nil, fmt.Errorf("%s: %w", flag, err)
	}
	var tokens []fleet.Token
	for n, line := range strings.Split(string(text), "\n") {
		line, _, _ = strings.Cut(line, "#")
		switch words := strings.Fields(line); {
		case len(words) == 0:
		case len(words) != 2 || len(words[1]) < minToken:
			return nil, fmt.Errorf("%s %s: line %d is not NAME SECRET, with a secret of %d bytes or more", flag, path, n+1, minToken)
		default:
			tokens = append(tokens, fleet.Token{Name: words[0], Secret: words[1]})
		}
	}
	if len(tokens) == 0 {
		return nil, fmt.Errorf("%s %s: no token in it", flag, path)
	}
	return tokens, nil
}

const minToken = 16 // bytes, as fleet.Token says

// base returns the address of the process, without a slash at its end.
func (op *operator) base() (string, error) {
	base := strings.TrimSuffix(op.url, "/")
	if base == "" {
		return "", usageError{errors.New("--url: must be given")}
	}
	if !strings.Contains(base, "://") {
		base = "http://" + base
	}
	return base, nil
}

// ask sends one request. It returns the answer, and decodes it into out. If the answer to a
// possible change is lost, the error is an unknownError.
func (op *operator) ask(ctx context.Context, method, path string, body, out any) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	var sent io.Reader
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			return nil, err
		}
		sent = bytes.NewReader(b)
	}
	base, err := op.base()
	if err != nil {
		return nil, err
	}
	r, err := http.NewRequestWithContext(ctx, method, base+"/"+path, sent)
	if err != nil {
		return nil, usageError{fmt.Errorf("--url %q: %w", op.url, err)}
	}
	if method != http.MethodGet {
		r.Header.Set("Content-Type", "application/json")
	}
	client, err := op.client(r)
	if err != nil {
		return nil, err
	}
	var written atomic.Bool // a request that may change something was sent
	if o, dry := body.(console.Order); method != http.MethodGet && !(dry && o.DryRun) {
		r = r.WithContext(httptrace.WithClientTrace(r.Context(), &httptrace.ClientTrace{
			WroteHeaders: func() { written.Store(true) }, // runs before the server can have the request
		}))
	}
	unanswered := func(err error) error {
		if written.Load() {
			return unknownError{fmt.Errorf("the outcome is unknown: %w; look before you repeat it", err)}
		}
		return err
	}
	a, err := client.Do(r)
	if err != nil {
		return nil, unanswered(fmt.Errorf("nobody answers for a %s at %s: %w", op.server, op.url, errors.Unwrap(err)))
	}
	defer func() { _ = a.Body.Close() }()
	raw, err := io.ReadAll(io.LimitReader(a.Body, 64<<20))
	if err != nil {
		return nil, unanswered(err)
	}
	if a.StatusCode != http.StatusOK {
		var refused struct {
			Error string `json:"error"`
		}
		if json.Unmarshal(raw, &refused) != nil || refused.Error == "" {
			none := ""
			if op.server == "fleet" && a.StatusCode == http.StatusNotFound {
				none = ": the process may have none"
			}
			return nil, unanswered(fmt.Errorf("%s answers %s, which no %s does%s", op.url, a.Status, op.server, none))
		}
		return nil, refusedError{a.StatusCode, refused.Error}
	}
	if err := json.Unmarshal(raw, out); err != nil {
		return nil, unanswered(fmt.Errorf("%s answers what no %s does: %w", op.url, op.server, err))
	}
	return raw, nil
}

// show prints the fleet. Without watch it prints once, from two statuses a second apart, or
// from one with --json. With watch it prints each second.
func (op *operator) show(ctx context.Context, w io.Writer, watch bool) error {
	var before fleet.Status
	at := time.Now()
	for looks := 1; ; looks++ {
		var s fleet.Status
		raw, err := op.ask(ctx, http.MethodGet, "fleet/status", nil, &s)
		if err != nil {
			return err
		}
		now := time.Now()
		switch {
		case op.json:
			if _, err := w.Write(raw); err != nil {
				return err
			}
		case looks > 1:
			if err := printFleet(w, words.From(ctx), &s, rates(&before, &s, now.Sub(at))); err != nil {
				return err
			}
		}
		if !watch && (op.json || looks > 1) {
			return nil
		}
		before, at = s, now
		select {
		case <-time.After(time.Second):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// keyRate is how many tokens of a key all members together admit and deny per second.
type keyRate struct {
	key              string
	admitted, denied float64
	level, full      float64
}

// rates returns the rates between two statuses, the highest first. A process that started
// between them counts as 0, and so does one without a newer status.
func rates(before, after *fleet.Status, d time.Duration) []keyRate {
	type at struct{ name, key string }
	was := map[at]fleet.Key{}
	for _, m := range before.Members {
		for _, k := range m.Keys {
			was[at{m.Name, k.Key}] = k
		}
	}
	all := map[string]*keyRate{}
	for _, m := range after.Members {
		for _, k := range m.Keys {
			r := all[k.Key]
			if r == nil {
				r = &keyRate{key: k.Key}
				all[k.Key] = r
			}
			r.level, r.full = r.level+k.Level, r.full+k.Cap
			if b, ok := was[at{m.Name, k.Key}]; ok && k.Admitted >= b.Admitted && k.Denied >= b.Denied {
				r.admitted += float64(k.Admitted-b.Admitted) / d.Seconds()
				r.denied += float64(k.Denied-b.Denied) / d.Seconds()
			}
		}
	}
	var sorted []keyRate
	for _, r := range all {
		sorted = append(sorted, *r)
	}
	slices.SortFunc(sorted, func(a, b keyRate) int {
		if a.admitted != b.admitted {
			if a.admitted > b.admitted {
				return -1
			}
			return 1
		}
		return strings.Compare(a.key, b.key)
	})
	return sorted
}

func printFleet(out io.Writer, l words.Language, s *fleet.Status, keys []keyRate) error {
	var b strings.Builder
	say := func(format string, values ...any) { b.WriteString(l.Sayf(format, values...)) }
	c := s.Configuration
	say("%s, as %s sees it at %s\n", s.Fleet, s.Name, time.Now().Format("15:04:05"))
	say("configuration %d, complete to %d: %g/s, burst %d", c.Number, c.Complete, c.Limit.Rate, c.Limit.Burst)
	if n := len(c.Limits); n > 0 {
		say(", %d keys with limits of their own", n)
	}
	say("\nstranded share %.1f %%, token skew %.2f, sync delay %v, journal backlog %d\n", 100*s.Stranded, s.Skew, s.SyncDelay.Round(100*time.Microsecond), s.Backlog)
	if len(c.Lacking) > 0 {
		say("NOT APPLIED YET by %s: until then they admit by what they had before\n", strings.Join(c.Lacking, ", "))
	}
	if c.Away != "" {
		say("REGISTER AWAY: %s; this configuration stays in force, and nothing can be changed\n", c.Away)
	}
	switch {
	case !c.Settled:
		say("NOT JOINED: this process does not know yet that its configuration is the newest; it mints nothing\n")
	case c.Evicted:
		say("EVICTED: this process is no member, and asks for its share again\n")
	}
	if c.Problem != "" {
		say("PROBLEM: %s\n", c.Problem)
	}
	section := func(n int, head string, rows func(row func(...any))) {
		if n > 0 {
			b.WriteByte('\n')
			_ = table(&b, l, head, rows) // a Builder returns no error
		}
	}
	section(len(s.Members), "MEMBER\tZONE\tSTATE\tSHARE\tLEVEL\tOF\tLENT\tPINNED\tNUMBER\tSYNC\tRTT\tCLOCK\tVERSION", func(row func(...any)) {
		for _, m := range s.Members {
			number := fmt.Sprint(m.Number)
			if m.Applied != m.Number {
				number += l.Sayf(" (applied %d)", m.Applied)
			}
			row(m.Name, zone(m), memberState(l, m), fmt.Sprintf("%.1f %%", 100*m.Share), whole(m.Level), whole(m.Cap), whole(m.Lent), whole(m.Pinned),
				number, m.SyncDelay.Round(100*time.Microsecond), m.RTT.Round(10*time.Microsecond), m.Offset.Round(100*time.Microsecond), m.Version)
		}
	})
	const most = 20
	section(len(keys), "KEY\tADMITTED\tDENIED\tLEVEL\tOF", func(row func(...any)) {
		for _, k := range keys[:min(len(keys), most)] {
			row(k.key, whole(k.admitted)+"/s", whole(k.denied)+"/s", whole(k.level), whole(k.full))
		}
	})
	section(len(s.Quarantine), "QUARANTINE\tBY\tUNTIL\tWHY", func(row func(...any)) {
		for _, q := range s.Quarantine[:min(len(s.Quarantine), most)] {
			row(q.Rule, q.By, q.Until.Format(time.RFC3339), q.Why)
		}
	})
	section(len(s.Scopes), "SCOPE\tSTATE\tHELD\tCAUSE", func(row func(...any)) {
		for _, sc := range s.Scopes {
			row(sc.Name, l.Say(sc.State), sc.Held, sc.Cause)
		}
	})
	section(len(s.Totals), "TOTAL\tHANDLED\tFAILED CALLS\tDEAD LETTERS\tPROCESSES", func(row func(...any)) {
		for _, t := range s.Totals {
			row(t.Key, t.Handled, t.Failed, t.DeadLettered, t.Processes)
		}
	})
	b.WriteByte('\n')
	_, err := io.WriteString(toTerminal{out}, b.String())
	return err
}

func whole(v float64) string { return fmt.Sprintf("%.0f", v) }

func memberState(l words.Language, m fleet.Member) string {
	state := m.State
	if m.State == "silent" || m.State == "lost" {
		state += " " + m.Heard.Round(time.Second).String()
	}
	if !m.Roster {
		state += l.Say(", learner")
	}
	if m.LoansRefused > 0 {
		state += l.Sayf(", BREAKS THE BOOKS: %d loans refused", m.LoansRefused)
	}
	return state
}

func zone(m fleet.Member) string {
	if m.Region == "" {
		return m.Zone
	}
	return m.Region + "/" + m.Zone
}
