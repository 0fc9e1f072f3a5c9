// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/fleet"
	"github.com/stormguard-mq/stormguard/internal/brokers"
)

const nine = 9

// A store is a register that a test starts, kills and starts again.
type store struct {
	url         string
	kill, start func(t *testing.T) // kill is called from a goroutine of its own
}

func brokerStore(kind brokers.Kind, url func(addr string) string) func(t *testing.T) store {
	return func(t *testing.T) store {
		b := brokers.StartForTest(t, kind, brokers.Options{})
		return store{
			url: url(b.Addr()),
			kill: func(t *testing.T) {
				if err := b.Kill(t.Context(), 1); err != nil {
					t.Error(err)
				}
			},
			start: func(t *testing.T) {
				if err := b.Restart(t.Context()); err != nil {
					t.Fatal(err)
				}
				answers(t, url(b.Addr()))
			},
		}
	}
}

// answers waits until the register of the fleet can be read again: a broker that serves may
// still be looking for its topics.
func answers(t *testing.T, url string) {
	t.Helper()
	flags := registerFlags{url: url}
	r, closes, err := flags.open(t.Context(), "nine", io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	defer closes()
	inTime(t, "the store answers", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), storeTimeout)
		defer cancel()
		_, _, err = r.Read(ctx)
		return err == nil
	})
}

// inTime is soon without a time of its own: what real brokers and nine processes take
// depends on the machine. Only the test's own deadline ends it.
func inTime(t *testing.T, what string, ok func() bool) {
	t.Helper()
	end, limited := t.Deadline()
	for begun := time.Now(); !ok(); time.Sleep(10 * time.Millisecond) {
		if limited && time.Until(end) < 20*time.Second { // which the logs of nine processes may need
			t.Fatalf("not within %v: %s", time.Since(begun).Round(time.Second), what)
		}
	}
}

func schemed(scheme string) func(string) string {
	return func(addr string) string {
		if _, rest, ok := strings.Cut(addr, "://"); ok {
			addr = rest
		}
		return scheme + "://" + addr
	}
}

// fileStore is a folder that is taken away.
func fileStore(t *testing.T) store {
	dir := filepath.Join(t.TempDir(), "folder")
	move := func(from, to string) func(*testing.T) {
		return func(t *testing.T) {
			if err := os.Rename(from, to); err != nil {
				t.Error(err)
			}
		}
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	return store{url: "file:" + filepath.Join(dir, "register"), kill: move(dir, dir+".away"), start: move(dir+".away", dir)}
}

// Nine real processes on each register. A limit is changed, the register is killed in the
// middle of changes, and is back. Each change happened or did not, as the operator was
// told, and the log and the journal have those that did. While the register is away all
// goes on by the newest configuration, and each process says so once.
func TestFleetOnRegisters(t *testing.T) { //nolint:tparallel // nine processes at a time
	t.Parallel()
	for _, r := range []struct {
		name string
		make func(t *testing.T) store
		long bool
	}{
		{"file", fileStore, false},
		{"etcd", brokerStore(brokers.Etcd, schemed("etcd")), false},
		{"nats", brokerStore(brokers.NATS, schemed("nats")), false},
		{"postgres", brokerStore(brokers.Postgres, func(addr string) string { return addr }), true},
		{"rabbitmq", brokerStore(brokers.RabbitMQ4, func(addr string) string { return addr }), true},
		{"kafka", brokerStore(brokers.Kafka, schemed("kafka")), true},
	} {
		t.Run(r.name, func(t *testing.T) {
			if r.long && os.Getenv("STORMGUARD_FULL") == "" {
				t.Skip("one more broker that is killed: STORMGUARD_FULL=1, or scripts/test --full")
			}
			onRegister(t, r.make(t))
		})
	}
}

// Simulated fleets keep their configuration in each of the stores: no number has two
// documents, and after the last fault every process has its share.
func TestExploreOnRegisters(t *testing.T) {
	t.Parallel()
	runs := cmp.Or(os.Getenv("STORMGUARD_EXPLORE"), "2")
	url := func(kind brokers.Kind, scheme string) func(t *testing.T) string {
		return func(t *testing.T) string {
			addr := brokers.ForTest(t, kind)
			if scheme == "" {
				return addr
			}
			return schemed(scheme)(addr)
		}
	}
	for name, at := range map[string]func(t *testing.T) string{
		"file": func(t *testing.T) string { return "file:" + filepath.Join(t.TempDir(), "register") },
		"etcd": url(brokers.Etcd, "etcd"),
		"nats": func(t *testing.T) string {
			return schemed("nats")(brokers.StartForTest(t, brokers.NATS, brokers.Options{}).Addr())
		},
		"postgres": url(brokers.Postgres, ""),
		"rabbitmq": url(brokers.RabbitMQ4, ""),
		"kafka":    url(brokers.Kafka, "kafka"),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var stdout, stderr bytes.Buffer
			args := []string{"simulate", "explore", "--register", at(t), "--runs", runs}
			if seed, err := strconv.ParseUint(os.Getenv("RAPID_SEED"), 10, 64); err == nil {
				args = append(args, "--seed", strconv.FormatUint(seed%(1<<31), 10))
			}
			code := run(args, &stdout, &stderr)
			t.Log(stdout.String())
			if code != exitOK {
				t.Errorf("%d %s", code, stderr.String())
			}
		})
	}
}

