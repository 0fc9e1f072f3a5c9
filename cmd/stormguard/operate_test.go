// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/console"
	"github.com/stormguard-mq/stormguard/fleet"
	"github.com/stormguard-mq/stormguard/fleet/register"
	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/guard/guardtest"
	"github.com/stormguard-mq/stormguard/limiter"
)

// guarded is a program with two queues and a console that wants a token.
type guarded struct {
	broker  *guardtest.Broker
	handler *guardtest.Handler
	url     string
	token   string // a file
}

func newGuarded(t *testing.T) guarded {
	t.Helper()
	const secret = "0123456789abcdef"
	p := guarded{broker: guardtest.NewBroker(), handler: new(guardtest.Handler), token: filepath.Join(t.TempDir(), "token")}
	if err := os.WriteFile(p.token, []byte("ann "+secret+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	g, err := guard.New(guard.Config{Group: "billing"}, guard.WithLogger(slog.New(slog.DiscardHandler)))
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 2)
	for _, queue := range []string{"orders", "refunds"} {
		p.broker.Publish(queue, guardtest.Message{Body: []byte("{}")})
		go func() { done <- p.broker.Run(ctx, g, queue, guardtest.Guarded{}, p.handler.HandleMessage) }()
	}
	c, err := console.New(console.Config{Process: "billing-1", Tokens: []console.Token{{Name: "ann", Secret: secret}}}, g)
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(c)
	p.url = server.URL
	t.Cleanup(func() {
		c.Close()
		server.Close()
		stop()
		for range 2 {
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
		if _, err := g.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	soon(t, "both queues have a source", func() bool { return len(g.Sources()) == 2 })
	return p
}

// stormguard runs a command against the program.
func (p guarded) stormguard(args ...string) (stdout, stderr string, code int) {
	var out, errs bytes.Buffer
	code = run(append(args, "--url", p.url, "--token-file", p.token), &out, &errs)
	return out.String(), errs.String(), code
}

// An operator sees what is held, holds a queue, forces a breaker, and undoes both; the
// audit has who and why.
func TestOperate(t *testing.T) {
	p := newGuarded(t)
	must := func(want string, args ...string) string {
		t.Helper()
		out, errs, code := p.stormguard(args...)
		if code != exitOK || !strings.Contains(out, want) {
			t.Errorf("%v: %d\n%s%s\nwant %q", args, code, out, errs, want)
		}
		return out
	}
	must("billing-1: 2 sources, 0 held", "status")
	list := must("orders", "source", "list")
	if !strings.Contains(list, "refunds") || !strings.Contains(list, "running") {
		t.Error(list)
	}
	must("not done: --dry-run", "source", "pause", "ord*", "--dry-run")
	if out := must("orders", "source", "list"); strings.Contains(out, "paused") {
		t.Error("a dry run paused:", out)
	}
	must("paused", "source", "pause", "ord*", "--for", "1h", "--why", "ticket 7", "--yes")
	p.broker.Publish("orders", guardtest.Message{Body: []byte("{}")})
	must("1 paused", "status")
	must("cleared by operator: Resume; time", "source", "show", "orders")
	must("done", "source", "resume", "orders", "--yes")
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := p.broker.Drained(ctx, "orders"); err != nil {
		t.Error("not drained after resume:", err)
	}
	var breakers []console.Breaker
	if err := json.Unmarshal([]byte(must("[", "breaker", "list", "-o", "json")), &breakers); err != nil || len(breakers) != 2 {
		t.Fatalf("%v: %+v", err, breakers)
	}
	name := breakers[0].Name
	must("breaker open by force", "breaker", "open", name, "--for", "10m", "--yes")
	must("true, ", "breaker", "list", name) // and for how much longer
	must("done", "breaker", "auto", name, "--yes")
	must("breaker closed", "breaker", "close", name, "--yes")
	must("done", "credits", "*", "--count", "5", "--yes")
	must("0 dead letters", "source", "deadletter", "orders", "--count", "3", "--yes")
	must("key=table 4", "quarantine", "add", "--key", "table 4", "--why", "broken", "--for", "1h")
	must("ann", "quarantine", "list")
	must("no longer in quarantine", "quarantine", "remove", "--key", "table 4")
	if out := must("RULE", "quarantine", "list"); strings.Contains(out, "ann") {
		t.Error("after its removal:", out)
	}
	must("DEAD LETTERS", "causes", "--since", "1h")
	must("| order | ann at ", "report", "--since", "1h")
	if out := must("quarantine add key=table 4", "audit"); !regexp.MustCompile(`quarantine add key=table 4 +broken +done\n`).MatchString(out) {
		t.Error(out)
	}
	lines := strings.Split(strings.TrimSpace(must("{", "audit", "-o", "jsonl")), "\n")
	var first console.Entry
	if err := json.Unmarshal([]byte(lines[0]), &first); err != nil || len(lines) != 9 || first.Why != "ticket 7" || !strings.HasPrefix(first.Who, "ann at ") {
		t.Errorf("%v: %d lines, %+v", err, len(lines), first)
	}
}

// An order to the fleet is carried out by the processes that are there; the status says
// that one is not.
func TestOperateAFleet(t *testing.T) {
	a, b, _ := trial(t)
	soon(t, "both hear each other, and the roster has both", func() bool {
		s := a.Status()
		return len(s.Members) == 2 && s.Members[1].State == "fresh" && s.Members[1].Roster && s.Configuration.Settled
	})
	g := guard.Must(guard.New(guard.Config{}, guard.WithLogger(slog.New(slog.DiscardHandler))))
	c, err := console.New(console.Config{Process: "a", Fleet: a.Orders()}, g)
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(c)
	defer server.Close()
	defer func() {
		c.Close()
		if _, err := g.Close(context.Background()); err != nil {
			t.Error(err)
		}
	}()
	var members, wrong bytes.Buffer
	if code := run([]string{"fleet", "--url", server.URL}, &members, &wrong); code != exitOK || !strings.Contains(members.String(), "trial, as a sees it") {
		t.Errorf("the fleet by the console: %d\n%s%s", code, members.String(), wrong.String())
	}
	b.Close() // it stays in the roster
	soon(t, "b is silent", func() bool { return a.Status().Members[1].State != "fresh" })
	var out, errs bytes.Buffer
	code := run([]string{"source", "pause", "*", "--in", "fleet", "--yes", "--url", server.URL}, &out, &errs)
	if code != exitPartial || !strings.Contains(out.String(), "a        0        done") || !strings.Contains(errs.String(), "no answer from b") {
		t.Errorf("%d\n%s%s", code, out.String(), errs.String())
	}
	out.Reset()
	errs.Reset()
	code = run([]string{"quarantine", "add", "--key", "k", "--url", server.URL}, &out, &errs)
	if code != exitPartial || !strings.Contains(errs.String(), "quarantine add key=k: done here and sent, but no answer from b") {
		t.Errorf("%d\n%s%s", code, out.String(), errs.String())
	}
	out.Reset()
	errs.Reset()
	code = run([]string{"source", "pause", "*", "--in", "zone:z9", "--yes", "--url", server.URL}, &out, &errs)
	if code != exitUnseen || !strings.Contains(errs.String(), `no process of the fleet is in "zone:z9"`) {
		t.Errorf("%d\n%s%s", code, out.String(), errs.String())
	}
}

// A process without consumers is an operator's seat: it shows the fleet, and an order that is
// given there is carried out where the consumers are.
func TestOperateFromASeat(t *testing.T) {
	path := filepath.Join(t.TempDir(), "register")
	store, err := register.NewFile(path)
	if err != nil {
		t.Fatal(err)
	}
	a, err := fleet.Start(fleet.Config{
		Fleet: "trial", Name: "a",
		Limits: fleet.Limits{Limit: limiter.Limit{Rate: 1000, Burst: 100}, Roster: fleet.Roster{Learners: true, Members: []fleet.Share{{Name: "a"}}}},
		Gossip: fleet.Gossip{Bind: "127.0.0.1:0"},
	}, fleet.WithRegister(store))
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	g := guard.Must(guard.New(guard.Config{Group: "billing"}, guard.WithLogger(slog.New(slog.DiscardHandler)), guard.WithQuarantine(a.Quarantine())))
	ctx, stop := context.WithCancel(t.Context())
	broker, handler, ends := guardtest.NewBroker(), new(guardtest.Handler), make(chan error, 2)
	go func() { ends <- broker.Run(ctx, g, "orders", guardtest.Guarded{}, handler.HandleMessage) }()
	c, err := console.New(console.Config{Process: "a", Fleet: a.Orders()}, g)
	if err != nil {
		t.Fatal(err)
	}
	out, in := io.Pipe()
	cmd := newFleetRun()
	cmd.SetOut(in)
	cmd.SetErr(io.Discard)
	cmd.SetArgs([]string{"--name", "seat", "--fleet", "trial", "--roster", "a", "--register", "file:" + path, "--seed", a.Addr().String(), "--http", "127.0.0.1:0", "--demand", "0", "--quiet"})
	go func() {
		err := cmd.ExecuteContext(ctx)
		_ = in.Close()
		if errors.Is(err, context.Canceled) {
			err = nil
		}
		ends <- err
	}()
	defer func() {
		stop()
		for range cap(ends) {
			if err := <-ends; err != nil {
				t.Error(err)
			}
		}
		c.Close()
		if _, err := g.Close(context.Background()); err != nil {
			t.Error(err)
		}
	}()
	url := ""
	lines := bufio.NewScanner(out)
	for url == "" && lines.Scan() {
		_, url, _ = strings.Cut(lines.Text(), "seat answers at ")
	}
	go func() { _, _ = io.Copy(io.Discard, out) }()
	ask := func(args ...string) (string, int) {
		var out, errs bytes.Buffer
		code := run(append(args, "--url", url), &out, &errs)
		return out.String() + errs.String(), code
	}
	soon(t, "the seat and the consumer hear each other", func() bool {
		said, _ := ask("fleet", "--json")
		var s fleet.Status
		_ = json.Unmarshal([]byte(said), &s)
		heard := 0
		for _, m := range slices.Concat(s.Members, a.Status().Members) {
			if m.State == "self" || m.State == "fresh" {
				heard++
			}
		}
		return heard == 4 && len(g.Sources()) == 1
	})
	soon(t, "the seat and the consumer do as they are told", func() bool { // each in five seconds, or the order is given again
		said, code := ask("source", "pause", "orders", "--in", "fleet", "--yes")
		done := code == exitOK && regexp.MustCompile(`(?m)^a +1 +done`).MatchString(said) && regexp.MustCompile(`(?m)^seat +0 +done`).MatchString(said)
		if !done {
			t.Logf("%d\n%s", code, said)
		}
		return done
	})
	if holds := g.Sources()[0].State().Holds; len(holds) != 1 || holds[0].Reason != guard.ReasonOperator {
		t.Errorf("held by %+v", holds)
	}
	if said, code := ask("audit"); code != exitOK || !strings.Contains(said, "1 sources in 2 processes") {
		t.Errorf("%d\n%s", code, said)
	}
	soon(t, "a rule is in force at the consumer", func() bool {
		said, code := ask("quarantine", "add", "--key", "k")
		if code != exitOK {
			t.Logf("%d\n%s", code, said)
			return false
		}
		if got := g.Quarantine().Entries(); len(got) != 1 || got[0].Rule.Value != "k" {
			t.Errorf("the command is done, and the consumer has %v", got)
		}
		return true
	})
	// The order stands, for a source that may begin; but nothing was done.
	soon(t, "nobody has a source of that name", func() bool {
		said, code := ask("source", "pause", "ordres", "--in", "fleet", "--yes")
		return code == exitUnseen && strings.Contains(said, "no process has a source")
	})
}

// What a stranger sends to the console, and is told in the audit, does not steer the operator's
// terminal, and looks like no line of ours.
func TestAuditDoesNotSteerTheTerminal(t *testing.T) {
	p := newGuarded(t)
	resp, err := http.Get(p.url + "/%1b]52;c;BASE64%07%0a2026-05-01T10:00:00Z%20%20ann")
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	for _, command := range []string{"audit", "report"} {
		out, errs, code := p.stormguard(command)
		if code != exitOK || strings.ContainsAny(out+errs, "\x1b\x07") || strings.Contains(out, "\n2026-05-01") {
			t.Errorf("%d %q %q", code, out, errs)
		}
	}
	if got := printable("a\x1b[2J\nb é 中 \u202e", ""); got != `a\x1b[2J\nb é 中 \u202e` {
		t.Errorf("%q", got)
	}
}

// What cannot be done has an exit status of its own and says what helps.
func TestOperateRefuses(t *testing.T) {
	p := newGuarded(t)
	for _, c := range []struct {
		args string
		code int
		says string
	}{
		{"source pause orders", exitUsage, "--yes: must be given where nobody can be asked"},
		{"source pause orders --for 25h --yes", exitUsage, `--for "25h": must be a duration from 1s to 24h0m0s`},
		{"source pause --yes", exitUsage, "requires at least 1 arg"},
		{"source pause typo --yes", exitUnseen, `"typo"; this process has orders, refunds`},
		{"source show typo", exitUnseen, `"stormguard source list" shows them`},
		{"breaker open typo --yes", exitUnseen, `breaker "typo"; this process has billing/`},
		{"source pause orders --in fleet --yes", exitError, `in: "fleet": this process has no fleet`},
		{"source pause orders --in zone: --yes", exitError, `in: "zone:" is not process, fleet or zone:NAME`},
		{"credits orders --count 0 --yes", exitUsage, "--count"},
		{"status --output xml", exitUsage, "must be table, json or jsonl"},
	} {
		out, errs, code := p.stormguard(strings.Fields(c.args)...)
		if code != c.code || !strings.Contains(errs, c.says) || out != "" {
			t.Errorf("%s: %d, want %d; %q %q", c.args, code, c.code, out, errs)
		}
	}
	var out, errs bytes.Buffer
	if code := run([]string{"status", "--url", p.url}, &out, &errs); code != exitDenied || !strings.Contains(errs.String(), "a token is needed") {
		t.Errorf("without a token: %d %s", code, errs.String())
	}
	t.Setenv("STORMGUARD_URL", "http://127.0.0.1:1")
	errs.Reset()
	if code := run([]string{"status"}, &out, &errs); code != exitError || !strings.Contains(errs.String(), "nobody answers for a console at http://127.0.0.1:1") {
		t.Errorf("nobody there: %d %s", code, errs.String())
	}
}

// An order whose answer did not come may have been carried out: the error says so. One that
// was never written, or only asked for, was not.
func TestOutcomeIsUnknown(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if r.Method == http.MethodGet || strings.Contains(string(body), `"dry_run":true`) {
			_, _ = io.WriteString(w, `{}`)
			return
		}
		conn, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		_ = conn.Close()
	}))
	defer server.Close()
	for _, c := range []struct {
		args    string
		unknown bool
	}{
		{"source deadletter orders --count 1 --yes --url " + server.URL, true},
		{"fleet reset --number 1 --url " + server.URL, true},
		{"fleet reset --number 1 --url http://127.0.0.1:1", false},
		{"source deadletter orders --count 1 --yes --url http://127.0.0.1:1", false},
	} {
		var out, errs bytes.Buffer
		if code := run(strings.Fields(c.args), &out, &errs); code != exitError || strings.Contains(errs.String(), "the outcome is unknown") != c.unknown {
			t.Errorf("%s: %d %s", c.args, code, errs.String())
		}
	}
}

// So may one that the operator has stopped to wait for.
func TestOutcomeOfAnInterruptedOrder(t *testing.T) {
	self, err := os.FindProcess(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	over := make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if body, _ := io.ReadAll(r.Body); r.Method == http.MethodGet || strings.Contains(string(body), `"dry_run":true`) {
			_, _ = io.WriteString(w, `{}`)
			return
		}
		_ = self.Signal(os.Interrupt)
		<-over
	}))
	defer server.Close()
	defer close(over)
	var out, errs bytes.Buffer
	code := run([]string{"source", "deadletter", "orders", "--count", "1", "--yes", "--url", server.URL}, &out, &errs)
	if said := errs.String(); code != exitInterrupted || !strings.Contains(said, "the outcome is unknown") || !strings.HasSuffix(said, "stormguard: interrupted\n") {
		t.Errorf("%d %s", code, said)
	}
}

