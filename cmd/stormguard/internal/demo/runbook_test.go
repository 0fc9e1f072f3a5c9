// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/console"
	"github.com/stormguard-mq/stormguard/guard"
)

// incident is a program in trouble, and an operator at a terminal with docs/runbook.md.
type incident struct {
	t      *testing.T
	g      *guard.Guard
	p      plumbing
	steps  map[string][]string // the page's commands, by the number of the step
	cli    string
	url    string
	source string
	scope  string // the breaker's name
	cause  string // of the poison
	log    lockedLog

	down      atomic.Bool
	calls     atomic.Int64
	handled   atomic.Int64
	published int
	poison    int // published
}

type lockedLog struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedLog) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedLog) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

var (
	errDown   = guard.Unavailable(errors.New("the ledger does not answer"))
	errPoison = errors.New("the amount has no currency")

	shBlock = regexp.MustCompile("(?s)```sh\n(.*?)```")
	heading = regexp.MustCompile(`(?m)^## (\d)\. `)
	aCause  = regexp.MustCompile(`msg="dead letter".* cause=(\S+)`)
)

// The runbook's commands do what the page says, typed at a terminal, on each broker: an
// outage is held and drains, poison is kept apart, nothing dies that should not.
func TestRunbook(t *testing.T) { //nolint:tparallel // one broker after another
	t.Parallel()
	if _, err := exec.LookPath("script"); err != nil {
		t.Skip("needs the command script, which makes a terminal (Debian: bsdutils)")
	}
	cli := filepath.Join(t.TempDir(), "stormguard")
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-ldflags=-w", "-o", cli, "../..").CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	on(t, func(t *testing.T, cfg Config) {
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
		defer cancel()
		i := &incident{t: t, cli: cli, steps: commands(t)}
		i.begin(ctx, cfg)
		began := time.Now()
		for _, step := range []func(){i.confirm, i.look, i.contain, i.restore, i.keepApart, i.learn} {
			step()
			if t.Failed() {
				t.Log(i.log.String())
				return
			}
		}
		t.Logf("the storm is contained and over after %v", time.Since(began).Round(time.Millisecond))
	})
}

// commands are those of the page, by the number of their step.
func commands(t *testing.T) map[string][]string {
	t.Helper()
	page, err := os.ReadFile("../../../../docs/runbook.md")
	if err != nil {
		t.Fatal(err)
	}
	text := string(page)
	all := make(map[string][]string)
	at := heading.FindAllStringSubmatchIndex(text, -1)
	for n, m := range at {
		end := len(text)
		if n+1 < len(at) {
			end = at[n+1][0]
		}
		for _, block := range shBlock.FindAllStringSubmatch(text[m[0]:end], -1) {
			for line := range strings.Lines(block[1]) {
				all[text[m[2]:m[3]]] = append(all[text[m[2]:m[3]]], strings.TrimSpace(line))
			}
		}
	}
	for _, step := range []string{"1", "2", "3", "4", "6"} {
		if len(all[step]) == 0 {
			t.Fatalf("step %s of the page has no command: %v", step, all)
		}
	}
	return all
}

// begin starts the program, and sends it messages.
func (i *incident) begin(ctx context.Context, cfg Config) {
	t := i.t
	b, err := open(ctx, cfg, t.Output())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.close)
	i.p, _ = lay(ctx, t, b, strings.ToUpper(rand.Text()[:8]))
	i.g, err = guard.New(guard.Config{Group: "billing"}, guard.WithLogger(slog.New(slog.NewTextHandler(&i.log, nil))))
	if err != nil {
		t.Fatal(err)
	}
	c, err := console.New(console.Config{Process: "billing-1"}, i.g)
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(c)
	i.url = server.URL
	consuming, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- i.p.guarded(consuming, i.g, i.handle) }()
	t.Cleanup(func() {
		c.Close()
		server.Close()
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		end, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if _, err := i.g.Close(end); err != nil {
			t.Error(err)
		}
	})
	i.publish(ctx, 100, 0)
	i.wait("it handles messages", func() bool { return i.handled.Load() == 100 })
	s := i.state()
	i.source, i.scope = s.Source, s.Breaker.Name
}

func (i *incident) handle(_ context.Context, body []byte) error {
	i.calls.Add(1)
	o, err := parseOrder(body)
	switch {
	case err != nil:
		return err
	case i.down.Load():
		return errDown
	case o.Customer == "":
		return errPoison
	}
	i.handled.Add(1)
	return nil
}

func (i *incident) publish(ctx context.Context, healthy, poison int) {
	i.t.Helper()
	for n := range healthy + poison {
		o := order{ID: i.published, Customer: "ann"}
		if n < poison {
			o.Customer = ""
		}
		body, err := json.Marshal(o)
		if err != nil {
			i.t.Fatal(err)
		}
		confirmed, err := i.p.send(ctx, body)
		if err == nil {
			err = confirmed(ctx)
		}
		if err != nil {
			i.t.Fatal(err)
		}
		i.published++
	}
	i.poison += poison
}

func (i *incident) state() guard.State {
	if all := i.g.Sources(); len(all) == 1 {
		return all[0].State()
	}
	return guard.State{}
}

func (i *incident) wait(what string, ok func() bool) {
	i.t.Helper()
	for end := time.Now().Add(time.Minute); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			i.t.Fatalf("not within a minute: %s: %+v", what, i.state())
		}
	}
}