// A cliProcess is one "stormguard fleet run".
type cliProcess struct {
	name           string
	stdout, stderr syncBuffer
	at, url        string
	from           int // of stderr: what it says from then on counts
}

func (p *cliProcess) said(text string) int { return strings.Count(p.stderr.String()[p.from:], text) }

func startCLI(t *testing.T, name string, args ...string) *cliProcess {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	p := &cliProcess{name: name}
	cmd := exec.CommandContext(context.WithoutCancel(t.Context()), self, append([]string{"fleet", "run", "--name", name, "--http", "127.0.0.1:0", "--quiet"}, args...)...)
	cmd.Env = append(os.Environ(), asCLI+"=1")
	cmd.Stdout, cmd.Stderr = &p.stdout, &p.stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // it was killed
		if t.Failed() {
			t.Logf("%s: %s%s", name, p.stdout.String(), p.stderr.String())
		}
	})
	inTime(t, name+" answers", func() bool {
		at := regexp.MustCompile(`listens on (\S+)\n`).FindStringSubmatch(p.stdout.String())
		url := regexp.MustCompile(`answers at (\S+)\n`).FindStringSubmatch(p.stdout.String())
		if at != nil && url != nil {
			p.at, p.url = at[1], url[1]
		}
		return p.url != ""
	})
	return p
}

func (p *cliProcess) get(t *testing.T, path string, out any) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, p.url+"/"+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	a, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = a.Body.Close() }()
	if err := json.NewDecoder(a.Body).Decode(out); err != nil {
		t.Fatal(err)
	}
}

func (p *cliProcess) status(t *testing.T) (s fleet.Status) {
	t.Helper()
	p.get(t, "fleet/status", &s)
	return s
}

// set asks for a rate upon a number, and says what the operator is told.
func (p *cliProcess) set(t *testing.T, number uint64, rate float64) (made uint64, err error) {
	t.Helper()
	body := fmt.Sprintf(`{"number":%d,"limit":{"rate":%g,"burst":900}}`, number, rate)
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, p.url+"/fleet/change", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Content-Type", "application/json")
	a, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = a.Body.Close() }()
	text, err := io.ReadAll(a.Body)
	if err != nil {
		t.Fatal(err)
	}
	var out struct {
		Number uint64
		Error  string
	}
	if err := json.Unmarshal(text, &out); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	if out.Error != "" {
		return 0, errors.New(out.Error)
	}
	return out.Number, nil
}

// inForce says that all keep within a number, by their own words.
func inForce(s *fleet.Status, number uint64) bool {
	n := 0
	for _, m := range s.Members {
		if m.Roster && m.Applied >= number {
			n++
		}
	}
	return n == nine && s.Configuration.Complete >= number
}