// The page on this host has what the process answers, for who has the token that the command
// prints, and nothing for anybody else. The process's own token never reaches the browser.
func TestConsoleInABrowser(t *testing.T) {
	p := newGuarded(t)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	out, in := io.Pipe()
	cmd := newConsole()
	cmd.SetOut(in)
	cmd.SetArgs([]string{"--url", p.url, "--token-file", p.token, "--listen", "127.0.0.1:0"})
	done := make(chan error, 1)
	go func() { done <- cmd.ExecuteContext(ctx) }()
	said, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	words := strings.Fields(said)
	address, secret := words[0], words[len(words)-1]
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	ask := func(method, path, token, body string) (int, string) {
		t.Helper()
		r, err := http.NewRequestWithContext(t.Context(), method, address+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Content-Type", "application/json")
		if token != "" {
			r.Header.Set("Authorization", "Bearer "+token)
		}
		a, err := client.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = a.Body.Close() }()
		text, err := io.ReadAll(a.Body)
		if err != nil {
			t.Fatal(err)
		}
		return a.StatusCode, string(text)
	}
	if status, text := ask(http.MethodGet, "", "", ""); status != http.StatusOK || !strings.Contains(text, "app.js") {
		t.Errorf("the page: %d %s", status, text)
	}
	for _, token := range []string{"", "0123456789abcdef"} { // the process's own is not the browser's
		if status, _ := ask(http.MethodGet, "status", token, ""); status != http.StatusUnauthorized {
			t.Errorf("with token %q: %d", token, status)
		}
	}
	if status, text := ask(http.MethodGet, "status", secret, ""); status != http.StatusOK || !strings.Contains(text, "billing-1") {
		t.Errorf("%d %s", status, text)
	}
	if status, text := ask(http.MethodPost, "order", secret, `{"action":"pause","sources":["orders"]}`); status != http.StatusOK || !strings.Contains(text, "paused") {
		t.Errorf("%d %s", status, text)
	}
	if audit, _, _ := p.stormguard("audit"); !strings.Contains(audit, "pause orders") || !strings.Contains(audit, "ann at ") {
		t.Error(audit)
	}
	stop()
	if err := <-done; err != nil {
		t.Error(err)
	}
	for _, listen := range []string{"0.0.0.0:8791", "somewhere"} {
		if _, errs, code := p.stormguard("console", "--listen", listen); code != exitUsage || !strings.Contains(errs, "--listen") {
			t.Errorf("--listen %s: %d %s", listen, code, errs)
		}
	}
}