// run types a command of the page at a terminal, and answers y where it asks.
func (i *incident) run(command string) string {
	i.t.Helper()
	command, _, _ = strings.Cut(command, " >")
	command = strings.NewReplacer("stormguard ", i.cli+" ", "'orders/*'", "'"+i.source+"'", "orders/3", i.source,
		"'billing/orders*'", "'"+i.scope+"'", "--header tenant=acme", "--cause "+i.cause).Replace(command)
	shell := exec.CommandContext(i.t.Context(), "script", "-qfec", command, os.DevNull)
	shell.Env = append(os.Environ(), "STORMGUARD_URL="+i.url, "SHELL=/bin/sh", "TERM=xterm")
	var out lockedLog
	shell.Stdout, shell.Stderr = &out, &out
	in, err := shell.StdinPipe()
	if err != nil {
		i.t.Fatal(err)
	}
	began := time.Now()
	if err := shell.Start(); err != nil {
		i.t.Fatal(err)
	}
	answered := make(chan struct{})
	ended := make(chan struct{})
	go func() {
		defer close(answered)
		for {
			if strings.Contains(out.String(), "[y/N]") {
				_, _ = io.WriteString(in, "y\n")
				return
			}
			select {
			case <-ended:
				return
			case <-time.After(5 * time.Millisecond): // the terminal has no event for this
			}
		}
	}()
	err = shell.Wait()
	close(ended)
	<-answered
	if err != nil {
		i.t.Errorf("%s: %v\n%s", command, err, out.String())
	}
	i.t.Logf("%6v  %s", time.Since(began).Round(time.Millisecond), strings.ReplaceAll(command, i.cli, "stormguard"))
	return out.String()
}

// step runs the commands of a step of the page that begin so, and wants each to say something.
func (i *incident) step(number, begins, says string) {
	i.t.Helper()
	found := false
	for _, command := range i.steps[number] {
		if strings.HasPrefix(command, "stormguard "+begins) {
			found = true
			if out := i.run(command); !strings.Contains(out, says) {
				i.t.Errorf("%s says\n%s\nwant %q", command, out, says)
			}
		}
	}
	if !found {
		i.t.Errorf("step %s of the page has no %q: %q", number, begins, i.steps[number])
	}
}

func (i *incident) confirm() {
	i.down.Store(true)
	i.publish(i.t.Context(), 100, 0)
	i.wait("the breaker is open", func() bool { return i.state().Breaker.State == breaker.Open })
	i.step("1", "status", "breaker")
}

func (i *incident) look() {
	i.step("2", "breaker list", "open")
	i.step("2", "source list", i.source)
	i.step("2", "source show", "held by breaker")
}

// contain holds the source and forces its breaker, from the page's commands without --yes.
// What was forced by a command that was killed is over after its time all the same.
func (i *incident) contain() {
	for n, command := range i.steps["3"] {
		i.steps["3"][n] = strings.TrimSuffix(command, " --yes")
	}
	i.step("3", "source pause", "paused")
	i.step("3", "breaker open", "open by force")
	i.wait("the last call is over", func() bool { return i.state().Account.Processing == 0 })
	calls := i.calls.Load()
	i.down.Store(false)
	if out := i.run("stormguard status"); !strings.Contains(out, "1 paused") {
		i.t.Error(out)
	}
	if n := i.calls.Load() - calls; n != 0 {
		i.t.Errorf("%d calls while the source was paused and its breaker forced", n)
	}

	killed := exec.CommandContext(i.t.Context(), i.cli, "source", "pause", i.source, "--for", "2s", "--yes", "--url", i.url)
	out, err := killed.StdoutPipe()
	if err != nil {
		i.t.Fatal(err)
	}
	if err := killed.Start(); err != nil {
		i.t.Fatal(err)
	}
	_, _ = out.Read(make([]byte, 1)) // the order is given
	_ = killed.Process.Kill()
	_ = killed.Wait()
	i.wait("the killed command's pause is over", func() bool {
		return !slices.ContainsFunc(i.state().Holds, func(h guard.Hold) bool { return h.Detail == "paused" })
	})
}

func (i *incident) restore() {
	i.step("4", "source resume", "done")
	i.step("4", "breaker auto", "done")
	i.wait("the hold is drained", func() bool { return i.handled.Load() == int64(i.published) && len(i.state().Holds) == 0 })
	i.step("4", "status", "0 held")
	if n, err := i.p.buried(i.t.Context()); n != 0 || err != nil {
		i.t.Errorf("%d dead letters of an outage, %v", n, err)
	}
}

// keepApart has poison die, and puts its cause on the quarantine list: the next does not
// reach the handler.
func (i *incident) keepApart() {
	i.publish(i.t.Context(), 20, 1)
	i.wait("the poison is dead and the rest is handled", func() bool { return i.settled() && aCause.MatchString(i.log.String()) })
	i.cause = aCause.FindStringSubmatch(i.log.String())[1]
	i.step("2", "causes", i.cause)
	i.step("3", "quarantine add", "in quarantine: cause="+i.cause)
	i.publish(i.t.Context(), 20, 3)
	i.wait("the rest is handled", i.settled)
	i.wait("what matches is in quarantine", func() bool { return i.state().Tally.Quarantined == 3 })
	i.step("4", "source deadletter", "0 dead letters")
}

// settled tells whether the healthy messages are handled and the others are in the DLQ.
func (i *incident) settled() bool {
	n, err := i.p.buried(i.t.Context())
	return err == nil && n == i.poison && i.handled.Load() == int64(i.published-i.poison)
}

func (i *incident) learn() {
	i.step("6", "report", "breaker opened | "+i.scope)
	i.step("6", "audit", `"why":"ticket 7"`)
	out := i.run("stormguard audit")
	for _, want := range []string{"pause", "open", "resume", "release", "quarantine add", "deadletter"} {
		if !strings.Contains(out, want) {
			i.t.Errorf("the audit has no %q:\n%s", want, out)
		}
	}
}