func onRegister(t *testing.T, r store) {
	var names []string
	for i := range nine {
		names = append(names, fmt.Sprintf("n%d", i+1))
	}
	var all []*cliProcess
	args := []string{"--fleet", "nine", "--roster", strings.Join(names, ","), "--register", r.url, "--rate", "900", "--burst", "900", "--demand", "50"}
	for _, name := range names {
		p := startCLI(t, name, args...)
		if len(all) == 0 {
			args = append(args, "--seed", p.at)
		}
		all = append(all, p)
	}
	a, b := all[0], all[nine-1]
	inTime(t, "all have begun", func() bool { s := b.status(t); return inForce(&s, 1) })

	// By the command, which names the newest.
	begun := time.Now()
	var stdout, stderr bytes.Buffer
	if code := run([]string{"fleet", "set", "--rate", "1800", "--burst", "900", "--url", a.url}, &stdout, &stderr); code != exitOK || stdout.String() != "changed: configuration 2, after 1\n" {
		t.Fatalf("%d %s%s", code, stdout.String(), stderr.String())
	}
	made := time.Since(begun)
	inTime(t, "it is in force", func() bool { s := b.status(t); return inForce(&s, 2) })
	t.Logf("more: made after %v, in force at nine after %v", made, time.Since(begun))
	begun = time.Now()
	if n, err := a.set(t, 2, 900); n != 3 || err != nil {
		t.Fatal(n, err)
	}
	inTime(t, "it is in force", func() bool { s := b.status(t); return inForce(&s, 3) })
	t.Logf("less: in force at nine after %v", time.Since(begun))

	// The register is killed in the middle of changes. A store may have stumbled over nine
	// processes that made it at once.
	for _, p := range all {
		p.from = len(p.stderr.String())
	}
	type asked struct {
		number uint64
		err    error
	}
	told := map[float64]asked{1800: {2, nil}, 900: {3, nil}}
	rate, newest := 1000.0, uint64(3)
	killed := make(chan struct{})
	time.AfterFunc(200*time.Millisecond, func() {
		defer close(killed)
		r.kill(t)
	})
	for {
		rate++
		n, err := a.set(t, newest, rate)
		if told[rate] = (asked{n, err}); err != nil {
			t.Logf("after %d changes: %v", len(told)-2, err)
			break
		}
		newest = n
	}
	<-killed
	inTime(t, "all know that it is away", func() bool {
		for _, p := range all {
			if p.said("the register cannot be reached") == 0 {
				return false
			}
		}
		return true
	})
	admitted := func() (n [nine]uint64) {
		for i, p := range all {
			for _, k := range p.status(t).Members[i].Keys {
				n[i] += k.Admitted
			}
		}
		return n
	}
	before := admitted()
	inTime(t, "everybody admits", func() bool {
		for i, n := range admitted() {
			if n < before[i]+10 {
				return false
			}
		}
		return true
	})
	rate++
	n, err := b.set(t, 0, rate)
	if told[rate] = (asked{n, err}); err == nil || strings.Contains(err.Error(), "unknown") {
		t.Errorf("a change without a register: %d, %v", n, err)
	}
	stderr.Reset()
	if code := run([]string{"fleet", "--url", b.url}, &stdout, &stderr); code != exitOK || !strings.Contains(stdout.String(), "REGISTER AWAY") {
		t.Errorf("%d %s%s", code, stdout.String(), stderr.String())
	}

	r.start(t)
	inTime(t, "all know that it is back", func() bool {
		for _, p := range all {
			if p.said("the register can be reached again") == 0 {
				return false
			}
		}
		return true
	})
	inTime(t, "a change is made again", func() bool {
		rate++
		n, err := b.set(t, 0, rate)
		told[rate] = asked{n, err}
		return err == nil
	})
	last := told[rate].number
	inTime(t, "it is in force", func() bool { s := a.status(t); return inForce(&s, last) })

	var lines []fleet.Entry
	log := a.status(t).Configuration.Log
	wrote := func(rate float64) (in []uint64) {
		for _, w := range log {
			if strings.Contains(w.What, fmt.Sprintf("%g/s", rate)) {
				if in = append(in, w.Number); w.Who == "" || w.At.IsZero() {
					t.Errorf("the log does not say who, or when: %+v", w)
				}
			}
		}
		return in
	}
	noted := func(rate float64) (n int) {
		for _, l := range lines {
			if l.Kind == "configuration" && l.Number > 0 && strings.Contains(l.Text, fmt.Sprintf("%g/s", rate)) && strings.Contains(l.Text, "by ") {
				n++
			}
		}
		return n
	}
	inTime(t, "the journal has the last one, which another process wrote", func() bool {
		a.get(t, "fleet/journal", &lines)
		return noted(rate) == 1
	})
	oldest := uint64(0)
	if len(log) > 0 {
		oldest = log[0].Number
	}
	for rate, x := range told {
		in, n := wrote(rate), noted(rate)
		switch {
		case x.err == nil && (n != 1 || x.number >= oldest && (len(in) != 1 || in[0] != x.number)):
			t.Errorf("%g/s was made as %d; the log has %v, the journal %d lines", rate, x.number, in, n)
		case x.err != nil && !strings.Contains(x.err.Error(), "unknown") && len(in)+n > 0:
			t.Errorf("%g/s was not made: %v; the log has %v, the journal %d lines", rate, x.err, in, n)
		}
	}
	for _, p := range all {
		// Said once for each time that it was away: a busy machine may time out one more read.
		inTime(t, p.name+" said once that the register is away, and once that it is back", func() bool {
			n := p.said("the register cannot be reached")
			return n > 0 && n == p.said("the register can be reached again")
		})
		if n := p.said("level=ERROR"); n > 0 {
			t.Errorf("%s has %d errors", p.name, n)
		}
	}
}
